"""Makes the trainer that the settings ask for: local, sharded over worker processes, or one that follows another's."""

from collections.abc import Callable
from typing import cast, get_args

import psutil

from node.config import Config
from node.federation.followed import FollowedPolicy
from node.home import Home, models_dir
from node.interfaces import Trainer
from node.large.node import LargeNode
from node.memory_plan import weights_pass_through
from node.models import ModelBundle, compute_dtype, device_of
from node.preflight import Setup
from node.training.local import LocalTrainer
from node.training.sharded import ShardedTrainer
from node.training.workers import Kind, WorkerPlan, Workers

ANSWER_SHARE = 0.9
"""Of a stage's deadline that workers have for their part in it: then they are started anew, and it has not failed."""


def make_trainer(
    bundle: ModelBundle, config: Config, home: Home, *, seconds: Callable[[], float], large: LargeNode | None = None
) -> Trainer:
    """The trainer, ready. `seconds`: deadline of a stage; `large`: has room for its workers elsewhere.

    Raises ModelError, TrainerLost.
    """
    if config.federation.follow:
        return FollowedPolicy(bundle, config.train)
    if config.train.shards == 1 and large is None:
        return LocalTrainer(bundle, config.train, dumps=home.path / "dumps")
    if large is None:
        workers, files = Workers(worker_plan(bundle, config, home)), home.path
    else:
        plan = large.worker_plan(bundle, config)
        workers, files = Workers(plan, large.make_launcher(plan)), large.planned.files
    trainer = ShardedTrainer(
        bundle,
        config.train,
        workers,
        handover=files / "weights" / "trainer",
        seconds=lambda: ANSWER_SHARE * seconds(),
        passing=None if files == home.path else files / "checkpoints",
    )
    trainer.start()
    return trainer


def worker_plan(bundle: ModelBundle, config: Config, home: Home) -> WorkerPlan:
    """How the workers of `train.shards` are started, for a bundle in the compute type."""
    shards, kind = config.train.shards, str(bundle.model.dtype).removeprefix("torch.")
    assert kind in get_args(Kind)
    cores = psutil.cpu_count(logical=False) or 1
    return WorkerPlan(
        count=shards,
        device="cuda" if device_of(config.model.device).type == "cuda" else "cpu",
        dtype=cast(Kind, kind),
        model=config.model.path,
        models=models_dir(),
        threads=config.node.threads or max(1, cores // shards),
        gpu_memory_share=config.limits.gpu_memory_share,
        dumps=home.path / "dumps",
        log=home.logs / "trainer.log",
    )


def place_of_model(config: Config, setup: Setup) -> tuple[str, str]:
    """Device and compute type of the node's own model.

    With shards, and an engine that has weights of its own, it is only where new weights pass through: not on a GPU,
    unless there is a teacher in this process, which is where the model is.
    """
    device, asked = config.model.device, config.model.dtype
    if config.train.shards == 1:
        return device, asked
    passes_through = weights_pass_through(config, setup.choice)
    kind = compute_dtype(device_of(device), asked)  # the workers', wherever this one lies
    return "cpu" if passes_through else device, str(kind).removeprefix("torch.")
