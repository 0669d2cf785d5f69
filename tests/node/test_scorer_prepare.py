"""Tasks that are made before the fork, so that no child has to make them again."""

import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from node.scorer import Scorer
from protocol.manifest import EnvironmentSpec
from protocol.rollout import TaskRef
from tests.node.evaluating import install

KEEPING = """
import os
import sys
import time

from node.interfaces import Score


class Keeping:
    name, version, evaluates = "keeping", "1", True

    def __init__(self, settings):
        self.made = {}

    def prepare(self, seed, index):
        if index == 666:
            while True:
                time.sleep(0.01)
        if index == 13:
            raise ValueError("no such task")
        if index == 14:
            sys.exit(1)
        if index == 15:
            os._exit(1)
        while index == 16:
            try:
                time.sleep(0.01)
            except BaseException:
                pass
        self.made[index] = self.made.get(index, (0, 0))[0] + 1, os.getpid()

    def task(self, seed, index):
        raise NotImplementedError

    def score(self, seed, index, answer):
        if answer == "nonsense":
            return Score(reward=True, parsed=True)
        times, process = self.made.get(index, (0, 0))
        return Score(reward=float(times == int(answer) and process == os.getppid()), parsed=True)

    def self_check(self):
        return []
"""


@pytest.fixture
async def keeping(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Scorer]:
    install(tmp_path, "keeping", KEEPING, "keeping@1 = keeping:Keeping")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    scorer = Scorer([EnvironmentSpec("keeping", "1", 1, {})], deadline=0.5, memory_mb=512, clock=time.monotonic)
    await scorer.start()
    yield scorer
    await scorer.close()


async def test_a_child_finds_what_was_prepared(keeping: Scorer) -> None:
    first, second = TaskRef("keeping", "1", 5, 0), TaskRef("keeping", "1", 5, 1)
    scores = await keeping.score([(first, "1"), (first, "2"), (second, "1")])
    assert [score.reward for score in scores] == [1, 0, 1]
    scores = await keeping.score([(first, "2"), (second, "1")])
    assert [score.reward for score in scores] == [1, 0]


@pytest.mark.parametrize("index", [13, 14, 666])
async def test_a_task_that_cannot_be_prepared_costs_its_own_answers_alone(keeping: Scorer, index: int) -> None:
    good, bad = TaskRef("keeping", "1", 5, 0), TaskRef("keeping", "1", 5, index)
    scores = await keeping.score([(good, "1"), (bad, "1")])
    assert [score.reward for score in scores] == [1, 0]
    assert keeping.restarts == 0
    assert keeping.pid is not None


@pytest.mark.parametrize("index", [15, 16])
async def test_a_task_that_ends_or_wedges_the_process_costs_that_once(
    keeping: Scorer, index: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("node.scorer.GRACE_SECONDS", 3.0)
    good, bad = TaskRef("keeping", "1", 5, 0), TaskRef("keeping", "1", 5, index)
    for _ in range(2):
        scores = await keeping.score([(good, "0"), (bad, "1"), (bad, "2")])
        assert [score.failure for score in scores] == [None] * 3
    assert keeping.restarts == 1


async def test_replies_before_nonsense_count(keeping: Scorer) -> None:
    ref = TaskRef("keeping", "1", 5, 0)
    scores = await keeping.score([(ref, "1"), (ref, "1"), (ref, "nonsense"), (ref, "2")])
    assert [score.reward for score in scores] == [1, 1, 0, 1]
    assert [score.failure for score in scores] == [None, None, "scorer_failed: it talks nonsense", None]
