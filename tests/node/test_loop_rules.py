"""Data rules in the loop: dynamic sampling, the curriculum's state, the alarm."""

import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from node.config import Config
from node.engines.requests import RequestTooLong
from node.interfaces import Sample, Score, StepSkipped
from node.loop import Loop
from node.own_groups import chosen
from node.progress import Progress
from node.rollouts import Rollout
from node.scheduling.rounds import Begun
from node.scorer import ScorerError
from node.selection import SAME_REWARDS_ALARM
from protocol.manifest import embedded_manifest
from protocol.rollout import TaskRef
from swarm.experience import PoolEntry, UnknownGroup
from swarm.sampler import Sampler


class Events(list[str]):
    def event(self, level: str, kind: str, message: str) -> None:
        self.append(message)


@pytest.fixture
def make_loop(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Loop]:
    """A loop whose groups are informative where `good` says so, by the index of the group in the step."""

    def make(good: Callable[[int], bool], **train: Any) -> Loop:
        asked: list[tuple[tuple[TaskRef, ...], list[int]]] = []
        longs: list[bool] = []
        sampled = 0

        async def take(count: int, tasks: Callable[[int], Sequence[Begun]], *, long: bool) -> list[Rollout]:
            nonlocal sampled
            longs.append(long)
            begun = tasks(count)
            asked.append((tuple(one.ref for one in begun), [one.seed for one in begun]))
            rollouts = []
            for one in begun:
                rewards = (1.0, 0.0) if good(sampled) else (0.0, 0.0)
                sampled += 1
                samples = (Sample((1,), (-1.0,), "stop", 0),) * 2
                scores = tuple(Score(reward, True) for reward in rewards)
                rollouts.append(Rollout("own", one.ref, (1,), samples, ("a", "b"), scores, budget=8))
            return rollouts

        swarm = {"foreign_adaptive": train.pop("foreign_adaptive", False)}
        parts: Any = SimpleNamespace(
            config=Config.model_validate({"train": train, "swarm": swarm}),
            manifest=embedded_manifest("one", time.time() - 60),
            peer_id="12D3",
            engine=None,
            bundle=SimpleNamespace(model=SimpleNamespace(dtype=torch.float32), routing=None),
            scorer=None,
            teacher=None,
            rounds=None,
            averaging=None,
            sampler=Sampler(0),
            history=Events(),
            progress=Progress(time.time, 60.0),
            clock=time.time,
        )
        loop = Loop(parts)
        monkeypatch.setattr(loop.own.rollouts, "take", take)
        loop.parts.asked, loop.parts.longs = asked, longs  # type: ignore[attr-defined]
        return loop

    return make


async def test_without_dynamic_sampling_a_step_has_the_groups_that_come(make_loop: Callable[..., Loop]) -> None:
    loop = make_loop(lambda i: False, dynamic_rounds=0)
    assert len(await loop.own.roll_out(1, 4)) == 4
    assert loop.own.position.taken == 4


async def test_tasks_of_an_epoch_that_come_again_are_told_of_once(make_loop: Callable[..., Loop]) -> None:
    loop = make_loop(lambda i: True)
    history = loop.parts.history
    await loop.own.roll_out(1, 4)
    loop.own.position.taken = 4092  # of 4,096
    assert history == []
    await loop.own.roll_out(2, 4)
    assert [message[:52] for message in history] == ["all 4096 tasks that this node has in an epoch are do"]
    await loop.own.roll_out(3, 4)
    assert len(history) == 1


async def test_a_round_that_fails_costs_none_of_the_groups_before_it(
    make_loop: Callable[..., Loop], monkeypatch: Any
) -> None:
    loop = make_loop(lambda i: False, dynamic_rounds=2)
    take, calls = loop.own.rollouts.take, 0

    async def failing(count: int, tasks: Any, *, long: bool) -> list[Rollout]:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise ScorerError("out of breath")
        return await take(count, tasks, long=long)

    monkeypatch.setattr(loop.own.rollouts, "take", failing)
    assert len(await loop.own.roll_out(1, 4)) == 4
    calls = 1
    with pytest.raises(StepSkipped, match="out of breath"):
        await loop.own.roll_out(2, 4)


async def test_a_task_too_long_for_the_model_is_told_and_costs_a_step(
    make_loop: Callable[..., Loop], monkeypatch: Any
) -> None:
    loop = make_loop(lambda i: False)

    async def too_long(count: int, tasks: Any, *, long: bool) -> list[Rollout]:
        raise RequestTooLong("9000 prompt tokens")

    monkeypatch.setattr(loop.own.rollouts, "take", too_long)
    with pytest.raises(StepSkipped, match="9000 prompt tokens") as skipped:
        await loop.own.roll_out(1, 4)
    assert "rollout.max_new_tokens" in skipped.value.advice


