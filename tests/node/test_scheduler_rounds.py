"""The groups of a step by each policy, over simulated engines on a virtual clock."""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

import pytest

from node.bench.simulated import EngineModel, SimulatedEngine, Trace
from node.bench.virtual_time import run_virtual
from node.engines.partial import spans_of
from node.interfaces import PromptRequest
from node.scheduler import Scheduler
from node.scheduling.rounds import Begun, Plan, Rounds
from protocol.rollout import TaskRef

MODEL = EngineModel(
    slots=16, kv_tokens=100_000, step_seconds=1.0, kv_seconds=0.0, token_seconds=0.0, prefill_seconds=0.0
)
SHORT, LONG = (20, 24), (20, 200)


class Node:
    """Steps without a loop: every third task has one long answer."""

    def __init__(self, plan: Plan, tasks: int = 60) -> None:
        self.lengths = {f"t/{i}": LONG if i % 3 == 0 else SHORT for i in range(tasks)}
        self.engine = SimulatedEngine("e", MODEL, Trace(self.lengths))
        self.scheduler = Scheduler([self.engine])
        self.rounds = Rounds(self.scheduler, plan, self.prepare)
        self.next = 0
        self.asked: list[PromptRequest] = []
        self.broken: Exception | None = None

    async def prepare(self, tasks: Sequence[Begun]) -> list[PromptRequest]:
        if self.broken is not None:
            raise self.broken
        requests = [PromptRequest(f"t/{one.ref.index}", (1, 2, 3), 2, 300, 1.0, seed=one.seed) for one in tasks]
        self.asked += requests
        return requests

    def begin(self, count: int, *, ahead: bool = False, long: bool = True) -> None:
        new = self.rounds.missing(count, ahead=ahead, long=long)
        self.rounds.begin([Begun(TaskRef("t", "1", 0, self.next + i), 0, self.next + i) for i in range(new)])
        self.next += new

    async def step(self, count: int, train_seconds: float = 0.0) -> list[int]:
        self.begin(count)
        taken = await self.rounds.take(count)
        for one in taken:
            assert sorted(len(sample.token_ids) for sample in one.samples) == list(self.lengths[f"t/{one.ref.index}"])
            assert {sample.finish for sample in one.samples} == {"stop"}
            assert one.prompt_ids == (1, 2, 3)
            assert self.scheduler.version - (one.oldest or 0) <= self.rounds.plan.staleness
        if self.rounds.plan.policy == "asynchronous":
            self.begin(count, ahead=True)
            await self.rounds.ahead()
        await asyncio.sleep(train_seconds)
        await self.scheduler.update_weights(self.scheduler.version + 1)
        return [one.ref.index for one in taken]


def now() -> float:
    return asyncio.get_running_loop().time()


def test_synchronous_steps_wait_for_all_they_begin() -> None:
    async def run() -> None:
        node = Node(Plan())
        assert await node.step(4) == [0, 1, 2, 3]
        assert now() == pytest.approx(200)
        assert await node.step(4) == [4, 5, 6, 7]
        assert node.rounds.begun == []
        assert node.engine.meters.tokens == sum(sum(node.lengths[f"t/{i}"]) for i in range(8))

    run_virtual(run())


def test_partial_steps_take_the_first_and_go_on_with_the_rest_under_the_next_weights() -> None:
    async def run() -> None:
        node = Node(Plan("partial", over_provision=2.0, max_staleness=2))
        assert await node.step(4) == [1, 2, 4, 5]
        assert now() < 60  # not the 200 of the long ones
        left = {one.ref.index: one for one in node.rounds.begun}
        assert left.keys() == {0, 3, 6, 7}
        assert left[7].finished is not None  # it was done at the same time
        kept = {i: left[i].samples for i in (0, 3, 6)}
        assert all(sample.token_ids for samples in kept.values() for sample in samples)
        steps = [await node.step(4) for _ in range(3)]
        assert 7 in steps[0]
        trained = {index for step in steps for index in step}
        assert {0, 3, 6} <= trained  # within the staleness of 2
        assert node.rounds.given_up == 0
        # nothing was sampled twice: all tokens are those of what was trained on or is kept
        done = [1, 2, 4, 5, *(index for step in steps for index in step)]
        known = sum(sum(node.lengths[f"t/{i}"]) for i in done) + sum(one.tokens for one in node.rounds.begun)
        assert node.engine.meters.tokens == known

    run_virtual(run())


