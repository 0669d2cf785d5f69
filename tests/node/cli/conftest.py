"""The real API over a node that is not there."""

import asyncio
import os
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from node.home import DaemonInfo, Home
from web.server import WebServer
from web.view import NodeView, NotFound, SettingOverridden, SettingRefused

STATUS: dict[str, Any] = {
    "state": "WAITING", "reason": "no peer reachable (3 tried), training alone", "next": "run shoal peers",
    "step": 12, "reward": 0.25, "reward_start": 0.125, "held_out": 0.5,
    "held_out_start": 0.25, "held_out_steps": [0, 10],
    "tokens_per_second": 101.5, "own_groups": 4, "foreign_groups": 3, "peers": 1, "peer_id": "12D3KooWabcdefgh",
    "name": "anna", "swarm": "mine", "stage": "evaluate", "stage_seconds": 2.5, "stage_count": (3, 8),
    "last_step_age": 3.0, "step_deadline": 600.0, "rss_mb": 900.0, "peak_rss_mb": 1200.0,
    "memory": {"weights": 3 << 20, "gradients": 0, "optimizer": 6 << 20}, "uptime": 60.0, "version": "0.1.0",
    "model": "SmolLM2-135M-Instruct",
    "groups": {"published": 9, "fetched": 8, "admitted": 7, "rejected": {"stale": 1}, "trained_foreign": 6},
}  # fmt: skip
GROUP: dict[str, Any] = {
    "row": 1, "id": "ab" * 32, "origin": "foreign", "producer": "12D3KooWzzzzzzzz", "environment": "chain_sum",
    "epoch": 3, "rewards": [1.0, 0.0], "verdict": "admitted", "detail": "", "at": 1_700_000_000.0,
}  # fmt: skip
COMPLETION = {"text": "4\x1b[2J", "finish": "stop", "tokens": 2, "claimed": 1.0, "reward": 1.0}
PEER = {
    "peer_id": "12D3KooWzzzzzzzz", "connected": True, "model": "qwen", "reputation": 0.75, "published": 5,
    "admitted": 4, "trained": 3, "followed": 2, "rejected": {"stale": 1}, "last_seen": 1_700_000_000.0,
}  # fmt: skip
STEP = {"step": 12, "reward": 0.25, "loss": -0.01, "own_groups": 4, "foreign_groups": 3}


class FakeNode(NodeView):
    """What the web layer asks of a node and the command line uses, with fixed answers. Remembers what it was asked."""

    def __init__(self, home: Home) -> None:
        self.home, self.asked, self.now, self.url = home, list[str](), STATUS, ""

    def status(self) -> dict[str, Any]:
        return self.now

    def steps(self, after: int, limit: int) -> list[dict[str, Any]]:
        return [STEP] if after < 12 else []

    def groups(self, before: int | None, limit: int, where: Mapping[str, str]) -> list[dict[str, Any]]:
        return [GROUP]

    async def group(self, group_id: str) -> dict[str, Any]:
        if not GROUP["id"].startswith(group_id):
            raise NotFound(f"no group {group_id}")
        return {**GROUP, "prompt": [{"role": "user", "content": "2+2"}], "completions": [COMPLETION]}

    def peers(self, offset: int, limit: int, **how: Any) -> dict[str, Any]:
        return {"total": 1, "connected": 1, "peers": [PEER]}

    def change(self, values: dict[str, Any]) -> dict[str, Any]:
        self.asked.append(f"change: {values}")
        (key,) = values
        if key == "swarm.own_groups":
            raise SettingOverridden(f"{key} is set by a flag of the running node ; leave that out")
        if key == "eval.tasks":
            raise SettingRefused(f"{key} = 0 (the request): too few ; set it to a whole number at least 1")
        entry = {"value": 8420, "pending": 9000} if key == "web.port" else {"value": values[key]}
        concerned = {"applied": [], "restart": [key]} if key == "web.port" else {"applied": [key], "restart": []}
        return {**concerned, "restart_by": "ask the captain", "config": {key: entry}}

    def pause(self, reason: str) -> None:
        self.asked.append(f"pause: {reason}")
        words = {"reason": f"{reason} (after the step in progress)", "next": "run shoal resume to go on"}
        self.now = {**self.now, "state": "PAUSED", **words}

    def resume(self) -> None:
        self.asked.append("resume")
        self.now = {**self.now, "state": "TRAINING", "reason": "with 1 peer", "next": ""}

    def stop(self) -> None:
        self.asked.append("stop")
        self.home.remove_daemon()


async def serve(node: FakeNode, started: threading.Event, stop: threading.Event) -> None:
    server = WebServer(
        node,
        host="127.0.0.1",
        port=0,
        token=node.home.token(),
        allowed_hosts=(),
        clock=time.monotonic,  # type: ignore[arg-type]
    )
    await server.start()
    node.url = server.url
    node.home.write_daemon(DaemonInfo(os.getpid(), server.url, 1.0))
    started.set()
    await asyncio.to_thread(stop.wait)
    await server.stop()


@pytest.fixture
def daemon(home: Home) -> Iterator[FakeNode]:
    node, started, stop = FakeNode(home), threading.Event(), threading.Event()
    thread = threading.Thread(target=lambda: asyncio.run(serve(node, started, stop)))
    thread.start()
    assert started.wait(30)
    yield node
    stop.set()
    thread.join(10)