async def test_a_teacher_sees_uniform_groups_too(make_loop: Callable[..., Loop], monkeypatch: Any) -> None:
    loop = make_loop(lambda i: False, dynamic_rounds=2)
    monkeypatch.setattr(loop.parts, "teacher", object())
    assert len(await loop.own.roll_out(1, 4)) == 4


async def test_dynamic_sampling_goes_on_with_the_next_tasks_in_place_of_uniform_groups(
    make_loop: Callable[..., Loop],
) -> None:
    loop = make_loop(lambda i: i in (1, 4, 6, 7), dynamic_rounds=5)
    rollouts = await loop.own.roll_out(3, 4)
    asked = loop.parts.asked  # type: ignore[attr-defined]
    assert [len(refs) for refs, _ in asked] == [4, 3, 1], "as many as are missing, and no more once all are there"
    assert loop.parts.longs == [True, False, False], "only a first round may be that of the long ones"  # type: ignore[attr-defined]
    assert sum(rollout.informative for rollout in rollouts) == 4
    refs = [ref for those, _ in asked for ref in those]
    seeds = [seed for _, those in asked for seed in those]
    assert len(set(refs)) == len(refs) == 8 == loop.own.position.taken
    assert len(set(seeds)) == 8
    assert chosen(rollouts, 4) == [rollout for rollout in rollouts if rollout.informative]


async def test_a_first_round_is_as_large_as_lately_was_needed(make_loop: Callable[..., Loop], monkeypatch: Any) -> None:
    monkeypatch.setattr("node.saving.model_mark", lambda bundle: "mark")
    loop = make_loop(lambda i: i % 2 == 0, dynamic_rounds=2)
    for step in range(1, 30):
        await loop.own.roll_out(step, 4)
    assert loop.own.informative.now == pytest.approx(0.5, abs=0.1)
    asked = loop.parts.asked  # type: ignore[attr-defined]
    assert [len(refs) for refs, _ in asked[:2]] == [4, 2]
    assert {len(refs) for refs, _ in asked[-3:]} <= {8, 9}
    again = make_loop(lambda i: i % 2 == 0, dynamic_rounds=2)
    again.saving.restore(loop.saving.state())
    assert again.own.informative.now == loop.own.informative.now


async def test_no_round_is_larger_than_all_rounds_together(make_loop: Callable[..., Loop]) -> None:
    loop = make_loop(lambda i: False, dynamic_rounds=2)
    for step in range(1, 20):
        assert len(await loop.own.roll_out(step, 4)) == 12
    loop = make_loop(lambda i: True, dynamic_rounds=2)
    loop.own.informative.now = 0.01
    assert len(await loop.own.roll_out(1, 4)) == 12


async def test_dynamic_sampling_keeps_what_there_is_when_its_rounds_are_over(make_loop: Callable[..., Loop]) -> None:
    loop = make_loop(lambda i: i == 5, dynamic_rounds=2)
    rollouts = await loop.own.roll_out(1, 4)
    assert len(rollouts) == 4 + 4 + 3
    own = chosen(rollouts, 4)
    assert [rollout.informative for rollout in own] == [True, False, False, False]
    assert own[1:] == rollouts[:3]


async def test_pass_rates_are_saved_with_the_position(make_loop: Callable[..., Loop], monkeypatch: Any) -> None:
    monkeypatch.setattr("node.saving.model_mark", lambda bundle: "mark")
    loop = make_loop(lambda i: True, curriculum_low=0.2, curriculum_high=0.8)
    await loop.own.roll_out(1, 8)
    state = loop.saving.state()
    assert set(state["pass_rates"].values()) == {0.5}
    again = make_loop(lambda i: True)
    again.saving.restore(state)
    assert again.own.curriculum.rates == loop.own.curriculum.rates
    del state["pass_rates"]
    again.saving.restore(state)
    assert again.own.curriculum.rates == {}


