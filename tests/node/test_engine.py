"""Sampling many groups in one batch: what comes out is what the plain model would give, whatever shares the batch."""

import asyncio
import copy
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from node.config_train import TrainConfig
from node.device import Device
from node.engines import decoding
from node.engines.agreement import AgreementError, check_agreement
from node.engines.decoding import Limits
from node.engines.requests import RequestTooLong
from node.engines.transformers import TransformersEngine
from node.interfaces import PromptRequest, SampledGroup
from node.models import ModelBundle, load_model
from node.training.local import LocalTrainer


@pytest.fixture(params=["llama", "qwen3"])
def bundle(request: pytest.FixtureRequest, tiny_model: Callable[[str], Path], tmp_path: Path) -> ModelBundle:
    torch.set_num_threads(1)
    return load_model(str(tiny_model(request.param)), device="cpu", dtype="float32", models=tmp_path)


def ask(key: str, prompt: tuple[int, ...], n: int = 6, new: int = 12, temperature: float = 1.0) -> PromptRequest:
    return PromptRequest(key, prompt, n=n, max_new_tokens=new, temperature=temperature, seed=sum(prompt))


REQUESTS = [
    ask("a", tuple(range(40, 60))),
    ask("b", (*range(40, 55), 9, 8, 7), new=5),
    ask("c", (3,), n=1, new=20),
    ask("d", tuple(range(90, 100)), n=9, temperature=0.2),
    ask("e", tuple(range(40, 60)), n=3, new=1),
]

PROMPTS = [(5, 6, 7), tuple(range(30, 60))]


async def collect(engine: TransformersEngine, requests: list[PromptRequest]) -> dict[str, SampledGroup]:
    return {group.key: group async for group in engine.generate(requests)}


def expected_logprobs(bundle: ModelBundle, prompt: tuple[int, ...], tokens: tuple[int, ...]) -> torch.Tensor:
    ids = torch.tensor([prompt + tokens])
    with torch.no_grad():
        scores = bundle.model(ids, use_cache=False).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    return scores[torch.arange(len(tokens)), torch.tensor(tokens)]


async def test_logprobs_are_those_of_the_plain_model_at_temperature_1(bundle: ModelBundle) -> None:
    engine = TransformersEngine(bundle, Device())
    await engine.update_weights(4)
    groups = await collect(engine, REQUESTS)
    assert groups.keys() == {request.key for request in REQUESTS}
    for request in REQUESTS:
        samples = groups[request.key].samples
        assert len(samples) == request.n
        for sample in samples:
            assert sample.version == 4
            torch.testing.assert_close(
                torch.tensor(sample.logprobs),
                expected_logprobs(bundle, request.prompt_ids, sample.token_ids),
                atol=2e-5,
                rtol=0,
            )


async def test_a_sample_ends_with_its_stop_token_or_at_its_budget(bundle: ModelBundle) -> None:
    groups = await collect(TransformersEngine(bundle, Device()), [ask("x", (5, 6, 7), n=64, new=30)])
    finishes = set()
    for sample in groups["x"].samples:
        finishes.add(sample.finish)
        assert not bundle.stop_ids & set(sample.token_ids[:-1])
        if sample.finish == "stop":
            assert sample.token_ids[-1] in bundle.stop_ids
        else:
            assert len(sample.token_ids) == 30
            assert sample.token_ids[-1] not in bundle.stop_ids
    assert finishes == {"stop", "length"}


async def test_draws_of_a_group_do_not_depend_on_the_batch(bundle: ModelBundle) -> None:
    """Alone, with others, and through a batch so small that groups queue for rows."""
    together = await collect(TransformersEngine(bundle, Device()), REQUESTS)
    narrow = await collect(TransformersEngine(bundle, Device(), Limits(rows=7)), REQUESTS)
    little = await collect(TransformersEngine(bundle, Device(), Limits(cache_bytes=1)), REQUESTS)
    for request in REQUESTS:
        alone = await collect(TransformersEngine(bundle, Device()), [request])
        tokens = [sample.token_ids for sample in alone[request.key].samples]
        for other in (together, narrow, little):
            assert [sample.token_ids for sample in other[request.key].samples] == tokens


async def test_another_seed_draws_otherwise(bundle: ModelBundle) -> None:
    engine = TransformersEngine(bundle, Device())
    first = await collect(engine, [REQUESTS[0]])
    second = await collect(engine, [replace(REQUESTS[0], seed=1)])
    assert first["a"].samples != second["a"].samples


async def test_frequencies_follow_the_model(bundle: ModelBundle) -> None:
    """The first token of 4000 samples at temperature 2 against softmax(logits / 2)."""
    prompt = (5, 6, 7)
    groups = await collect(TransformersEngine(bundle, Device()), [ask("x", prompt, n=4000, new=1, temperature=2.0)])
    with torch.no_grad():
        wanted = torch.softmax(bundle.model(torch.tensor([prompt])).logits[0, -1] / 2, -1)
    drawn = torch.tensor([sample.token_ids[0] for sample in groups["x"].samples])
    found = torch.bincount(drawn, minlength=len(wanted)) / len(drawn)
    assert (found - wanted).abs().max() < 5 * (wanted.max() / 4000) ** 0.5


