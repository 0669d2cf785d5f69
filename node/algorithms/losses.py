"""Policy losses, token by token.

One canonical shape: flat. Everything is [N], one entry a token, with `sequence` saying which completion it belongs to
(0 <= sequence < N); a padded [B, T] batch is flattened, with the row number as sequence and False in `mask` where it
is padded. A loss gives one number a token; the loss of a step is `sum(token_weights(...) * loss)` with weights taken
once over the whole step, so that any split into micro-batches along sequences gives the same sum and gradient.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from node.config_train import TrainConfig

MAX_LOG_RATIO = 20.0
"""exp(20) is 5e8: beyond it a ratio says nothing more and float32 soon overflows."""


class TokenLosses(NamedTuple):
    loss: Tensor
    """[N], differentiable with respect to the log-probabilities."""
    clipped: Tensor
    """[N] bool: clipping holds the ratio, so this token moves less (cispo) or nothing (the others)."""


Loss = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, TrainConfig], TokenLosses]
"""(logprobs, old, advantages, sequence, mask, config) -> TokenLosses, all [N]; entries outside `mask` mean nothing."""


def log_ratio(logprobs: Tensor, old: Tensor) -> Tensor:
    """log r = logp - old, clamped to +-20 (outside that range the gradient is 0)."""
    return (logprobs - old).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def clip(
    logprobs: Tensor, old: Tensor, advantages: Tensor, sequence: Tensor, mask: Tensor, config: TrainConfig
) -> TokenLosses:
    """max(-r A, -clip(r, 1-lo, 1+hi) A), and at most -c A for A < 0.

    PPO (arXiv 1707.06347), the higher upper clip of DAPO (2503.14476), dual clip (1912.09729).
    """
    ratio = log_ratio(logprobs, old).exp()
    plain = -ratio * advantages
    held = -ratio.clamp(1 - config.clip_low, 1 + config.clip_high) * advantages
    loss = torch.maximum(plain, held)
    ceiling = -config.dual_clip * advantages
    dual = (advantages < 0) & (loss > ceiling)
    return TokenLosses(torch.where(dual, ceiling, loss), (held > plain) | dual)


def reinforce(
    logprobs: Tensor, old: Tensor, advantages: Tensor, sequence: Tensor, mask: Tensor, config: TrainConfig
) -> TokenLosses:
    """-A logp (Williams 1992): no ratio, no clip."""
    return TokenLosses(-advantages * logprobs, torch.zeros_like(mask))


def gspo(
    logprobs: Tensor, old: Tensor, advantages: Tensor, sequence: Tensor, mask: Tensor, config: TrainConfig
) -> TokenLosses:
    """max(-s A, -clip(s, 1-lo, 1+hi) A), s = exp(mean of log r over the sequence) as sg[s] pi / sg[pi].

    GSPO-token (arXiv 2507.18071, eq. 13-14); meant for the aggregation seq-mean-token-mean.
    """
    mean = sequence_mean(log_ratio(logprobs, old), sequence, mask)[sequence].detach()
    ratio = mean.exp() * (logprobs - logprobs.detach()).exp()
    plain = -ratio * advantages
    held = -ratio.clamp(1 - config.gspo_clip_low, 1 + config.gspo_clip_high) * advantages
    return TokenLosses(torch.maximum(plain, held), held > plain)


def cispo(
    logprobs: Tensor, old: Tensor, advantages: Tensor, sequence: Tensor, mask: Tensor, config: TrainConfig
) -> TokenLosses:
    """-sg[clip(r, 1-lo, 1+hi)] A logp: a clipped token keeps its gradient (MiniMax-M1, arXiv 2506.13585, eq. 4)."""
    ratio = log_ratio(logprobs, old).exp().detach()
    held = ratio.clamp(1 - config.cispo_clip_low, 1 + config.cispo_clip_high)
    return TokenLosses(-held * advantages * logprobs, held != ratio)


def soft_gate(
    logprobs: Tensor, old: Tensor, advantages: Tensor, sequence: Tensor, mask: Tensor, config: TrainConfig
) -> TokenLosses:
    """-4/tau sigmoid(tau (r - 1)) A, tau of its own for A <= 0: a ratio far from 1 fades out instead of being cut.

    Soft Adaptive Policy Optimization (arXiv 2511.20347); meant for the aggregation seq-mean-token-mean.
    """
    ratio = log_ratio(logprobs, old).exp()
    tau = torch.where(advantages > 0, config.soft_gate_positive, config.soft_gate_negative).to(ratio.dtype)
    gate = 4 / tau * torch.sigmoid(tau * (ratio - 1))
    return TokenLosses(-gate * advantages, torch.zeros_like(mask))


def gmpo(
    logprobs: Tensor, old: Tensor, advantages: Tensor, sequence: Tensor, mask: Tensor, config: TrainConfig
) -> TokenLosses:
    """-A times the geometric mean of the ratios of a sequence, each clipped to [e^-lo, e^hi] on the side A pushes to.

    GMPO (arXiv 2507.20673). Every token carries its sequence's loss: meant for the aggregation seq-mean-token-mean.
    """
    advantage = sequence_mean(advantages, sequence, mask)[sequence]
    raw = log_ratio(logprobs, old)
    held = raw.clamp(-config.gmpo_clip_low, config.gmpo_clip_high)
    kept = torch.where(advantage > 0, torch.minimum(raw, held), torch.maximum(raw, held))
    ratio = sequence_mean(kept, sequence, mask).exp()[sequence]
    return TokenLosses(-advantage * ratio, kept != raw)


LOSSES: dict[str, Loss] = {
    "ppo": clip,
    "dapo": clip,
    "reinforce": reinforce,
    # GPG (arXiv 2504.02546) is -A logp with R - mean, scaled up for groups that teach nothing: `token_weights` does
    # that already, because such groups are not in the step
    "gpg": reinforce,
    "gspo": gspo,
    "cispo": cispo,
    "soft_gate": soft_gate,
    "gmpo": gmpo,
}


def sequence_sum(values: Tensor, sequence: Tensor, mask: Tensor) -> Tensor:
    """Sum over the trained tokens of each sequence; [N], of which the first entries are used (0 without tokens)."""
    # N bounds the number of sequences without asking the device for it
    return torch.zeros_like(values).index_add(0, sequence, values.masked_fill(~mask, 0))


def sequence_mean(values: Tensor, sequence: Tensor, mask: Tensor) -> Tensor:
    """Mean over the trained tokens of each sequence; [N], of which the first entries are used (0 without tokens)."""
    counts = sequence_sum(torch.ones_like(values), sequence, mask)
    return sequence_sum(values, sequence, mask) / counts.clamp(min=1)


def token_weights(sequence: Tensor, mask: Tensor, aggregation: str, constant: float) -> Tensor:
    """Weight of each token of a whole step, [N] float32, 0 outside `mask`.

    With T trained tokens in S sequences that have any, L of them in this token's sequence: `token-mean` 1/T (DAPO,
    arXiv 2503.14476); `seq-mean-token-mean` 1/(S L) (GRPO, 2402.03300); `seq-mean-token-sum` 1/S;
    `seq-mean-token-sum-norm` 1/(S constant) (Dr. GRPO, 2503.20783). Raises ValueError for another name.
    """
    trained = mask.float()
    lengths = torch.zeros_like(trained).index_add(0, sequence, trained)
    sequences = (lengths > 0).sum().clamp(min=1)
    if aggregation == "token-mean":
        return trained / trained.sum().clamp(min=1)
    if aggregation == "seq-mean-token-mean":
        return trained / (lengths[sequence].clamp(min=1) * sequences)
    if aggregation == "seq-mean-token-sum":
        return trained / sequences
    if aggregation == "seq-mean-token-sum-norm":
        return trained / (sequences * constant)
    raise ValueError(f"unknown aggregation {aggregation!r}")


def kl_to_reference(logprobs: Tensor, reference: Tensor, estimator: str) -> Tensor:
    """Estimate of KL(policy || reference) token by token, [N] (Schulman, 'Approximating KL divergence', 2020).

    With d = reference - logp clamped to +-20: `k1` -d, `k2` d^2/2, `k3` e^d - d - 1, and `k3+` the value of k3 with
    the gradient of k2, which is that of the KL. Raises ValueError for others.
    """
    d = log_ratio(reference, logprobs)
    if estimator == "k1":
        return -d
    k2 = d.square() / 2
    if estimator == "k2":
        return k2
    k3 = d.exp() - d - 1
    if estimator == "k3":
        return k3
    if estimator == "k3+":
        return k2 - k2.detach() + k3.detach()
    raise ValueError(f"unknown KL estimator {estimator!r}")


def value_loss(values: Tensor, old: Tensor, returns: Tensor, clip: float) -> Tensor:
    """max((V - G)^2, (V held within `clip` of its old value - G)^2) / 2 token by token, [N] (PPO implementations)."""
    held = old + (values - old).clamp(-clip, clip)
    return torch.maximum((values - returns).square(), (held - returns).square()) / 2
