"""From log-probabilities to a loss: advantages, policy loss, correction, KL, entropy, critic; and its statistics."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from node.algorithms.corrections import CORRECTIONS, effective_sample_size, opsm, topr
from node.algorithms.estimate import estimate
from node.algorithms.losses import LOSSES, kl_to_reference, token_weights, value_loss
from node.config_train import TrainConfig
from node.interfaces import TrainGroup, UpdateStats
from node.training import distill

Member = tuple[int, int]
"""(group, sequence)."""


class Forward(NamedTuple):
    """What a pass gives for the tokens of some completions, one after the other; all [n] float32."""

    logprobs: Tensor
    entropy: Tensor
    """Of the distribution each token was drawn from, in nats."""
    values: Tensor | None
    """The critic's, before each token."""


class StepObjective:
    """All completions of one step as flat tensors [N], token after token, sequence after sequence.

    In order: `remember` what a pass over all of them gave (only if `config.looks_first`), `judge` once; then for each
    optimizer step `begin` with its completions, call `loss` once per micro-batch, and `end`. `refer` comes before what
    needs the reference. The losses add up to the loss of the optimizer step, because a token's weight is taken over all
    of its completions.
    """

    def __init__(self, config: TrainConfig, groups: Sequence[TrainGroup], device: torch.device) -> None:
        self.config, self.groups, self.device = config, groups, device
        all_of_them = [(g, s) for g, group in enumerate(groups) for s in range(len(group.sequences))]
        sequences = [groups[g].sequences[s] for g, s in all_of_them]
        self.members = [member for member, sequence in zip(all_of_them, sequences, strict=True) if any(sequence.mask)]
        """Completions with anything to train on."""
        self._spans: dict[Member, range] = {}
        mask: list[bool] = []
        mu: list[float] = []
        group: list[int] = []
        for member, sequence in zip(all_of_them, sequences, strict=True):
            length = len(sequence.token_ids)
            self._spans[member] = range(len(mask), len(mask) + length)
            mask += sequence.mask
            mu += sequence.behaviour_logprobs or (torch.nan,) * length
            group += [member[0]] * length
        foreign = [groups[g].origin == "foreign" for g in group]
        self.mask = torch.tensor(mask, dtype=torch.bool, device=device)
        self.mu = torch.tensor(mu, dtype=torch.float32, device=device)
        self.group = torch.tensor(group)
        self.foreign = torch.tensor(foreign, dtype=torch.bool, device=device)
        self.teacher = distill.known(groups, device)
        """log-probabilities under the teacher, nan where it was not asked; None where it was not asked at all."""
        empty = torch.zeros_like(self.mu)
        self.advantages, self.returns = empty, empty
        self.token_weights, self.value_weights = empty, empty
        # under the policy as the step finds it; filled in by `remember`, or by `loss` where that is the first pass
        self.old, self.values, self.reference = empty.clone(), empty.clone(), empty.clone()
        # what the statistics are made of, filled in by `loss`
        self.correction, self.entropy, self.kl = torch.ones_like(empty), empty.clone(), empty.clone()
        self._clipped = torch.zeros(2, device=device)
        """How many tokens the loss clipped, and of how many."""
        self._part, self._done = self._clipped.clone(), torch.zeros_like(self.mask)
        """The same in the optimizer step in progress, and which tokens `loss` has seen in it."""
        self._begun = self._done.clone()

    def remember(self, members: Sequence[Member], forward: Forward) -> None:
        """Keep what a pass that changes nothing gave for some of `members`."""
        at, _ = self._places(members)
        self.old[at] = forward.logprobs
        if forward.values is not None:
            self.values[at] = forward.values

    def refer(self, members: Sequence[Member], logprobs: Tensor) -> None:
        """Keep the log-probabilities of some of `members` under the frozen reference."""
        self.reference[self._places(members)[0]] = logprobs

    def judge(self) -> list[Member]:
        """Compute the advantages; returns the completions of all groups that teach something."""
        config = self.config
        found = estimate(
            self.groups,
            config,
            values=self.values if config.critic else None,
            kl=kl_to_reference(self.old, self.reference, config.kl_estimator) if config.kl_in_reward else None,
        )
        self.advantages = found.advantages.to(self.device)
        if found.returns is not None:
            self.returns = found.returns.to(self.device)
        teaches = found.advantages != 0
        if self.teacher is not None:
            teaches |= ~self.teacher.isnan().cpu()
        informative = set(self.group[teaches].tolist())
        return [member for member in self.members if member[0] in informative]

    def begin(self, members: Sequence[Member]) -> None:
        """The next calls of `loss` are for one optimizer step on these completions."""
        at, sequence = self._places(members)
        mask, config = self.mask[at], self.config
        self._part.zero_()
        self._begun.zero_()[at] = True
        self._done.zero_()
        self.token_weights, self.value_weights = torch.zeros_like(self.mu), torch.zeros_like(self.mu)
        self.token_weights[at] = token_weights(sequence, mask, config.aggregation, config.aggregation_constant)
        self.value_weights[at] = token_weights(sequence, mask, "token-mean", 1.0)

    def loss(self, members: Sequence[Member], forward: Forward) -> tuple[Tensor, Tensor | None]:
        """This part of the policy's loss and of the critic's; logprobs, entropy and values may carry gradients."""
        config = self.config
        logprobs = forward.logprobs
        at, sequence = self._places(members)
        mask, advantages, mu = self.mask[at], self.advantages[at], self.mu[at]
        if not config.looks_first:
            self.remember(members, Forward(logprobs.detach(), forward.entropy, None))
        old = self.old[at]
        losses, clipped = LOSSES[config.loss](logprobs, old, advantages, sequence, mask, config)
        if self.teacher is not None:
            losses = losses + config.distill_coefficient * distill.reverse_kl(logprobs, old, self.teacher[at])

        sampled = torch.where(mu.isnan(), old, mu)
        weight = CORRECTIONS[config.correction](old, sampled, sequence, mask, config)
        if config.foreign_negatives == "truncated":
            tapered = self.foreign[at] & (advantages < 0)
            # a loss with r = logp / old has the rest of the ratio itself, as with the corrections
            policy = old if config.loss_has_ratio else logprobs
            weight = torch.where(tapered, topr(policy, sampled, advantages), weight)
        if config.opsm_delta > 0:
            weight = weight * opsm(logprobs, sampled, advantages, sequence, mask, config.opsm_delta)
        losses = losses * weight

        if config.kl_coefficient > 0:
            kl = kl_to_reference(logprobs, self.reference[at], config.kl_estimator)
            if config.kl_in == "loss":
                losses = losses + config.kl_coefficient * kl
            self.kl[at] = kl.detach()
        if config.entropy_coefficient > 0:
            losses = losses - config.entropy_coefficient * forward.entropy
        self.correction[at], self.entropy[at] = weight, forward.entropy.detach()
        self._part += torch.stack(((clipped & mask).sum(), mask.sum()))
        self._done[at] = True

        critic = None
        if forward.values is not None:
            critic = value_loss(forward.values, self.values[at], self.returns[at], config.critic_clip)
            critic = (critic * self.value_weights[at]).sum()
        return (losses * self.token_weights[at]).sum(), critic

    def end(self, add_up: Callable[[Tensor], None]) -> None:
        """The optimizer step has been through `loss`, in this process or in parts in several: `add_up` sums over them.

        It works in place, and everything that a process did not see is 0 in its part.
        """
        add_up(self._part)
        self._clipped += self._part
        begun, elsewhere = self._begun, self._begun & ~self._done
        found = [self.correction, self.entropy, self.kl]
        if not self.config.looks_first:
            found += [self.old, self.reference]
        for values in found:
            values[elsewhere] = 0.0
            part = values[begun]
            add_up(part)
            values[begun] = part

    def stats(
        self,
        members: Sequence[Member],
        *,
        loss: float,
        critic_loss: float | None,
        grad_norm: float,
        learning_rate: float,
        tokens_forwarded: int,
        optimizer_steps: int,
        micro_batches: int,
        oom_retries: int,
    ) -> UpdateStats:
        """Statistics of the step, once all of `members` have been through `loss`."""
        trained = torch.zeros_like(self.mask)
        trained[self._places(members)[0]] = True
        mask = trained & self.mask
        gap = (self.mu - self.old)[mask & ~self.foreign & ~self.mu.isnan()]
        return UpdateStats(
            loss=loss,
            grad_norm=grad_norm,
            learning_rate=learning_rate,
            tokens_trained=int(mask.sum()),
            tokens_forwarded=tokens_forwarded,
            kl_behaviour=float(gap.mean()) if len(gap) else 0.0,
            max_mismatch=float(gap.abs().max()) if len(gap) else 0.0,
            clip_fraction=float(self._clipped[0] / self._clipped[1]),
            ess=float(effective_sample_size(self.correction, mask)),
            entropy=float(self.entropy[mask].mean()),
            kl_reference=float(self.kl[mask].mean()) if self.config.kl_coefficient > 0 else None,
            micro_batches=micro_batches,
            oom_retries=oom_retries,
            optimizer_steps=optimizer_steps,
            critic_loss=critic_loss,
            kl_teacher=None if self.teacher is None else distill.mean_gap(self.old, self.teacher, mask),
        )

    def _places(self, members: Sequence[Member]) -> tuple[Tensor, Tensor]:
        """Where the tokens of some completions are, [n], and which completion each belongs to, counted from 0, [n]."""
        at = torch.tensor([token for member in members for token in self._spans[member]], device=self.device)
        lengths = torch.tensor([len(self._spans[member]) for member in members], device=self.device)
        return at, torch.arange(len(members), device=self.device).repeat_interleave(lengths)
