"""The local trainer: one model, one device, AdamW on float32 weights; or one process's part of several devices'.

One update: compute advantages, leave out what teaches nothing, merge what shares a beginning, and run micro-batches
within a token budget, for one optimizer step or several (`mini_batches` times `passes`). Old log-probabilities are
those before the first of them, so a ratio starts at 1, and what the rollout saw otherwise (mu) enters as a correction
weight. All denominators are those of a whole optimizer step.
"""

import functools
import logging
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from node.batching import MicroBatch, micro_batches
from node.config_train import TrainConfig
from node.interfaces import Batch, Interrupted, StepSkipped, TrainGroup, UpdateStats
from node.memory import out_of_memory
from node.models import ModelBundle, ModelError
from node.training import files, lora
from node.training.critic import Critic
from node.training.dumps import dump_batch
from node.training.forward import States, Take, sequence_logprobs
from node.training.objective import Forward, Member, StepObjective
from node.training.optimizers import make_optimizer
from node.training.ranks import Alone, Ranks
from node.training.weights import weights_copied

log = logging.getLogger(__name__)

SMALLEST_BUDGET = 64
"""Tokens of a micro-batch at which running out of memory is final."""


@dataclass(slots=True)
class Counts:
    """Sums over the micro-batches of an update."""

    loss: float = 0.0
    critic_loss: float = 0.0
    tokens: int = 0
    micro_batches: int = 0
    oom_retries: int = 0

    def add(self, other: "Counts") -> None:
        self.loss += other.loss
        self.critic_loss += other.critic_loss
        self.tokens += other.tokens
        self.micro_batches += other.micro_batches

    def check(self) -> None:
        """Raises _NotFinite."""
        if not math.isfinite(self.loss):
            raise _NotFinite(f"the loss is {self.loss}")
        if not math.isfinite(self.critic_loss):
            raise _NotFinite(f"the critic's loss is {self.critic_loss}")

    def summed(self, ranks: Ranks) -> "Counts":
        """What all processes counted together."""
        if ranks.count == 1:
            return self
        # gloo and nccl add tensors; float64 counts exactly
        own = torch.tensor([self.loss, self.critic_loss, self.tokens, self.micro_batches], dtype=torch.float64)
        ranks.sum(own)
        loss, critic_loss, tokens, micro_batches = own.tolist()
        return Counts(loss, critic_loss, int(tokens), int(micro_batches))


class _NotFinite(Exception):
    """A loss or a gradient that must not be applied."""


def _never() -> bool:
    return False


