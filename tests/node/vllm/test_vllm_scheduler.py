"""The scheduler over two servers: one breaks off, new weights come amid the answers, the trainer works meanwhile."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from node.interfaces import PromptRequest, Sample
from node.scheduler import Dispatch, Scheduler
from node.scheduling.rounds import Begun, Plan, Rounds
from protocol.rollout import TaskRef

PROMPT = tuple(range(40, 60))


@pytest.fixture
async def pair(make: Callable[..., Any], fake: Any, serve: Any, bundle: Any, tmp_path: Path) -> AsyncIterator[Any]:
    """Two engines, each on a server of its own, started."""
    one = make()
    async with serve(type(fake)(bundle.tokenizer, bundle.vocabulary_size)) as other:
        two = type(one)(other, bundle, tmp_path / "second")
        for made in (one, two):
            await made.engine.start()
        yield one, two
        await two.engine.close()
        two.engine.device.close()


def check(sample: Sample, tokens: int) -> None:
    """Each token is the one its position has, with the log-probability that the weights of its version give."""
    assert (len(sample.token_ids), sample.finish) == (tokens, "length")
    spans = sample.spans or ((sample.version, tokens),)
    versions = [version for version, count in spans for _ in range(count)]
    assert sample.logprobs == tuple(-1.0 - version for version in versions)


async def test_what_a_server_had_when_it_broke_off_goes_on_at_the_other(pair: Any) -> None:
    one, two = pair
    one.fake.dies_after, one.fake.token_seconds = 40, 0.002
    scheduler = Scheduler([one.engine, two.engine], Dispatch("divided", concurrency=4, chunk_tokens=16))
    requests = [PromptRequest(f"e/{i}", PROMPT, 2, 48, 1.0, seed=i) for i in range(6)]
    groups = {group.key: group.samples async for group in scheduler.generate(requests)}
    assert groups.keys() == {request.key for request in requests}
    for samples in groups.values():
        for sample in samples:
            check(sample, 48)
    resumed = {len(body["token_ids"]) - len(PROMPT) for body in two.fake.bodies}
    assert resumed - {0, 16, 32}, "some went on from amid a chunk, with the tokens that had come"
    await scheduler.close()


async def test_answers_in_flight_cross_an_update_and_tell_the_versions_apart(pair: Any) -> None:
    one, two = pair
    for made in pair:
        made.fake.token_seconds = 0.002
    scheduler = Scheduler([one.engine, two.engine])
    rounds = Rounds(scheduler, Plan("asynchronous", over_provision=2.0, max_staleness=2), prepare)
    trained: list[Begun] = []
    for version in range(4):
        rounds.begin([Begun(TaskRef("e", "1", 0, i), 0, i) for i in range(rounds.missing(4))])
        taken = await rounds.take(4)
        rounds.begin([Begun(TaskRef("e", "1", 0, i), 0, i) for i in range(rounds.missing(4))])
        await rounds.ahead()
        await asyncio.sleep(0.03)  # the trainer works
        for made in pair:
            made.number = version + 1
        for begun in taken:
            assert version - (begun.oldest or 0) <= 2
        trained += taken
        await scheduler.update_weights(version + 1)
    samples = [sample for begun in trained for sample in begun.samples]
    assert len(samples) == 4 * 4 * 2
    assert any(sample.spans for sample in samples), "some crossed an update"
    for sample in samples:
        check(sample, 60)
    await rounds.close()
    await scheduler.close()


async def prepare(tasks: Sequence[Begun]) -> list[PromptRequest]:
    return [PromptRequest(f"e/{one.place}", PROMPT, 2, 60, 1.0, seed=one.seed) for one in tasks]


async def test_a_server_found_dead_leaves_its_work_to_the_other_and_comes_back(
    make: Callable[..., Any], fake: Any, serve: Any, bundle: Any, tmp_path: Path
) -> None:
    two = make(alone=False, start_seconds=60.0)
    async with serve(type(fake)(bundle.tokenizer, bundle.vocabulary_size)) as first:
        one = type(two)(first, bundle, tmp_path / "first", alone=False, start_seconds=60.0)
        for made in (one, two):
            await made.engine.start()
        port = int(first.url.rpartition(":")[2])
    scheduler = Scheduler([one.engine, two.engine])
    requests = [PromptRequest(f"e/{i}", PROMPT, 2, 20, 1.0, seed=i) for i in range(4)]
    async with asyncio.timeout(30.0):  # it does not wait for the first one to be there again
        groups = [group async for group in scheduler.generate(requests)]
    assert (len(groups), len(two.fake.bodies), len(first.bodies)) == (4, 8, 0)
    for made in (one, two):
        made.number = 1
    await scheduler.update_weights(1)
    async with serve(first, port):
        async with asyncio.timeout(30.0):
            while one.engine._upkeep.loaded != 1 or scheduler._lanes[0].resting:  # noqa: ASYNC110 - after its rest
                await asyncio.sleep(0.05)
        for sample in [sample async for group in scheduler.generate(requests) for sample in group.samples]:
            check(sample, 20)
        assert first.bodies, "it takes work again, with the weights it missed"
        await one.engine.close()
    one.engine.device.close()
