"""The vLLM engine against a fake server: what it asks, what it makes of the answers, and what it does in trouble."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from node.engines.partial import EngineFailed
from node.engines.requests import RequestTooLong
from node.engines.vllm import VllmEngine
from node.engines.vllm_probe import EngineSetupError
from node.interfaces import PromptRequest, Sample, SampledGroup
from node.routing import Routing
from node.scheduler import Scheduler, derived_seed

Make = Callable[..., Any]
PROMPT = tuple(range(40, 60))


def ask(key: str = "a", n: int = 2, new: int = 12, seed: int = 5, starts: tuple[Sample, ...] = ()) -> PromptRequest:
    return PromptRequest(key, PROMPT, n, new, 1.0, seed, starts)


async def collect(
    engine: VllmEngine | Scheduler, *requests: PromptRequest, stop: asyncio.Event | None = None
) -> dict[str, SampledGroup]:
    return {group.key: group async for group in engine.generate(requests, stop)}


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not true():  # noqa: ASYNC110 - it watches a server
            await asyncio.sleep(0.002)


def ids(count: int, begin: int = 0) -> tuple[int, ...]:
    return tuple(10 + at % 50 for at in range(begin, begin + count))


async def test_samples_have_tokens_logprobs_and_the_version(make: Make, fake: Any) -> None:
    made = make()
    await made.update(3, version=7)  # noted: the engine has not started
    await made.engine.start()
    fake.ends[derived_seed(5, 1, 0)] = 6
    groups = await collect(made.engine, ask("a"), ask("b", n=1, new=3, seed=8))
    full, short = groups["a"].samples
    assert full == Sample(ids(12), (-4.0,) * 12, "length", 7)
    assert short == Sample((*ids(5), 1), (-4.0,) * 6, "stop", 7)
    assert groups["b"].samples == (Sample(ids(3), (-4.0,) * 3, "length", 7),)


async def test_what_a_server_is_asked(make: Make, fake: Any, bundle: Any) -> None:
    made = make()
    await made.engine.start()
    start = Sample((20, 21), (-0.5, -0.25), "aborted", 0)
    await collect(made.engine, replace(ask(n=2, new=9, starts=(start,)), temperature=0.7))
    by_length = sorted(fake.bodies, key=lambda body: len(body["token_ids"]))
    assert [tuple(body["token_ids"]) for body in by_length] == [PROMPT, (*PROMPT, 20, 21)]
    sampling = by_length[1]["sampling_params"]
    assert sampling == {
        "n": 1,
        "temperature": 0.7,
        "max_tokens": 7,
        "seed": derived_seed(5, 0, 2),
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "stop_token_ids": sorted(bundle.stop_ids),
        "ignore_eos": True,
        "logprobs": 0,
        "detokenize": False,
        "stream_interval": 8,
    }
    assert by_length[0]["sampling_params"]["seed"] != sampling["seed"]
    assert {body["cache_salt"] for body in fake.bodies} == {fake.label}


async def test_the_experts_that_a_server_tells_come_with_the_samples(
    make: Make, fake: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Those of the layers with experts, for the prompt and all tokens but the last; a start keeps its own."""
    made = make()
    made.engine.bundle = replace(made.engine.bundle, routing=Routing((1, 2), 8, 2))
    await made.engine.start()
    await collect(made.engine, ask(n=1))
    assert "start it with --enable-return-routed-experts" in caplog.text
    fake.layers = 3
    start = Sample((20, 21), (-0.5, -0.25), "aborted", 0, experts=bytes(4 * (len(PROMPT) + 1)))
    groups = await collect(made.engine, ask(n=2, new=5, starts=(start,)))
    continued, fresh = groups["a"].samples
    expected = b"".join(bytes(i % 8 for i in (at + 1, at + 2, at + 2, at + 3)) for at in range(len(PROMPT) + 4))
    assert fresh.experts == expected
    assert continued.experts == start.experts + expected[len(start.experts) :]
    fake.layers = 1
    with pytest.raises(EngineSetupError, match=r"has shape \(\d+, 1, 2\), but the model has 3 layers or more"):
        await collect(made.engine, ask(n=1))


async def test_a_start_goes_on_with_its_own_tokens(make: Make) -> None:
    made = make()
    await made.update(1, version=4)
    await made.engine.start()
    start = Sample((20, 21), (-0.5, -0.25), "aborted", 2)
    groups = await collect(made.engine, ask(n=2, new=5, starts=(start,)))
    continued, fresh = groups["a"].samples
    assert continued == Sample((20, 21, *ids(3)), (-0.5, -0.25, -2.0, -2.0, -2.0), "length", 2, ((2, 2), (4, 3)))
    assert fresh == Sample(ids(5), (-2.0,) * 5, "length", 4)


