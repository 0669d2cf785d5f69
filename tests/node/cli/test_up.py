"""What `up`, `local` and `bench` hand to the modules that do the work; those are replaced here."""

import base64
import hashlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import Result

from node.cli.session import Session
from node.home import Home
from protocol.identity import Identity
from protocol.invite import Invite
from protocol.manifest import embedded_manifest

Run = Callable[..., Result]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    made: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def record(*args: Any, **options: Any) -> Any:
        made.append((args, options))
        return {"bench": args[0], "ours": {"seconds": 1.5}, "ratio": 12.0} if args == ("step",) else 0

    for name in ("node.daemon", "node.local", "node.bench"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(run=record))
    monkeypatch.setattr(Session, "start_logging", lambda self, file: None)
    return made


def test_up_initialises_an_empty_home_and_founds_a_swarm(run: Run, tmp_path: Path, calls: Any) -> None:
    result = run("--home", tmp_path / "home", "up", "--steps", "3", "--set", "web.port=0")
    assert result.exit_code == 0
    home = Home(tmp_path / "home")
    assert home.identity().peer_id in result.stderr
    [((used, settings), options)] = calls
    assert used.path == home.path
    assert (settings.config.web.port, options) == (0, {"steps": 3, "stay": False})
    assert home.manifest() is not None


def test_up_joins(run: Run, home: Home, calls: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = embedded_manifest("theirs", 1.0)
    first, second = (
        Invite(manifest.digest, (f"/ip4/192.0.2.{i}/tcp/1/p2p/{Identity.generate().peer_id}",), None, "theirs")
        for i in (1, 2)
    )
    assert run("--home", home.path, "up", "--join", first.to_uri()).exit_code == 0
    assert home.swarm() == first
    monkeypatch.setenv("SHOAL_JOIN", second.to_uri())
    assert run("--home", home.path, "up").exit_code == 0
    assert home.swarm() == second
    assert len(calls) == 2


def link_of_version_2() -> str:
    frame = b"\x02whatever a later shoal puts here"
    return "shoal:" + base64.urlsafe_b64encode(frame + hashlib.sha256(frame).digest()[:4]).rstrip(b"=").decode()


def test_up_refuses_before_it_starts_anything(run: Run, home: Home, tmp_path: Path, calls: Any) -> None:
    broken = run("--home", tmp_path / "new", "up", "--set", "rollout.group_size=1")
    assert (broken.exit_code, (tmp_path / "new").exists()) == (2, False)
    assert run("--home", home.path, "up", "--join", "shoal:AQ").exit_code == 2
    future = run("--home", home.path, "up", "--join", link_of_version_2())
    assert (future.exit_code, "version 2" in future.stderr, "upgrade" in future.stderr) == (2, True, True)
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
    [((home,), options)] = calls
    assert home.path == tmp_path
    assert options == {"nodes": 3, "steps": 2, "as_json": True, "overrides": {"eval.every": "0"}}


def test_bench_prints_its_result(run: Run, calls: Any) -> None:
    assert json.loads(run("bench", "step", "--json").stdout)["ratio"] == 12.0
    assert run("bench", "step").stdout.split() == ["bench", "step", "ours.seconds", "1.5", "ratio", "12"]
    assert run("bench", "nothing").exit_code == 2
