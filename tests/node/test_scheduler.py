"""The scheduler over simulated engines on a virtual clock, and over real ones."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from node.bench.simulated import EngineModel, SimulatedEngine, Trace
from node.bench.virtual_time import NothingToWaitFor, run_virtual
from node.device import Device
from node.engines.partial import EngineFailed
from node.engines.transformers import TransformersEngine
from node.interfaces import Engine, PromptRequest, Sample, SampledGroup
from node.models import load_model
from node.scheduler import Dispatch, Scheduler, derived_seed
from node.scheduling.lengths import Lengths, family_of, of_group

MODEL = EngineModel(
    slots=4, kv_tokens=4000, step_seconds=1.0, kv_seconds=1e-4, token_seconds=0.05, prefill_seconds=1e-3
)
LENGTHS = {f"sums/{i}": [40 + 4 * i + j for j in range(4)] for i in range(16)} | {"sums/16": [300, 310, 290, 305]}
TOTAL = sum(map(sum, LENGTHS.values()))


def ask(key: str, n: int = 4, new: int = 400) -> PromptRequest:
    return PromptRequest(key, (5,) * 20, n=n, max_new_tokens=new, temperature=1.0, seed=3)


REQUESTS = [ask(key) for key in LENGTHS]


def engines(count: int, model: EngineModel = MODEL) -> list[SimulatedEngine]:
    trace = Trace(LENGTHS)
    return [SimulatedEngine(f"e{i}", model, trace) for i in range(count)]


async def collect(
    engine: Engine, requests: Sequence[PromptRequest], stop: asyncio.Event | None = None
) -> dict[str, tuple[Sample, ...]]:
    return {group.key: group.samples async for group in engine.generate(requests, stop)}


def check_complete(groups: dict[str, tuple[Sample, ...]]) -> None:
    assert groups.keys() == LENGTHS.keys()
    for key, samples in groups.items():
        assert {sample.finish for sample in samples} == {"stop"}
        assert sorted(len(sample.token_ids) for sample in samples) == sorted(LENGTHS[key])
        for sample in samples:
            assert len(sample.token_ids) == LENGTHS[key][sample.token_ids[0]] == len(sample.logprobs)


async def timed(scheduler: Scheduler, requests: Sequence[PromptRequest] = REQUESTS) -> float:
    check_complete(await collect(scheduler, requests))
    return asyncio.get_running_loop().time()


class Recorder:
    """An engine that answers at once, and remembers what it was asked for."""

    name = "recorder"
    version = 4

    def __init__(self) -> None:
        self.asked: list[Sequence[PromptRequest]] = []
        self.stops: list[asyncio.Event | None] = []

    async def generate(
        self, requests: Sequence[PromptRequest], stop: asyncio.Event | None = None
    ) -> AsyncIterator[SampledGroup]:
        self.asked.append(requests)
        self.stops.append(stop)
        for request in reversed(requests):
            yield SampledGroup(request.key, (Sample((7,), (-1.0,), "stop", 4),) * request.n)

    async def update_weights(self, version: int) -> None: ...

    async def close(self) -> None: ...


async def test_by_default_requests_pass_one_engine_as_they_are() -> None:
    recorder = Recorder()
    scheduler = Scheduler([recorder])
    assert (scheduler.name, scheduler.version) == ("recorder", 4)
    start = Sample((1,), (-2.0,), "aborted", 3)
    requests = [ask("a"), replace(ask("b"), starts=(start,))]
    stop = asyncio.Event()
    groups = [group async for group in scheduler.generate(requests, stop)]
    assert recorder.asked == [requests]
    assert recorder.stops == [stop]
    assert [group.key for group in groups] == ["b", "a"]
    assert await collect(scheduler, []) == {}


@pytest.mark.parametrize("by", ["whole", "longest-first", "divided"])
def test_every_sample_comes_back_once_and_complete(by: str) -> None:
    made = engines(3)
    scheduler = Scheduler(made, Dispatch(by, concurrency=4, chunk_tokens=25))  # type: ignore[arg-type]
    run_virtual(timed(scheduler))
    assert sum(engine.meters.tokens for engine in made) == TOTAL
    assert min(engine.meters.tokens for engine in made) > 0


def test_the_longest_first_are_done_sooner() -> None:
    """The long group is asked for last; whole, it is also all on one engine."""
    seconds = {}
    for by in ("whole", "longest-first", "divided"):
        scheduler = Scheduler(engines(3), Dispatch(by, concurrency=4, chunk_tokens=25))  # type: ignore[arg-type]
        seconds[by] = run_virtual(timed(scheduler))
    assert seconds["longest-first"] < 0.9 * seconds["whole"]
    assert seconds["divided"] < 0.9 * seconds["whole"]


def test_one_sample_of_each_group_goes_ahead_and_then_the_longest() -> None:
    begun: list[str] = []

    class Watched(SimulatedEngine):
        def generate(
            self, requests: Sequence[PromptRequest], stop: asyncio.Event | None = None
        ) -> AsyncIterator[SampledGroup]:
            begun.extend(request.key for request in requests)
            return super().generate(requests, stop)

    lengths = {"a/0": [5, 5], "a/1": [6, 6], "a/2": [90, 90], "a/3": [7, 7]}
    scheduler = Scheduler([Watched("e", MODEL, Trace(lengths))], Dispatch("longest-first", concurrency=4))
    run_virtual(collect(scheduler, [ask(key, n=2, new=100) for key in lengths]))
    assert begun[:4] == ["a/0#0", "a/1#0", "a/2#0", "a/3#0"]
    # a/0 is known to be short first; the others are taken for long until they are known
    assert begun[4:] == ["a/1#1", "a/2#1", "a/3#1", "a/0#1"]


def test_chunks_fit_the_memory_where_whole_groups_are_put_back() -> None:
    tight = replace(MODEL, slots=16, kv_tokens=900)
    plain, divided = engines(2, tight), engines(2, tight)
    run_virtual(timed(Scheduler(plain)))
    bound = Dispatch("divided", concurrency=16, chunk_tokens=25, kv_tokens=900)
    run_virtual(timed(Scheduler(divided, bound)))
    assert sum(engine.meters.preempted for engine in plain) > 0
    assert sum(engine.meters.preempted for engine in divided) == 0


def test_a_stop_keeps_every_token_and_going_on_samples_none_twice() -> None:
    async def run(by: str) -> None:
        made = engines(2)
        scheduler = Scheduler(made, Dispatch(by, concurrency=4, chunk_tokens=25))  # type: ignore[arg-type]
        stop = asyncio.Event()
        asyncio.get_running_loop().call_later(60.0, stop.set)
        first = await collect(scheduler, REQUESTS, stop)
        assert asyncio.get_running_loop().time() < 80
        assert first.keys() == LENGTHS.keys()
        unfinished = {key: [s for s in samples if s.finish == "aborted"] for key, samples in first.items()}
        assert any(s.token_ids for samples in unfinished.values() for s in samples)
        assert sum(len(s.token_ids) for samples in first.values() for s in samples) == sum(
            engine.meters.tokens for engine in made
        )

        await scheduler.update_weights(1)
        left = [
            replace(ask(key, n=len(samples)), starts=tuple(s for s in samples if s.token_ids))
            for key, samples in unfinished.items()
            if samples
        ]
        rest = await collect(scheduler, left)
        assert sum(engine.meters.tokens for engine in made) == TOTAL
        resumed = {key: [s for s in samples if s.spans] for key, samples in rest.items()}
        assert any(resumed.values())
        for samples in resumed.values():
            for sample in samples:
                assert [version for version, _ in sample.spans] == [0, 1]
                assert sum(count for _, count in sample.spans) == len(sample.token_ids)
        check_complete(
            {key: tuple(s for s in samples if s.finish == "stop") + rest.get(key, ()) for key, samples in first.items()}
        )

    for by in ("whole", "longest-first", "divided"):
        run_virtual(run(by))


@pytest.mark.parametrize("by", ["whole", "divided"])
def test_the_samples_of_an_engine_that_fails_go_on_elsewhere(by: str) -> None:
    async def run() -> None:
        made = engines(2)
        scheduler = Scheduler(made, Dispatch(by, concurrency=8, chunk_tokens=25))  # type: ignore[arg-type]
        asyncio.get_running_loop().call_later(40.0, setattr, made[0], "broken", "the server is gone; look at its log")
        check_complete(await collect(scheduler, REQUESTS))
        assert sum(engine.meters.tokens for engine in made) == TOTAL  # nothing was sampled again
        assert 0 < made[0].meters.tokens < made[1].meters.tokens
        await scheduler.update_weights(7)
        assert (made[0].version, made[1].version) == (0, 7)
        made[0].broken = None
        await asyncio.sleep(61)
        assert made[0].version == 7  # given when it woke, before it works again
        before = made[0].meters.tokens
        await collect(scheduler, REQUESTS)
        assert made[0].meters.tokens > before
        await scheduler.close()

    run_virtual(run())


def test_when_no_engine_comes_back_it_is_said() -> None:
    async def run() -> None:
        made = engines(2)
        scheduler = Scheduler(made, Dispatch())
        for engine in made:
            engine.broken = "the server is gone; look at its log"
        with pytest.raises(EngineFailed, match="the server is gone"):
            await collect(scheduler, REQUESTS)
        await scheduler.update_weights(2)  # they get it when they are back
        await scheduler.close()

    run_virtual(run())


def test_other_errors_are_raised_at_once() -> None:
    class Broken(Recorder):
        async def generate(
            self, requests: Sequence[PromptRequest], stop: asyncio.Event | None = None
        ) -> AsyncIterator[SampledGroup]:
            raise ValueError("no such prompt")
            yield

    class Silent(Recorder):
        async def generate(
            self, requests: Sequence[PromptRequest], stop: asyncio.Event | None = None
        ) -> AsyncIterator[SampledGroup]:
            for request in requests[:1]:
                yield SampledGroup(request.key, (Sample((7,), (-1.0,), "stop", 4),) * request.n)

    with pytest.raises(ValueError, match="no such prompt"):
        run_virtual(collect(Scheduler([Broken()]), REQUESTS))
    with pytest.raises(RuntimeError, match="recorder left 16 requests unanswered"):
        run_virtual(collect(Scheduler([Silent()]), REQUESTS))


def test_leaving_early_ends_what_is_in_flight_and_makes_room() -> None:
    async def run() -> None:
        made = engines(1)
        scheduler = Scheduler(made, Dispatch("divided", concurrency=4, chunk_tokens=25))
        groups = scheduler.generate(REQUESTS)
        await anext(groups)
        await groups.aclose()  # type: ignore[attr-defined]
        had = made[0].meters.tokens
        await asyncio.sleep(100)
        assert made[0].meters.tokens <= had + 4 * 16  # the steps it was amid
        check_complete({**await collect(scheduler, REQUESTS)})

    run_virtual(run())


def test_overlapping_calls_share_the_engines() -> None:
    async def run() -> None:
        scheduler = Scheduler(engines(2), Dispatch("divided", concurrency=4, chunk_tokens=25))
        halves = await asyncio.gather(collect(scheduler, REQUESTS[:4]), collect(scheduler, REQUESTS[4:]))
        check_complete(halves[0] | halves[1])

    run_virtual(run())


def test_a_clock_that_cannot_go_on_says_so() -> None:
    async def run() -> None:
        await asyncio.Event().wait()

    with pytest.raises(NothingToWaitFor):
        run_virtual(run())


def test_expected_lengths() -> None:
    assert (family_of("sums/17"), family_of("17")) == ("sums", "")
    assert (of_group([], 100), of_group([3, 9], 100)) == (100, 9)
    lengths = Lengths()
    assert lengths.of_family("sums/1", 100) == 100
    lengths.finished("sums/2", 10)
    lengths.finished("sums/3", 60)
    assert lengths.of_family("sums/1", 100) == pytest.approx(11.0)
    assert lengths.of_family("sums/1", 5) == 5
    assert lengths.of_family("words/1", 100) == 100
    for i in range(300):
        lengths.finished(f"e{i}/0", 1)
    assert lengths.of_family("sums/1", 100) == 100  # forgotten: there is room for 256
    assert derived_seed(1, 2, 3) != derived_seed(1, 23)


async def test_divided_over_real_engines(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    """Close to greedy, so that it must be what one undivided pass gives; log-probabilities are the plain model's."""
    torch.set_num_threads(1)
    bundle = load_model(str(tiny_model("llama")), device="cpu", dtype="float32", models=tmp_path)
    bundle = replace(bundle, stop_ids=frozenset())
    requests = [
        PromptRequest(f"a/{i}", tuple(range(30 + i, 40 + 2 * i)), n=3, max_new_tokens=20, temperature=1e-4, seed=i)
        for i in range(3)
    ]
    whole = await collect(TransformersEngine(bundle, Device()), requests)
    pair = [TransformersEngine(bundle, Device()) for _ in range(2)]
    divided = await collect(Scheduler(pair, Dispatch("divided", concurrency=2, chunk_tokens=6)), requests)
    for request in requests:
        for ours, theirs in zip(divided[request.key], whole[request.key], strict=True):
            assert (ours.token_ids, ours.finish) == (theirs.token_ids, "length")
            torch.testing.assert_close(torch.tensor(ours.logprobs), torch.tensor(theirs.logprobs), atol=1e-4, rtol=0)
