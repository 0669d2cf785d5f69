"""Megatron's trainer against the local one: the same numbers, however the model is divided, and the same files."""

import importlib.util
import os
import random
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from node.config_train import TrainConfig
from node.interfaces import Batch, TrainerLost
from node.models import ModelBundle, ModelError, load_model
from node.training.local import LocalTrainer
from node.training.sharded import ShardedTrainer
from tests.node.fsdp.conftest import SETTINGS, batch
from tests.node.fsdp.test_sharded import same, saved

pytestmark = [
    pytest.mark.interop,
    pytest.mark.slow,
    pytest.mark.network,
    pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="needs shoal[megatron]"),
]

Make = Callable[..., Any]
FOUR_LAYERS = {"num_hidden_layers": 4, "tie_word_embeddings": False}
EVERYTHING: dict[str, Any] = {
    "advantage": "gae",
    "passes": 2,
    "mini_batches": 2,
    "kl_coefficient": 0.1,
    "kl_in": "reward",
    "gradient_checkpointing": "on",
}
"""A critic, a reference, several optimizer steps, and layers computed twice."""


def same_weights(ours: ShardedTrainer, theirs: LocalTrainer) -> None:
    """What the node has taken over, against the local trainer's: a step is up to 1e-4."""
    pairs = zip(ours.bundle.model.named_parameters(), theirs.model.parameters(), strict=True)
    for (name, mine), other in pairs:
        torch.testing.assert_close(mine, other, atol=1e-5, rtol=0, msg=lambda said, name=name: f"{name}: {said}")


def same_updates(ours: ShardedTrainer, theirs: LocalTrainer, *batches: Batch) -> None:
    for given in batches:
        same(ours.update(given), theirs.update(given))
        same_weights(ours, theirs)
    for mine, other in zip(ours.logprobs(given.groups), theirs.logprobs(given.groups), strict=True):
        assert [pytest.approx(row, abs=2e-5) for row in other] == mine


def same_files(model: Path, exported: Path) -> None:
    """Bit for bit."""
    weights = [
        dict(load_model(str(path), device="cpu", dtype="float32", models=path).model.named_parameters())
        for path in (model, exported)
    ]
    assert weights[0].keys() == weights[1].keys()
    for name, weight in weights[0].items():
        assert torch.equal(weight, weights[1][name]), name


def exported(trainer: ShardedTrainer, directory: Path) -> Path:
    directory.mkdir()
    trainer.export(directory)
    return directory


def noted(given: Batch, bundle: ModelBundle) -> Batch:
    """The batch, with experts drawn at random for every token, as if the rollout had chosen them."""
    rng, routing = random.Random(5), bundle.routing
    assert routing is not None

    def experts(tokens: int) -> bytes:
        drawn = [[rng.sample(range(routing.experts), routing.chosen) for _ in routing.layers] for _ in range(tokens)]
        return np.array(drawn, routing.dtype).tobytes()

    groups = [
        msgspec.structs.replace(
            group,
            prompt_experts=experts(len(group.prompt_ids)),
            sequences=tuple(msgspec.structs.replace(s, experts=experts(len(s.token_ids) - 1)) for s in group.sequences),
        )
        for group in given.groups
    ]
    return Batch(given.step, tuple(groups))


def test_layers_divided_between_two(
    tiny_model: Callable[..., Path], alone: Make, divided: Make, tmp_path: Path
) -> None:
    model = tiny_model("qwen3", vocab_size=259)  # the second one has fewer tokens, and padding
    ours, theirs = divided(model, 2, tensor_parallel=2), alone(model)
    same_files(model, exported(ours, tmp_path / "exported"))
    same_updates(ours, theirs, batch(1), batch(2), batch(3, groups=1))
    held, all_of_it = ours.memory(), theirs.memory()
    assert held["gradients"] == 0
    assert all_of_it["optimizer"] < held["optimizer"] < 1.1 * all_of_it["optimizer"]  # norms are in both

    # the local trainer goes on from what the two wrote, and the two from what it wrote
    alone_again = alone(model)
    alone_again.load(saved(ours, tmp_path / "by-two"))
    assert alone_again.step == 3
    same_updates(ours, alone_again, batch(4))
    ours.configure(TrainConfig(**SETTINGS, **EVERYTHING, backend="megatron", shards=2, tensor_parallel=2))
    critical = alone(model, **EVERYTHING)
    ours.load(saved(critical, tmp_path / "fresh"))
    same_updates(ours, critical, batch(5), batch(6))

    # a worker that is lost
    kept = saved(ours, tmp_path / "kept")
    threading.Timer(0.05, os.kill, (ours.workers.pids[1], signal.SIGKILL)).start()

    def train_on() -> None:
        for step in range(7, 1000):
            ours.update(batch(step))

    with pytest.raises(TrainerLost, match=r"worker 2 \(process \d+\) was ended by SIGKILL") as lost:
        train_on()
    lost.value.again()
    ours.load(kept)
    same_updates(ours, critical, batch(7))


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("llama", {}),  # two replicas, of a tied embedding
        ("qwen2", {"tensor_parallel": 2}),
    ],
)
def test_other_models(
    tiny_model: Callable[..., Path], alone: Make, divided: Make, tmp_path: Path, kind: str, settings: dict[str, int]
) -> None:
    model = tiny_model(kind)
    ours, theirs = divided(model, 2, **settings), alone(model)
    same_files(model, exported(ours, tmp_path / "exported"))
    same_updates(ours, theirs, batch(1), batch(2))