async def test_new_weights_are_loaded_between_a_pause_and_a_resume(make: Make, fake: Any) -> None:
    made = make()
    await made.engine.start()
    fake.calls.clear()
    await made.update(5, version=1)
    assert fake.calls == [
        "/pause?mode=keep",
        "/collective_rpc",
        "/update_weight_version",
        "/reset_prefix_cache",
        "/resume",
    ]
    assert fake.weights == 5
    groups = await collect(made.engine, ask(n=1, new=2))
    assert groups["a"].samples == (Sample(ids(2), (-6.0, -6.0), "length", 1),)


async def test_a_request_in_flight_crosses_a_version(make: Make, fake: Any) -> None:
    made = make()
    await made.engine.start()
    fake.token_seconds = 0.01
    task = asyncio.ensure_future(collect(made.engine, ask(n=1, new=60)))
    await until(lambda: fake.sent >= 8)
    await made.update(1, version=1)
    (sample,) = (await task)["a"].samples
    assert sample.finish == "length"
    assert [version for version, _ in sample.spans] == [0, 1]
    (_, old), (_, new) = sample.spans
    assert old + new == 60
    assert sample.version == 0
    assert sample.logprobs == (-1.0,) * old + (-2.0,) * new


async def test_a_stop_keeps_what_there_is(make: Make, fake: Any) -> None:
    made = make(concurrency=3)
    await made.engine.start()
    fake.token_seconds = 0.01
    stop = asyncio.Event()
    fake.ends[derived_seed(5, 0, 0)] = 2
    task = asyncio.ensure_future(collect(made.engine, ask("a", n=4, new=200), ask("b", n=1, new=200), stop=stop))
    await until(lambda: fake.sent >= 18)
    stop.set()
    groups = await task
    samples = groups["a"].samples
    assert samples[0] == Sample((10, 1), (-1.0, -1.0), "stop", 0)
    begun = [sample for sample in samples[1:] if sample.token_ids]
    assert len(begun) >= 2
    for sample in begun:
        assert sample.finish == "aborted"
        assert sample.token_ids == ids(len(sample.token_ids))
    # what never got a place comes back as it was
    assert groups["b"].samples == (Sample((), (), "aborted", 0),)
    assert fake.streams == 0
    # and goes on from there
    fake.token_seconds = 0
    groups = await collect(made.engine, ask("a", n=1, new=200, starts=(begun[0],)))
    (sample,) = groups["a"].samples
    assert sample.token_ids[: len(begun[0].token_ids)] == begun[0].token_ids
    assert len(sample.token_ids) == 200


