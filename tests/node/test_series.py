"""Numbers of steps for charts: what a bucket holds, at every width, and with 100,000 steps."""

import json
import math
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from node.history import History
from node.series import COLUMNS, WIDTHS

STEPS = 100_000


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "node.db"


@pytest.fixture
def history(path: Path, clock: Any) -> Iterator[History]:
    opened = History(path, clock)
    yield opened
    opened.close()


def record(step: int, **others: Any) -> dict[str, Any]:
    return {
        "reward": step / 10,
        "rewards": {"odd" if step % 2 else "even": step / 10},
        "own_groups": 4,
        "foreign_groups": step % 3,
        "foreign_reward": step / 100 if step % 3 else None,
        "prepare_seconds": 2.0,
        "update_seconds": 1.0,
        **others,
    }


def test_every_step_is_a_point_where_there_is_room(history: History) -> None:
    for step in (3, 4, 5):
        history.record_step(step, record(step, loss=math.nan if step == 4 else 0.5))
    found = history.series(50, None, None)
    assert (found["first"], found["last"], found["width"]) == (3, 5, 1)
    assert found["step"] == [3, 4, 5]
    assert found["reward"] == found["reward_low"] == found["reward_high"] == [0.3, 0.4, 0.5]
    assert (found["seconds"], found["loss"], found["entropy"]) == ([3.0] * 3, [0.5, None, 0.5], [None] * 3)
    assert found["foreign_reward"] == [None, 0.04, 0.05]
    assert found["environments"] == {"even": [None, 0.4, None], "odd": [0.3, None, 0.5]}
    assert history.series(50, 4, 4)["reward"] == [0.4]
    assert history.series(50, 9, None)["step"] == []


def test_a_node_that_has_not_stepped_yet(history: History) -> None:
    history.record_evaluation(0, {"sums": 0.25})
    found = history.series(400, None, None)
    assert (found["first"], found["last"], found["step"], found["reward"], found["environments"]) == (
        None, None, [], [], {},
    )  # fmt: skip
    assert found["evaluations"] == {"step": [0], "mean": [0.25], "scores": {"sums": [0.25]}}


def test_buckets_are_means_with_the_smallest_and_the_largest(history: History) -> None:
    for step in range(1, 131):
        history.record_step(step, record(step))
    found = history.series(50, None, None)  # 130 steps: by threes, of the rows of single steps
    assert (found["width"], len(found["step"])) == (3, 44)
    assert found["step"][:2] == [2, 5]
    assert found["step"][-1] == 130
    assert found["reward"][1] == pytest.approx((0.3 + 0.4 + 0.5) / 3)
    assert (found["reward_low"][1], found["reward_high"][1]) == (0.3, 0.5)
    assert found["environments"]["odd"][1] == pytest.approx((0.3 + 0.5) / 2)


def test_wide_buckets_are_those_of_the_steps_they_hold(history: History, path: Path) -> None:
    history._series.fill((step, json.dumps(record(step))) for step in range(1, 3_001))
    found = history.series(50, None, None)
    assert found["width"] == 64  # 60 steps a point, of the rows of 16 steps each
    first, last = 640, 703
    at = found["step"].index(last)
    steps = [record(step) for step in range(first, last + 1)]
    groups = sum(one["foreign_groups"] for one in steps)
    assert found["reward"][at] == pytest.approx(sum(one["reward"] for one in steps) / len(steps))
    assert (found["reward_low"][at], found["reward_high"][at]) == (64.0, 70.3)
    assert found["foreign_groups"][at] == pytest.approx(groups / len(steps))
    assert found["foreign_reward"][at] == pytest.approx(
        sum((one["foreign_reward"] or 0) * one["foreign_groups"] for one in steps) / groups
    )
    assert found["environments"]["even"][at] == pytest.approx(sum(range(640, 704, 2)) / 32 / 10)
    with sqlite3.connect(path) as database:
        assert dict(database.execute("SELECT width, COUNT(*) FROM series GROUP BY width")) == {
            width: 3_000 // width + (width > 1) for width in WIDTHS
        }


