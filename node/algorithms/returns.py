"""Advantages of single tokens: discounted returns and generalised advantage estimation.

A function takes one completion as [T] tensors. Tokens outside `mask` (tools, environments, padding) are as if not
there; a turn is a run of tokens inside it. The reward of a completion stands at its last token in `mask`.
"""

from itertools import groupby

import torch
from torch import Tensor


def discounted(rewards: Tensor, mask: Tensor, gamma: float) -> Tensor:
    """Return of each token, r + gamma times that of the next token in `mask`, [T], 0 outside it (REINFORCE++,
    arXiv 2501.03262)."""
    given, returns, carried = rewards.tolist(), [0.0] * len(rewards), 0.0
    for t in reversed(_inside(mask)):
        returns[t] = carried = given[t] + gamma * carried
    return rewards.new_tensor(returns)


def gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Advantages and returns (advantage + value), both [T], 0 outside `mask` (GAE, arXiv 1506.02438).

    delta = r + gamma V' - V, A = delta + gamma lam A', where the primed ones are of the next token in `mask`.
    `values` is [T], the critic's estimate before each token; after the last one it is 0.
    """
    given, estimates, advantages = rewards.tolist(), values.tolist(), [0.0] * len(rewards)
    following = carried = 0.0
    for t in reversed(_inside(mask)):
        advantages[t] = carried = given[t] + gamma * following - estimates[t] + gamma * lam * carried
        following = estimates[t]
    found = values.new_tensor(advantages)
    return found, torch.where(mask, found + values, 0)


def turn_gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """GAE over turns: V is that of a turn's last token, and all tokens of a turn get its advantage and its return.

    Both [T], 0 outside `mask`. `gamma` discounts from turn to turn (VAGEN, arXiv 2510.16907).
    """
    given, estimates = rewards.tolist(), values.tolist()
    advantages, returns = [0.0] * len(rewards), [0.0] * len(rewards)
    following = carried = 0.0
    for turn in reversed(_turns(mask)):
        value = estimates[turn[-1]]
        carried = sum(given[t] for t in turn) + gamma * following - value + gamma * lam * carried
        following = value
        for t in turn:
            advantages[t], returns[t] = carried, carried + value
    return values.new_tensor(advantages), values.new_tensor(returns)


def bilevel_gae(
    rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float, turn_gamma: float
) -> tuple[Tensor, Tensor]:
    """GAE over turns with `turn_gamma`, whose return becomes the reward at the turn's end; then GAE inside each turn.

    Advantages and returns, both [T], 0 outside `mask` (VAGEN, arXiv 2510.16907).
    """
    given, estimates = rewards.tolist(), values.tolist()
    advantages = [0.0] * len(rewards)
    following = above = 0.0
    for turn in reversed(_turns(mask)):
        end = turn[-1]
        above = given[end] + turn_gamma * following - estimates[end] + turn_gamma * lam * above
        following = estimates[end]
        given[end] = above + estimates[end]
        after = carried = 0.0
        for t in reversed(turn):
            advantages[t] = carried = given[t] + gamma * after - estimates[t] + gamma * lam * carried
            after = estimates[t]
    found = values.new_tensor(advantages)
    return found, torch.where(mask, found + values, 0)


def whiten(values: Tensor, mask: Tensor) -> Tensor:
    """(x - mean) / sqrt(var + 1e-8) over a batch's tokens in `mask`, var with n - 1; 0 outside, and if all are equal.

    Shapes [N] (PPO implementations; REINFORCE++, arXiv 2501.03262).
    """
    inside = values[mask]
    if inside.numel() < 2 or inside.max() == inside.min():
        return torch.zeros_like(values)
    return torch.where(mask, (values - inside.mean()) * torch.rsqrt(inside.var() + 1e-8), 0)


def _inside(mask: Tensor) -> list[int]:
    return [t for t, trained in enumerate(mask.tolist()) if trained]


def _turns(mask: Tensor) -> list[list[int]]:
    """Tokens of each turn."""
    runs = groupby(enumerate(mask.tolist()), key=lambda item: bool(item[1]))
    return [[t for t, _ in run] for trained, run in runs if trained]
