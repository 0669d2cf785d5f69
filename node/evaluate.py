"""Held-out evaluation: a fixed set of tasks that no node can be assigned, sampled as rollouts are."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from node.checkpoint import CheckpointError, CheckpointStore, damage
from node.config import Config
from node.device import Device, use_threads
from node.engines.transformers import TransformersEngine
from node.home import Home, NoSwarm, models_dir
from node.interfaces import Engine
from node.models import ModelBundle, load_model
from node.rollouts import sample, sampling_seed
from node.scorer import Scorer, make_scorer
from node.settings import Settings
from node.training.lora import has_adapters, load_with_adapters
from protocol.assignment import held_out_task
from protocol.manifest import Manifest


async def held_out(
    engine: Engine,
    bundle: ModelBundle,
    scorer: Scorer,
    config: Config,
    manifest: Manifest,
    sampled: Callable[[int, int], None] | None = None,
) -> Mapping[str, float]:
    """Mean reward by environment over `eval.tasks` held-out tasks x `eval.samples` completions.

    `sampled` is told how many tasks there are and how many of them are sampled. Tasks and sampling seeds are the same
    every time, so two scores of one run differ only by the policy.
    """
    refs = [
        held_out_task(manifest, spec.name, index)
        for spec in manifest.environments
        for index in range(config.eval.tasks)
    ]
    seeds = [sampling_seed(config.node.seed, "held-out", ref.environment, ref.index) for ref in refs]
    done = None if sampled is None else partial(sampled, len(refs))
    rollouts = await sample(engine, bundle, scorer, config, refs, seeds, config.eval.samples, done)
    rewards: dict[str, list[float]] = {}
    for rollout in rollouts:
        rewards.setdefault(rollout.ref.environment, []).extend(rollout.rewards)
    return {name: sum(values) / len(values) for name, values in rewards.items()}


@dataclass(frozen=True, slots=True)
class HeldOut:
    """What `shoal checkpoint eval` found."""

    checkpoint: str
    step: int
    scores: Mapping[str, float]
    """By environment."""
    mean: float


def evaluate_checkpoint(
    home: Home, settings: Settings, name: str, sampled: Callable[[int, int], None] | None = None
) -> HeldOut:
    """Held-out score of a saved checkpoint ('latest', 'best' or a step). `sampled`: see `held_out`.

    Works beside a running daemon: it reads only. Raises CheckpointError, ModelError, ScorerError, and NoSwarm when the
    swarm's manifest is not here yet.
    """
    manifest = home.manifest()
    if manifest is None:
        raise NoSwarm(f"the manifest of the swarm is not in {home.path} yet ; run `shoal up` until it has come")
    entry = CheckpointStore(home.checkpoints, settings.config.checkpoint.keep).find(name)
    if fault := damage(entry.path):
        raise CheckpointError(f"{entry.path} is damaged: {fault} ; score another one (shoal checkpoint list)")
    scores = asyncio.run(_evaluate_directory(entry.path, settings.config, manifest, sampled))
    return HeldOut(entry.name, entry.step, scores, sum(scores.values()) / len(scores))


async def _evaluate_directory(
    directory: Path, config: Config, manifest: Manifest, sampled: Callable[[int, int], None] | None
) -> Mapping[str, float]:
    device = Device()
    scorer = make_scorer(manifest.environments, config.limits)

    def load() -> ModelBundle:
        use_threads(config.node.threads)
        model, adapted = config.model, has_adapters(directory)
        path = model.path if adapted else str(directory)
        bundle = load_model(path, device=model.device, dtype=model.dtype, models=models_dir())
        if adapted:
            load_with_adapters(bundle, directory)
        return bundle

    try:
        await scorer.start()
        bundle = await device.run(load)
        return await held_out(TransformersEngine(bundle, device), bundle, scorer, config, manifest, sampled)
    finally:
        await scorer.close()
        device.close()
