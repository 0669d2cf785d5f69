"""`shoal` in this process, and a daemon's API with fixed answers."""

import json
import os
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from click.testing import CliRunner, Result

from node.cli.app import shoal
from node.home import DaemonInfo, Home

STATUS = {
    "state": "WAITING", "reason": "no peer reachable (3 tried), training alone", "next": "run shoal peers",
    "step": 12, "reward": 0.25, "reward_start": 0.125, "held_out": 0.5, "held_out_start": None,
    "tokens_per_second": 101.5, "own_groups": 4, "foreign_groups": 3, "peers": 1, "peer_id": "12D3KooWabcdefgh",
    "name": "anna", "swarm": "mine", "stage": "update", "stage_seconds": 2.5, "last_step_age": 3.0,
    "step_deadline": 600.0, "rss_mb": 900.0, "peak_rss_mb": 1200.0, "uptime": 60.0, "version": "0.1.0",
    "model": "SmolLM2-135M-Instruct",
    "groups": {"published": 9, "fetched": 8, "admitted": 7, "rejected": {"stale": 1}, "trained_foreign": 6},
}  # fmt: skip
GROUP = {
    "row": 1, "id": "ab" * 32, "origin": "foreign", "producer": "12D3KooWzzzzzzzz", "environment": "chain_sum",
    "epoch": 3, "rewards": [1.0, 0.0], "verdict": "admitted", "detail": "", "at": 1_700_000_000.0,
}  # fmt: skip
COMPLETION = {"text": "4\x1b[2J", "finish": "stop", "tokens": 2, "claimed": 1.0, "reward": 1.0}
ANSWERS: dict[str, Any] = {
    "/api/v1/status": STATUS,
    "/api/v1/peers": [
        {"peer_id": "12D3KooWzzzzzzzz", "connected": True, "model": "qwen", "reputation": 0.75, "published": 5,
         "admitted": 4, "rejected": {"stale": 1}, "last_seen": 1_700_000_000.0},
    ],
    "/api/v1/groups": [GROUP],
    "/api/v1/groups/abab": {**GROUP, "prompt": [{"role": "user", "content": "2+2"}], "completions": [COMPLETION]},
    "/api/v1/steps": [{"step": 12, "reward": 0.25, "loss": -0.01, "own_groups": 4, "foreign_groups": 3}],
}  # fmt: skip


class FakeDaemon(ThreadingHTTPServer):
    """Answers as web/server.py does, and remembers what was posted."""

    daemon_threads = True

    def __init__(self, home: Home) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.home, self.posted = home, list[tuple[str, Any]]()
        self.ready: tuple[int, Any] = (200, {"reasons": []})
        self.url = f"http://127.0.0.1:{self.server_port}"
        home.write_daemon(DaemonInfo(os.getpid(), self.url, 1.0))


class Handler(BaseHTTPRequestHandler):
    server: FakeDaemon

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        if path == "/readyz":
            return self.answer(*self.server.ready)
        if self.headers["Authorization"] != f"Bearer {self.server.home.token()}":
            return self.answer(401, {"error": "wrong API token", "fix": "run `shoal open`"})
        if path not in ANSWERS:
            return self.answer(404, {"error": "no such group", "fix": "list them: shoal groups"})
        return self.answer(200, ANSWERS[path])

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.posted.append((self.path, body))
        if self.path == "/api/v1/stop":
            self.server.home.remove_daemon()
        self.answer(200, {"path": "/login?code=once"} if self.path == "/api/v1/login" else {})

    def answer(self, status: int, value: Any) -> None:
        raw = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def daemon(home: Home) -> Iterator[FakeDaemon]:
    with FakeDaemon(home) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join(10)


@pytest.fixture
def run(no_variables: None) -> Callable[..., Result]:
    def call(*args: str | Path, input: str | None = None) -> Result:
        return CliRunner().invoke(shoal, [str(arg) for arg in args], input=input)

    return call
