"""Corrections for sampling from one policy (mu, in the rollout) and training another (old, in the trainer).

A correction gives each token a weight, detached: its loss is multiplied by it. Every token has its own mu, also in a
rollout that was resumed under newer weights; where mu is not known, give mu = old, and the ratio is 1. Denominators of
the loss stay those of all trained tokens, whatever is weighted 0.
"""

from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from node.algorithms.losses import MAX_LOG_RATIO, log_ratio, sequence_mean, sequence_sum
from node.config_train import TrainConfig

Level = Literal["token", "sequence", "geometric"]

Correction = Callable[[Tensor, Tensor, Tensor, Tensor, TrainConfig], Tensor]
"""(old, mu, sequence, mask, config) -> weights, all [N], flat as in node/algorithms/losses.py."""


def ratios(old: Tensor, mu: Tensor, sequence: Tensor, mask: Tensor, level: Level) -> Tensor:
    """old/mu of each token, of its whole sequence (the product), or the geometric mean in its sequence; [N]."""
    if level == "token":
        return log_ratio(old, mu).exp()
    reduce = sequence_sum if level == "sequence" else sequence_mean
    return reduce(old - mu, sequence, mask)[sequence].clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def none(old: Tensor, mu: Tensor, sequence: Tensor, mask: Tensor, config: TrainConfig) -> Tensor:
    """1."""
    return torch.ones_like(old)


def tis(old: Tensor, mu: Tensor, sequence: Tensor, mask: Tensor, config: TrainConfig, *, level: Level) -> Tensor:
    """min(ratio, C): truncated importance sampling (Ionides 2008; for rollout-training mismatch: Yao et al. 2025)."""
    return ratios(old, mu, sequence, mask, level).clamp(max=config.tis_cap).detach()


def icepop(old: Tensor, mu: Tensor, sequence: Tensor, mask: Tensor, config: TrainConfig) -> Tensor:
    """The token's ratio inside [alpha, beta], 0 outside (IcePop, Ring-1T, arXiv 2510.18855)."""
    return _inside(ratios(old, mu, sequence, mask, "token"), config.icepop_low, config.icepop_high)


def mis(old: Tensor, mu: Tensor, sequence: Tensor, mask: Tensor, config: TrainConfig, *, level: Level) -> Tensor:
    """The ratio inside [lo, hi], 0 outside; and 0 for a whole sequence with a token ratio below the veto.

    Masked importance sampling (Liu, Li et al. 2025, 'When Speed Kills Stability').
    """
    weights = _inside(ratios(old, mu, sequence, mask, level), config.mis_low, config.mis_high)
    vetoed = (old - mu).exp() < config.mis_veto
    return torch.where(sequence_sum(vetoed.to(old.dtype), sequence, mask)[sequence] > 0, 0, weights)


CORRECTIONS: dict[str, Correction] = {
    "none": none,
    "tis": partial(tis, level="token"),
    "tis-sequence": partial(tis, level="sequence"),
    "icepop": icepop,
    "mis": partial(mis, level="token"),
    "mis-sequence": partial(mis, level="sequence"),
    "mis-geometric": partial(mis, level="geometric"),
}


def opsm(new: Tensor, sampled: Tensor, advantages: Tensor, sequence: Tensor, mask: Tensor, delta: float) -> Tensor:
    """Which tokens stay, [N] bool: not those with A < 0 in a sequence with mean(sampled - new) > delta.

    Off-policy sequence masking (DeepSeek-V3.2, arXiv 2512.02556). `sampled`: log-probabilities under the policy that
    sampled, or the old ones where that is not known; `new`: under the policy as it is now.
    """
    drift = sequence_mean((sampled - new).detach(), sequence, mask)[sequence]
    return ~((advantages < 0) & (drift > delta))


def topr(new: Tensor, sampled: Tensor, advantages: Tensor) -> Tensor:
    """min(new/sampled, 1) where A < 0 and 1 elsewhere, [N]: what the policy has unlearned is not pushed down for ever.

    Tapered off-policy REINFORCE (arXiv 2503.14286), token by token.
    """
    return torch.where(advantages < 0, log_ratio(new, sampled).exp().clamp(max=1), 1).detach()


def effective_sample_size(weights: Tensor, mask: Tensor) -> Tensor:
    """(sum w)^2 / (n sum w^2) over the n tokens in `mask`: a scalar in [0, 1], 1 for equal weights (Kish 1965)."""
    kept = weights[mask]
    squares = kept.square().sum() * kept.numel()
    if not kept.numel():
        return weights.new_ones(())
    return torch.where(squares > 0, kept.sum().square() / squares.clamp(min=1e-30), 0)


def _inside(values: Tensor, low: float, high: float) -> Tensor:
    return torch.where((values >= low) & (values <= high), values, 0).detach()
