"""A sharded trainer of two processes on a tiny model, and what to compare it with."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from node.config_train import TrainConfig
from node.interfaces import Batch, TrainGroup, TrainSequence
from node.models import load_model
from node.training.local import LocalTrainer
from node.training.sharded import ShardedTrainer
from node.training.workers import Kind, WorkerPlan, Workers

SETTINGS: dict[str, Any] = {"learning_rate": 1e-4, "warmup_steps": 0, "tokens_per_micro_batch": 64}
"""Micro-batches so small that a batch is several."""
SECONDS = 240.0


def batch(step: int = 1, groups: int = 3, longest: int = 12) -> Batch:
    """Own and foreign groups of different lengths, with masked tokens."""
    rng = random.Random(step)

    def ids(low: int, high: int) -> tuple[int, ...]:
        return tuple(rng.randrange(2, 250) for _ in range(rng.randint(low, high)))

    def sequence(at: int, own: bool) -> TrainSequence:
        tokens = ids(2, longest)
        mask = tuple(i != 1 for i in range(len(tokens)))
        return TrainSequence(tokens, mask, float(at % 2), (-2.0,) * len(tokens) if own else None)

    made = [
        TrainGroup(ids(5, 12), tuple(sequence(at, own) for at in range(4)), "own" if own else "foreign")
        for own in (True, False, True)[:groups]
    ]
    return Batch(step, tuple(made))


@pytest.fixture(scope="session")
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def local(tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory, one_thread: None) -> Any:
    """A local trainer with some settings of TrainConfig."""
    place = tmp_path_factory.mktemp("local")

    def make(dtype: str = "float32", **settings: Any) -> LocalTrainer:
        bundle = load_model(str(tiny_model("llama")), device="cpu", dtype=dtype, models=place)
        return LocalTrainer(bundle, TrainConfig(**{**SETTINGS, **settings}), dumps=place / "dumps")

    return make


@pytest.fixture(scope="session")
def sharded(
    tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory, one_thread: None
) -> Iterator[Callable[..., ShardedTrainer]]:
    """A sharded trainer that is started."""
    place = tmp_path_factory.mktemp("sharded")
    made: list[ShardedTrainer] = []

    def make(shards: int = 2, dtype: Kind = "float32") -> ShardedTrainer:
        path = str(tiny_model("llama"))
        bundle = load_model(path, device="cpu", dtype=dtype, models=place)
        plan = WorkerPlan(shards, "cpu", dtype, path, place, 1, 0.0, place / "dumps", place / "trainer.log")
        config = TrainConfig(**SETTINGS, shards=shards)
        handover = place / f"handover-{len(made)}"
        trainer = ShardedTrainer(bundle, config, Workers(plan), handover=handover, seconds=lambda: SECONDS)
        made.append(trainer)
        trainer.start()
        return trainer

    yield make
    for trainer in made:
        trainer.close()
