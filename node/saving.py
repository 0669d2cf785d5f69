"""What is on disk of a loop's steps: the journal record of each, now and then a checkpoint; a start finds both."""

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from node.checkpoint import CheckpointError, Recovery
from node.interfaces import TrainerLost
from node.journal import JournalRecord
from node.own_groups import OwnGroups
from node.parts import Parts, dtype_of, model_mark
from node.rollback import roll_back
from node.selection import ForeignShare

JOURNAL_RETRY_SECONDS = 10.0
CHECKPOINT_RETRY_SECONDS = 30.0
"""After the first one that could not be written, and twice as long after each that follows it."""


class Saving:
    """Writes and finds the state of one node: weights, and the positions of what it draws from."""

    def __init__(self, parts: Parts, own: OwnGroups, share: ForeignShare) -> None:
        self.parts, self._own, self._share = parts, own, share
        self.saved: int | None = None
        """The step that the next start will reach; None until that is known."""
        self.checkpointed_at = parts.clock()
        self._attempted = 0
        """Step of the last checkpoint that this process tried to write: on a full disk not every step tries again."""
        self.unkept = ""
        """Why the last checkpoint could not be written, and what to do; empty: it was."""
        self._retry_seconds = CHECKPOINT_RETRY_SECONDS

    async def load(self) -> Recovery:
        """Have the newest good checkpoint; the updates to repeat after it are in what this returns.

        Raises CheckpointError, TrainerLost.
        """
        p = self.parts
        recovery = await p.device.run(p.checkpoints.latest)
        records = recovery.records
        self._check_model(records[0].state if records else recovery.state or {})
        self.saved = records[-1].step if records else recovery.step
        for problem in recovery.problems:
            p.history.event("warning", "checkpoint", problem)
        if recovery.directory is not None:
            await p.device.run(p.trainer.load, recovery.directory)
            # by its age: what the last process trained since must not grow for ever
            self.checkpointed_at = min(p.clock(), recovery.directory.stat().st_mtime)
        if p.averaging is not None:
            await p.device.run(p.averaging.begin, recovery.directory)
        if recovery.state:
            self.restore(recovery.state)
        return recovery

    def reaches(self, step: int) -> None:
        """The next start comes to this step at least."""
        self.saved = max(self.saved or 0, step)

    async def journal(self, record: JournalRecord) -> bool:
        """Have the update's input on disk. A full disk holds the step up until there is room: nothing is lost.

        Returns whether it had to wait, and the state says so.
        """
        p, waited = self.parts, False
        while True:
            try:
                async with p.progress.during("journal"):
                    await p.device.run(p.checkpoints.append, record)
                return waited
            except CheckpointError as error:
                trouble, _, fix = str(error).partition("; ")
                p.progress.say("WAITING", trouble, fix)
                p.history.event("error", "journal", str(error))
                waited = True
                await asyncio.sleep(JOURNAL_RETRY_SECONDS)

    def is_due(self) -> bool:
        """A checkpoint, by steps or by age, whichever comes first: a start repeats what was trained since, and must not
        take long."""
        p = self.parts
        age = p.clock() - self.checkpointed_at
        steps = p.trainer.step - max(p.checkpoints.base, self._attempted)
        patience = self._retry_seconds if self.unkept else p.config.checkpoint.seconds
        return steps >= p.config.checkpoint.every or age >= min(patience, p.config.checkpoint.seconds)

    async def checkpoint(self) -> None:
        """Write a full checkpoint. A full disk costs the checkpoint, not the training: the journal goes on."""
        p = self.parts
        async with p.progress.during("checkpoint"):
            try:
                await p.device.run(self.keep)
            except (CheckpointError, TrainerLost) as error:  # the next step has a lost trainer again
                p.history.event("error", "checkpoint", str(error))
        self.checkpointed_at, self._attempted = p.clock(), p.trainer.step

    def keep(self) -> None:
        """On the model thread. Raises CheckpointError, which the state tells until one is written, and TrainerLost."""
        p = self.parts

        def write(directory: Path) -> None:
            p.trainer.save(directory)
            if p.averaging is not None:
                p.averaging.save(directory)

        try:
            p.checkpoints.save(p.trainer.step, write, self.state())
        except CheckpointError as error:
            self._retry_seconds *= 2 if self.unkept else 1
            self.unkept = str(error)
            raise
        self.unkept, self._retry_seconds = "", CHECKPOINT_RETRY_SECONDS

    def roll_back(self) -> None:
        """Go on from the weights with the best held-out score, as a step of its own. On the model thread.

        They are a checkpoint before the trainer has them, so that a kill leaves the one or the other. Raises
        CheckpointError, and then nothing has changed, and TrainerLost, and then the next start has them.
        """
        p = self.parts
        best, step = p.checkpoints.find("best"), p.trainer.step + 1
        directory = roll_back(p.checkpoints, best, step, p.config.train.optimizer, self.state())
        self.reaches(step)
        p.trainer.load(directory)
        if p.averaging is not None:
            p.averaging.begin(directory)
        self.checkpointed_at, self._attempted = p.clock(), step

    def state(self) -> dict[str, Any]:
        """What a checkpoint and a journalled update say of the node besides its weights."""
        return {
            "model": model_mark(self.parts.bundle),
            "dtype": dtype_of(self.parts.bundle),
            "sampler": self.parts.sampler.state(),
            "foreign_share": self._share.state(),
            **self._own.state(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        self.parts.sampler.restore(state["sampler"])
        self._own.restore(state)
        if "foreign_share" in state:  # a checkpoint of Shoal 0.1 may lack it
            self._share.restore(state["foreign_share"])

    def _check_model(self, state: Mapping[str, Any]) -> None:
        """Raises CheckpointError when what was saved is another model's: nothing of it fits this one."""
        p = self.parts
        if "model" in state and state["model"] != model_mark(p.bundle):
            raise CheckpointError(
                f"{p.checkpoints.directory} has the steps of another model than {p.bundle.name} ; "
                "set model.path back to it, or give another --home"
            )
        if "dtype" in state and state["dtype"] != dtype_of(p.bundle):
            p.history.event(
                "warning",
                "resume",
                f"the steps so far were computed in {state['dtype']}, and now it is {dtype_of(p.bundle)}: what is "
                f"repeated comes out a little different; to have it as it was, set model.dtype to {state['dtype']}",
            )
