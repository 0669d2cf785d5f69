"""What `up`, `local` and `bench` hand to the modules that do the work; those are replaced here."""

import base64
import hashlib
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import Result

from node.cli.session import Session
from node.client import DaemonUnreachable, connect
from node.home import Home
from node.local.prepare import Swarm
from protocol.identity import Identity
from protocol.invite import Invite
from protocol.manifest import embedded_manifest

Run = Callable[..., Result]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[tuple[Any, ...], dict[str, Any]]]]:
    made: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def record(*args: Any, **options: Any) -> Any:
        made.append((args, options))
        return {"bench": args[0], "ours": {"seconds": 1.5}, "ratio": 12.0} if args == ("step",) else 0

    for name in ("node.daemon", "node.bench"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(run=record))
    monkeypatch.setitem(sys.modules, "node.local.supervise", SimpleNamespace(run=lambda *a, **o: record(*a, **o) == 0))
    monkeypatch.setattr(Session, "start_logging", lambda self, file: None)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield made
    for number, handler in handlers.items():  # `up` takes them for its process
        signal.signal(number, handler)


def test_up_initialises_an_empty_home_and_founds_a_swarm(
    run: Run, tmp_path: Path, calls: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "node"):
        result = run("--home", tmp_path / "home", "up", "--steps", "3", "--set", "web.port=0")
    assert result.exit_code == 0
    home = Home(tmp_path / "home")
    assert caplog.messages[0] == f"New node {home.identity().peer_id} in {home.path}"
    [((used, settings), options)] = calls
    assert used.path == home.path
    assert (settings.config.web.port, options) == (0, {"steps": 3, "stay": False, "as_json": False, "cluster": None})
    assert home.manifest() is not None


def test_up_joins(run: Run, home: Home, calls: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = embedded_manifest("theirs", 1.0)
    first, second = (
        Invite(manifest.digest, (f"/ip4/192.0.2.{i}/tcp/1/p2p/{Identity.generate().peer_id}",), None, "theirs")
        for i in (1, 2)
    )
    assert run("--home", home.path, "up", "--set", "web.port=0", "--join", first.to_uri()).exit_code == 0
    assert home.swarm() == first
    monkeypatch.setenv("SHOAL_JOIN", second.to_uri())
    assert run("--home", home.path, "up", "--set", "web.port=0").exit_code == 0
    assert home.swarm() == second
    assert len(calls) == 2


def test_an_invite_that_is_empty_is_not_no_invite(run: Run, home: Home, calls: Any) -> None:
    """What `--join "$UNSET"` says."""
    for command in (("up",), ("coordinator", "up")):
        refused = run("--home", home.path, *command, "--join", "")
        assert (refused.exit_code, "invite" in refused.stderr) == (2, True), refused.output
    assert not home.invite_path.exists()
    assert calls == []


def test_up_takes_a_cluster_file(run: Run, home: Home, tmp_path: Path, calls: Any) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text("[trainer]\nworkers = 4\n[engines]\nnumber = 2\n")
    assert run("--home", home.path, "up", "--set", "web.port=0", "--large", file).exit_code == 0
    [((_, settings), options)] = calls
    assert (options["cluster"].engines.number, options["cluster"].trainer.workers) == (2, 4)
    assert (settings.config.train.shards, settings.config.rollout.engine) == (4, "vllm")
    assert settings.sources["train.shards"] == "flag"

    refused = run("--home", home.path, "up", "--large", file, "--set", "train.shards=2")
    assert (refused.exit_code, "by which it is 4" in refused.output) == (2, True)
    file.write_text("[trainer]\nworkers = 0\n")
    refused = run("--home", home.path, "up", "--large", file)
    assert (refused.exit_code, "trainer.workers = 0" in refused.output) == (2, True)
    alone = run("--home", home.path, "up", "--plan")
    assert (alone.exit_code, "give --large FILE" in alone.output) == (2, True)
    assert len(calls) == 1


def link_of_version_3() -> str:
    frame = b"\x03whatever a later shoal puts here"
    return "shoal:" + base64.urlsafe_b64encode(frame + hashlib.sha256(frame).digest()[:4]).rstrip(b"=").decode()


def test_up_refuses_before_it_starts_anything(run: Run, home: Home, tmp_path: Path, calls: Any) -> None:
    broken = run("--home", tmp_path / "new", "up", "--set", "rollout.group_size=1")
    assert (broken.exit_code, (tmp_path / "new").exists()) == (2, False)
    assert run("--home", home.path, "up", "--join", "shoal:AQ").exit_code == 2
    future = run("--home", home.path, "up", "--join", link_of_version_3())
    assert (future.exit_code, "version 3" in future.stderr, "upgrade" in future.stderr) == (2, True, True)
    with home.lock():
        held = run("--home", home.path, "up", "--join", Invite(b"x" * 32, (), None, "x").to_uri())
    assert (held.exit_code, "in use by process" in held.stderr) == (1, True)
    home.identity_path.unlink()
    home.database.touch()
    assert "put your backup" in run("--home", home.path, "up").stderr
    assert calls == []


def test_local_passes_its_flags_on(run: Run, tmp_path: Path, calls: Any) -> None:
    assert (
        run("--home", tmp_path, "local", "--nodes", "3", "--steps", "2", "--set", "eval.every=0", "--json").exit_code
        == 0
    )
    [((home, settings, swarm), options)] = calls
    assert (home.path, swarm) == (tmp_path, Swarm(3))
    assert settings.config.eval.every == 0
    assert options == {"steps": 2, "as_json": True, "overrides": {"eval.every": "0"}}


def test_local_refuses_what_its_nodes_would_not_see(
    run: Run, home: Home, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    joined = run("--home", tmp_path / "new", "local", "--nodes", "1", "--set", "swarm.join=shoal:x")
    assert (joined.exit_code, "swarm of their own" in joined.stderr) == (2, True)
    shared = run("--home", tmp_path / "new", "local", "--set", "web.port=9")
    assert (shared.exit_code, "flag sets web.port, which 2 nodes" in shared.stderr) == (2, True)
    monkeypatch.setenv("SHOAL_NODE_NAME", "anna")
    named = run("--home", tmp_path / "new", "local")
    assert (named.exit_code, "SHOAL_NODE_NAME sets node.name" in named.stderr) == (2, True)
    assert not (tmp_path / "new").exists()
    monkeypatch.delenv("SHOAL_NODE_NAME")
    assert run("--home", home.path, "config", "set", "eval.every", "9").exit_code == 0
    ignored = run("--home", home.path, "local")
    assert (ignored.exit_code, "config.toml sets eval.every" in ignored.stderr) == (2, True)
    assert "node-1/config.toml" in ignored.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--nodes", "0"), "--nodes 0 leaves nobody to train; give --large 1"),
        (("--nodes", "2", "--others", "3"), "--others 3 is more than --nodes 2; give at most 2"),
        (("--other-model", "."), "--other-model is for --others; give --others 1"),
    ],
)
def test_local_refuses_what_makes_no_swarm(run: Run, tmp_path: Path, words: tuple[str, ...], said: str) -> None:
    result = run("--home", tmp_path / "new", "local", *words)
    assert (result.exit_code, said in result.stderr) == (2, True)
    assert not (tmp_path / "new").exists()


