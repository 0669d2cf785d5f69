"""Reward workers: a bounded number of chunks at each, own before foreign, and none lost with an actor."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from node.config import LimitsConfig
from node.interfaces import Score
from node.large import reward_actors
from node.large.reward_actors import RewardActor, RewardCrew
from node.large.room import Bundle
from node.scorer import CHUNK_JOBS, GRACE_SECONDS, MAX_WAITING, START_SECONDS, Scorer, ScorerError, make_scorer
from node.scorer_wire import Done, Job, Ready, Refused
from protocol.manifest import EnvironmentSpec
from protocol.rollout import TaskRef

SPEC = EnvironmentSpec("even", "1", 1, {})
LIMITS = LimitsConfig()


class Even:
    """An actor that scores in no time, or when it is let."""

    made: "list[Even]" = []  # noqa: RUF012 - one list for all of a test

    def __init__(self, environments: Sequence[EnvironmentSpec], deadline: float, memory_mb: int) -> None:
        assert (environments, deadline, memory_mb) == ((SPEC,), LIMITS.scorer_seconds, LIMITS.scorer_memory_mb)
        self.let = asyncio.Event()
        self.let.set()
        self.busy = self.most = 0
        self.seen: list[str | None] = []
        Even.made.append(self)

    async def start(self) -> Ready | Refused:
        return Ready(("seccomp", "rlimits") if len(Even.made) == 1 else ("seccomp",))

    async def work(self, jobs: Sequence[Job]) -> tuple[list[Done], int]:
        self.busy += 1
        self.most = max(self.most, self.busy)
        self.seen += [job.answer for job in jobs]
        await self.let.wait()
        self.busy -= 1
        return [Done(at, Score(len(job.answer or "") % 2, True)) for at, job in enumerate(jobs)], 0


@pytest.fixture
def crew(ray: Any, bundles: list[Bundle]) -> RewardCrew:
    Even.made = []
    ray.replaced = lambda number: Even
    return RewardCrew(ray, "group", bundles, [SPEC], LIMITS, in_flight=2)


def items(count: int, first: str = "") -> list[tuple[TaskRef, str]]:
    return [(TaskRef("even", "1", 0, at), first + "x" * at) for at in range(count)]


async def test_scores_are_in_order_and_no_actor_has_more_than_its_share(crew: RewardCrew) -> None:
    scorer = make_scorer([SPEC], LIMITS, crew=crew)
    await scorer.start()
    assert scorer.isolation == ("seccomp",), "what all of them have"
    for even in Even.made:
        even.let.clear()
    calls = [asyncio.create_task(scorer.score(items(200))) for _ in range(4)]
    await asyncio.sleep(0.1)
    assert [even.busy for even in Even.made] == [2, 2]
    assert sum(len(even.seen) for even in Even.made) <= 4 * 64, "chunks are of 64 at most, the rest waits in the node"
    for even in Even.made:
        even.let.set()
    for scores in await asyncio.gather(*calls):
        assert [score.reward for score in scores] == [at % 2 for at in range(200)]
    assert [even.most for even in Even.made] == [2, 2]
    assert (scorer.answers, scorer.failures, scorer.restarts) == (800, 0, 0)
    assert scorer.busy_seconds > 0
    await scorer.close()


async def test_own_work_goes_before_that_of_peers(crew: RewardCrew) -> None:
    scorer = make_scorer([SPEC], LIMITS, crew=crew)
    await scorer.start()
    for even in Even.made:
        even.let.clear()
    full = [asyncio.create_task(scorer.score(items(4))) for _ in range(4)]
    await asyncio.sleep(0.05)
    foreign = asyncio.create_task(scorer.score(items(4, "foreign"), foreign=True))
    await asyncio.sleep(0.05)
    own = asyncio.create_task(scorer.score(items(4, "own")))
    await asyncio.sleep(0.05)
    for even in Even.made:
        even.let.set()
    await asyncio.gather(*full, foreign, own)
    order = [answer for even in Even.made for answer in even.seen if answer and answer[0] in "fo"]
    assert order.index("own") < order.index("foreign") or Even.made[0].seen[4][:1] != Even.made[1].seen[4][:1]
    await scorer.close()


async def test_a_call_that_is_cancelled_before_its_chunk_begins_keeps_no_room(crew: RewardCrew) -> None:
    await crew.start()
    jobs = [Job(ref, answer) for ref, answer in items(4)]
    for _ in range(4):
        call = asyncio.create_task(crew.work(jobs, foreign=True))
        asyncio.get_running_loop().call_soon(call.cancel)  # where the call has begun, and its chunk has not
        with pytest.raises(asyncio.CancelledError):
            await call
    assert Even.made[0].seen == Even.made[1].seen == []
    async with asyncio.timeout(5):
        assert len(await crew.work(jobs, foreign=True)) == 4
    assert [lane.busy for lane in crew._lanes] == [0, 0]
    await crew.close()


async def test_peers_work_goes_on_when_the_own_that_was_to_go_before_is_given_up(crew: RewardCrew) -> None:
    await crew.start()
    lanes = [(await crew._take(foreign=False))[0] for _ in range(4)]
    foreign, own = (asyncio.create_task(crew._take(foreign=one)) for one in (True, False))
    await asyncio.sleep(0.01)
    crew._give(lanes[0])
    own.cancel()
    async with asyncio.timeout(5):
        assert (await foreign)[0] is lanes[0]
    await crew.close()


async def test_a_chunk_goes_to_the_next_actor_when_its_own_ends(crew: RewardCrew, ray: Any) -> None:
    scorer = make_scorer([SPEC], LIMITS, crew=crew)
    await scorer.start()
    Even.made[0].let.clear()
    call = asyncio.create_task(scorer.score(items(60)))
    await asyncio.sleep(0.05)
    assert Even.made[0].busy == 1
    ray.actors[0].die()
    assert [score.reward for score in await call] == [at % 2 for at in range(60)]
    assert len(Even.made[1].seen) == 60
    async with asyncio.timeout(5):
        while len(Even.made) < 3 or crew._tasks:  # noqa: ASYNC110 - it comes after a pause
            await asyncio.sleep(0.01)
    assert scorer.restarts == 1
    await scorer.score(items(60))
    assert Even.made[2].seen, "the one in its place works"
    await scorer.close()


async def test_a_small_chunk_has_the_time_of_the_large_one_before_it(crew: RewardCrew) -> None:
    each = LIMITS.scorer_seconds + GRACE_SECONDS
    assert crew._seconds(4) >= START_SECONDS + CHUNK_JOBS * each + 4 * each


async def test_an_actor_has_no_chunk_overtaken_by_later_ones() -> None:
    actor = RewardActor([SPEC], LIMITS.scorer_seconds, LIMITS.scorer_memory_mb)
    said: list[str] = []

    async def work(jobs: Sequence[Job], foreign: bool) -> list[Done]:
        for job in jobs:  # a turn each, as after answers that ended the process
            await asyncio.sleep(0)
            said.append(str(job.answer))
        return []

    actor._scorer.work = work  # type: ignore[method-assign]
    await asyncio.gather(*(actor.work([Job(ref, name) for ref, _ in items(3)]) for name in "ab"))
    assert said == ["a", "a", "a", "b", "b", "b"]


async def test_answers_that_end_every_actor_are_given_up_at_the_third(crew: RewardCrew, ray: Any) -> None:
    class Fragile(Even):
        async def work(self, jobs: Sequence[Job]) -> tuple[list[Done], int]:
            raise RuntimeError("gone")

    ray.replaced = lambda number: Fragile
    scorer = make_scorer([SPEC], LIMITS, crew=crew)
    await scorer.start()
    with pytest.raises(ScorerError, match="3 reward workers failed over the same 4 answers"):
        await scorer.score(items(4))
    await scorer.close()


async def test_what_cannot_be_had_is_said(crew: RewardCrew, ray: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing(Even):
        async def start(self) -> Ready | Refused:
            return Refused("environment even 1 is not installed")

    ray.replaced = lambda number: Refusing
    with pytest.raises(ScorerError, match="even 1 is not installed"):
        await crew.start()

    class Late(Even):
        async def start(self) -> Ready | Refused:
            await asyncio.sleep(10)
            return Ready(())

    ray.replaced = lambda number: Late
    ray.section.start_seconds = 0.05
    with pytest.raises(ScorerError, match=r"reward worker 1 on 10.0.0.1: no answer in time; .* start the node again"):
        await crew.start()
    # none has room, and none comes
    monkeypatch.setattr(reward_actors, "START_SECONDS", 0.0)
    monkeypatch.setattr(RewardCrew, "_seconds", lambda self, jobs: 0.05)
    with pytest.raises(ScorerError, match="no reward worker has room"):
        await crew.work([Job(TaskRef("even", "1", 0, 0), "x")], foreign=False)
    await crew.close()


async def test_peers_calls_are_turned_away_when_too_many_wait(crew: RewardCrew) -> None:
    scorer: Scorer = make_scorer([SPEC], LIMITS, crew=crew)
    await scorer.start()
    for even in Even.made:
        even.let.clear()
    calls = [asyncio.create_task(scorer.score(items(4), foreign=True)) for _ in range(MAX_WAITING)]
    await asyncio.sleep(0.05)
    with pytest.raises(ScorerError, match="256 groups of peers wait"):
        await scorer.score(items(4), foreign=True)
    assert scorer.turned_away == 1
    for even in Even.made:
        even.let.set()
    await asyncio.gather(*calls)
    with pytest.raises(ScorerError, match="environment odd 1 is not one of this swarm's"):
        await scorer.score([(TaskRef("odd", "1", 0, 0), "x")])
    await scorer.close()
