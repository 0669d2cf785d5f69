"""Log-probabilities of chosen tokens, without ever holding the logits of positions nobody asks about."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

CHUNK_BYTES = 64 << 20
"""Logits computed at once."""
KEEP_BYTES = 256 << 20
"""Probabilities kept for the way back; beyond that they are computed again, which costs one more product."""
WIDENED_BYTES = 8 << 20
"""Of the output embedding in float32, at a time."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The part of the vocabulary that one of several processes has the output embedding of."""

    first: int
    """Token of its first row."""
    most: int
    """Rows of the largest part: all processes must cut their work alike."""
    group: dist.ProcessGroup

    def logsumexp(self, own: torch.Tensor) -> torch.Tensor:
        """Over all parts, from each one's."""
        largest = own.clone()
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.group)
        total = (own - largest).exp_()
        dist.all_reduce(total, group=self.group)
        return total.log_().add_(largest)

    def add_up(self, tensor: torch.Tensor) -> None:
        dist.all_reduce(tensor, group=self.group)


def chosen_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    rows: torch.Tensor,
    tokens: torch.Tensor,
    vocabulary: Vocabulary | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """log-probability of tokens [N] after the states of `rows` [N], and the entropy after every state, in nats.

    hidden [M, D] last states, weight [V, D] output embedding; returns float32 [N] and [M], both differentiable. With
    `vocabulary`, `weight` is this process's rows, and everything else, gradients too, is the same in all processes.
    """
    logprobs, entropy = _Chosen.apply(hidden, weight, rows, tokens, vocabulary)
    return logprobs, entropy


class _Chosen(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        rows: torch.Tensor,
        tokens: torch.Tensor,
        vocabulary: Vocabulary | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, most = tokens - (vocabulary.first if vocabulary else 0), vocabulary.most if vocabulary else len(weight)
        logprobs = hidden.new_zeros(len(rows), dtype=torch.float32)
        entropy = hidden.new_empty(len(hidden), dtype=torch.float32)
        chunk = max(1, CHUNK_BYTES // (4 * most))
        room = KEEP_BYTES if any(ctx.needs_input_grad) else 0
        kept: list[torch.Tensor | None] = []
        for start in range(0, len(hidden), chunk):
            scores = _log_softmax(hidden[start : start + chunk], weight, vocabulary)
            here = _within(rows, start, len(scores), tokens, len(weight))
            logprobs[here] = scores[rows[here] - start, tokens[here]]
            probabilities = scores.exp()
            entropy[start : start + len(scores)] = -torch.linalg.vecdot(probabilities, scores)
            room -= 4 * len(scores) * most
            kept.append(probabilities if room >= 0 else None)
        if vocabulary is not None:
            vocabulary.add_up(logprobs)
            vocabulary.add_up(entropy)
        ctx.save_for_backward(hidden, weight, rows, tokens)
        ctx.kept, ctx.chunk, ctx.entropy, ctx.vocabulary = kept, chunk, entropy.detach(), vocabulary
        ctx.set_materialize_grads(False)  # whoever asks for no entropy bonus does not pay for its gradient
        return logprobs, entropy

    @staticmethod
    def backward(
        ctx: Any, gradient: torch.Tensor | None, of_entropy: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, rows, tokens = ctx.saved_tensors
        d_hidden = torch.empty_like(hidden)
        d_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        if gradient is None:
            gradient = torch.zeros(len(rows), device=hidden.device)
        by_row = gradient.new_zeros(len(hidden)).index_add_(0, rows, gradient)
        for i, start in enumerate(range(0, len(hidden), ctx.chunk)):
            states = hidden[start : start + ctx.chunk]
            scores, ctx.kept[i] = ctx.kept[i], None
            if scores is None:
                scores = _log_softmax(states, weight, ctx.vocabulary).exp_()
            here = slice(start, start + len(scores))
            # d logprob(t) / d logits = onehot(t) - softmax; d entropy / d logits = -softmax (log softmax + entropy)
            if of_entropy is None:
                scores.mul_(by_row[here, None]).neg_()
            else:
                pull = torch.xlogy(scores, scores).addcmul_(scores, ctx.entropy[here, None])
                scores.mul_(by_row[here, None]).addcmul_(pull, of_entropy[here, None]).neg_()
            asked = _within(rows, start, len(scores), tokens, len(weight))
            scores.index_put_((rows[asked] - start, tokens[asked]), gradient[asked], accumulate=True)
            d_logits = scores.to(weight.dtype)
            torch.mm(d_logits, weight, out=d_hidden[start : start + len(scores)])
            if d_weight is not None:
                d_weight.addmm_(d_logits.t(), states)
        if ctx.vocabulary is not None:
            ctx.vocabulary.add_up(d_hidden)
        return d_hidden, d_weight, None, None, None


def logits_of(states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """states [M, D] by the output embedding [V, D]: float32 [M, V].

    They are not rounded to the compute type: bfloat16 has steps of 1/8 at a logit of 20, by which rollout and training
    would disagree (MiniMax-M1, arXiv 2506.13585, computes its output layer in float32 for that reason).
    """
    if weight.dtype == torch.float32:
        return torch.mm(states, weight.t())
    if weight.is_cuda:
        return torch.mm(states, weight.t(), out_dtype=torch.float32)
    logits = states.new_empty(len(states), len(weight), dtype=torch.float32)
    states, rows = states.float(), max(1, WIDENED_BYTES // (4 * weight.shape[1]))
    for start in range(0, len(weight), rows):  # torch has no such product on a CPU
        torch.mm(states, weight[start : start + rows].float().t(), out=logits[:, start : start + rows])
    return logits


def _log_softmax(states: torch.Tensor, weight: torch.Tensor, vocabulary: Vocabulary | None) -> torch.Tensor:
    """Of the tokens that `weight` has rows of."""
    logits = logits_of(states, weight)
    total = torch.logsumexp(logits, -1, keepdim=True)
    return logits.sub_(total if vocabulary is None else vocabulary.logsumexp(total))


def _within(rows: torch.Tensor, start: int, count: int, tokens: torch.Tensor, known: int) -> torch.Tensor:
    """Which of the asked tokens are after `count` states from `start` on, and among the `known` ones here."""
    here = (rows >= start) & (rows < start + count) & (tokens >= 0) & (tokens < known)
    return here.nonzero(as_tuple=True)[0]