def test_local_of_a_large_node(run: Run, tmp_path: Path, calls: Any) -> None:
    assert run("--home", tmp_path, "local", "--coordinator", "--large", "1", "--nodes", "3").exit_code == 0
    [((_, _, swarm), _)] = calls
    assert swarm == Swarm(3, coordinator=True, large=1, others=1)
    assert swarm.processes == 5


def test_local_that_was_ended_before_its_steps_were_done(run: Run, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "node.local.supervise", SimpleNamespace(run=lambda *_, **__: False))
    assert run("--home", tmp_path, "local", "--steps", "2").exit_code == 130


def test_bench_prints_its_result(run: Run, calls: Any) -> None:
    assert json.loads(run("bench", "step", "--json").stdout)["ratio"] == 12.0
    assert run("bench", "step").stdout.split() == ["bench", "step", "ours.seconds", "1.5", "ratio", "12"]
    assert run("bench", "nothing").exit_code == 2


STUCK = """
import sys, time

class Stuck:
    "An import of node.daemon that takes for ever and swallows what is raised in it, as some do."
    def find_spec(self, name, path=None, target=None):
        if name == "node.daemon":
            print("importing", flush=True)
            while True:
                try:
                    time.sleep(60)
                except BaseException:
                    pass

sys.meta_path.insert(0, Stuck())
from node.cli import main
main()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_amid_the_imports_ends_at_once(home: Home, number: int) -> None:
    command = [sys.executable, "-c", STUCK, "--home", str(home.path), "up", "--set", "web.port=0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "importing\n"
        with pytest.raises(DaemonUnreachable, match=f"process {process.pid}, which has .* is still starting"):
            connect(home)
        asked = time.monotonic()
        process.send_signal(number)
        _, errors = process.communicate(timeout=30)
    assert time.monotonic() - asked < 5
    assert process.returncode == 130
    first, last = errors.splitlines()
    assert first.endswith(f"starting the node of {home.path}")
    assert last == "shoal: stopped before training began; what was saved before is untouched"


def test_for_a_container_every_line_on_stderr_is_json(home: Home) -> None:
    """The form is asked for by a variable, and a flag wins over it. What ends the process is an entry like others."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SHOAL_")}
    environment["SHOAL_LOG_FORMAT"] = "json"

    def errors(*args: str) -> list[str]:
        command = [sys.executable, "-m", "node", "--home", str(home.path), "up", *args]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment, check=False)
        assert (done.returncode, done.stdout) == (1, "")
        return done.stderr.splitlines()

    with home.lock():
        entries = [json.loads(line) for line in errors()]
        plain = errors("--log-format", "text")
    assert [sorted(entry) for entry in entries] == [["at", "level", "logger", "message"]] * len(entries)
    assert (entries[-1]["level"], "is in use by process" in entries[-1]["message"]) == ("error", True)
    assert plain[-2].startswith(f"Error: home {home.path} is in use by process")