def test_stages_of_two_each(tiny_model: Callable[..., Path], alone: Make, divided: Make, tmp_path: Path) -> None:
    model = tiny_model("qwen3", **FOUR_LAYERS)
    ours = divided(model, 4, tensor_parallel=2, pipeline_parallel=2, **EVERYTHING)
    theirs = alone(model, **EVERYTHING)
    same_files(model, exported(ours, tmp_path / "exported"))
    same_updates(ours, theirs, batch(1), batch(2, groups=1))
    by_four = saved(ours, tmp_path / "by-four")
    ours.close()

    # two of FSDP's, then two replicas of two that divide layers: each goes on from what the ones before wrote
    rows = divided(model, 2, backend="fsdp", **EVERYTHING)
    rows.load(by_four)
    same_updates(rows, theirs, batch(3))
    by_rows = saved(rows, tmp_path / "by-rows")
    rows.close()
    replicas = divided(model, 4, tensor_parallel=2, **EVERYTHING)
    replicas.load(by_rows)
    assert replicas.step == 3
    same_updates(replicas, theirs, batch(4))
    theirs = alone(model, **EVERYTHING)
    theirs.load(saved(replicas, tmp_path / "by-replicas"))
    same_updates(replicas, theirs, batch(5))


@pytest.mark.parametrize("recompute", ["off", "on"])
def test_experts_divided_between_two(
    tiny_model: Callable[..., Path], alone: Make, divided: Make, tmp_path: Path, recompute: str
) -> None:
    model = tiny_model("mixtral", sliding_window=None)
    settings = {"gradient_checkpointing": recompute}
    ours, theirs = divided(model, 2, expert_parallel=2, **settings), alone(model, **settings)
    same_files(model, exported(ours, tmp_path / "exported"))
    # what was noted is chosen again; a single group is not enough work for two, and the other one idles along
    same_updates(ours, theirs, noted(batch(1), theirs.bundle), batch(2), noted(batch(3, groups=1), theirs.bundle))


def test_experts_in_stages(tiny_model: Callable[..., Path], alone: Make, divided: Make, tmp_path: Path) -> None:
    model = tiny_model("qwen3_moe", mlp_only_layers=[], norm_topk_prob=True, **FOUR_LAYERS)
    ours, theirs = divided(model, 4, expert_parallel=2, pipeline_parallel=2), alone(model)
    same_files(model, exported(ours, tmp_path / "exported"))
    same_updates(ours, theirs, noted(batch(1), theirs.bundle), batch(2))
    again = alone(model)
    again.load(saved(ours, tmp_path / "kept"))
    same_updates(ours, again, batch(3))


def test_the_compute_type(tiny_model: Callable[..., Path], divided: Make, tmp_path: Path) -> None:
    """bfloat16 rounds differently in Megatron's products than in ours, so only about the same comes out."""
    model = tiny_model("qwen3")
    ours = divided(model, 2, tensor_parallel=2, dtype="bfloat16")
    bundle = load_model(str(model), device="cpu", dtype="bfloat16", models=tmp_path)
    theirs = LocalTrainer(bundle, TrainConfig(**SETTINGS), dumps=tmp_path)
    first, same_first = ours.update(batch()), theirs.update(batch())
    assert first.tokens_trained == same_first.tokens_trained
    assert first.grad_norm == pytest.approx(same_first.grad_norm, rel=0.05)
    assert {weight.dtype for weight in ours.bundle.model.parameters()} == {torch.bfloat16}
    for mine, other in zip(ours.bundle.model.parameters(), theirs.model.parameters(), strict=True):
        # Adam's first step is the learning rate one way or the other; a weight below 1 is rounded to 2^-8 of it
        torch.testing.assert_close(mine, other, atol=2 * SETTINGS["learning_rate"], rtol=2**-7)
    [row, *_] = ours.logprobs(batch().groups)[0]
    assert row == pytest.approx(theirs.logprobs(batch().groups)[0][0], abs=0.1)


def test_a_model_that_is_not_known_ends_the_start(tiny_model: Callable[..., Path], divided: Make) -> None:
    with pytest.raises(ModelError, match="does not know the architecture 'olmoe'; use one of llama"):
        divided(tiny_model("olmoe"), 2)
