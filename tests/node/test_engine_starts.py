"""Samples that stop and go on: nothing of them is lost, and nothing about them is otherwise than undivided."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from node.device import Device
from node.engines import decoding
from node.engines.decoding import Limits
from node.engines.partial import continued, spans_of
from node.engines.transformers import TransformersEngine
from node.interfaces import PromptRequest, Sample
from node.models import ModelBundle, load_model

PROMPT = tuple(range(40, 60))
BUDGET = 40


@pytest.fixture(params=["llama", "qwen3"])
def bundle(request: pytest.FixtureRequest, tiny_model: Callable[[str], Path], tmp_path: Path) -> ModelBundle:
    torch.set_num_threads(1)
    return load_model(str(tiny_model(request.param)), device="cpu", dtype="float32", models=tmp_path)


def ask(key: str = "a", prompt: tuple[int, ...] = PROMPT, n: int = 6, new: int = BUDGET) -> PromptRequest:
    return PromptRequest(key, prompt, n=n, max_new_tokens=new, temperature=1.0, seed=5)


async def run(
    engine: TransformersEngine, *requests: PromptRequest, stop: asyncio.Event | None = None
) -> dict[str, tuple[Sample, ...]]:
    return {group.key: group.samples async for group in engine.generate(requests, stop)}


def check_logprobs(bundle: ModelBundle, prompt: tuple[int, ...], samples: Sequence[Sample]) -> None:
    for sample in samples:
        ids = torch.tensor([prompt + sample.token_ids])
        with torch.no_grad():
            scores = bundle.model(ids, use_cache=False).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        wanted = scores[torch.arange(len(sample.token_ids)), torch.tensor(sample.token_ids)]
        torch.testing.assert_close(torch.tensor(sample.logprobs), wanted, atol=1e-4, rtol=0)


async def test_going_on_gives_the_tokens_and_logprobs_of_an_undivided_pass(bundle: ModelBundle) -> None:
    """All samples, each cut somewhere else, one of them not begun: the same seed and place draw the same tokens."""
    engine = TransformersEngine(bundle, Device())
    (whole,) = (await run(engine, ask())).values()
    cuts = (3, 11, 0, 7, 11, 1)
    starts = tuple(
        replace(sample, token_ids=sample.token_ids[:cut], logprobs=sample.logprobs[:cut], finish="aborted")
        for sample, cut in zip(whole, cuts, strict=True)
    )
    assert all(len(sample.token_ids) > cut for sample, cut in zip(whole, cuts, strict=True))
    together = await run(engine, ask("other", (7, 8, 9), n=3), replace(ask(), starts=starts))
    resumed = together["a"]
    assert [sample.token_ids for sample in resumed] == [sample.token_ids for sample in whole]
    assert [sample.finish for sample in resumed] == [sample.finish for sample in whole]
    for ours, theirs in zip(resumed, whole, strict=True):
        torch.testing.assert_close(torch.tensor(ours.logprobs), torch.tensor(theirs.logprobs), atol=1e-4, rtol=0)
    check_logprobs(bundle, PROMPT, resumed)


async def test_chunks_add_up_to_the_undivided_pass(bundle: ModelBundle) -> None:
    """A budget that grows chunk by chunk, always going on with what is not finished."""
    engine = TransformersEngine(bundle, Device())
    (whole,) = (await run(engine, ask(n=1))).values()
    sample: Sample | None = None
    for budget in range(6, BUDGET + 6, 6):
        starts = (sample,) if sample else ()
        ((sample,),) = (await run(engine, replace(ask(n=1, new=min(budget, BUDGET)), starts=starts))).values()
        if sample.finish == "stop" or len(sample.token_ids) == BUDGET:
            break
    assert sample is not None
    assert (sample.token_ids, sample.finish) == (whole[0].token_ids, whole[0].finish)
    check_logprobs(bundle, PROMPT, [sample])


async def test_equal_starts_are_computed_once(bundle: ModelBundle, forwarded: list[int]) -> None:
    starts = (Sample((9, 8, 7), (-1.0,) * 3, "aborted", 0), Sample((9, 8, 6), (-1.0,) * 3, "length", 0))
    await run(TransformersEngine(bundle, Device()), replace(ask(n=4, new=4), starts=starts))
    assert forwarded[0] == len(PROMPT) + 4  # the prompt, 9, 8, 7 and 6
    assert forwarded[1] <= 2  # the two that begin at the prompt; those with starts have drawn their last token


async def test_a_stop_yields_everything_with_the_tokens_it_has(
    bundle: ModelBundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped amid one batch while others wait for rows; going on gives the undivided pass again."""
    device = Device()
    endless = replace(bundle, stop_ids=frozenset())
    engine = TransformersEngine(endless, device, Limits(rows=8))
    requests = [ask("a"), ask("b", (7, 8, 9), n=2, new=5), replace(ask("c"), seed=8)]
    whole = await run(engine, *requests)

    stop, steps, step = asyncio.Event(), 0, decoding._step
    loop = asyncio.get_running_loop()

    def counted(*arguments: object) -> torch.Tensor:
        nonlocal steps
        steps += 1
        if steps == 9:
            asyncio.run_coroutine_threadsafe(_set(stop), loop).result()
        return step(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(decoding, "_step", counted)
    partial = await run(engine, *requests, stop=stop)
    monkeypatch.setattr(decoding, "_step", step)
    assert {sample.finish for sample in partial["b"]} == {"length"}
    assert {sample.finish for sample in partial["a"]} == {"aborted"}
    assert {len(sample.token_ids) for sample in partial["a"]} <= {10, 11}
    assert partial["c"] == (Sample((), (), "aborted", 0),) * 6

    await engine.update_weights(3)
    left = [replace(request, starts=partial[request.key]) for request in (requests[0], requests[2])]
    resumed = await run(engine, *left)
    for key in "ac":
        assert [sample.token_ids for sample in resumed[key]] == [sample.token_ids for sample in whole[key]]
    for before, after in zip(partial["a"], resumed["a"], strict=True):
        had = len(before.token_ids)
        assert after.logprobs[:had] == before.logprobs
        assert (after.version, after.spans) == (0, ((0, had), (3, BUDGET - had)))
    assert {(sample.version, sample.spans) for sample in resumed["c"]} == {(3, ())}


async def _set(event: asyncio.Event) -> None:
    event.set()


async def test_a_stop_before_the_start_costs_no_forward_pass(bundle: ModelBundle) -> None:
    stop = asyncio.Event()
    stop.set()
    engine = TransformersEngine(bundle, Device())
    start = Sample((4, 5), (-1.0, -2.0), "aborted", 2)
    groups = await run(engine, replace(ask(n=2), starts=(start,)), stop=stop)
    assert groups == {"a": (start, Sample((), (), "aborted", 0))}


async def test_a_stop_because_of_a_group_takes_effect_at_that_very_token(bundle: ModelBundle) -> None:
    engine = TransformersEngine(replace(bundle, stop_ids=frozenset()), Device())
    requests = [ask("a", new=30), ask("b", (7, 8, 9), n=2, new=5), ask("c", (5, 6), n=2, new=9)]
    stop = asyncio.Event()
    lengths = {}
    async for group in engine.generate(requests, stop):
        lengths[group.key] = {len(sample.token_ids) for sample in group.samples}
        await asyncio.sleep(0.02)  # the model does not use the time
        if group.key == "b":
            stop.set()
    assert lengths == {"a": {5}, "b": {5}, "c": {5}}


async def test_starts_that_cannot_go_on_are_refused(bundle: ModelBundle) -> None:
    engine = TransformersEngine(bundle, Device())
    start = Sample((4, 5), (-1.0, -2.0), "aborted", 2)
    with pytest.raises(ValueError, match="2 starts, but n is 1"):
        await run(engine, replace(ask(n=1), starts=(start, start)))
    with pytest.raises(ValueError, match="2 tokens that ended by stop has nothing to go on to"):
        await run(engine, replace(ask(), starts=(replace(start, finish="stop"),)))
    with pytest.raises(ValueError, match="nothing to go on to with max_new_tokens 2"):
        await run(engine, replace(ask(new=2), starts=(start,)))


def test_spans_name_the_version_of_every_token() -> None:
    first = continued(None, (1, 2), (-1.0, -1.0), "aborted", 4)
    assert (first.version, first.spans, spans_of(first)) == (4, (), ((4, 2),))
    second = continued(first, (3,), (-1.0,), "aborted", 4)
    assert second.spans == ()
    third = continued(second, (5, 6), (-1.0, -2.0), "stop", 7, spans=((6, 1), (7, 1)))
    assert (third.version, third.spans) == (4, ((4, 3), (6, 1), (7, 1)))
    assert continued(continued(None, (), (), "aborted", 1), (9,), (-1.0,), "stop", 2).version == 2
