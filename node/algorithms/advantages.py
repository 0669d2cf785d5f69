"""Advantages of whole completions: how much better an answer was than the others to the same task.

Those that differ from token to token are in node/algorithms/returns.py; node/algorithms/estimate.py chooses.
"""

from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor

Advantage = Callable[[Tensor, Tensor], Tensor]
"""(scores [n], lengths [n] in trained tokens) of one group -> advantages [n]. All 0 where a group teaches nothing."""


def centred(scores: Tensor) -> Tensor:
    """R - mean; exactly 0 where all scores are equal, which rounding of the mean would not give."""
    return torch.zeros_like(scores) if scores.max() == scores.min() else scores - scores.mean()


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


def opo(scores: Tensor, lengths: Tensor) -> Tensor:
    """R - sum(length R) / sum(length): the baseline of least variance (OPO, arXiv 2505.23585). Nothing trained: 0."""
    if scores.max() == scores.min() or not lengths.any():
        return torch.zeros_like(scores)
    return scores - (lengths * scores).sum() / lengths.sum()


ADVANTAGES: dict[str, Advantage] = {"grpo": grpo, "dr_grpo": dr_grpo, "rloo": rloo, "opo": opo}


def gdpo(parts: Tensor) -> Tensor:
    """Sum over reward components of each one's `grpo`, so that none drowns the others (GDPO, arXiv 2601.05242).

    parts [n, K] of one group -> [n]. The paper's last step, whitening over the batch, is the caller's.
    """
    return torch.stack([grpo(part, part) for part in parts.unbind(1)]).sum(0)


def gigpo(
    scores: Tensor, states: Sequence[Sequence[Hashable]], *, gamma: float = 0.95, step_weight: float = 1.0
) -> list[Tensor]:
    """Advantages of every turn: the episode's, and that of the turn among all turns begun in the same state.

    `scores` [n] of one group; `states[i]` names the state before each turn of episode i. A turn's return is
    gamma^(turns left) R; returns of one state are normalised as `grpo` does, 0 where a state was met once.
    Returns [turns of i] for each episode i (GiGPO, arXiv 2505.10978).
    """
    episode = grpo(scores, scores)
    returns = [score * gamma ** torch.arange(len(met) - 1, -1, -1) for score, met in zip(scores, states, strict=True)]
    by_state: dict[Hashable, list[tuple[int, int]]] = {}
    for i, met in enumerate(states):
        for turn, state in enumerate(met):
            by_state.setdefault(state, []).append((i, turn))
    advantages = [episode[i].repeat(len(met)) for i, met in enumerate(states)]
    for places in by_state.values():
        values = torch.stack([returns[i][turn] for i, turn in places])
        for (i, turn), advantage in zip(places, grpo(values, values), strict=True):
            advantages[i][turn] += step_weight * advantage
    return advantages
