"""Notices a node that hangs: stacks of all threads go to the log, so that 'it hung' comes with a place."""

import asyncio
import faulthandler
import logging
from pathlib import Path

from node.progress import Progress

log = logging.getLogger(__name__)

MAX_BYTES = 4 << 20
"""A file of stacks that is longer is begun anew: a node that hangs and restarts for weeks must not fill its disk."""


async def watch(progress: Progress, dump: Path, *, every: float = 5.0) -> None:
    """Dump all stacks once per stage that has outlived nine tenths of its deadline. Runs until cancelled."""
    warned: tuple[str, float] | None = None
    while True:
        await asyncio.sleep(every)
        age = progress.clock() - progress.since
        if age > 0.9 * progress.deadline and warned != (progress.stage, progress.since):
            if progress.stage == "paused" or progress.state not in {"TRAINING", "RESUMING", "STARTING"}:
                continue
            warned = (progress.stage, progress.since)
            with dump.open("a") as file:
                if file.tell() > MAX_BYTES:
                    file.truncate(0)
                file.write(f"stage '{progress.stage}' has taken {age:.0f} s\n")
                file.flush()  # the stacks go around its buffer
                faulthandler.dump_traceback(file, all_threads=True)
            log.error("stage '%s' has taken %.0f s; stacks are in %s", progress.stage, age, dump)
