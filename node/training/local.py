"""The local trainer: one model, one device, AdamW on float32 weights.

One update: leave out what teaches nothing, merge what shares a beginning, and run micro-batches within a token
budget. Old log-probabilities are the current ones (one pass per batch), so a ratio starts at 1, and what the rollout
saw otherwise (mu) enters as a truncated importance weight. All denominators are those of the whole step.
"""

import copy
import itertools
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch

from node.attention import PackedAttention
from node.batching import MicroBatch, micro_batches, pack
from node.config import TrainConfig
from node.interfaces import Batch, Interrupted, StepSkipped, TrainGroup, UpdateStats
from node.logprobs import chosen_logprobs
from node.models import ModelBundle, load_model
from node.training import files
from node.training.objective import StepObjective
from node.training.weights import Weights

log = logging.getLogger(__name__)

SMALLEST_BUDGET = 64
"""Tokens of a micro-batch at which running out of memory is final."""
DUMPS_KEPT = 8
"""Batches of non-finite steps kept for inspection; the oldest make room."""


@dataclass(slots=True)
class _Counts:
    """Sums over the micro-batches of a step."""

    loss: float = 0.0
    tokens: int = 0
    micro_batches: int = 0


class LocalTrainer:
    """Owns the policy (the bundle's model) and its optimizer. Every method runs on the model thread."""

    def __init__(self, bundle: ModelBundle, config: TrainConfig, *, dumps: Path, merge: bool = True) -> None:
        """`dumps`: where a batch that gave a non-finite update is written for inspection.

        Without `merge`, every sequence is laid out whole: the same gradients for more work (`shoal bench train`).
        """
        self.bundle, self.config, self.dumps, self.merge = bundle, config, dumps, merge
        self.model = bundle.model.eval()
        self.step = 0
        self.budget = config.tokens_per_micro_batch
        # the reference is the model as loaded, before any checkpoint is
        self.reference = copy.deepcopy(self.model).requires_grad_(False) if config.kl_coefficient > 0 else None
        self.weights = Weights(self.model)
        self.optimizer = torch.optim.AdamW(
            self.weights.masters.values(),
            lr=config.learning_rate,
            betas=config.betas,
            weight_decay=config.weight_decay,
            fused=True,  # one pass over each tensor, no temporaries
        )

    def configure(self, config: TrainConfig) -> None:
        """Use these settings from the next update on. Raises ModelError when they need a reference that is gone."""
        if config == self.config:
            return
        if config.kl_coefficient == 0:
            self.reference = None
        elif self.reference is None:
            self.reference = self._initial_model()
        self.config, self.budget = config, config.tokens_per_micro_batch
        for group in self.optimizer.param_groups:
            group["betas"], group["weight_decay"] = config.betas, config.weight_decay

    def _initial_model(self) -> Any:
        """The model as it was loaded, from its files: the one in memory has been trained since."""
        kind = str(self.model.dtype).removeprefix("torch.")
        path = str(self.bundle.directory)
        bundle = load_model(path, device=str(self.model.device), dtype=kind, models=self.bundle.directory.parent)
        return bundle.model.requires_grad_(False)

    # -- learning ----------------------------------------------------------------------------------------------

    def update(self, batch: Batch, should_stop: Callable[[], bool] = lambda: False) -> UpdateStats:
        """One optimizer step on the informative groups of a batch.

        Raises StepSkipped (nothing to learn from, a non-finite loss or gradient, or no memory; weights and optimizer
        are as before) and Interrupted (`should_stop` between micro-batches; likewise).
        """
        members = _informative(batch.groups)
        if not members:
            raise StepSkipped("all groups are uniform: every answer to a task got the same reward")
        retries = 0
        while True:
            try:
                objective, counts = self._accumulate(batch, members, should_stop)
                break
            except (RuntimeError, MemoryError) as error:
                self.weights.drop_gradients()
                if not _out_of_memory(error):
                    raise
                if self.budget <= SMALLEST_BUDGET:
                    raise StepSkipped(f"out of memory even at {self.budget} tokens a micro-batch: {error}") from error
                retries += 1
                self.budget = max(SMALLEST_BUDGET, self.budget // 2)
                log.warning("out of memory; step %d again with %d tokens a micro-batch", batch.step, self.budget)
            except BaseException:
                self.weights.drop_gradients()
                raise
        norm = self.weights.clip(self.config.max_grad_norm)
        if not math.isfinite(norm):
            self.weights.drop_gradients()
            self._skip(batch, f"the gradient norm is {norm}")
        rate = self.config.learning_rate * min(1.0, (self.step + 1) / max(1, self.config.warmup_steps))
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.weights.publish()
        self.weights.drop_gradients()
        self.step += 1
        return objective.stats(
            loss=counts.loss,
            grad_norm=norm,
            learning_rate=rate,
            tokens_forwarded=counts.tokens,
            micro_batches=counts.micro_batches,
            oom_retries=retries,
        )

    def _accumulate(
        self, batch: Batch, members: Sequence[tuple[int, int]], should_stop: Callable[[], bool]
    ) -> tuple[StepObjective, "_Counts"]:
        """Gradients of the whole step. Raises Interrupted, StepSkipped, and what running out of memory raises."""
        objective = StepObjective(self.config, batch.groups, members, self.model.device)
        counts = _Counts()
        for micro in micro_batches(batch.groups, members, self.budget, self.merge):
            if should_stop():
                raise Interrupted("a stop was asked for during the update; the step is repeated at the next start")
            logprobs, entropy = self._logprobs(self.model, micro)
            reference = None
            if self.reference is not None:
                with torch.no_grad():
                    reference, _ = self._logprobs(self.reference, micro)
            loss = objective.loss(micro.members, logprobs, entropy, reference)
            value = loss.item()
            if not math.isfinite(value):
                self._skip(batch, f"the loss is {value}")
            loss.backward()
            counts.loss += value
            counts.tokens += micro.trie.inner
            counts.micro_batches += 1
        return objective, counts

    def _skip(self, batch: Batch, problem: str) -> None:
        path = self.dumps / f"step-{batch.step}.msgpack"
        try:
            self.dumps.mkdir(parents=True, exist_ok=True)
            older = sorted(self.dumps.glob("step-*.msgpack"), key=lambda dump: dump.stat().st_mtime)
            for dump in older[: max(0, len(older) + 1 - DUMPS_KEPT)]:
                dump.unlink()
            path.write_bytes(msgspec.msgpack.encode(batch))
        except OSError as error:  # a full disk must not make of a skipped step a failed node
            where = f"and the batch could not be written to {path} ({error.strerror}); free some disk"
        else:
            where = f"the batch is in {path}"
        raise StepSkipped(f"{problem}; no update was made, {where}")

    # -- log-probabilities -------------------------------------------------------------------------------------

    def logprobs(self, groups: Sequence[TrainGroup]) -> list[list[tuple[float, ...]]]:
        """log-probability of every sequence token under the current policy; [group][sequence][token]."""
        results: list[list[tuple[float, ...]]] = [[()] * len(group.sequences) for group in groups]
        members = [(g, s) for g, group in enumerate(groups) for s in range(len(group.sequences))]
        with torch.no_grad():
            for micro in micro_batches(groups, members, self.budget, self.merge):
                values = iter(self._logprobs(self.model, micro)[0].tolist())
                for (group, sequence), path in zip(micro.members, micro.paths, strict=True):
                    results[group][sequence] = tuple(itertools.islice(values, len(path)))
        return results

    def _logprobs(self, model: Any, micro: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """log-probability of every completion token of a micro-batch and entropy before it, [n], in member order."""
        device = self.model.device
        trie = micro.trie
        packed = pack(trie, device, leaves=False)
        hidden = model.base_model(
            input_ids=packed.token_ids[None],
            position_ids=packed.positions[None],
            use_cache=False,
            shoal=PackedAttention(packed.blocks),
        ).last_hidden_state[0]
        # completions that begin alike share their tokens: each distinct one is computed once
        nodes: dict[int, int] = {}
        index = torch.tensor(
            [nodes.setdefault(node, len(nodes)) for path in micro.paths for node in path], device=device
        )
        # a token's probability is read off the token before it, and branches share that one
        parents = torch.tensor([packed.place[trie.parents[node]] for node in nodes], device=device)
        before, rows = torch.unique(parents, return_inverse=True)
        tokens = torch.tensor([trie.tokens[node] for node in nodes], device=device)
        logprobs, entropy = chosen_logprobs(hidden[before], model.get_output_embeddings().weight, rows, tokens)
        return logprobs[index], entropy[rows][index]

    # -- files -------------------------------------------------------------------------------------------------

    def save(self, directory: Path) -> None:
        """Write model (safetensors, HF layout with tokenizer) and optimizer into an existing empty directory."""
        self.export(directory)
        files.save_optimizer(self.optimizer, self.weights.masters, self.step, directory)

    def load(self, directory: Path) -> None:
        """Inverse of `save`, in place. Raises CheckpointError."""
        step = files.load_optimizer(self.optimizer, self.weights.masters, directory)
        files.load_weights(self.weights.masters, directory)
        self.weights.publish()
        self.step = step

    def export(self, directory: Path) -> None:
        """Write only what inference needs: a directory `from_pretrained` loads."""
        files.save_model(self.bundle, self.weights.masters, directory)

    def memory(self) -> Mapping[str, int]:
        """Bytes held, by kind: weights, gradients, optimizer."""
        moments = [t for state in self.optimizer.state.values() for t in state.values()]
        return {**self.weights.memory(), "optimizer": sum(t.numel() * t.itemsize for t in moments)}


def _informative(groups: Sequence[TrainGroup]) -> list[tuple[int, int]]:
    """(group, sequence) of everything that gives a gradient: groups whose advantages are not all zero."""
    return [
        (g, s)
        for g, group in enumerate(groups)
        if any(sequence.advantage != 0 for sequence in group.sequences)
        for s, sequence in enumerate(group.sequences)
        if any(sequence.mask)
    ]


def _out_of_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    # the CPU allocator has no exception type of its own
    return "DefaultCPUAllocator" in str(error) or "not enough memory" in str(error)
