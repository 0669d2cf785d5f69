"""`shoal train offline`: options to an order, a report in words and in JSON, errors with their exit codes."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from node.home import Home

Run = Callable[..., Result]
REPORT: dict[str, Any] = {
    "method": "dpo", "source": "experience", "model": "tiny", "step": 7, "groups": 20, "tasks": 9, "examples": 8,
    "left_out": {"groups of held-out tasks": 2}, "steps": 3, "ended": "deadline", "seconds": 61.7,
    "loss": [0.6931, 0.5], "last": {}, "output": "/x/model", "checkpoint": 8,
    "held_out": {"before": {"a": 0.25, "mean": 0.25}, "after": {"a": 0.5, "mean": 0.5}},
}  # fmt: skip


@pytest.fixture
def orders(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What `run` was asked for, instead of doing it."""
    from node.offline import run

    asked: list[Any] = []

    def fake(home: Home, settings: Any, order: Any) -> dict[str, Any]:
        asked.append(order)
        return REPORT

    monkeypatch.setattr(run, "run", fake)
    return asked


def test_options_make_an_order(run: Run, home: Home, orders: list[Any]) -> None:
    from node.offline.run import Order

    start = ("--home", home.path, "train", "offline", "--method")
    assert run(*start, "sft", "--from-environments", "--tasks", "9", "--output", "m").exit_code == 0
    assert run(*start, "dpo", "--from-experience", "--apply", "--steps", "5", "--beta", "0.3").exit_code == 0
    assert run(*start, "kto").exit_code == 0
    assert orders == [
        Order("sft", "environments", Path("m"), tasks=9), Order("dpo", apply=True, steps=5, beta=0.3), Order("kto")
    ]  # fmt: skip


def test_the_report(run: Run, home: Home, orders: list[Any]) -> None:
    start = ("--home", home.path, "train", "offline", "--method", "dpo")
    assert json.loads(run(*start, "--json").stdout) == REPORT
    lines = run(*start).stdout.splitlines()
    assert [line.split("  ", 1)[1].strip() for line in lines[:7]] == [
        "tiny after step 7", "8, of 9 tasks in 20 experience groups", "2", "3 steps in 62 s (stopped by --minutes)",
        "0.6931 -> 0.5000", "0.250 -> 0.500", "0.250 -> 0.500"
    ]  # fmt: skip
    assert lines[7:] == [
        "The model is in /x/model; shoal config set model.path /x/model starts from it",
        "It is step 8 of this node now; its optimizer starts anew. Next: shoal up",
    ]


def test_errors_and_exit_codes(run: Run, home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start = ("--home", home.path, "train", "offline", "--method")
    assert run(*start, "ppo").exit_code == 2
    assert run("--home", tmp_path / "none", "train", "offline", "--method", "dpo").exit_code == 4
    monkeypatch.setattr("node.offline.trainers.find_spec", lambda name: None)
    missing = run(*start, "dpo", "--apply")
    assert missing.exit_code == 1
    assert missing.stderr.endswith("trl, which is not installed\nFix: .venv/bin/pip install -e '.[trl]'\n")
    monkeypatch.setattr("node.offline.run.require_trl", lambda: None)
    nowhere = run(*start, "dpo", "--json")
    assert nowhere.exit_code == 2
    assert json.loads(nowhere.stderr)["fix"].startswith("give --output DIR")
    assert run(*start, "dpo", "--apply").exit_code == 1  # in no swarm yet
