"""Engine and trainer share one set of weights: an update is what is sampled next, without a copy; no row outlives its
answer."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from node.config_train import TrainConfig
from node.device import Device
from node.engines.transformers import TransformersEngine
from node.interfaces import Batch, PromptRequest, SampledGroup, TrainGroup, TrainSequence
from node.models import load_model
from node.training.local import LocalTrainer

PROMPT = (9, 4, 77)
REQUEST = PromptRequest("x", PROMPT, n=4, max_new_tokens=6, temperature=1.0, seed=5)


async def sample(engine: TransformersEngine, request: PromptRequest = REQUEST) -> SampledGroup:
    (group,) = [group async for group in engine.generate([request])]
    return group


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 2e-5), ("bfloat16", 0.1)])
async def test_an_update_is_what_is_sampled_next(
    tiny_model: Callable[[str], Path], tmp_path: Path, dtype: str, tolerance: float
) -> None:
    torch.set_num_threads(1)
    bundle = load_model(str(tiny_model("llama")), device="cpu", dtype=dtype, models=tmp_path)
    trainer = LocalTrainer(bundle, TrainConfig(learning_rate=1e-2, warmup_steps=0), dumps=tmp_path / "dumps")
    engine = TransformersEngine(bundle, Device())
    where = {name: weight.data_ptr() for name, weight in bundle.model.named_parameters()}
    before = await sample(engine)
    good, bad = (TrainSequence((token, 1), (True, True), float(token == 40), None) for token in (40, 50))
    for step in (1, 2, 3):
        trainer.update(Batch(step, (TrainGroup(PROMPT, (good, bad), "own"),)))
    await engine.update_weights(trainer.step)
    after = await sample(engine)
    assert {name: weight.data_ptr() for name, weight in bundle.model.named_parameters()} == where, "no copy"
    assert [one.version for one in (before.samples[0], after.samples[0])] == [0, 3]
    sequences = tuple(TrainSequence(one.token_ids, (True,) * len(one.token_ids), 0.0, None) for one in after.samples)
    (known,) = trainer.logprobs([TrainGroup(PROMPT, sequences, "own")])
    for one, logprobs in zip(after.samples, known, strict=True):
        torch.testing.assert_close(torch.tensor(one.logprobs), torch.tensor(logprobs), atol=tolerance, rtol=0)
    assert before.samples != after.samples


async def test_a_finished_answer_leaves_the_batch(
    tiny_model: Callable[[str], Path], tmp_path: Path, forwarded: list[int]
) -> None:
    """Every forward pass after the prompt's has a row for each distinct answer that goes on, and none for the rest."""
    torch.set_num_threads(1)
    bundle = load_model(str(tiny_model("llama")), device="cpu", dtype="float32", models=tmp_path)
    group = await sample(
        TransformersEngine(bundle, Device()),
        PromptRequest("x", PROMPT, n=64, max_new_tokens=30, temperature=1.0, seed=5),
    )
    answers = [sample.token_ids for sample in group.samples]
    longest = max(map(len, answers))
    assert len({len(answer) for answer in answers}) > 2, "some end early"
    going_on = [len({answer[:at] for answer in answers if len(answer) > at}) for at in range(1, longest)]
    assert forwarded == [len(PROMPT), *going_on]
