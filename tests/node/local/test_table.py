"""What `shoal local` shows of its nodes, on a terminal and where there is none."""

import io
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from node.home import Home
from node.local.member import Member, tend
from node.local.table import COLUMNS, PLAIN_SECONDS, SMALL, LiveTable, row

STATUS: dict[str, Any] = {
    "state": "TRAINING", "reason": "with 1 peer", "stage": "update", "stage_seconds": 2.4, "step": 12, "reward": 0.5,
    "reward_start": 0.125, "held_out": 0.375, "held_out_start": 0.25, "tokens_per_second": 101.6, "own_groups": 4,
    "foreign_groups": 3, "peers": 1,
}  # fmt: skip


@pytest.fixture
def member(tmp_path: Path) -> Member:
    return Member("node-1", Home(tmp_path), 7946, 8421, status=dict(STATUS))


def test_a_row_has_what_one_wants_to_know_of_a_node(member: Member) -> None:
    assert dict(zip(COLUMNS, row(member), strict=True)) == {
        "node": "node-1",
        "state": "TRAINING  update 2 s",
        "step": "12",
        "reward": "0.50",
        "since start": "+0.38",
        "held-out": "0.25 -> 0.38",
        "tokens/s": "102",
        "own + foreign": "4 + 3",
        "peers": "1",
        "page": "http://127.0.0.1:8421",
    }
    member.status |= {"state": "WAITING", "reason": "no peer", "reward": None, "reward_start": None}
    assert row(member)[1:5] == ("WAITING  no peer", "12", "-", "-")


def test_what_ended_a_node_is_shown_and_remembered(member: Member) -> None:
    for code in ("raise SystemExit(7)", "import os; os.kill(os.getpid(), 9)"):
        member.process = subprocess.Popen([sys.executable, "-c", code])
        member.process.wait(30)
        tend(member, 2, None, (), now=10.0)
    assert member.ends == ["exit code 7", "SIGKILL"]
    assert row(member)[1] == "died (SIGKILL), restarting in 4 s"


def test_a_node_that_has_said_nothing_yet_is_starting(member: Member) -> None:
    member.status = {}
    assert row(member) == ("node-1", "starting", *[""] * (len(COLUMNS) - 2))


def test_on_a_terminal_it_is_a_live_table(member: Member) -> None:
    shown = io.StringIO()
    with LiveTable(Console(file=shown, force_terminal=True, width=200)) as table:
        table.show([member])
        member.note = "OSError: [Errno 28] for [/ip4/0.0.0.0]"
        table.show([member])
    assert "Ctrl-C stops" in shown.getvalue()
    assert member.note in shown.getvalue()
    member.note = ""
    for cell in row(member):
        assert cell in shown.getvalue()


def test_a_narrow_terminal_cuts_off_neither_address_nor_path(member: Member) -> None:
    shown = io.StringIO()
    member.note = "stopped; step 13 is saved in /some/where"
    with LiveTable(Console(file=shown, force_terminal=True, width=80)) as table:
        table.show([member])
    assert "http://127.0.0.1:8421  stopped; step 13 is saved in /some/where" in shown.getvalue()


def test_elsewhere_it_is_a_line_when_something_changes(member: Member, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("node.local.table.time.monotonic", lambda: now)
    shown = io.StringIO()
    with LiveTable(Console(file=shown, width=80)) as table:
        table.show([member])
        member.status["step"] = 13
        table.show([member])  # the same state, too soon
        assert shown.getvalue().count("\n") == 1
        now += PLAIN_SECONDS
        table.show([member])
        member.note = "stopped; step 13 is saved in [somewhere]"
        table.show([member])
    first, second, third = shown.getvalue().splitlines()
    assert first.startswith("node node-1  state TRAINING  update 2 s  step 12  reward 0.50")
    assert first.endswith("page http://127.0.0.1:8421")
    assert "step 13  reward" in second
    assert "state stopped; step 13 is saved in [somewhere]" in third


def test_a_narrow_terminal_has_a_table_that_fits(member: Member) -> None:
    shown = io.StringIO()
    with LiveTable(Console(file=shown, force_terminal=True, width=80, color_system=None)) as table:
        table.show([member, member])
    lines = re.sub(r"\x1b\[[?\d]*[A-Za-z]", "", shown.getvalue()).splitlines()
    heads = next(line for line in lines if "own + foreign" in line)
    assert all(name in heads for name in SMALL)
    first = next(line for line in lines if line.strip().startswith("node-1") and "TRAINING" in line)
    assert first.index("TRAINING") == heads.index("state")
    assert "0.50" in first
    assert "update 2 s" not in first


def test_on_a_narrow_terminal_nothing_is_cut(member: Member) -> None:
    shown = io.StringIO()
    with LiveTable(Console(file=shown, force_terminal=True, width=80)) as table:
        table.show([member])
    text = "".join(shown.getvalue().split())
    state, _, words = row(member)[1].partition("  ")
    for cell in (state, words, *row(member)[2:], f"shoal --home {member.home.path} open"):
        assert "".join(cell.split()) in text
