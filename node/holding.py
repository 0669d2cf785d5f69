"""Holds training between steps while a person or a limit says so, and lets it go on by itself (node/limits.py decides).

A person's pause and each limit are separate: what ends one leaves the others. `resume` ends the pause; once there is
none, it passes over quiet hours or hours a day until they end. Nothing passes over a full disk. A pause lasts until it
is ended, over restarts too: a machine that boots again must not take up what its owner has stopped.
"""

import asyncio
import contextlib
import logging
import shutil
from collections.abc import Callable
from datetime import tzinfo
from pathlib import Path

from node.checkpoint import CheckpointError, CheckpointStore
from node.config import LimitsConfig
from node.disk import home_size, write_atomic
from node.history import History
from node.limits import RESUME, Disk, Hold, Holder, day_of, disk_hold, limit_hold, no_room, over_disk
from node.loop import Loop
from node.progress import Progress
from node.trained import TrainedDays
from swarm.child import cut_log
from swarm.experience import ExperienceStore, StoreError

log = logging.getLogger(__name__)

TICK_SECONDS = 5.0
MEASURE_SECONDS = 60.0
FULL_SECONDS = 1.0
"""Between two looks at a disk that holds training: whoever frees it sees it go on."""
BOUNDED_LOGS = ("node.log", "stacks.log")
"""Whoever writes them keeps them short. All others are output of processes that only append."""
LEAST_STORE = 16 << 20
"""Bytes of experience that are kept, however full the disk is."""
PAUSED = "paused"
"""File of the home that a person's pause is kept in: its reason."""
LONGEST_REASON = 4096