def test_short_groups_overtake_long_ones_within_the_window_only() -> None:
    async def run() -> None:
        for window in (1, 4, 0):
            node = Node(Plan("partial", over_provision=3.0, max_staleness=5, window=window))
            furthest = 0
            for _ in range(6):
                node.begin(3)
                taken = await node.rounds.take(3)
                await node.scheduler.update_weights(node.scheduler.version + 1)
                waiting = [one.place for one in node.rounds.begun if one.finished is None]
                if waiting:
                    furthest = max(furthest, *(one.place - min(waiting) for one in taken))
            assert furthest < window or (window == 0 and furthest >= 4)

    run_virtual(run())


def test_a_resumed_group_asks_only_for_what_is_open_and_names_every_token() -> None:
    async def run() -> None:
        node = Node(Plan("partial", over_provision=2.0, max_staleness=2))
        await node.step(2)
        (zero,) = (one for one in node.rounds.begun if one.ref.index == 0)
        before = [sample for sample in zero.samples if sample.finish == "aborted"]
        assert [len(sample.token_ids) for sample in zero.samples if sample.finish == "stop"] == [20]
        while zero in node.rounds.begun:
            await node.step(2)
        (after,) = (sample for sample in zero.samples if len(sample.token_ids) == 200)
        assert after.token_ids[: len(before[0].token_ids)] == before[0].token_ids
        assert (after.version, after.spans[0]) == (0, (0, len(before[0].token_ids)))
        assert [version for version, _ in after.spans] == [0, 1, 2]
        assert len(after.logprobs) == 200 == sum(count for _, count in spans_of(after))

    run_virtual(run())


def test_tail_batching_is_on_policy_and_gives_the_long_ones_a_step_of_their_own() -> None:
    async def run() -> None:
        node = Node(Plan("tail", over_provision=1.5))
        steps = [await node.step(4) for _ in range(5)]
        long_rounds = [step for step in steps if any(index % 3 == 0 for index in step)]
        assert len(long_rounds) == 1
        assert all(index % 3 == 0 for index in long_rounds[0])
        assert long_rounds[0] == [0, 3, 6, 9]
        assert len({index for step in steps for index in step}) == 20
        assert node.rounds.given_up > 0

    run_virtual(run())


def test_a_further_round_of_dynamic_sampling_is_no_step_of_the_long_ones() -> None:
    async def run() -> None:
        node = Node(Plan("tail", over_provision=1.5))
        for _ in range(2):
            node.begin(4)
            await node.rounds.take(4)
            assert any(one.long for one in node.rounds.begun)
            began = now()
            node.begin(1, long=False)
            (one,) = await node.rounds.take(1, long=False)
            assert one.ref.index % 3 != 0
            assert now() - began < 60  # not the 200 of the long ones
            await node.scheduler.update_weights(node.scheduler.version + 1)

    run_virtual(run())


def test_a_step_tried_again_for_fewer_groups_may_be_that_of_the_long_ones() -> None:
    async def run() -> None:
        node = Node(Plan("tail", over_provision=1.5))
        while sum(one.long for one in node.rounds.begun) < 2:
            await node.step(4)
        node.broken = RuntimeError("no scorer")
        node.begin(4)
        with pytest.raises(RuntimeError, match="no scorer"):
            await node.rounds.take(4)
        node.broken = None
        node.begin(2)
        assert all(one.ref.index % 3 == 0 for one in await node.rounds.take(2))

    run_virtual(run())


def test_asynchronous_steps_train_while_the_next_ones_are_sampled() -> None:
    async def run() -> None:
        seconds = {}
        for plan in (Plan(), Plan("asynchronous", over_provision=2.0, max_staleness=2)):
            node = Node(plan)
            began = now()
            trained = [index for _ in range(6) for index in await node.step(4, train_seconds=100.0)]
            assert len(set(trained)) == 24
            seconds[plan.policy] = now() - began
            await node.rounds.close()
        assert seconds["synchronous"] == pytest.approx(6 * 300, rel=0.01)
        assert seconds["asynchronous"] < 0.5 * seconds["synchronous"]

    run_virtual(run())


