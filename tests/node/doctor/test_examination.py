"""How checks are run, and those of settings, daemon, home and disk."""

import json
import threading
import time
from collections import namedtuple
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from node.checkpoint import CheckpointStore
from node.cli.app import shoal
from node.config import Config
from node.doctor import examination, machine, stored
from node.doctor.examination import examine, subject
from node.doctor.finding import Finding, Subject, ok
from node.home import Home

Usage = namedtuple("Usage", "total used free")
STATUS: dict[str, Any] = {
    "state": "TRAINING", "reason": "with 1 peer", "next": "", "step": 12, "last_step_age": 30.0, "step_deadline": 600.0,
    "uptime": 900.0, "stage": "update", "stage_seconds": 3.0, "peers": 1, "groups": {"rejected": {}},
}  # fmt: skip


@pytest.fixture
def node(home: Home) -> Subject:
    return subject(home, {})


def verdicts(findings: list[Finding]) -> list[tuple[str, str]]:
    return [(finding.check, finding.verdict) for finding in findings]


def test_a_check_that_breaks_or_hangs_is_a_finding_and_the_others_go_on(node: Subject) -> None:
    forever = threading.Event()

    def breaks(_node: Subject) -> list[Finding]:
        raise ZeroDivisionError("a trap")

    def hangs(_node: Subject) -> list[Finding]:
        forever.wait(60)
        return []

    started, begun = time.monotonic(), list[str]()
    checks = {"one": breaks, "two": hangs, "three": lambda _node: [ok("three", "fine")]}
    found = list(examine(node, checks, begins=begun.append, seconds=0.2))
    forever.set()
    assert time.monotonic() - started < 10
    assert verdicts(found) == [("one", "fail"), ("two", "fail"), ("three", "ok")]
    assert found[0].said == "the check broke with ZeroDivisionError: a trap"
    assert "no answer within 0 s" in found[1].said
    assert begun == ["one", "two", "three"]


def test_settings_that_cannot_be_read_fail_and_the_rest_is_of_the_defaults(home: Home) -> None:
    home.config_path.write_text("[swarm]\nown_grups = 3\n")
    node = subject(home, {})
    (found,) = examination.settings(node)
    assert (found.verdict, "unknown key swarm.own_grups" in found.said) == ("fail", True)
    assert found.fix == "did you mean swarm.own_groups?"
    assert node.config == Config()


def test_settings_that_are_odd_are_told(node: Subject) -> None:
    (found,) = examination.settings(replace(node, config=Config.model_validate({"train": {"kl_in": "reward"}})))
    assert (found.verdict, "does nothing" in found.said) == ("warn", True)


def test_daemon(node: Subject) -> None:
    (down,) = examination.daemon(node)
    assert (down.verdict, "no daemon runs" in down.said, "up`" in down.fix) == ("warn", True, True)
    (well,) = examination.daemon(replace(node, status=STATUS))
    assert (well.verdict, well.said) == ("ok", "TRAINING, step 12, the last one 30 s ago")
    (late,) = examination.daemon(replace(node, status={**STATUS, "last_step_age": 601.0}))
    assert (late.verdict, "no step for 601 s, the deadline is 600 s" in late.said) == ("fail", True)
    (broken,) = examination.daemon(replace(node, status={**STATUS, "state": "FAILED", "reason": "out of memory"}))
    assert (broken.verdict, "failed: out of memory" in broken.said) == ("fail", True)
    (waits,) = examination.daemon(replace(node, status={**STATUS, "state": "WAITING", "next": "free some disk"}))
    assert (waits.verdict, waits.fix) == ("warn", "free some disk")


def test_secrets_open_to_others_fail(home: Home, node: Subject) -> None:
    assert verdicts(stored.home(node)) == [("home", "ok")]
    home.token_path.chmod(0o644)
    home.path.chmod(0o755)
    found = stored.home(node)
    assert verdicts(found) == [("home", "warn"), ("home", "fail")]
    assert found[1].fix == f"chmod 600 {home.token_path}"
    home.token_path.unlink()
    assert "is missing" in stored.home(node)[1].said


def test_no_home_yet(tmp_path: Path, no_variables: None) -> None:
    none = subject(Home(tmp_path / "none"), {})
    assert verdicts(stored.home(none)) == [("home", "warn")]
    assert verdicts(examination.daemon(none)) == [("daemon", "ok")]
    assert not (tmp_path / "none").exists()


def test_disk_against_what_checkpoints_take(
    node: Subject, home: Home, tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model("llama")
    node = replace(node, config=Config.model_validate({"model": {"path": str(model)}, "limits": {"store_mb": 16}}))
    weights = (model / "model.safetensors").stat().st_size
    assert 0.9 * 3 * weights < machine.shape_of_checkpoint(node.config, model) < 3 * weights  # moments besides
    free = [100 << 30]
    monkeypatch.setattr(stored.shutil, "disk_usage", lambda path: Usage(1 << 40, 0, free[0]))
    assert verdicts(stored.disk(node)) == [("disk", "ok")]
    free[0] = 70 << 20  # one checkpoint and the margin fit, and not what all of them and the experience may take
    node = replace(node, config=node.config.model_copy(update={"limits": Config().limits}))
    assert verdicts(stored.disk(node)) == [("disk", "warn")]
    CheckpointStore(home.checkpoints, 2).save(5, lambda to: (to / "weights").write_bytes(b"x" * (8 << 20)) and None, {})
    free[0] = 60 << 20  # less than training is held below
    (full,) = stored.disk(node)
    assert (full.verdict, full.fix.startswith("free some disk")) == ("fail", True)
    free[0] = 100 << 30
    limits = Config.model_validate({"limits": {"disk_mb": 4}}).limits
    (over,) = stored.disk(replace(node, config=node.config.model_copy(update={"limits": limits})))
    assert (over.verdict, "the limit is 4 (limits.disk_mb)" in over.said) == ("fail", True)


def test_the_command_tells_verdicts_and_exits_by_them(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    checks = {"home": stored.home, "daemon": examination.daemon}
    monkeypatch.setattr(examination.examine, "__defaults__", (checks,))
    well = CliRunner().invoke(shoal, ["--home", str(home.path), "doctor"])
    assert well.exit_code == 0
    assert well.stdout.splitlines()[0].startswith("ok    home          ")
    assert well.stdout.splitlines()[2].strip().startswith("-> start it with")
    assert well.stdout.splitlines()[-1] == "0 failed, 1 to look at, 1 well"
    home.identity_path.chmod(0o644)
    ill = CliRunner().invoke(shoal, ["--home", str(home.path), "doctor", "--json"])
    report = json.loads(ill.stdout)
    assert (ill.exit_code, report["failed"], report["warned"], ill.stderr) == (1, 1, 1, "")
    assert report["checks"][0]["fix"] == f"chmod 600 {home.identity_path}"
