"""Answers are scored in fair order: who hands in what is slow to score holds up itself, and not for long."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from protocol.assignment import round_task
from protocol.messages import MAX_REPORT_BYTES, ReportRequest, Trained
from protocol.rollout import TaskRef
from protocol.rounds import Round, State
from swarm.coordination.evaluation import SCORING_SECONDS, Evaluation, ScoringUnavailable, within_bounds
from swarm.coordination.reports import Reports
from tests.swarm.coordinated import manifest_of
from tests.swarm.world import who

TASKS = 16
ANNA, BERT, MALLORY = (who(name).peer_id for name in ("anna", "bert", "mallory"))


class Court:
    """A closing round, a clock, and a scorer whose time an answer names."""

    def __init__(self, path: Path) -> None:
        self.now, self.path, self.manifest = 1000.0, path, manifest_of("lead")
        self.scored: list[str] = []
        self.told: list[str] = []
        self.broken = ""
        self.record = Round(
            self.manifest.digest, 1, State.closing, 0, 0, b"", 1, 2, 3, (1, 3), TASKS, 1, b"", b"s" * 32, b"m" * 32
        )
        self.start()

    def start(self) -> None:
        self.reports = Reports(self.path, self.manifest.digest)
        unused: Any = SimpleNamespace()
        self.evaluation = Evaluation(
            self.manifest,
            unused,
            unused,
            self.reports,
            self.score,
            lambda: self.now,
            lambda kind, said: self.say(said),
            60,
        )

    def say(self, said: str) -> None:
        self.told.append(said)

    async def score(self, items: Sequence[tuple[TaskRef, str]]) -> Sequence[float]:
        """An answer is: name, seconds, reward."""
        rewards = []
        for _, text in items:
            name, seconds, reward = text.split()
            if name == self.broken:
                raise ScoringUnavailable("the scorer died")
            self.now += float(seconds)
            self.scored.append(name)
            rewards.append(float(reward))
        return rewards

    def hand_in(self, peer: str, *answers: str | None) -> None:
        report = ReportRequest(self.manifest.digest, 1, answers, (Trained(ANNA, 2),))
        assert self.reports.add(peer, report, msgspec.msgpack.encode(report))

    async def finish(self, most: int = 1000) -> None:
        for _ in range(most):
            if not await self.evaluation.score_next(self.record):
                return
        raise AssertionError("there is no end to it")


@pytest.fixture
def court(tmp_path: Path) -> Court:
    return Court(tmp_path / "lead.db")


async def test_scores_are_means_by_environment_and_none_where_one_is_missing(court: Court) -> None:
    court.hand_in(ANNA, *("a 0 1",) * 12, *("a 0 0.5",) * 4, *("a 0 nan",) * 4, *("a 0 1",) * 12)
    court.hand_in(BERT, *("b 0 1",) * 15, None, *("b 0 0.25",) * 16)
    await court.finish()
    found = court.reports.scored(1)
    assert found[ANNA].scores == (0.875, 0.75)
    assert found[BERT].scores == (None, 0.25)
    assert found[ANNA].trained == (Trained(ANNA, 2),)
    assert court.scored.count("b") == 16  # half an environment is not scored for nothing
    assert court.reports.waiting_bytes == 0


def test_answers_that_are_too_long_together_leave_room_for_the_rest(court: Court) -> None:
    def report(*answers: str | None) -> ReportRequest:
        return ReportRequest(court.manifest.digest, 1, answers, (Trained(ANNA, 2),))

    short = report("a" * 512, None, *("é" * 30_000,) * 2)  # of 4 tokens and of any number
    assert within_bounds(court.manifest, short) == (short, 0)
    found, left_out = within_bounds(court.manifest, report("a" * 513, "b", "c" * 65_537, "d" * 65_536))
    assert (left_out, found.answers) == (2, ("", "b", "", "d" * 65_536))
    many = report(*("a",) * 20, *(chr(97 + n) * (65_536 - n) for n in range(20)))
    found, left_out = within_bounds(court.manifest, many)
    assert left_out == 5
    assert found.answers == (*("a",) * 20, *("",) * 5, *many.answers[25:])
    assert len(msgspec.msgpack.encode(found)) <= MAX_REPORT_BYTES
    assert found.trained == many.trained


async def test_every_answer_is_scored_for_its_own_task(court: Court) -> None:
    seen: list[TaskRef] = []

    async def score(items: Sequence[tuple[TaskRef, str]]) -> Sequence[float]:
        seen.extend(ref for ref, _ in items)
        return [0.0] * len(items)

    court.evaluation._score = score
    court.hand_in(ANNA, *("a 0 1",) * 32)
    await court.finish()
    seed = court.record.seed
    assert seen == [round_task(court.manifest, seed, name, n) for name in ("even", "odd") for n in range(TASKS)]


async def test_slow_answers_hold_up_nobody_else_and_end(court: Court) -> None:
    court.hand_in(MALLORY, *("m 5 1",) * 32)
    court.hand_in(ANNA, *("a 0.1 1",) * 32)
    court.hand_in(BERT, *("b 0.1 1",) * 32)
    await court.finish()
    # mallory came first and has one answer scored, no more, before the others are through
    assert court.scored[: 1 + 64].count("m") == 1
    assert court.now - 1000 == pytest.approx(16 * 5 + 64 * 0.1)  # 40 s, which is less than a minute, and once more
    found = court.reports.scored(1)
    assert found[ANNA].scores == found[BERT].scores == (1.0, 1.0)
    assert found[MALLORY].scores == (1.0, 0.0)
    assert court.told == [f"{MALLORY}: scoring took 80 s; what is left of its answers scores 0"]


async def test_slow_answers_of_many_identities_leave_time_for_the_others(court: Court) -> None:
    for number in range(57):  # half of them leave the first environment out
        first = None if number % 2 else "m 5 1"
        court.hand_in(who(f"mallory {number}").peer_id, *(first,) * TASKS, *("m 5 1",) * TASKS)
    court.hand_in(ANNA, *("a 0.1 1",) * 32)
    while court.now < 1000 + SCORING_SECONDS:
        assert await court.evaluation.score_next(court.record)
    assert court.reports.scored(1)[ANNA].scores == (1.0, 1.0)


async def test_answers_that_kill_the_scorer_let_others_have_their_turn(court: Court) -> None:
    court.broken = "m"
    court.hand_in(MALLORY, *("m 0 1",) * 32)
    court.hand_in(ANNA, *("a 0.1 1",) * 32)
    failures = 0
    for _ in range(20):
        try:
            await court.evaluation.score_next(court.record)
        except ScoringUnavailable:
            failures += 1
    assert court.reports.scored(1)[ANNA].scores == (1.0, 1.0)
    assert failures > 10
    court.broken = ""
    await court.finish()
    assert court.reports.scored(1)[MALLORY].scores == (1.0, 1.0)  # it was not to blame


async def test_a_restart_in_the_middle_scores_anew(court: Court) -> None:
    court.hand_in(ANNA, *("a 1 0.5",) * 32)
    assert await court.evaluation.score_next(court.record)
    court.reports.close()
    court.start()
    await court.finish()
    assert court.scored.count("a") == 1 + 32
    assert court.reports.scored(1)[ANNA].scores == (0.5, 0.5)
