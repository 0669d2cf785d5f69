"""The advantages of a whole step, by the name in `train.advantage`: groups of scored completions -> one per token.

They are computed in the update, from rewards that are in the journal, because some need what only the trainer knows
(a critic's values, the KL to the reference) and some all groups at once (whitening).
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from node.algorithms.advantages import ADVANTAGES, dr_grpo, gdpo
from node.algorithms.returns import bilevel_gae, discounted, gae, turn_gae, whiten
from node.config_train import TrainConfig
from node.interfaces import TrainGroup, TrainSequence


class Estimates(NamedTuple):
    """Of all tokens of all completions of the step, group after group; [N] float32 on the CPU."""

    advantages: Tensor
    """0 outside the mask, and in a group that teaches nothing."""
    returns: Tensor | None
    """What the critic is to learn; None without one."""


def estimate(
    groups: Sequence[TrainGroup], config: TrainConfig, *, values: Tensor | None = None, kl: Tensor | None = None
) -> Estimates:
    """Advantages of a step.

    `values` [N]: the critic's estimate before each token, for those that need one (`config.critic`); `kl` [N]: the KL
    estimate of each token, taken off its reward times `config.kl_coefficient` (`config.kl_in = "reward"`).
    """
    sequences = [sequence for group in groups for sequence in group.sequences]
    lengths = [len(sequence.token_ids) for sequence in sequences]
    mask = torch.tensor([trained for sequence in sequences for trained in sequence.mask], dtype=torch.bool)
    if config.advantage in (*ADVANTAGES, "gdpo", "reinforce_pp_baseline"):
        scores = torch.cat([_of_group(group.sequences, config) for group in groups if group.sequences])
        advantages = torch.where(mask, scores.repeat_interleave(torch.tensor(lengths)), 0)
        whole_batch = config.advantage in ("gdpo", "reinforce_pp_baseline")
        return Estimates(whiten(advantages, mask) if whole_batch else advantages, None)

    rewards = torch.cat([_token_rewards(sequence) for sequence in sequences])
    if kl is not None:
        rewards = torch.where(mask, rewards - config.kl_coefficient * kl.cpu(), 0)
    split = zip(rewards.split(lengths), mask.split(lengths), strict=True)
    if config.advantage == "reinforce_pp":
        returns = torch.cat([discounted(reward, inside, config.gamma) for reward, inside in split])
        return Estimates(whiten(returns, mask), None)
    if values is None:
        raise ValueError(f"{config.advantage} needs the values of a critic")
    found = [
        _with_critic(reward, value, inside, config)
        for (reward, inside), value in zip(split, values.cpu().split(lengths), strict=True)
    ]
    return Estimates(whiten(torch.cat([a for a, _ in found]), mask), torch.cat([g for _, g in found]))


def _of_group(sequences: Sequence[TrainSequence], config: TrainConfig) -> Tensor:
    """One number a completion, [n]."""
    scores = torch.tensor([sequence.reward for sequence in sequences], dtype=torch.float32)
    if config.advantage == "gdpo":
        return gdpo(torch.tensor(_parts(sequences, config.gdpo_parts), dtype=torch.float32).T)
    if config.advantage == "reinforce_pp_baseline":
        return dr_grpo(scores, scores)
    return ADVANTAGES[config.advantage](scores, torch.tensor([sum(sequence.mask) for sequence in sequences]))


def _parts(sequences: Sequence[TrainSequence], names: Sequence[str]) -> list[list[float]]:
    """Components by name, each of all completions. One that no completion has is 0; who lacks it alone has the reward.

    (An environment leaves out a part that says no more than the reward; foreign groups have the reward only.)
    """
    return [
        [sequence.reward if name == "reward" else sequence.parts.get(name, sequence.reward) for sequence in sequences]
        if name == "reward" or any(name in sequence.parts for sequence in sequences)
        else [0.0] * len(sequences)
        for name in names
    ]


def _token_rewards(sequence: TrainSequence) -> Tensor:
    """The reward at the last trained token, [T]."""
    rewards = torch.zeros(len(sequence.mask))
    if any(sequence.mask):
        rewards[max(t for t, trained in enumerate(sequence.mask) if trained)] = sequence.reward
    return rewards


def _with_critic(rewards: Tensor, values: Tensor, mask: Tensor, config: TrainConfig) -> tuple[Tensor, Tensor]:
    if config.advantage == "gae":
        return gae(rewards, values, mask, config.gamma, config.gae_lambda)
    if config.advantage == "turn_gae":
        return turn_gae(rewards, values, mask, config.turn_gamma, config.gae_lambda)
    return bilevel_gae(rewards, values, mask, config.gamma, config.gae_lambda, config.turn_gamma)
