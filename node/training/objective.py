"""From log-probabilities to a loss: policy loss, correction and KL over the tokens of one step, and its statistics."""

from collections.abc import Sequence

import torch

from node.algorithms.corrections import CORRECTIONS, effective_sample_size
from node.algorithms.losses import LOSSES, kl_to_reference, token_weights
from node.config import TrainConfig
from node.interfaces import TrainGroup, UpdateStats


class StepObjective:
    """The trained sequences of one step as flat tensors [N], token after token, sequence after sequence.

    `loss` is called once per micro-batch with some of the sequences; the losses of all add up to the loss of the
    step, because a token's weight is taken over the whole step.
    """

    def __init__(
        self,
        config: TrainConfig,
        groups: Sequence[TrainGroup],
        members: Sequence[tuple[int, int]],
        device: torch.device,
    ) -> None:
        self.config = config
        sequences = [groups[group].sequences[index] for group, index in members]
        lengths = [len(sequence.token_ids) for sequence in sequences]
        ends = torch.tensor(lengths).cumsum(0).tolist()
        self.spans = {
            member: range(end - length, end) for member, end, length in zip(members, ends, lengths, strict=True)
        }
        repeat = torch.tensor(lengths, device=device)
        own = torch.tensor([groups[group].origin == "own" for group, _ in members], device=device)
        advantages = torch.tensor([sequence.advantage for sequence in sequences], dtype=torch.float32, device=device)
        self.sequence = torch.arange(len(sequences), device=device).repeat_interleave(repeat)
        self.own = own.repeat_interleave(repeat)
        self.advantages = advantages.repeat_interleave(repeat)
        self.mask = torch.tensor([flag for sequence in sequences for flag in sequence.mask], device=device)
        self.mu = torch.tensor(
            [
                value
                for sequence, length in zip(sequences, lengths, strict=True)
                for value in (sequence.behaviour_logprobs or (torch.nan,) * length)
            ],
            dtype=torch.float32,
            device=device,
        )
        self.token_weights = token_weights(self.sequence, self.mask, config.aggregation, config.aggregation_constant)
        # what the statistics are made of, filled in by `loss`
        self.old = torch.zeros_like(self.mu)
        self.correction = torch.ones_like(self.mu)
        self.entropy = torch.zeros_like(self.mu)
        self.clipped = torch.zeros_like(self.mask)
        self.kl = torch.zeros_like(self.mu)

    def loss(
        self,
        members: Sequence[tuple[int, int]],
        logprobs: torch.Tensor,
        entropy: torch.Tensor,
        reference: torch.Tensor | None,
    ) -> torch.Tensor:
        """This part of the step's loss. All [n], the members' tokens in order; only logprobs carries gradients."""
        config = self.config
        at = torch.tensor([token for member in members for token in self.spans[member]], device=logprobs.device)
        lengths = torch.tensor([len(self.spans[member]) for member in members], device=logprobs.device)
        sequence = torch.arange(len(members), device=logprobs.device).repeat_interleave(lengths)
        mask, advantages, mu = self.mask[at], self.advantages[at], self.mu[at]
        old = logprobs.detach()
        losses, clipped = LOSSES[config.loss](logprobs, old, advantages, sequence, mask, config)
        weight = CORRECTIONS[config.correction](old, torch.where(mu.isnan(), old, mu), sequence, mask, config)
        losses = losses * weight
        self.correction[at] = weight
        if reference is not None:
            kl = kl_to_reference(logprobs, reference, config.kl_estimator)
            losses = losses + config.kl_coefficient * kl
            self.kl[at] = kl.detach()
        self.old[at], self.entropy[at], self.clipped[at] = old, entropy, clipped
        return (losses * self.token_weights[at]).sum()

    def stats(
        self,
        *,
        loss: float,
        grad_norm: float,
        learning_rate: float,
        tokens_forwarded: int,
        micro_batches: int,
        oom_retries: int,
    ) -> UpdateStats:
        """Statistics of the step, once every sequence has been through `loss`."""
        mask = self.mask
        gap = (self.mu - self.old)[mask & self.own & ~self.mu.isnan()]
        return UpdateStats(
            loss=loss,
            grad_norm=grad_norm,
            learning_rate=learning_rate,
            tokens_trained=int(mask.sum()),
            tokens_forwarded=tokens_forwarded,
            kl_behaviour=float(gap.mean()) if len(gap) else 0.0,
            max_mismatch=float(gap.abs().max()) if len(gap) else 0.0,
            clip_fraction=float(self.clipped[mask].float().mean()),
            ess=float(effective_sample_size(self.correction, mask)),
            entropy=float(self.entropy[mask].mean()),
            kl_reference=float(self.kl[mask].mean()) if self.config.kl_coefficient > 0 else None,
            micro_batches=micro_batches,
            oom_retries=oom_retries,
        )
