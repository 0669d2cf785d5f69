"""Checkpoints: full ones now and then, and a journal of the updates between them.

A full checkpoint of the embedded model is 1.6 GB: written every step it would wear out a disk. A step is therefore
saved by what its update consumed (node/journal.py, some ten KB), and a start repeats those updates on top of the newest
good checkpoint. Kept checkpoints form a chain: when the newest one is damaged, the one before and its journals lead to
the same step.

    checkpoints/step-50/            files of the trainer, state.json, files.json (size and CRC-32 of each)
    checkpoints/journal-50.bin      updates after step 50 (journal-0.bin: after the initial model)
    checkpoints/best/               weights for inference with the best held-out score, with best.json
"""

import json
import re
import shutil
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from node import journal
from node.disk import advice, failed_write, sync
from node.journal import JournalRecord

FILES, STATE, BEST = "files.json", "state.json", "best.json"
TRAINER = "trainer.json"
"""Step, updates so far and optimizer of a trainer (node/training/files.py); with the best weights there is none."""
ASIDE, REPLACED, DAMAGED = ".aside-", ".aside-old-", "damaged-"
CHUNK = 1 << 22
FREE_MARGIN = 64 << 20
"""Bytes left free besides what a checkpoint takes, for the journal and the database."""


class CheckpointError(Exception):
    """A checkpoint could not be written or read; the message names the path, what is wrong and the fix."""


@dataclass(frozen=True, slots=True)
class Recovery:
    """What a start has to do: load `directory` (None: keep the initial model), then repeat `records` in order."""

    directory: Path | None
    step: int
    state: Mapping[str, Any] | None
    records: Sequence[JournalRecord]
    problems: Sequence[str] = field(default=())
    """What was damaged, and what was done about it, for a person to read."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One checkpoint as `shoal checkpoint list` shows it."""

    name: str
    step: int
    path: Path
    size: int
    at: float
    score: float | None = None