class LocalTrainer:
    """Owns the policy (the bundle's model) and its optimizer. Every method runs on the model thread."""

    def __init__(
        self, bundle: ModelBundle, config: TrainConfig, *, dumps: Path, merge: bool = True, ranks: Ranks | None = None
    ) -> None:
        """`dumps`: where a batch that gave a non-finite update is written for inspection.

        Without `merge`, every sequence is laid out whole: the same gradients for more work (`shoal bench train`).
        `ranks`: the processes that hold the model together, where there are several (fsdp.py, megatron.py).
        Raises ModelError for routing replay without experts.
        """
        self.bundle, self.config, self.dumps, self.merge = bundle, config, dumps, merge
        self.ranks: Ranks = ranks or Alone()
        if config.routing_replay == "on" and bundle.routing is None:
            raise ModelError(f"train.routing_replay is on, but {bundle.name} has no experts; set it to auto")
        self.model = bundle.model.eval()
        if config.lora_rank:
            lora.add_adapters(bundle, config)
        self.step = 0
        self._origin: Path | None = None
        """The checkpoint that was loaded."""
        self._size_work(config)
        self.reference: Any = None
        """The model as loaded, before any checkpoint is; with adapters the model itself, without them."""
        if config.kl_coefficient > 0:
            self.reference = self._initial_model(untrained=True)
        self.critic = self._new_critic() if config.critic else None
        self.weights = self.ranks.weights(self.model)
        self.optimizer = make_optimizer(config, self.weights.masters.values(), self.model.device)

    def _size_work(self, config: TrainConfig) -> None:
        self.budget = config.tokens_per_micro_batch
        self.recompute = config.gradient_checkpointing == "on"
        """Whether layers keep only their inputs for the way back."""

    def configure(self, config: TrainConfig) -> None:
        """Use these settings from the next update on.

        Raises ModelError when they need a reference that is gone, or are for other weights than these.
        """
        if config == self.config:
            return
        if config.trained != self.config.trained:
            raise ModelError(
                f"steps were journalled that trained with {config.trained}, and the settings say {self.config.trained} "
                "(train.optimizer, train.lora_rank, train.lora_alpha, train.lora_targets); set them back, or give "
                "another --home"
            )
        if config.kl_coefficient == 0:
            self.reference = None
        elif self.reference is None:
            self.reference = self._initial_model()
        if not config.critic:
            self.critic = None
        elif self.critic is None:
            self.critic = self._new_critic()
        self.config = config
        self._size_work(config)
        for group in self.optimizer.param_groups:
            group["betas"], group["weight_decay"] = config.betas, config.weight_decay

    def _new_critic(self) -> Critic:
        """A critic as the loaded checkpoint has it, or a fresh one."""
        critic = Critic(self.model.config.hidden_size, self.model.device)
        if self._origin is not None and not critic.load(self._origin):
            log.warning("%s has no critic: a new one starts", self._origin)
        return critic

    def _initial_model(self, *, untrained: bool = False) -> Any:
        """The model as it was loaded; with adapters the model itself, without them."""
        return self.model if self.config.lora_rank else self.ranks.reference(self.bundle, untrained=untrained)

    # -- learning ----------------------------------------------------------------------------------------------

    def update(self, batch: Batch, should_stop: Callable[[], bool] = _never) -> UpdateStats:
        """Learn from the groups of a batch that teach something, in one optimizer step or several.

        Raises StepSkipped (nothing to learn from, a non-finite loss or gradient, or no memory; weights and optimizer
        are as before) and Interrupted (`should_stop` between micro-batches; likewise). Once an optimizer step is done
        the update goes on to its end: what fails then is left out, and `optimizer_steps` says so.
        """
        config, counts = self.config, Counts()
        objective = StepObjective(config, batch.groups, self.model.device)
        if not objective.members:
            raise StepSkipped("there is no token to train on: all completions are empty, or cut off and masked")
        if config.looks_first:
            look = functools.partial(self._look, objective, should_stop)
            counts.add(self._within_memory(batch.step, counts, look))
        members = objective.judge()
        if not members:
            raise StepSkipped(
                "all groups are uniform: every answer to a task got the same reward",
                "see shoal groups, and choose easier or harder environments",
            )
        norms, problems = list[float](), list[Exception]()
        for part in self._parts(batch.step, members):
            job = functools.partial(self.accumulate, objective, part, _never if norms else should_stop)
            try:
                done = self._within_memory(batch.step, counts, job)
                norms.append(self._apply_gradients())
                counts.add(done)
            except (_NotFinite, StepSkipped) as problem:
                problems.append(problem)
            finally:
                self._drop_gradients()
        if not norms and isinstance(problems[0], StepSkipped):
            raise problems[0]
        if not norms:
            dumped = dump_batch(batch, self.dumps) if self.ranks.rank == 0 else "and the batch is dumped"
            raise StepSkipped(f"{problems[0]}; no update was made, {dumped}")
        for left_out in problems:
            log.warning("step %d: one of several optimizer steps is left out: %s", batch.step, left_out)
        self.step += 1
        self._origin = None  # a critic that is switched on later starts anew, in this process and in a replay
        return objective.stats(
            members,
            loss=counts.loss / len(norms),
            critic_loss=counts.critic_loss / len(norms) if config.critic else None,
            grad_norm=sum(norms) / len(norms),
            learning_rate=self.optimizer.param_groups[0]["lr"],
            tokens_forwarded=counts.tokens,
            optimizer_steps=len(norms),
            micro_batches=counts.micro_batches,
            oom_retries=counts.oom_retries,
        )

    def _parts(self, step: int, members: Sequence[Member]) -> Iterator[list[Member]]:
        """Completions of each optimizer step: whole groups, dealt anew in every pass and the same in every replay."""
        groups = sorted({group for group, _ in members})
        for number in range(self.config.passes):
            dealt = random.Random(f"{step}/{number}").sample(groups, len(groups))
            for k in range(min(self.config.mini_batches, len(groups))):
                hand = set(dealt[k :: self.config.mini_batches])
                yield [member for member in members if member[0] in hand]

    def _within_memory(self, step: int, counts: Counts, job: Callable[[], Counts]) -> Counts:
        """Run a job, again with smaller micro-batches when memory runs out. Raises StepSkipped when it still does."""
        while True:
            try:
                return job()
            except (RuntimeError, MemoryError) as error:
                self._drop_gradients()
                if not out_of_memory(error) or self.ranks.count > 1:  # the other processes wait for this one's pass
                    raise
                if self.config.gradient_checkpointing == "auto" and not self.recompute:
                    counts.oom_retries += 1
                    self.recompute = True
                    log.warning("out of memory; step %d again, with layers computed twice to keep less", step)
                    continue
                if self.budget <= SMALLEST_BUDGET:
                    raise StepSkipped(f"out of memory even at {self.budget} tokens a micro-batch: {error}") from error
                counts.oom_retries += 1
                self.budget = max(SMALLEST_BUDGET, self.budget // 2)
                log.warning("out of memory; step %d again with %d tokens a micro-batch", step, self.budget)

    def _look(self, objective: StepObjective, should_stop: Callable[[], bool]) -> Counts:
        """Log-probabilities, values and the reference's log-probabilities before the update. Raises Interrupted."""
        counts = Counts()
        micros = self._micro_batches(objective, objective.members)

        def keep(micro: MicroBatch, found: States) -> None:
            _stop_if(should_stop)
            objective.remember(micro.members, self._given(micro, found))
            counts.tokens += micro.trie.inner

        self._refer(objective, micros, should_stop)
        with torch.no_grad():
            self._passes(micros, keep)
        for found in (objective.old, objective.values, objective.reference):
            self.ranks.sum(found)  # each process has filled in its part, and left 0 elsewhere
        return counts.summed(self.ranks)

    def _micro_batches(self, objective: StepObjective, members: Sequence[Member]) -> list[MicroBatch]:
        return micro_batches(objective.groups, members, self.budget, self.merge)

    def accumulate(
        self, objective: StepObjective, members: Sequence[Member], should_stop: Callable[[], bool] = _never
    ) -> Counts:
        """Gradients of one optimizer step on `members`, left in the weights. The objective has been judged.

        Raises Interrupted, and what running out of memory or a non-finite loss raises.
        """
        objective.begin(members)
        counts = Counts()
        micros = self._micro_batches(objective, members)

        def learn(micro: MicroBatch, found: States) -> torch.Tensor:
            _stop_if(should_stop)
            loss, critic_loss = objective.loss(micro.members, self._given(micro, found))
            counts.add(Counts(loss.item(), 0.0 if critic_loss is None else critic_loss.item(), micro.trie.inner, 1))
            if critic_loss is not None:
                loss = loss + critic_loss
            if self.ranks.count == 1:  # several go on to the end together
                counts.check()
            return loss

        if not self.config.looks_first:
            self._refer(objective, micros, should_stop)
        self._passes(micros, learn)
        objective.end(self.ranks.sum)
        counts = counts.summed(self.ranks)
        counts.check()
        return counts

    def _apply_gradients(self) -> float:
        """One optimizer step; returns the gradient norm before clipping. Raises _NotFinite and does nothing then."""
        norm = self.weights.clip(self.config.max_grad_norm)
        if not math.isfinite(norm):
            raise _NotFinite(f"the gradient norm is {norm}")
        if self.critic is not None:
            for gradient in self.critic.gradients():
                self.ranks.sum(gradient)
            if not self.critic.finite():
                raise _NotFinite("the critic's gradient is not finite")
            self.critic.step(self.config.critic_learning_rate)
        rate = self._learning_rate()
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.weights.publish()
        return norm

    def _learning_rate(self) -> float:
        """Of the next optimizer step: warm-up, the peak, then the inverse square root, which needs no last step.

        Source: Zhai et al., "Scaling Vision Transformers", 2106.04560, section 3.5.
        """
        config, step = self.config, self.step + 1
        rate = config.learning_rate * min(1.0, step / max(1, config.warmup_steps))
        return rate * math.sqrt(config.decay_after / step) if 0 < config.decay_after < step else rate

    def _drop_gradients(self) -> None:
        self.weights.drop_gradients()
        if self.critic is not None:
            self.critic.drop_gradients()

    # -- log-probabilities -------------------------------------------------------------------------------------

    def logprobs(self, groups: Sequence[TrainGroup]) -> list[list[tuple[float, ...]]]:
        """log-probability of every sequence token under the current policy; [group][sequence][token]."""
        return sequence_logprobs(groups, self.budget, self._passes, merge=self.merge, add_up=self.ranks.sum)

    def _passes(self, micros: Sequence[MicroBatch], take: Take) -> None:
        """Of the policy."""
        routing = None if self.config.routing_replay == "off" else self.bundle.routing
        self.ranks.run(self.model, micros, take, routing=routing, recompute=self.recompute)

    def _refer(self, objective: StepObjective, micros: Sequence[MicroBatch], should_stop: Callable[[], bool]) -> None:
        """Passes of the frozen reference, where there is one: another policy, whose routers choose for themselves."""
        if self.reference is None:
            return

        def keep(micro: MicroBatch, found: States) -> None:
            _stop_if(should_stop)
            objective.refer(micro.members, found.logprobs)

        with torch.no_grad(), lora.switched_off(self.reference):
            self.ranks.run(self.reference, micros, keep)

    def _given(self, micro: MicroBatch, found: States) -> Forward:
        """What the objective is made of, from a pass over `micro`."""
        values = None if self.critic is None else self.critic(found.states)[found.drawn]
        return Forward(found.logprobs, found.entropy, values)

    # -- files -------------------------------------------------------------------------------------------------

    def save(self, directory: Path) -> None:
        """Write what `export` does, and the optimizer, into an existing empty directory."""
        files.write_all(functools.partial(write, directory) for write in (self.export, self._save_optimizer))
        if self.critic is not None and self.ranks.rank == 0:
            self.critic.save(directory)

    def _save_optimizer(self, directory: Path) -> None:
        files.save_optimizer(
            self.optimizer, self.weights.masters, self.step, directory, self.ranks.rank, self.ranks.count
        )

    def load(self, directory: Path) -> None:
        """Inverse of `save`, in place. Raises CheckpointError."""
        lora.check_kind(directory, self.config.lora_rank)
        if self.config.lora_rank:
            lora.load_adapters(self.model, self.weights.masters, directory)
        else:
            files.load_weights(self.weights.masters, files.weight_files(directory))
        step = files.load_optimizer(self.optimizer, self.weights.masters, directory)
        self._origin = directory
        if self.critic is not None:
            self.critic = self._new_critic()
        self.weights.publish()
        self.step = step

    def export(self, directory: Path) -> None:
        """Write only what inference needs: a directory `from_pretrained` loads, with adapters that of peft."""
        if self.config.lora_rank:
            return lora.save_adapters(self.model, self.weights.masters, directory)
        return self.ranks.save_model(self.bundle, self.weights.masters, directory)

    def snapshot(self, dtype: Literal["float32", "bfloat16"]) -> Mapping[str, torch.Tensor]:
        """A copy of all weights by name in main memory, in that type, as they are computed with now."""
        return weights_copied(self.model, dtype)

    def memory(self) -> Mapping[str, int]:
        """Bytes held, by kind: weights, gradients, optimizer."""
        moments = [files.local(t) for state in self.optimizer.state.values() for t in state.values()]
        held = {**self.weights.memory(), "optimizer": sum(t.numel() * t.itemsize for t in moments)}
        return held if self.critic is None else {**held, "critic": self.critic.memory()}


def _stop_if(should_stop: Callable[[], bool]) -> None:
    if should_stop():
        raise Interrupted("a stop was asked for during the update; the step is repeated at the next start")