def test_a_step_done_again_and_steps_forgotten(history: History) -> None:
    for step in range(1, 101):
        history.record_step(step, record(step))
    history.record_step(2, record(2, reward=9.0, rewards={"new": 9.0}))
    assert history.series(50, 1, 3)["environments"] == {"new": [None, 9.0, None], "odd": [0.1, None, 0.3]}
    assert history.series(50, None, None)["reward_high"][1] == 9.0
    history.forget_after(2)
    found = history.series(50, None, None)
    assert (found["last"], found["step"], found["reward"]) == (2, [1, 2], [0.1, 9.0])
    for step in range(3, 101):
        history.record_step(step, record(step))
    found = history.series(50, None, None)
    assert (found["width"], found["reward"][1]) == (2, pytest.approx((9.0 + 0.3) / 2))


def test_held_out_scores_of_the_steps_asked_for(history: History) -> None:
    for step in range(0, 101, 5):
        if step:
            history.record_step(step, record(step))
        history.record_evaluation(step, {"sums": step / 100} | ({"words": 0.5} if step > 90 else {}))
    scored = history.series(50, 80, None)["evaluations"]
    assert (scored["step"], scored["mean"][:3]) == ([80, 85, 90, 95, 100], [0.8, 0.85, 0.9])
    assert scored["scores"]["words"] == [None, None, None, 0.5, 0.5]
    assert history.series(50, None, 10)["evaluations"]["step"] == [0, 5, 10]


def test_a_history_from_before_the_series_is_taken_over(path: Path, clock: Any) -> None:
    with sqlite3.connect(path) as database:
        database.executescript(
            "CREATE TABLE history_version (version INTEGER NOT NULL); INSERT INTO history_version VALUES (2);"
            "CREATE TABLE steps (step INTEGER PRIMARY KEY, at REAL NOT NULL, record TEXT NOT NULL,"
            " trained_foreign INTEGER NOT NULL);"
            "CREATE TABLE evaluations (step INTEGER PRIMARY KEY, at REAL NOT NULL, mean REAL NOT NULL,"
            " scores TEXT NOT NULL);"
            "CREATE TABLE events (id INTEGER PRIMARY KEY AUTOINCREMENT, at REAL NOT NULL, level TEXT NOT NULL,"
            " kind TEXT NOT NULL, message TEXT NOT NULL);"
        )
        for step in (1, 100, 101, 102):  # older ones were thinned out
            database.execute("INSERT INTO steps VALUES (?, 5.0, ?, 0)", (step, json.dumps(record(step, loss=math.nan))))
    for _ in range(2):  # the second start finds it done
        opened = History(path, clock)
        found = opened.series(50, None, None)
        assert (found["first"], found["last"], found["width"]) == (1, 102, 3)
        assert (found["step"], found["reward"]) == ([1, 101, 102], [0.1, pytest.approx(10.05), 10.2])
        assert found["loss"] == [None] * 3
        opened.close()


def test_a_hundred_thousand_steps(history: History) -> None:
    """In how many rows it answers, not in what time: that is printed (25 ms on one core here)."""
    counter = f"(SELECT 1 UNION ALL SELECT step + 1 FROM counter WHERE step < {STEPS})"
    for table, columns in (
        ("series", "1, step, step, 1" + ", step / 10.0" * (2 + len(COLUMNS))),
        ("series_rewards", "1, step, 'sums', 1, 0.5"),
    ):
        history._database.execute(
            f"INSERT INTO {table} WITH RECURSIVE counter (step) AS {counter} SELECT {columns} FROM counter"
        )
    history._series._fold(1, STEPS)
    history.record_step(STEPS + 1, record(STEPS + 1, rewards={"sums": 0.5}))
    began = time.process_time()
    found = history.series(400, None, None)
    print(f"series of {STEPS} steps in {1000 * (time.process_time() - began):.0f} ms")  # noqa: T201
    assert (found["first"], found["last"], found["width"]) == (1, STEPS + 1, 256)
    assert len(found["step"]) == len(found["reward"]) == len(found["environments"]["sums"]) == 391
    assert found["step"][-2:] == [99_839, 100_001]
    assert found["reward"][1] == pytest.approx(sum(range(256, 512)) / 256 / 10)
    assert (found["reward_low"][-1], found["reward_high"][-1]) == (9_984.0, 10_000.1)
    zoomed = history.series(100, 50_001, 50_100)
    assert (zoomed["width"], zoomed["step"]) == (1, list(range(50_001, 50_101)))