def test_asynchronous_steps_send_ahead_no_more_than_they_can_take() -> None:
    async def run() -> None:
        for staleness in (1, 2):
            node = Node(Plan("asynchronous", over_provision=1.5, max_staleness=staleness))
            done = [index for _ in range(8) for index in await node.step(4, train_seconds=100.0)]
            assert node.rounds.given_up == 0
            await node.rounds.close()
            trained = sum(sum(node.lengths[f"t/{i}"]) for i in done)
            assert node.engine.meters.tokens <= trained + sum(sum(LONG) for _ in node.rounds.begun)

    run_virtual(run())


def test_a_flight_that_ends_leaves_what_has_gone_off_with_another_one() -> None:
    async def run() -> None:
        node = Node(Plan("asynchronous", over_provision=2.0, max_staleness=1))
        flying: Counter[int] = Counter()
        sampled = node.rounds._sampled

        async def counted(tasks: Any, *others: Any) -> AsyncGenerator[Begun, None]:
            flying.update(one.place for one in tasks)
            assert max(flying.values()) == 1
            async with aclosing(sampled(tasks, *others)) as groups:
                async for one in groups:
                    flying[one.place] -= 1
                    yield one

        node.rounds._sampled = counted  # type: ignore[method-assign]
        for count in (4, 4, 1, 1, 1, 4, 4):
            await node.step(count, train_seconds=5.0)
        await node.rounds.close()

    run_virtual(run())


def test_what_is_begun_survives_a_restart() -> None:
    async def run() -> None:
        plan = Plan("partial", over_provision=2.0, max_staleness=2)
        first = Node(plan)
        steps = [await first.step(4)]
        state = json.loads(json.dumps(first.rounds.state()))
        tokens = [one.tokens for one in first.rounds.begun]
        assert sum(tokens) > 0

        second = Node(plan)
        await second.scheduler.update_weights(1)
        second.rounds.restore(state)
        second.next = first.next
        assert [one.tokens for one in second.rounds.begun] == tokens
        for node in (first, second):
            node.asked.clear()
        for _ in range(4):
            steps.append(await first.step(4))
            assert await second.step(4) == steps[-1]
        assert second.asked == first.asked
        assert second.rounds.state() == first.rounds.state()

    run_virtual(run())


def test_what_is_in_flight_is_begun_again_after_a_restart_of_an_asynchronous_node() -> None:
    async def run() -> None:
        plan = Plan("asynchronous", over_provision=2.0, max_staleness=2)
        first = Node(plan)
        await first.step(4)
        state = first.rounds.state()
        await first.rounds.close()
        second = Node(plan)
        second.rounds.restore(state)
        second.next = first.next
        assert len(second.rounds.begun) == 8
        done = [index for _ in range(5) for index in await second.step(4)]
        assert {one[0][3] for one in state} <= set(done)
        await second.rounds.close()

    run_virtual(run())


def test_trouble_leaves_what_was_begun_in_place() -> None:
    async def run() -> None:
        for policy in ("synchronous", "partial", "asynchronous"):
            node = Node(Plan(policy))  # type: ignore[arg-type]
            node.broken = RuntimeError("no tasks")
            for _ in range(2):
                with pytest.raises(RuntimeError, match="no tasks"):
                    await node.step(4)
            begun = [one.ref.index for one in node.rounds.begun]
            assert begun == list(range(len(begun)))
            node.broken = None
            assert set(await node.step(4)) <= set(begun)
            await node.rounds.close()

    run_virtual(run())


def test_tokens_that_are_too_old_are_given_up() -> None:
    async def run() -> None:
        node = Node(Plan("partial", over_provision=2.0, max_staleness=1))
        await node.step(4)
        kept = sum(one.tokens for one in node.rounds.begun)
        assert kept > 0
        await node.scheduler.update_weights(3)
        await node.step(4)
        assert node.rounds.given_up == kept

    run_virtual(run())
