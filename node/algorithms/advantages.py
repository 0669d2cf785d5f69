"""Advantages: how much better an answer was than the others to the same task."""

from collections.abc import Callable

import torch
from torch import Tensor

Advantage = Callable[[Tensor, Tensor], Tensor]
"""(scores [n], lengths [n] in tokens) of one group -> advantages [n]. All 0 where a group teaches nothing."""


def centred(scores: Tensor) -> Tensor:
    """R - mean; exactly 0 where all scores are equal, which rounding of the mean would not give."""
    return scores - scores.mean() if scores.max() > scores.min() else torch.zeros_like(scores)


def grpo(scores: Tensor, lengths: Tensor) -> Tensor:
    """(R - mean) / (std + 1e-6), std with n - 1 (GRPO, arXiv 2402.03300). A group of one teaches nothing: 0."""
    return centred(scores) / (scores.std() + 1e-6) if len(scores) > 1 else torch.zeros_like(scores)


def dr_grpo(scores: Tensor, lengths: Tensor) -> Tensor:
    """R - mean: no division by the spread, which overweights tasks that are almost solved (arXiv 2503.20783)."""
    return centred(scores)


def rloo(scores: Tensor, lengths: Tensor) -> Tensor:
    """R - mean of the others = n/(n-1) (R - mean) (RLOO, arXiv 2402.14740). A group of one: 0."""
    n = len(scores)
    return centred(scores) * (n / max(1, n - 1))


ADVANTAGES: dict[str, Advantage] = {"grpo": grpo, "dr_grpo": dr_grpo, "rloo": rloo}


def gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Advantages and returns (advantage + value) of one sequence, both [T], 0 outside `mask`.

    Generalised advantage estimation (arXiv 1506.02438): delta = r + gamma V' - V, A = delta + gamma lam A', where the
    primed ones are of the next token in `mask`; tokens of tools and environments between two are as if not there.
    `values` is [T], the critic's estimate before each token; after the last one it is 0.
    """
    advantages = torch.zeros_like(values)
    following = carried = values.new_zeros(())
    for t in reversed(torch.nonzero(mask).flatten().tolist()):
        carried = rewards[t] + gamma * following - values[t] + gamma * lam * carried
        advantages[t], following = carried, values[t]
    return advantages, torch.where(mask, advantages + values, 0)
