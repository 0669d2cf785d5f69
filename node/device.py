"""The device lock: one worker thread does all model work, one job after the other."""

import asyncio
import concurrent.futures
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import psutil
import torch

T = TypeVar("T")


def use_threads(threads: int) -> None:
    """Of this thread's torch; 0: one a core, because two on one core are slower than one."""
    torch.set_num_threads(threads or psutil.cpu_count(logical=False) or 1)


class Device:
    """Runs model jobs off the asyncio thread, never two at once."""

    def __init__(self) -> None:
        self.make_room: Callable[[], Awaitable[None]] | None = None
        """Awaited before every job: an engine of another process gives back the memory that it shares with us."""
        self._worker = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="model")

    async def run(self, job: Callable[..., T], *args: Any) -> T:
        """Run `job(*args)` when the device is free; its result, or what it raises.

        A job cannot be interrupted: after a timeout or a cancellation of this call it still runs to its end, and the
        next one waits for it.
        """
        if self.make_room is not None:
            await self.make_room()
        return await asyncio.get_running_loop().run_in_executor(self._worker, job, *args)

    def close(self) -> None:
        """Take no more jobs; does not wait for the one that runs."""
        self._worker.shutdown(wait=False, cancel_futures=True)
