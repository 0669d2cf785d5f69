"""Notices a node that hangs: stacks of all threads go to the log, so that 'it hung' comes with a place.

A stage that hangs is ended by its own deadline (node/progress.py), which the event loop keeps. What blocks the loop
itself, as a file on a dead mount may, is noticed by a thread, which ends the process; who started it starts it anew.
"""

import asyncio
import faulthandler
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path

from node.progress import Progress

log = logging.getLogger(__name__)

MAX_BYTES = 4 << 20
"""A file of stacks that is longer is begun anew: a node that hangs and restarts for weeks must not fill its disk."""
DUMP_SECONDS = 10.0
"""For the last stacks of a process: their disk may be what it hangs on."""


async def watch(progress: Progress, dump: Path, *, every: float = 5.0, end: Callable[[int], object] = os._exit) -> None:
    """Dump all stacks once per stage that has outlived nine tenths of its deadline. Runs until cancelled.

    `end`: called with the exit code from another thread, once this loop has not turned for as long as a stage may take.
    """
    warned: tuple[str, float] | None = None
    pulse = _Pulse(progress, dump, every, end)
    threading.Thread(target=pulse.run, name="pulse", daemon=True).start()
    try:
        while True:
            await asyncio.sleep(every)
            pulse.beats += 1
            age = progress.clock() - progress.since
            if age > 0.9 * progress.deadline and warned != (progress.stage, progress.since):
                if progress.stage == "paused" or progress.state not in {"TRAINING", "RESUMING", "STARTING"}:
                    continue
                warned = (progress.stage, progress.since)
                write_stacks(dump, f"stage '{progress.stage}' has taken {age:.0f} s")
                log.error("stage '%s' has taken %.0f s; stacks are in %s", progress.stage, age, dump)
    finally:
        pulse.over.set()


class _Pulse:
    """Counts its own turns between two beats of the loop: time in which the machine slept or the process was stopped
    has none of either."""

    def __init__(self, progress: Progress, dump: Path, every: float, end: Callable[[int], object]) -> None:
        self.progress, self.dump, self.every, self.end = progress, dump, every, end
        self.beats = 0
        self.over = threading.Event()

    def run(self) -> None:
        seen, missed = self.beats, 0
        while not self.over.wait(self.every):
            missed = missed + 1 if self.beats == seen else 0
            seen = self.beats
            if missed * self.every > self.progress.deadline:
                what = f"the event loop has not turned for {missed * self.every:.0f} s; the process ends"
                last = threading.Thread(target=write_stacks, args=(self.dump, what), daemon=True)
                last.start()
                last.join(DUMP_SECONDS)
                self.end(1)
                return


def write_stacks(dump: Path, what: str) -> None:
    """Append to the file why, and where all threads are. Raises OSError."""
    with dump.open("a") as file:
        if file.tell() > MAX_BYTES:
            file.truncate(0)
        file.write(f"{what}\n")
        file.flush()  # the stacks go around its buffer
        faulthandler.dump_traceback(file, all_threads=True)
