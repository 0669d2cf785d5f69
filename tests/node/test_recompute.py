"""Layers computed twice: the same gradients for less kept, and routers told the same both times."""

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from node.config_train import TrainConfig
from node.interfaces import TrainGroup, TrainSequence
from node.models import ModelBundle, load_model
from node.routing import Routing
from node.training.local import LocalTrainer
from node.training.objective import StepObjective

Load = Callable[..., ModelBundle]


@pytest.fixture
def load(tiny_model: Callable[[str], Path], tmp_path: Path) -> Load:
    torch.set_num_threads(1)
    return lambda kind, dtype="float32": load_model(str(tiny_model(kind)), device="cpu", dtype=dtype, models=tmp_path)


def group(routing: Routing | None = None) -> TrainGroup:
    """Completions of a prompt; with routers, each token noted to have gone to experts drawn at random."""
    rng = random.Random(3)

    def experts(tokens: int) -> bytes:
        if routing is None:
            return b""
        drawn = [[rng.sample(range(routing.experts), routing.chosen) for _ in routing.layers] for _ in range(tokens)]
        return np.array(drawn, routing.dtype).tobytes()

    sequences = tuple(
        TrainSequence(
            tuple(rng.randrange(2, 250) for _ in range(9)), (True,) * 9, float(i % 2), None, experts=experts(8)
        )
        for i in range(4)
    )
    return TrainGroup(tuple(rng.randrange(2, 250) for _ in range(20)), sequences, "own", experts(20))


def gradients(bundle: ModelBundle, checkpointing: str, given: TrainGroup, place: Path) -> list[torch.Tensor]:
    """Of one batch."""
    trainer = LocalTrainer(bundle, TrainConfig(gradient_checkpointing=checkpointing), dumps=place)  # type: ignore[arg-type]
    objective = StepObjective(trainer.config, [given], trainer.model.device)
    trainer.accumulate(objective, objective.judge())
    return [weight.grad for weight in trainer.weights.masters.values() if weight.grad is not None]


@pytest.mark.parametrize("kind", ["llama", "qwen3", "mixtral", "qwen2_moe"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradients_are_the_same_bit_for_bit(load: Load, kind: str, dtype: str, tmp_path: Path) -> None:
    """After the forward pass routers are told of nothing, or of another row: the second time must not ask them."""
    bundle = load(kind, dtype)
    given = group(bundle.routing)
    once = gradients(bundle, "off", given, tmp_path)
    twice = gradients(load(kind, dtype), "on", given, tmp_path)
    assert len(once) == len(twice) > 20
    assert all(map(torch.equal, once, twice))
    if bundle.routing is not None:
        free = gradients(load(kind, dtype), "on", group(), tmp_path)
        assert not all(map(torch.equal, once, free)), "what is told makes a difference"


def test_nothing_is_left_in_the_layers(load: Load, tmp_path: Path) -> None:
    bundle = load("llama")
    gradients(bundle, "on", group(), tmp_path)
    assert all("forward" not in vars(layer) for layer in bundle.model.base_model.layers)