async def test_own_groups_take_the_place_of_foreign_ones_that_are_not_wanted(
    make_loop: Callable[..., Loop], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("node.saving.model_mark", lambda bundle: "mark")
    monkeypatch.setattr(Sampler, "available", lambda self, pool, count, **_: min(count, len(pool)))
    fixed, adaptive = make_loop(lambda i: True), make_loop(lambda i: True, foreign_adaptive=True)

    def missing(loop: Loop, held: int) -> int:
        p: Any = loop.parts
        p.store = SimpleNamespace(pool=lambda now: [None] * held)
        return loop.foreign.missing()

    for loop in (fixed, adaptive):
        loop.foreign.share.judge(0.5)
        loop.foreign.share.judge(0.3)
    assert [missing(fixed, 9), missing(fixed, 1)] == [0, 3]
    assert [missing(adaptive, 9), missing(adaptive, 1)] == [2, 3]
    again = make_loop(lambda i: True, foreign_adaptive=True)
    again.saving.restore(adaptive.saving.state())
    assert missing(again, 9) == 2


@pytest.mark.parametrize(("before", "after", "own"), [(0, 4, 4), (0, 1, 7), (4, 4, 4), (4, 3, 4), (0, 0, 8)])
async def test_own_groups_yield_to_foreign_ones_that_come_during_the_rollouts(
    make_loop: Callable[..., Loop], monkeypatch: pytest.MonkeyPatch, before: int, after: int, own: int
) -> None:
    loop = make_loop(lambda i: True)
    foreign = [SimpleNamespace(name=i) for i in range(after)]
    groups, shared = list[Any](), list[Rollout]()

    class Batched(Exception):
        """The step is as far as this test goes."""

    async def choose() -> list[Any]:
        return foreign

    async def taught(groups_of_step: Sequence[Any]) -> tuple[Any, ...]:
        groups.extend(groups_of_step)
        raise Batched

    loop.parts.trainer = SimpleNamespace(step=1)  # type: ignore[assignment]
    monkeypatch.setattr(loop.foreign, "missing", lambda: 4 - before)
    monkeypatch.setattr(loop.foreign, "choose", choose)
    monkeypatch.setattr(loop, "_share", shared.extend)
    monkeypatch.setattr(loop, "_say_state", lambda: None)
    monkeypatch.setattr(loop, "_taught", taught)
    monkeypatch.setattr("node.loop.train_group", lambda rollout, config, routing: rollout)
    monkeypatch.setattr("node.loop.bounded", lambda groups_of_step: groups_of_step)
    with pytest.raises(Batched):
        await loop.step()
    assert [group for group in groups if not isinstance(group, Rollout)] == foreign
    assert len(groups) - after == own
    assert len(shared) == 8 - before, "all are shared, also those not trained on"


@pytest.mark.parametrize(("own_share", "most"), [(1.0, 2), (0.25, 1)])
async def test_a_flood_fills_no_more_of_an_update_than_the_manifest_lets_it(
    make_loop: Callable[..., Loop], own_share: float, most: int
) -> None:
    loop = make_loop(lambda i: True)
    producers = ["flood"] * 96 + ["a", "b", "c"]
    pool = [PoolEntry(i.to_bytes(32, "big"), producer, (0.0, 1.0), float(i)) for i, producer in enumerate(producers)]
    used: list[bytes] = []

    def gone(digest: bytes) -> None:
        raise UnknownGroup(digest.hex())

    p: Any = loop.parts
    p.config = Config.model_validate({"swarm": {"max_producer_share": own_share}})
    p.store = SimpleNamespace(
        pool=lambda now: pool, group_body=gone, mark_used=lambda chosen, followed: used.extend(chosen)
    )
    p.exchange = SimpleNamespace(weight=lambda producer: 1.0)
    assert p.manifest.caps.max_producer_share == 0.5
    for seed in range(20):
        p.sampler = Sampler(seed)
        assert loop.foreign.missing() == 0
        used.clear()
        await loop.foreign.choose()
        assert len(used) == 4
        assert sum(producers[int.from_bytes(digest, "big")] == "flood" for digest in used) <= most


async def test_environments_outside_the_window_get_few_tasks(make_loop: Callable[..., Loop]) -> None:
    loop = make_loop(lambda i: True, curriculum_low=0.2, curriculum_high=0.8)
    names = [spec.name for spec in loop.parts.manifest.environments]
    for name in names[1:]:
        loop.own.curriculum.observe(name, [0.0])
    rollouts = await loop.own.roll_out(1, 16)
    within = sum(rollout.ref.environment == names[0] for rollout in rollouts)
    assert within >= 8
    assert loop.own.position.taken > 16


async def test_one_and_the_same_reward_for_many_steps_is_told(make_loop: Callable[..., Loop]) -> None:
    loop = make_loop(lambda i: False)
    for step in range(SAME_REWARDS_ALARM):
        await loop.own.roll_out(step, 2)
    (said,) = loop.parts.history
    assert "got the reward 0" in said
