"""What the history keeps of a step's rollouts, besides the update's own numbers."""

from collections.abc import Mapping, Sequence
from typing import Any

from node.rollouts import Rollout


def summarise(
    sampled: Sequence[Rollout],
    own: Sequence[Rollout],
    foreign: Sequence[Rollout],
    *,
    version: int,
    rollout_seconds: float,
    seconds: float,
) -> dict[str, Any]:
    """JSON values. Rewards are those of all own samples, also of groups that are not trained on; `own_reward` and
    `foreign_reward` are means over the groups that are (None: there are none).

    `version`: of the policy before the update; `seconds`: since the step began, `rollout_seconds` of them sampling.
    """
    scores = [score for rollout in sampled for score in rollout.scores]
    samples = [sample for rollout in sampled for sample in rollout.samples]
    by_environment: dict[str, list[float]] = {}
    for rollout in sampled:
        by_environment.setdefault(rollout.ref.environment, []).extend(rollout.rewards)
    tokens = sum(len(sample.token_ids) for sample in samples)
    return {
        "reward": sum(score.reward for score in scores) / max(1, len(scores)),
        "own_reward": _mean([reward for rollout in own for reward in rollout.rewards]),
        "foreign_reward": _mean([reward for rollout in foreign for reward in rollout.rewards]),
        "rewards": {name: sum(values) / len(values) for name, values in sorted(by_environment.items())},
        "sampled_groups": len(sampled),
        "own_groups": len(own),
        "foreign_groups": len(foreign),
        "own_informative": sum(rollout.informative for rollout in own),
        "foreign_informative": sum(rollout.informative for rollout in foreign),
        "unparsed": sum(not score.parsed for score in scores) / max(1, len(scores)),
        "truncated": sum(sample.finish == "length" for sample in samples) / max(1, len(samples)),
        "rollout_tokens": tokens,
        "completion_tokens": tokens / max(1, len(samples)),
        "staleness": max((version - sample.version for sample in samples), default=0),
        "tokens_per_second": tokens / rollout_seconds if rollout_seconds else 0.0,
        "prepare_seconds": seconds,
    }


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def in_words(step: int, summary: Mapping[str, Any], update_seconds: float) -> str:
    """A step that is done, in one line for the log."""
    return (
        f"step {step}: reward {summary['reward']:.3f} of {summary['sampled_groups']} own groups; trained on "
        f"{summary['own_groups']} own + {summary['foreign_groups']} foreign groups; "
        f"{summary['prepare_seconds']:.0f} s of rollouts, {update_seconds:.0f} s of update"
    )
