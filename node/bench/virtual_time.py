"""An asyncio event loop on a virtual clock: waiting takes no time, and everything else is as in a real one.

Where nothing is ready to run, the clock jumps to the next timer. The code that runs on it is the code of the node.
"""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class NothingToWaitFor(Exception):
    """Everything waits and no timer is set: on a real clock this program would hang."""


class VirtualLoop(asyncio.SelectorEventLoop):
    """Begins at second 0. For one thread: it does not wait for others."""

    def __init__(self) -> None:
        self.now = 0.0
        super().__init__(_Selector(self))

    def time(self) -> float:
        return self.now


class _Selector(selectors.SelectSelector):
    """Lets the clock jump instead of waiting."""

    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self.loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if ready:
            return ready
        if timeout is None:
            raise NothingToWaitFor("every task waits, and no timer is set")
        self.loop.now += max(0.0, timeout)
        return []


def run_virtual(work: Coroutine[Any, Any, T]) -> T:
    """Run to the end on a clock of its own."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work)
