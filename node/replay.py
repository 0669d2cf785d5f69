"""Repeating journalled updates at a start: with the settings they were made with, and not for ever when one kills.

An update is journalled before it happens. One that outlives `limits.stage_seconds`, or for which the kernel ends the
process (out of memory), would therefore end every start too. How often that happened is counted on disk.
"""

import asyncio
import json
import logging
import zlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
from pydantic import ValidationError

from node.checkpoint import CheckpointError
from node.config_train import TrainConfig
from node.disk import write_atomic
from node.interfaces import StepSkipped
from node.journal import JournalRecord

if TYPE_CHECKING:
    from node.parts import Parts

log = logging.getLogger(__name__)

MAX_ATTEMPTS: Final = 2
"""Starts that may die while they repeat one and the same last update; the next one leaves it out."""
MAX_ATTEMPTS_DONE: Final = 8
"""The same for an update that was made once: a kill says little of it then, but memory may be short now."""
MAX_NOTED: Final = 16
FILE: Final = "replay.json"


async def replay(
    parts: "Parts",
    records: Sequence[JournalRecord],
    *,
    apply: Callable[[JournalRecord], Awaitable[None]],
    restore: Callable[[Mapping[str, Any]], None],
) -> None:
    """Repeat updates in order by `apply`, each with its own settings, and go back to the present ones.

    `restore` sets the position of a record that is left out. Raises CheckpointError when an update that others follow
    cannot be repeated, and what `apply` raises besides StepSkipped.
    """
    run, event = parts.device.run, parts.history.event
    attempts = Attempts(parts.checkpoints.directory)
    done = parts.history.last_step()
    settings = [settings_of(record, parts.config.train) for record in records]
    unknown = [record.step for record, then in zip(records, settings, strict=True) if then is None]
    if unknown:
        event(
            "warning",
            "resume",
            f"{len(unknown)} updates (steps {unknown[0]} to {unknown[-1]}) were journalled without settings that this "
            "version reads; they are repeated with the present train.* settings",
        )
    for at, (record, then) in enumerate(zip(records, settings, strict=True)):
        last = at + 1 == len(records)
        if not last and records[at + 1].step == record.step:
            continue  # it was skipped: the same step was tried again with other groups
        failed = await run(attempts.failed, record)
        if failed:
            starts = "start" if failed == 1 else "starts"
            event("warning", "resume", f"{failed} {starts} ended while they repeated step {record.step}")
        if last and failed >= (MAX_ATTEMPTS_DONE if done and done["step"] >= record.step else MAX_ATTEMPTS):
            restore(record.state)  # the step must not be tried with the same groups again
            event(
                "error",
                "resume",
                f"the update of step {record.step} is left out and the step tried again with other groups; if that "
                "happens again, lower train.tokens_per_micro_batch or raise limits.stage_seconds",
            )
            break
        parts.progress.say("RESUMING", f"{records[-1].step} steps are saved; repeating that of step {record.step}")
        await run(parts.trainer.configure, then or parts.config.train)
        await run(attempts.begin, record)
        parts.progress.stages.clear()
        try:
            await apply(record)
        except asyncio.CancelledError:
            attempts.take_back(record)
            raise
        except StepSkipped as skipped:
            attempts.end(record)
            if not last:
                raise CheckpointError(
                    f"journalled step {record.step} cannot be repeated: {skipped} ; free some memory, start again"
                ) from skipped
            event("warning", "resume", f"the last journalled step {record.step} is skipped: {skipped}")
        else:
            attempts.end(record)
    await run(parts.trainer.configure, parts.config.train)


def settings_of(record: JournalRecord, present: TrainConfig) -> TrainConfig | None:
    """The settings an update was made with; None when the record has none that this version understands.

    Whoever lowered `train.tokens_per_micro_batch` since did so for want of memory: the smaller one holds, which
    changes an update by rounding only.
    """
    if record.train is None:
        return None
    try:
        then = TrainConfig.model_validate(record.train)
    except ValidationError as error:
        log.warning("settings of journalled step %d: %s", record.step, error)
        return None
    budget = min(then.tokens_per_micro_batch, present.tokens_per_micro_batch)
    return then.model_copy(update={"tokens_per_micro_batch": budget})


class Attempts:
    """How many starts died while they repeated a step, in a file beside the journal. A full disk does not stop it."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / FILE

    def failed(self, record: JournalRecord) -> int:
        """Attempts at this very update that were begun and never ended."""
        return self._noted().get(_mark(record), 0)

    def begin(self, record: JournalRecord) -> None:
        """Have one more attempt on disk, before it is made."""
        self._note(record, self.failed(record) + 1)

    def take_back(self, record: JournalRecord) -> None:
        """The attempt was given up for a stop: it says nothing of the update."""
        self._note(record, self.failed(record) - 1)

    def end(self, record: JournalRecord) -> None:
        """The update was made, or skipped for a reason: it may be repeated as often as there are starts."""
        self._note(record, 0)

    def _noted(self) -> dict[str, int]:
        try:
            return {str(mark): int(attempts) for mark, attempts in json.loads(self._path.read_bytes()).items()}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, TypeError, AttributeError) as error:
            log.error("%s cannot be read, counting from 0: %s", self._path, error)
            return {}

    def _note(self, record: JournalRecord, attempts: int) -> None:
        noted = {mark: count for mark, count in self._noted().items() if mark != _mark(record)}
        if attempts:
            noted[_mark(record)] = attempts
        try:
            if noted:
                write_atomic(self._path, json.dumps(dict([*noted.items()][-MAX_NOTED:])).encode())
            else:
                self._path.unlink(missing_ok=True)
        except OSError as error:
            log.error("%s: the attempt to repeat step %d is not counted: %s", self._path, record.step, error)


def _mark(record: JournalRecord) -> str:
    """Names an update: step, and a checksum, since other groups may have been tried for the same step before."""
    return f"{record.step}-{zlib.crc32(msgspec.msgpack.encode(record)):08x}"
