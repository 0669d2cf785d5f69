"""The sharded trainer as the node sees it: worker processes hold the model, and the node has a copy for its rollouts.

Every update ends with the new weights in the node's own model, in its compute type: written by the first worker,
compared by SHA-256, loaded in place. So engines take them as from the local trainer.

Workers are either all alive with the same state or none is. When they are lost, nothing of them is: the last checkpoint
and the journal lead to the same step (node/loop.py repeats it).
"""

import contextlib
import dataclasses
import logging
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

import torch
from safetensors import SafetensorError, safe_open

from node.checkpoint import CheckpointError
from node.config_train import TrainConfig
from node.engines.vllm_weights import digest
from node.interfaces import Batch, StepSkipped, TrainerLost, TrainGroup, UpdateStats
from node.models import ModelBundle, ModelError
from node.training.local import SMALLEST_BUDGET
from node.training.weights import weights_copied
from node.training.worker_wire import Command, Configure, Done, Failed, Files, Logprobs, Memory, Update
from node.training.workers import Workers, WorkersLost

log = logging.getLogger(__name__)

PASSED = "checkpoint-"
"""Beginning of the names of directories in which checkpoints come by."""


class ShardedTrainer:
    """The `Trainer` of `train.shards` > 1. Every method runs on the model thread, but `close`."""

    def __init__(
        self,
        bundle: ModelBundle,
        config: TrainConfig,
        workers: Workers,
        *,
        handover: Path,
        seconds: Callable[[], float],
        passing: Path | None = None,
    ) -> None:
        """`handover`: directory for weights on their way into the bundle's model; `seconds`: deadline of a stage;
        `passing`: directory that workers see, where checkpoints come by; None: they see all that the node does.

        Call `start` before anything else.
        """
        self.bundle, self.config = bundle, config
        self.workers = workers
        self.step = 0
        self._handover, self._seconds, self._passing = handover, seconds, passing
        self._recompute, self._halvings, self._retries = False, 0, 0
        """What running out of memory has led to, for as long as the node lives; how often since the last update."""

    def start(self) -> None:
        """Have workers with the model as its files have it. Raises ModelError, TrainerLost."""
        self.step = 0
        if self._passing is not None:
            for left in self._passing.glob(f"{PASSED}*"):  # by a node that was killed: nobody else writes here
                shutil.rmtree(left, ignore_errors=True)
        try:
            self.workers.start(self._within_memory(self.config), self._seconds())
        except WorkersLost as lost:
            raise self._lost(lost) from lost

    def configure(self, config: TrainConfig) -> None:
        """Use these settings from the next update on. Raises ModelError, TrainerLost."""
        if config == self.config:
            return
        self._ask(Configure(self._within_memory(config).model_dump(mode="json")), self._until())
        self.config = config

    def update(self, batch: Batch, should_stop: Callable[[], bool] = lambda: False) -> UpdateStats:
        """One step on all workers, and its weights in the node's model.

        Raises StepSkipped; TrainerLost; and Interrupted at any time before the workers are done, which ends them: the
        node is about to end, and its next start repeats the step.
        """
        until = self._until()
        stats = self._ask(Update(batch), until, should_stop)[0].stats
        assert stats is not None
        self._take_over(until)
        retries, self._retries = self._retries, 0
        return dataclasses.replace(stats, oom_retries=retries)

    def logprobs(self, groups: Sequence[TrainGroup]) -> list[list[tuple[float, ...]]]:
        """log-probability of every sequence token under the current policy; [group][sequence][token]."""
        return self._ask(Logprobs(tuple(groups)), self._until())[0].logprobs

    # -- files -------------------------------------------------------------------------------------------------

    def save(self, directory: Path) -> None:
        """Write the model, and every worker's rows of the moments, into an existing empty directory."""
        self._written(directory, "save")

    def load(self, directory: Path) -> None:
        """Inverse of `save`, and of the local trainer's, in place. Raises CheckpointError."""
        until = self._until()
        if self._passing is None:
            self._ask(Files("load", str(directory)), until)
        else:
            with self._passed(self._passing) as seen:
                shutil.copytree(directory, seen, dirs_exist_ok=True)
                self._ask(Files("load", str(seen)), until)
        self._take_over(until)

    def export(self, directory: Path) -> None:
        """Write only what inference needs: a directory `from_pretrained` loads."""
        self._written(directory, "export")

    def _written(self, directory: Path, do: Literal["save", "export"]) -> None:
        """Have workers write files into a directory of the node's. Raises OSError."""
        until = self._until()
        if self._passing is None:
            self._ask(Files(do, str(directory)), until)
            return
        with self._passed(self._passing) as seen:
            self._ask(Files(do, str(seen)), until)
            for file in seen.iterdir():
                shutil.move(file, directory / file.name)

    @contextlib.contextmanager
    def _passed(self, passing: Path) -> Iterator[Path]:
        """An empty directory that workers see, removed at the end."""
        passing.mkdir(parents=True, exist_ok=True)
        seen = Path(tempfile.mkdtemp(prefix=PASSED, dir=passing))
        try:
            yield seen
        finally:
            shutil.rmtree(seen, ignore_errors=True)

    def snapshot(self, dtype: Literal["float32", "bfloat16"]) -> Mapping[str, torch.Tensor]:
        """A copy of all weights by name in main memory, in that type, as they are computed with now."""
        return weights_copied(self.bundle.model, dtype)

    def memory(self) -> Mapping[str, int]:
        """Bytes held by all workers together, by kind."""
        total: dict[str, int] = {}
        for done in self._ask(Memory(), self._until()):
            for kind, held in done.memory.items():
                total[kind] = total.get(kind, 0) + held
        return total

    def close(self) -> None:
        self.workers.close()

    # -- workers -----------------------------------------------------------------------------------------------

    def _until(self) -> float:
        """When a method that begins now has to be done: each takes one stage's time, however often it asks workers."""
        return time.monotonic() + self._seconds()

    def _ask(self, command: Command, until: float, should_stop: Callable[[], bool] = lambda: False) -> list[Done]:
        try:
            answers = self.workers.ask(command, max(0.0, until - time.monotonic()), should_stop)
        except WorkersLost as lost:
            raise self._lost(lost) from lost
        failures = [answer for answer in answers if isinstance(answer, Failed)]
        for failed in failures:
            match failed.kind:
                case "skipped":
                    raise StepSkipped(failed.why, failed.advice)
                case "checkpoint":
                    raise CheckpointError(failed.why)
                case _:
                    raise OSError(failed.why)
        done = [answer for answer in answers if isinstance(answer, Done)]
        self.step = done[0].step
        return done

    def _lost(self, lost: WorkersLost) -> Exception:
        """What to raise; the next start is told to take less memory, where that is what was missing."""
        if lost.kind == "model":
            return ModelError(str(lost))
        if lost.kind == "memory":
            self._retries += 1
            if self.config.gradient_checkpointing == "auto" and not self._recompute:
                self._recompute = True
            else:
                self._halvings += 1
        return TrainerLost(str(lost), self.start)

    def _within_memory(self, config: TrainConfig) -> TrainConfig:
        """The settings, in less memory where it has run out: that changes an update by rounding only."""
        budget = max(SMALLEST_BUDGET, config.tokens_per_micro_batch >> self._halvings)
        recompute = "on" if self._recompute else config.gradient_checkpointing
        return config.model_copy(update={"tokens_per_micro_batch": budget, "gradient_checkpointing": recompute})

    # -- the node's own model ----------------------------------------------------------------------------------

    def _take_over(self, until: float) -> None:
        """Bring the node's model up to the workers' weights. Raises TrainerLost: it must not go on with old ones."""
        try:
            shutil.rmtree(self._handover, ignore_errors=True)
            self._handover.mkdir(parents=True)
            sums = self._ask(Files("hand_over", str(self._handover)), until)[0].sums
            load_in_place(self.bundle.model, self._handover, sums)
        except (OSError, SafetensorError) as error:
            self.workers.kill()
            why = f"the new weights did not get from the workers into the node's model ({error}); free some disk"
            raise TrainerLost(why, self.start) from error
        finally:
            shutil.rmtree(self._handover, ignore_errors=True)


def load_in_place(model: torch.nn.Module, directory: Path, sums: Mapping[str, str]) -> None:
    """Copy weights from files, named with their SHA-256, into a model's tensors. Raises OSError unless all come."""
    missing = dict(model.named_parameters())
    for file, wanted in sums.items():
        if digest(directory / file) != wanted:
            raise OSError(f"{directory / file} is not what was written")
        with safe_open(directory / file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - no mapping
                missing.pop(name).detach().copy_(opened.get_tensor(name))
    if missing:
        raise OSError(f"{len(missing)} tensors are missing, the first is {min(missing)}")