class CheckpointStore:
    """Checkpoints and journals of one node. Used from one thread at a time."""

    def __init__(self, directory: Path, keep: int) -> None:
        self.directory, self.keep = directory, keep
        self._base = 0
        self._size = 0
        self._whole: int | None = None
        """Bytes of the journal that are good, when a failed append may have left more behind."""
        self._put_aside: set[Path] = set()
        """What this process found damaged: it stays until the next start or save, for who wants to look into it."""

    @property
    def base(self) -> int:
        """Step of the checkpoint that the current journal follows (0: the initial model)."""
        return self._base

    # -- reading ---------------------------------------------------------------------------------------------

    def latest(self) -> Recovery:
        """The furthest step that can be reached, from the newest checkpoint that is whole. Raises CheckpointError.

        Cuts torn journal tails and removes what a killed save left behind, so the store can be written to afterwards.
        """
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._remove_unfinished()
            problems: list[str] = []
            step = self._newest_whole(problems)
            path = self._path(step)
            state = json.loads((path / STATE).read_text()) if step else None
            records = self._records_from(step, problems)
        except OSError as error:
            raise CheckpointError(f"{self.directory} cannot be read: {error} ; mend that and start again") from error
        except journal.OtherFormat as error:
            raise CheckpointError(
                f"{error} ; let the version of Shoal that wrote it go on to a checkpoint, or move the file away to "
                "start from the checkpoint before it, without its updates"
            ) from error
        try:
            self._remove_damaged(leave=self._put_aside)  # only here: where nothing is whole, they are all there is
        except OSError as error:  # on a failing disk, say: nothing depends on it
            problems.append(f"what was damaged before cannot be removed: {error}")
        self._base = step if not records else self._last_base(step)
        return Recovery(path if step else None, step, state, records, problems)

    def tidy(self) -> None:
        """Give back what a killed save was writing, before a start needs its room; `latest` raises what fails here."""
        with suppress(OSError):
            self._remove_unfinished()

    def _remove_unfinished(self) -> None:
        """Finish a replacement that a kill interrupted, and remove what was being written."""
        for old in self.directory.glob(f"{REPLACED}*"):
            target = self.directory / old.name.removeprefix(REPLACED)
            if not target.exists():
                old.replace(target)
        for leftover in self.directory.glob(f"{ASIDE}*"):
            shutil.rmtree(leftover)

    def _newest_whole(self, problems: list[str]) -> int:
        """Step of the newest undamaged checkpoint, 0 for the initial model; damaged ones are put aside."""
        for step in reversed(self._steps()):
            path = self._path(step)
            fault = damage(path)
            if fault is None:
                return step
            problems.append(f"checkpoint {path.name} is damaged ({fault}); going on from the one before")
            aside = self.directory / f"{DAMAGED}{path.name}"
            if aside.exists():
                shutil.rmtree(aside)
            self._put_aside.add(path.replace(aside))
        # what there is comes after steps that cannot be repeated: starting over must be a person's decision
        if any(self.directory.iterdir()) and not self._journal(0).exists():
            raise CheckpointError(
                f"no checkpoint in {self.directory} is whole and the first steps' journal is gone; "
                "restore a backup, or move the directory away to start from the initial model"
            )
        return 0

    def _records_from(self, step: int, problems: list[str]) -> list[JournalRecord]:
        """Journalled updates after `step`, through the journals of later (damaged) checkpoints too."""
        records: list[JournalRecord] = []
        for base in sorted(base for base in self._journals() if base >= step):
            path = self._journal(base)
            reached = records[-1].step if records else step
            found, length = journal.read(path)
            if base > reached:
                problems.append(
                    f"{path.name} begins after step {base}, but only step {reached} can be reached; left out"
                )
                self._put_aside.add(path.replace(path.with_name(f"{DAMAGED}{path.name}")))
                continue
            records += found
            if (rest := path.stat().st_size - length) > 0:
                problems.append(
                    f"{path.name}: its last {rest} bytes are no whole record (a kill while writing, or damage) and are "
                    f"left out; going on after step {records[-1].step if records else step}"
                )
                journal.cut(path, length)
        return records

    def _last_base(self, step: int) -> int:
        return max([base for base in self._journals() if base >= step], default=step)

    def entries(self) -> list[Entry]:
        """All checkpoints, oldest first, the best one last."""
        found = []
        for path in [*(self._path(step) for step in self._steps()), self.directory / "best"]:
            if not path.is_dir():
                continue
            try:
                best = json.loads((path / BEST).read_text()) if path.name == "best" else {}
                step = int(best["step"]) if best else int(path.name.removeprefix("step-"))
                size = sum(file.stat().st_size for file in path.iterdir())
                found.append(Entry(path.name, step, path, size, path.stat().st_mtime, best.get("score")))
            except (FileNotFoundError, ValueError, KeyError, TypeError):
                continue  # a running node has just removed it, or the best one is damaged: the next evaluation mends it
        return found

    def best_score(self) -> float | None:
        """Held-out score of the weights kept as the best ones."""
        try:
            return float(json.loads((self.directory / "best" / BEST).read_text())["score"])
        except (OSError, ValueError, KeyError, TypeError):
            return None  # none yet, or damaged: the next evaluation writes it anew

    def find(self, name: str) -> Entry:
        """'latest', 'best', a step number or a directory name. Raises CheckpointError naming what there is."""
        entries = self.entries()
        numbered = [entry for entry in entries if entry.name != "best"]
        if name == "latest" and numbered:
            return numbered[-1]
        for entry in entries:
            if name == entry.name or (entry.name != "best" and name == str(entry.step)):
                return entry
        there = ", ".join(entry.name for entry in entries) or "none yet"
        raise CheckpointError(f"no checkpoint {name!r} in {self.directory}; there is: {there}")

    # -- writing ---------------------------------------------------------------------------------------------

    def append(self, record: JournalRecord) -> None:
        """Journal an update before it is applied. Raises CheckpointError (the disk is full or broken)."""
        path = self._journal(self._base)
        try:
            fresh = not path.exists()
            if self._whole is not None and not fresh:
                journal.cut(path, self._whole)
            self._whole = 0 if fresh else path.stat().st_size
            journal.append(path, record)
            if self._whole == 0:  # also where this failed at the first try
                sync(self.directory)
            self._whole = None
        except OSError as error:
            raise CheckpointError(
                f"{path}: the step cannot be journalled ({error.strerror}); "
                f"{advice(error, self.directory)}: training waits for it"
            ) from error

    def save(self, step: int, write: Callable[[Path], None], state: Mapping[str, Any]) -> Path:
        """Write a full checkpoint of `step` with `write(directory)`; a new journal begins. Raises CheckpointError.

        Whatever fails before it has its name leaves the checkpoints and the journal as they were; afterwards it counts:
        `base` is its step. A step that is there already, or that is the initial model's (0), is not written again.
        """
        target = self._path(step)
        if step == 0 or target.is_dir():
            return target

        def fill(aside: Path) -> None:
            write(aside)
            (aside / STATE).write_text(json.dumps(state))

        try:
            self._write(target, fill)
        finally:
            if target.is_dir():  # a start would take it, and none of the journal before it, whatever failed after that
                self._base, self._whole = step, None
        self._prune()
        return target

    def prune(self) -> bool:
        """Remove checkpoints beyond `keep`, which may be less than it was; whether there were any. CheckpointError."""
        surplus = len(self._steps()) > self.keep
        if surplus:
            self._prune()
        return surplus

    def _prune(self) -> None:
        """Keep `keep` checkpoints and the journals that lead on from them. Damaged ones are superseded by now."""
        try:
            self._remove_old(self._steps())
        except OSError as error:
            raise CheckpointError(f"an old checkpoint in {self.directory} cannot be removed: {error}") from error

    def _remove_old(self, steps: Sequence[int]) -> None:
        for old in steps[: -self.keep]:
            # renamed first: a kill must not leave half a checkpoint under its name
            self._path(old).replace(self.directory / f"{ASIDE}step-{old}")
        for removed in self.directory.glob(f"{ASIDE}step-*"):
            shutil.rmtree(removed)
        oldest = [0, *steps][-self.keep :][0]  # the initial model counts: the first checkpoint has one before it too
        for base in self._journals():
            if base < oldest:
                self._journal(base).unlink()
        self._remove_damaged()

    def _remove_damaged(self, leave: Collection[Path] = ()) -> None:
        for path in self.directory.glob(f"{DAMAGED}*"):
            if path in leave:
                continue
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()

    def save_best(self, step: int, score: float, export: Callable[[Path], None]) -> None:
        """Replace the best weights. Raises CheckpointError; the ones before stay then."""

        def fill(aside: Path) -> None:
            export(aside)
            (aside / BEST).write_text(json.dumps({"step": step, "score": score}))

        self._write(self.directory / "best", fill)

    def _write(self, target: Path, fill: Callable[[Path], None]) -> None:
        aside, problem = self.directory / f"{ASIDE}{target.name}", "could not be written"
        try:
            free = shutil.disk_usage(self.directory).free
            need = self._size or max((entry.size for entry in self.entries() if entry.name != "best"), default=0)
            if target.name != "best" and free < need + FREE_MARGIN:
                raise CheckpointError(
                    f"{target} needs {(need + FREE_MARGIN) >> 20} MB, {free >> 20} MB are free; free some or lower "
                    "checkpoint.keep: until then every step is journalled, and a restart takes longer"
                )
            shutil.rmtree(aside, ignore_errors=True)
            aside.mkdir(mode=0o700)
            fill(aside)
            listing = {file.name: [file.stat().st_size, _checksum(file)] for file in sorted(aside.iterdir())}
            (aside / FILES).write_text(json.dumps(listing))
            for file in aside.iterdir():
                sync(file)
            sync(aside)
            if target.exists():
                old = self.directory / f"{REPLACED}{target.name}"
                target.replace(old)
                aside.replace(target)
                shutil.rmtree(old)
            else:
                aside.replace(target)
            problem = "is there, but may be gone after a loss of power"
            sync(self.directory)
        except Exception as error:
            shutil.rmtree(aside, ignore_errors=True)
            if isinstance(error, CheckpointError) or not failed_write(error):
                raise
            raise CheckpointError(
                f"{target} {problem} ({error}); {advice(error, self.directory)}: every step is journalled meanwhile"
            ) from error
        if target.name != "best":
            self._size = sum(size for size, _ in listing.values())

    # -- names -----------------------------------------------------------------------------------------------

    def _path(self, step: int) -> Path:
        return self.directory / f"step-{step}"

    def _journal(self, base: int) -> Path:
        return self.directory / f"journal-{base}.bin"

    def _steps(self) -> list[int]:
        return _numbers(self.directory, r"step-(\d+)")

    def _journals(self) -> list[int]:
        return _numbers(self.directory, r"journal-(\d+)\.bin")


def damage(checkpoint: Path) -> str | None:
    """What is wrong with a checkpoint's files, or None. Reads all of them."""
    try:
        listing = json.loads((checkpoint / FILES).read_text())
        for name, (size, checksum) in listing.items():
            file = checkpoint / name
            if file.stat().st_size != size:
                return f"{name} has {file.stat().st_size} bytes, not {size}"
            if _checksum(file) != checksum:
                return f"{name} has changed"
    except (OSError, ValueError, TypeError, AttributeError) as error:
        return str(error)
    return None


def _numbers(directory: Path, pattern: str) -> list[int]:
    if not directory.exists():
        return []
    matches = (re.fullmatch(pattern, path.name) for path in directory.iterdir())
    return sorted(int(match[1]) for match in matches if match)


def _checksum(file: Path) -> int:
    """CRC-32: it finds damage at 1 GB/s; nobody is defended against here."""
    value = 0
    with file.open("rb") as content:
        while chunk := content.read(CHUNK):
            value = zlib.crc32(chunk, value)
    return value
