"""Held-out evaluation: a fixed set of tasks that no node can be assigned, sampled at temperature 1."""

from collections.abc import Mapping

from node.config import Config
from node.interfaces import Engine
from node.models import ModelBundle
from node.rollouts import sample, sampling_seed
from node.scorer import Scorer
from protocol.assignment import held_out_task
from protocol.manifest import Manifest


async def held_out(
    engine: Engine, bundle: ModelBundle, scorer: Scorer, config: Config, manifest: Manifest
) -> Mapping[str, float]:
    """Mean reward by environment over `eval.tasks` held-out tasks x `eval.samples` completions.

    Tasks and sampling seeds are the same every time, so two scores of one run differ only by the policy.
    """
    refs = [
        held_out_task(manifest, spec.name, index) for spec in manifest.environments for index in range(config.eval.tasks)
    ]
    seeds = [sampling_seed(config.node.seed, "held-out", ref.environment, ref.index) for ref in refs]
    rollouts = await sample(engine, bundle, scorer, config, refs, seeds, config.eval.samples)
    rewards: dict[str, list[float]] = {}
    for rollout in rollouts:
        rewards.setdefault(rollout.ref.environment, []).extend(rollout.rewards)
    return {name: sum(values) / len(values) for name, values in rewards.items()}