class Holding:
    """What holds training up now. Used from the asyncio thread; `run` keeps it up to date."""

    def __init__(
        self,
        home: Path,
        limits: LimitsConfig,
        *,
        progress: Progress,
        history: History,
        store: ExperienceStore,
        trained: TrainedDays,
        clock: Callable[[], float],
        zone: tzinfo,
    ) -> None:
        self._home, self._limits = home, limits
        self._progress, self._history, self._store, self._trained = progress, history, store, trained
        self._clock, self._zone = clock, zone
        self._loop: Loop | None = None
        self.unpaused = asyncio.Event()
        """Cleared while training is held."""
        self._person = _kept_pause(home / PAUSED)
        self._passed_over: dict[Holder, float] = {}
        self._disk: Disk | None = None
        self._to_give_back = False
        """Whether experience was cut and its room is still the database's."""
        self.measured_at = float("-inf")
        """When the disk was last looked at, and room made where it had to be."""
        self._ticked_at = clock()
        self.decide()

    @property
    def trained_today(self) -> float:
        """Seconds."""
        return self._trained.on(day_of(self._clock(), self._zone))

    # -- what people ask -------------------------------------------------------------------------------------

    def pause(self, reason: str) -> None:
        self._history.event("info", "pause", f"paused: {reason}")
        self._person = _pause(reason)
        try:
            write_atomic(self._home / PAUSED, reason.encode(errors="replace"))
        except OSError as error:
            self._history.event("warning", "pause", f"a restart will end the pause: it cannot be kept ({error})")
        self.decide()

    def resume(self) -> None:
        held = self._progress.hold
        if self._person is not None or held is None:
            self._history.event("info", "pause", "resumed")
            self._person = None
            try:
                (self._home / PAUSED).unlink(missing_ok=True)
            except OSError as error:
                self._history.event("warning", "pause", f"a restart will pause again: {error}")
        elif held.resumes_at is not None:
            self._history.event("info", "pause", f"resumed in spite of: {held.reason}")
            self._passed_over[held.by] = held.resumes_at
        else:
            self.measured_at = float("-inf")
        self.decide()

    def change(self, limits: LimitsConfig) -> None:
        """Limits are others from now on; those that were passed over and changed hold again."""
        for key in ("quiet_hours", "hours_per_day"):
            if getattr(limits, key) != getattr(self._limits, key):
                self._passed_over.pop(key, None)
        if limits.disk_mb != self._limits.disk_mb:
            self.measured_at = float("-inf")
            self.resize_store(max(self._store.size, limits.store_mb << 20))  # what was cut may grow again
        self._limits = limits
        self.decide()

    # -- the service -----------------------------------------------------------------------------------------

    def steer(self, loop: Loop) -> None:
        """The loop whose steps are held; it may be made long after the start."""
        self._loop = loop

    async def run(self) -> None:
        while True:
            self.tick()
            await asyncio.sleep(TICK_SECONDS)

    async def watch_disk(self) -> None:
        """Beside `run`: to make room may have to wait for an update to end, and the clock must not wait with it."""
        while True:
            now = self._clock()
            if self._progress.stage != "checkpoint":
                if not 0 <= now - self.measured_at < MEASURE_SECONDS:
                    await self._measure()
                    self.measured_at = now
                    self.decide()
                elif self._disk_holds():
                    self._disk = await self._look()
                    self.decide()
            if self._to_give_back:
                await self._give_back()
            await asyncio.sleep(FULL_SECONDS if self._disk_holds() else TICK_SECONDS)

    def _disk_holds(self) -> bool:
        return disk_hold(self._limits.disk_mb, self._disk) is not None

    def tick(self) -> None:
        """Count the time since the last tick if it was trained, and look at the clock again."""
        now = self._clock()
        # a clock that was set, or a machine that slept, is no training
        elapsed = min(max(0.0, now - self._ticked_at), 2 * TICK_SECONDS)
        self._ticked_at = now
        at_work = self._progress.stage != "paused" and self._progress.state not in {"IDLE", "STOPPING", "FAILED"}
        if self._loop is not None and at_work:
            self._trained.add(day_of(now, self._zone), elapsed)
        self.decide()

    def decide(self) -> None:
        """Hold training, or let it go on."""
        before = self._progress.hold
        held = self._progress.hold = self._person or limit_hold(
            self._limits,
            now=self._clock(),
            zone=self._zone,
            trained=self.trained_today,
            disk=self._disk,
            passed_over=self._passed_over,
        )
        if (held and held.by) != (before and before.by):
            if held is not None and held.by != "person":
                advice = "" if held.next == RESUME else f"; {held.next}"
                level = "warning" if held.by == "disk" else "info"
                self._history.event(level, "limits", f"training is held: {held.reason}{advice}")
            elif held is None and before is not None and before.by != "person":
                self._history.event("info", "limits", "training goes on")
        if held is None:
            self.unpaused.set()
        else:
            self.unpaused.clear()

    # -- disk ------------------------------------------------------------------------------------------------

    async def _measure(self) -> None:
        await asyncio.to_thread(cut_logs, self._home / "logs")
        self._disk = await self._look()
        if over_disk(self._limits.disk_mb, self._disk) and await self._make_room(self._disk):
            self._disk = await self._look()

    async def no_room(self, size: int) -> str:
        """Why the disk, as it is now, has no room for `size` bytes more, and what to do; empty: it has."""
        return no_room(self._limits.disk_mb, await self._look(), size)

    async def _look(self) -> Disk:
        loop = self._loop
        checkpoints = None if loop is None else loop.parts.checkpoints
        memory = self._progress.memory
        first = memory.get("weights", 0) + memory.get("optimizer", 0)
        return await asyncio.to_thread(measure, self._home, checkpoints, first)

    async def _make_room(self, disk: Disk) -> bool:
        """Remove what may go: checkpoints beyond checkpoint.keep, then experience, if that is enough. Whether any."""
        if self._loop is not None:
            parts = self._loop.parts
            try:
                if await parts.device.run(parts.checkpoints.prune):
                    return True
            except CheckpointError as error:
                self._history.event("error", "checkpoint", str(error))
        if self._store.freed > LEAST_STORE:
            return await self._give_back()
        bound = self._store.size - over_disk(self._limits.disk_mb, disk)
        if bound < LEAST_STORE:  # training would be held all the same: nothing is thrown away for that
            return False
        self._history.event("info", "limits", f"experience is cut to {bound >> 20} MB to keep to limits.disk_mb")
        self.resize_store(bound)
        return await self._give_back()

    def resize_store(self, max_bytes: int) -> None:
        """Hold at most so much experience; `watch_disk` gives back to the disk what that frees."""
        self._to_give_back |= max_bytes < self._store.size
        try:
            self._store.resize(max_bytes)
        except StoreError as error:
            self._history.event("error", "limits", f"experience could not be cut: {error}")

    async def _give_back(self) -> bool:
        """Room of evicted experience to the disk, a little at a time; whether that could be done."""
        self._to_give_back = False
        try:
            while self._store.compact():  # noqa: ASYNC110 - other work gets its turn
                await asyncio.sleep(0)
        except StoreError as error:  # then nothing that is evicted would come back to the disk either
            self._history.event("error", "limits", f"room of experience could not be given back: {error}")
            return False
        return True


def _pause(reason: str) -> Hold:
    return Hold("person", reason, "run shoal resume to go on")


def _kept_pause(path: Path) -> Hold | None:
    """The pause that the last process was in."""
    try:
        with path.open("rb") as file:
            return _pause(file.read(LONGEST_REASON).decode(errors="replace"))
    except FileNotFoundError:
        return None
    except OSError as error:
        log.error("whether this node was paused cannot be read, so it is not: %s", error)
        return None


def cut_logs(directory: Path) -> None:
    """What processes that may live for weeks write, with nobody else to keep it short."""
    for path in directory.glob("*.log"):
        if path.name not in BOUNDED_LOGS:
            try:
                cut_log(path)
            except OSError as error:
                log.warning("%s cannot be cut, and may grow: %s", path, error)


def measure(home: Path, checkpoints: CheckpointStore | None, first_checkpoint: int) -> Disk:
    """What the home takes and what is left. What a checkpoint takes while it is written aside does not count.

    `first_checkpoint`: bytes that one is taken to have while there is none.
    """
    sizes: list[int] = []
    if checkpoints is not None:
        with contextlib.suppress(OSError):  # one is being replaced
            sizes = [entry.size for entry in checkpoints.entries() if entry.name != "best"]
    return Disk(home_size(home), shutil.disk_usage(home).free, max(sizes, default=first_checkpoint))
