"""The device lock: one worker thread does all model work, one job after the other."""

import asyncio
import concurrent.futures
from collections.abc import Callable
from typing import Any, TypeVar

from node.progress import StageTimeout

T = TypeVar("T")


class Device:
    """Runs model jobs off the asyncio thread, never two at once."""

    def __init__(self) -> None:
        self._worker = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="model")

    async def run(self, job: Callable[..., T], *args: Any, stage: str, deadline: float | None = None) -> T:
        """Run `job(*args)` when the device is free and return its result.

        `deadline` is in seconds and counts the wait for the device; without one the caller's own deadline holds.
        A job cannot be interrupted: after a timeout or a cancellation it still runs to its end, and the next one
        waits for it. Raises StageTimeout naming the stage, and whatever the job raises.
        """
        future = asyncio.get_running_loop().run_in_executor(self._worker, job, *args)
        try:
            async with asyncio.timeout(deadline) as limit:
                return await future
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise StageTimeout(f"stage '{stage}' took longer than {deadline:.0f} s on the device") from error

    def close(self) -> None:
        """Take no more jobs; does not wait for the one that runs."""
        self._worker.shutdown(wait=False, cancel_futures=True)