async def test_a_server_that_does_not_abort_is_hung_up_on(
    make: Make, fake: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("node.engines.vllm.ABORT_SECONDS", 0.1)
    made = make()
    await made.engine.start()
    fake.token_seconds, fake.ignores_aborts = 0.01, True
    stop = asyncio.Event()
    task = asyncio.ensure_future(collect(made.engine, ask(n=1, new=300), stop=stop))
    await until(lambda: fake.sent >= 12)
    stop.set()
    (sample,) = (await task)["a"].samples
    assert sample.finish == "aborted"
    assert len(sample.token_ids) >= 8
    await until(lambda: fake.streams == 0)


async def test_closing_the_iterator_aborts_at_the_server(make: Make, fake: Any) -> None:
    made = make()
    await made.engine.start()
    fake.token_seconds = 0.01
    fake.ends[derived_seed(9, 0, 0)] = 1
    iterator = made.engine.generate([ask("a", n=3, new=300), ask("b", n=1, new=300, seed=9)])
    assert (await anext(iterator)).key == "b"
    await iterator.aclose()  # type: ignore[attr-defined]
    await until(lambda: fake.streams == 0)


async def test_a_dying_server_loses_no_token_that_came(make: Make, fake: Any) -> None:
    made = make()
    await made.update(1, version=3)
    await made.engine.start()
    fake.dies_after = 30
    fake.token_seconds = 0.001
    with pytest.raises(EngineFailed, match="is it still running") as failed:
        await collect(made.engine, ask("a", n=3, new=100))
    (group,) = failed.value.groups
    kept = [len(sample.token_ids) for sample in group.samples]
    assert sum(kept) >= 12  # all but the message under way of each stream
    for sample in group.samples:
        assert sample == Sample(ids(len(sample.token_ids)), (-2.0,) * len(sample.token_ids), "aborted", 3)


async def test_under_a_scheduler_samples_go_on_when_the_server_is_back(make: Make, fake: Any) -> None:
    made = make()
    await made.engine.start()
    scheduler = Scheduler([made.engine])
    fake.dies_after = 30
    fake.token_seconds = 0.001
    task = asyncio.ensure_future(collect(scheduler, ask("a", n=3, new=100)))
    await until(lambda: fake.sent >= 30)
    # it comes back with the weights it began with
    fake.dies_after, fake.label, fake.weights = None, "default", 0
    asked = len(fake.bodies)
    groups = await task
    assert [len(sample.token_ids) for sample in groups["a"].samples] == [100] * 3
    assert all(sample.finish == "length" for sample in groups["a"].samples)
    again = fake.bodies[asked:]
    assert sum(len(body["token_ids"]) - len(PROMPT) for body in again) >= 12
    assert fake.label.endswith(":0")


async def test_a_server_restarted_in_between_gets_the_weights_again(make: Make, fake: Any) -> None:
    made = make()
    await made.engine.start()
    await made.update(4, version=2)
    fake.weights, fake.label = 0, "default"
    groups = await collect(made.engine, ask(n=1, new=2))
    assert groups["a"].samples == (Sample(ids(2), (-5.0, -5.0), "length", 2),)


async def test_a_failed_load_is_an_engine_failure_and_made_up_for(make: Make, fake: Any) -> None:
    made = make()
    await made.engine.start()
    fake.fails.add("/collective_rpc")
    with pytest.raises(EngineFailed, match=r"did not take the weights of version 1: .*failed inside; .*weights_dir"):
        await made.update(2, version=1)
    fake.fails.clear()
    groups = await collect(made.engine, ask(n=1, new=2))
    assert groups["a"].samples == (Sample(ids(2), (-3.0, -3.0), "length", 1),)


async def test_a_silent_server_is_given_up(make: Make, fake: Any) -> None:
    made = make(stall_seconds=0.2)
    await made.engine.start()
    fake.silent = True
    with pytest.raises(EngineFailed, match="has given no token for 0 s"):
        await collect(made.engine, ask())


async def test_a_pause_for_weights_is_no_silence(make: Make, fake: Any) -> None:
    made = make(stall_seconds=0.2)
    await made.engine.start()
    fake.token_seconds = 0.01
    task = asyncio.ensure_future(collect(made.engine, ask(n=1, new=40)))
    await until(lambda: fake.sent >= 4)
    export = made.files.export
    made.files.export = lambda directory: (asyncio.run(asyncio.sleep(0.5)), export(directory))
    await made.update(1, version=1)
    assert (await task)["a"].samples[0].finish == "length"


async def test_a_server_without_versions_is_told_them_by_time(make: Make, fake: Any) -> None:
    fake.scale_out = False
    made = make()
    await made.engine.start()
    fake.token_seconds = 0.005
    task = asyncio.ensure_future(collect(made.engine, ask(n=1, new=100)))
    await until(lambda: fake.sent >= 20)
    await made.update(1, version=1)
    (sample,) = (await task)["a"].samples
    assert [version for version, _ in sample.spans] == [0, 1]
    really_old = sample.logprobs.count(-1.0)
    # too many tokens may be told to be old, never too few
    assert really_old <= sample.spans[0][1] <= really_old + 8
    assert fake.bodies[0]["return_token_ids"] is True


async def test_somebody_elses_weights_are_noticed(make: Make, fake: Any) -> None:
    made = make()
    await made.engine.start()
    fake.token_seconds = 0.005
    task = asyncio.ensure_future(collect(made.engine, ask(n=1, new=40)))
    await until(lambda: fake.sent >= 4)
    fake.label = "somebody:9"
    with pytest.raises(EngineSetupError, match="'somebody:9', which are not this node's"):
        await task


async def test_memory_is_given_back_for_the_trainer_and_taken_in_two_parts(make: Make, fake: Any) -> None:
    made = make(sleep=True)
    await made.engine.start()
    await collect(made.engine, ask(n=1, new=2))
    fake.calls.clear()
    await made.engine.device.run(lambda: None)  # what the trainer does
    await made.update(2, version=1)
    await made.engine.device.run(lambda: None)
    assert fake.calls == ["/sleep?level=2"]
    groups = await collect(made.engine, ask(n=1, new=2))
    assert groups["a"].samples == (Sample(ids(2), (-3.0, -3.0), "length", 1),)
    assert [call for call in fake.calls if "generate" not in call] == [
        "/sleep?level=2",
        "/wake_up?tags=weights",
        "/collective_rpc",
        "/update_weight_version",
        "/wake_up?tags=kv_cache",
        "/reset_prefix_cache",
        "/resume",
    ]


async def test_it_does_not_sleep_while_it_samples(make: Make, fake: Any) -> None:
    made = make(sleep=True)
    await made.engine.start()
    fake.token_seconds = 0.01
    task = asyncio.ensure_future(collect(made.engine, ask(n=1, new=20)))
    await until(lambda: fake.sent >= 4)
    await made.engine.device.run(lambda: None)
    assert (await task)["a"].samples[0].finish == "length"
    assert "/sleep?level=2" not in fake.calls


async def test_requests_that_cannot_be_served(make: Make) -> None:
    made = make()
    await made.engine.start()
    with pytest.raises(RequestTooLong, match="exceed the context of 400 tokens"):  # the server's, not the model's
        await collect(made.engine, ask(new=390))
    with pytest.raises(ValueError, match="must not be empty"):
        await collect(made.engine, ask(n=0))
    assert await collect(made.engine) == {}
