"""Adapters in the real vLLM: what it samples with them is what the trainer computes, before and after updates."""

import asyncio
import dataclasses
import random
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from node.config import Config
from node.device import Device
from node.engines.agreement import check_agreement
from node.engines.choose import make_engine
from node.engines.vllm import VllmEngine
from node.engines.vllm_probe import MissingFlag
from node.interfaces import Batch, PromptRequest, SampledGroup, TrainGroup, TrainSequence
from node.models import load_model
from node.preflight import prepare
from node.training import lora
from node.training.local import LocalTrainer

pytestmark = pytest.mark.interop

PROMPTS = [tuple(range(5, 45)), tuple(range(10, 90))]


class Made:
    """A trainer of adapters, and an engine that gets them."""

    def __init__(self, model: Path, place: Path, **engine: Any) -> None:
        config = Config.model_validate(
            {
                "rollout": {"engine": "vllm"},
                "engine": {"start_seconds": 900, **engine},
                "model": {"path": str(model), "dtype": "float32"},
                "node": {"threads": 1},
                "train": {"lora_rank": 4, "learning_rate": 3e-2, "warmup_steps": 0},
            }
        )
        self.device = Device()
        bundle = load_model(str(model), device="cpu", dtype="float32", models=place)
        self.trainer = LocalTrainer(bundle, config.train, dumps=place)
        setup = prepare(config, place)
        made = make_engine(setup, config, bundle, self.device, home=place, peer_id="p" * 20, say=lambda told: None)
        assert isinstance(made, VllmEngine)
        self.engine = made

    async def learn(self) -> None:
        rng = random.Random(self.trainer.step)

        def tokens(count: int) -> tuple[int, ...]:
            return tuple(rng.randrange(2, 90) for _ in range(count))

        answers = [tokens(8) for _ in range(4)]
        rewarded = [TrainSequence(ids, (True,) * 8, float(i % 2), None) for i, ids in enumerate(answers)]
        batch = Batch(self.trainer.step + 1, (TrainGroup(PROMPTS[0], tuple(rewarded), "own"),))
        await self.device.run(self.trainer.update, batch)
        await self.engine.update_weights(self.trainer.step)

    async def difference(self) -> float:
        return await check_agreement(self.engine, self.trainer, self.device, PROMPTS, dtypes=["float32"], tokens=32)


@pytest.fixture
def model(tiny_model: Callable[..., Path]) -> Path:
    pytest.importorskip("peft", reason="needs shoal[lora]")
    return tiny_model("llama", ascii_only=True, head_dim=32)


@pytest.fixture
async def own(vllm: str, model: Path, tmp_path: Path) -> AsyncIterator[Made]:
    """With a server of the node's own."""
    made = Made(model, tmp_path, command=vllm, args=["--max-num-seqs=16"])
    await made.engine.start()
    yield made
    await made.engine.close()
    made.device.close()


def ask(new: int, seed: int = 5) -> PromptRequest:
    return PromptRequest("a", PROMPTS[0], 4, new, 1.0, seed)


async def collect(engine: VllmEngine, request: PromptRequest) -> SampledGroup:
    (group,) = [group async for group in engine.generate([request])]
    return group


def merged(own: Made, place: Path) -> Any:
    """The policy as it is now, as a plain model."""
    adapters, whole = place / "adapters", place / "whole"
    adapters.mkdir()
    whole.mkdir()
    own.trainer.export(adapters)
    lora.merge(own.trainer.bundle.directory, adapters, whole)
    return AutoModelForCausalLM.from_pretrained(whole, dtype=torch.float32, local_files_only=True).eval()


async def test_logprobs_are_the_trainers_over_updates(own: Made, tmp_path: Path) -> None:
    """One server for all of it: its start is what takes time."""
    assert await own.difference() < 1e-3
    first = await collect(own.engine, ask(24))
    for _ in range(3):
        await own.learn()
        assert await own.difference() < 1e-3
    trained = await collect(own.engine, ask(24))
    assert {sample.version for sample in trained.samples} == {3}
    assert [sample.token_ids for sample in trained.samples] != [sample.token_ids for sample in first.samples]
    served = {card["id"] for card in (await own.engine.client.get("/v1/models"))["data"]}
    assert len(served) == 3, "the base model, the newest adapters and those before them"

    # a request in flight goes on with what it began with, and the next one takes the new ones
    own.engine.bundle = dataclasses.replace(own.engine.bundle, stop_ids=frozenset())
    task = asyncio.ensure_future(collect(own.engine, ask(300)))
    async with asyncio.timeout(120):
        while sum(len(stream.token_ids) for stream in own.engine._open) < 20:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    old = merged(own, tmp_path)
    await own.learn()
    assert not task.done(), "it was over before the update"
    samples = (await task).samples
    assert {(sample.version, sample.spans) for sample in samples} == {(3, ())}
    with torch.no_grad():
        logits = old(torch.tensor([PROMPTS[0] + samples[0].token_ids]), use_cache=False).logits[0]
    at = range(len(PROMPTS[0]) - 1, len(PROMPTS[0]) + 299)
    wanted = logits.log_softmax(-1)[at, samples[0].token_ids]
    torch.testing.assert_close(torch.tensor(samples[0].logprobs), wanted, atol=1e-3, rtol=0)
    assert {sample.version for sample in (await collect(own.engine, ask(4))).samples} == {4}
    assert await own.difference() < 1e-3


async def test_a_server_without_adapters_is_named(server: str, model: Path, tmp_path: Path) -> None:
    made = Made(model, tmp_path, url=server)
    with pytest.raises(MissingFlag, match="lacks adapters of rank 4; start it with --enable-lora --max-lora-rank 8"):
        await made.engine.start()
    await made.engine.close()
    made.device.close()
