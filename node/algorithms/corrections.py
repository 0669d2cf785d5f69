"""Corrections for sampling from one policy (mu, in the rollout) and training another (old, in the trainer)."""

from torch import Tensor

from node.algorithms.losses import log_ratio


def tis_weights(old: Tensor, mu: Tensor, cap: float) -> Tensor:
    """w = min(old/mu, C) of each token, [N], detached: multiply the token's loss by it.

    Truncated importance sampling (Ionides 2008; for rollout-training mismatch: Yao et al. 2025). Where mu is not known,
    give mu = old, and the weight is 1.
    """
    return log_ratio(old, mu).exp().clamp(max=cap).detach()


def effective_sample_size(weights: Tensor, mask: Tensor) -> Tensor:
    """(sum w)^2 / (n sum w^2) over the n tokens in `mask`: a scalar in (0, 1], 1 for equal weights (Kish 1965)."""
    kept = weights[mask]
    squares = kept.square().sum() * kept.numel()
    return kept.sum().square() / squares if kept.numel() else weights.new_ones(())
