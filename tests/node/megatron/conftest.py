"""Trainers of several Megatron processes on small models, and what to compare them with."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from node.config_train import TrainConfig
from node.models import load_model
from node.training import launching
from node.training.local import LocalTrainer
from node.training.sharded import ShardedTrainer
from node.training.workers import Kind, WorkerPlan, Workers
from tests.node.fsdp.conftest import SETTINGS

Make = Callable[..., Any]
SECONDS = 600.0


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[Make]:
    """A local trainer of a model, with some settings of TrainConfig."""
    place = tmp_path / "alone"
    threads = torch.get_num_threads()
    torch.set_num_threads(1)

    def make(model: Path, **settings: Any) -> LocalTrainer:
        bundle = load_model(str(model), device="cpu", dtype="float32", models=place)
        return LocalTrainer(bundle, TrainConfig(**{**SETTINGS, **settings}), dumps=place / "dumps")

    yield make
    torch.set_num_threads(threads)


@pytest.fixture
def divided(tmp_path: Path) -> Iterator[Make]:
    """A started trainer of `shards` processes over a model, as its settings divide it."""
    place = tmp_path / "divided"
    made: list[ShardedTrainer] = []
    script = Path(__file__).with_name("worker_on_cpu.py")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launching, "COMMAND", (sys.executable, "-P", str(script)))

        def make(model: Path, shards: int, *, dtype: Kind = "float32", **settings: Any) -> ShardedTrainer:
            bundle = load_model(str(model), device="cpu", dtype=dtype, models=place)
            plan = WorkerPlan(shards, "cpu", dtype, str(model), place, 1, 0.0, place / "dumps", place / "trainer.log")
            config = TrainConfig(**{**SETTINGS, "backend": "megatron", "shards": shards, **settings})
            handover = place / f"handover-{len(made)}"
            trainer = ShardedTrainer(
                bundle, config, Workers(plan, silent=SECONDS), handover=handover, seconds=lambda: SECONDS
            )
            made.append(trainer)
            trainer.start()
            return trainer

        yield make
        for trainer in made:
            trainer.close()