async def test_equal_beginnings_are_computed_once(bundle: ModelBundle, forwarded: list[int]) -> None:
    """Close to greedy, all samples of a group agree, so there is one row a token and not n."""
    groups = await collect(TransformersEngine(bundle, Device()), [ask("x", (9, 4, 77), n=8, new=6, temperature=1e-4)])
    assert len({sample.token_ids for sample in groups["x"].samples}) == 1
    assert forwarded == [3, *[1] * (len(groups["x"].samples[0].token_ids) - 1)]


async def test_prompts_that_begin_alike_are_computed_together(bundle: ModelBundle, forwarded: list[int]) -> None:
    begun = tuple(range(3, 203)) + tuple(range(3, 103))
    requests = [ask(str(i), (*begun, 200 + i, 7), n=1, new=1) for i in range(12)]
    assert sum(len(request.prompt_ids) for request in requests) > decoding.PREFILL_TOKENS
    await collect(TransformersEngine(bundle, Device()), requests)
    assert forwarded == [len(begun) + 12 * 2]


async def test_closing_the_iterator_stops_the_model(bundle: ModelBundle, monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device()
    steps = 0
    step = decoding._step

    def counted(*values: Any) -> torch.Tensor:
        nonlocal steps
        steps += 1
        return step(*values)

    monkeypatch.setattr(decoding, "_step", counted)
    engine = TransformersEngine(bundle, device)
    iterator = engine.generate(
        [ask("a", (5, 6), n=1, new=1), *(ask(str(i), (7, i + 2), n=16, new=500) for i in range(4))]
    )
    first = await anext(iterator)
    assert first.key == "a"
    started, before = time.monotonic(), steps
    await iterator.aclose()  # type: ignore[attr-defined]
    await device.run(lambda: None)
    assert time.monotonic() - started < 1.0
    assert steps <= before + 10  # of 500; one or two, and what the thread does until it hears of it


async def test_what_goes_wrong_on_the_model_thread_is_raised_to_the_reader(
    bundle: ModelBundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(decoding, "_step", broken)
    with pytest.raises(RuntimeError, match="no such kernel"):
        await collect(TransformersEngine(bundle, Device()), REQUESTS)


async def test_requests_that_cannot_be_served(bundle: ModelBundle) -> None:
    engine = TransformersEngine(bundle, Device())
    with pytest.raises(RequestTooLong, match=r"3 prompt tokens and max_new_tokens 510 exceed the context of 512"):
        await collect(engine, [ask("x", (4, 5, 6), new=510)])
    with pytest.raises(ValueError, match="must not be empty"):
        await collect(engine, [ask("x", ())])
    assert await collect(engine, []) == {}


async def test_agreement_of_engine_and_trainer(bundle: ModelBundle, tmp_path: Path) -> None:
    engine = TransformersEngine(bundle, Device())
    trainer = LocalTrainer(bundle, TrainConfig(), dumps=tmp_path)
    assert await check_agreement(engine, trainer, engine.device, PROMPTS, dtypes=["float32"]) < 1e-4
    logprobs = trainer.logprobs
    trainer.logprobs = lambda groups: [  # type: ignore[method-assign]
        [tuple(value - 0.5 for value in row) for row in rows] for rows in logprobs(groups)
    ]
    with pytest.raises(AgreementError, match=r"differ by 0\.50"):
        await check_agreement(engine, trainer, engine.device, PROMPTS, dtypes=["float32"])


async def test_bfloat16(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    bundle = load_model(str(tiny_model("llama")), device="cpu", dtype="bfloat16", models=tmp_path)
    engine = TransformersEngine(bundle, Device())
    trainer = LocalTrainer(bundle, TrainConfig(), dumps=tmp_path)
    assert await check_agreement(engine, trainer, engine.device, PROMPTS, dtypes=["bfloat16"]) < 0.2


async def test_an_engine_in_float16(bundle: ModelBundle, tmp_path: Path) -> None:
    """As a vLLM server of another owner may be."""
    engine = TransformersEngine(replace(bundle, model=copy.deepcopy(bundle.model).half()), Device())
    trainer = LocalTrainer(bundle, TrainConfig(), dumps=tmp_path)
    kinds = ["float32", "float16"]
    assert 0 < await check_agreement(engine, trainer, engine.device, PROMPTS, dtypes=kinds) < 0.05
    with pytest.raises(AgreementError, match="float32, allowed"):
        await check_agreement(engine, trainer, engine.device, PROMPTS, dtypes=["float32"])


async def test_the_device_runs_one_job_at_a_time_and_the_next_waits_for_a_late_one() -> None:
    device = Device()
    running: list[str] = []

    def job(name: str) -> str:
        running.append(name)
        assert len(running) == 1
        time.sleep(0.02)
        running.pop()
        return name

    assert await asyncio.gather(*(device.run(job, name) for name in "abc")) == ["a", "b", "c"]
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await device.run(time.sleep, 0.3)
    assert await device.run(job, "after the late one") == "after the late one"
    device.close()
