"""asyncio on one side, trio in a thread of its own on the other (about 0.05 ms a crossing).

Only bytes, strings and frozen dataclasses cross. Towards trio: one task per call, cancelled when its asyncio waiter
is. Towards asyncio: callbacks, and answers that trio waits for.
"""

import asyncio
import contextlib
import logging
import threading
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import trio

from protocol.rules import Rejected
from swarm.transport import Busy, RequestFailed, TransportError

START_SECONDS = 30.0
CALL_SECONDS = 30.0
STOP_SECONDS = 3.0
"""For a thread that did not start."""

T = TypeVar("T")
log = logging.getLogger(__name__)


class TrioThread:
    """A trio run, used from one asyncio loop; may be started again after `stop`. `ended` is called when it is over."""

    def __init__(self, name: str, ended: Callable[[], None]) -> None:
        self._name, self._tell_ended = name, ended
        self._answering: set[asyncio.Future[bytes]] = set()
        self._waiting: set[asyncio.Future[Any]] = set()
        self._stopping = False
        # Set while the thread runs.
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._token: trio.lowlevel.TrioToken | None = None
        self._nursery: trio.Nursery | None = None
        self._ended: asyncio.Future[BaseException | None] | None = None

    @property
    def started(self) -> bool:
        """Whether `start` was called, and `stop` was not since."""
        return self._thread is not None

    @property
    def stopping(self) -> bool:
        return self._stopping

    async def start(self, main: Callable[[Callable[[], None]], Awaitable[None]]) -> None:
        """Run `main(ready)` in trio, and return when it has called `ready`. Raises TransportError, `main`'s own too."""
        loop = self._loop = asyncio.get_running_loop()
        started: asyncio.Future[None] = loop.create_future()
        self._ended = loop.create_future()
        self._stopping = False

        def ready() -> None:
            self.to_loop(loop, _settle, started, None, None)

        self._thread = threading.Thread(target=self._run, args=(main, ready), name=self._name, daemon=True)
        self._thread.start()
        either: set[asyncio.Future[Any]] = {started, self._ended}
        await asyncio.wait(either, timeout=START_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        if started.done():
            return
        cause = self._ended.result() if self._ended.done() else None
        await self.stop(STOP_SECONDS)
        if isinstance(cause, TransportError):
            raise cause
        raise TransportError(f"the {self._name} host did not start within {START_SECONDS:g} s: {cause!r}") from cause

    async def stop(self, seconds: float) -> None:
        """Cancel everything, and wait so long for the thread to end."""
        if self._ended is None:
            return
        self._stopping = True
        self.post(self._cancel_all)
        await asyncio.wait({self._ended}, timeout=seconds)
        if not self._ended.done():
            log.warning("the %s thread did not end within %g s; leaving it", self._name, seconds)
        for task in tuple(self._answering):
            task.cancel()
        self._thread = None

    async def failed(self) -> BaseException:
        """Wait until the run ends by itself, and return why."""
        if self._ended is None:
            raise TransportError("the transport is not running: start it first")
        error = await asyncio.shield(self._ended)
        if error is None:
            # An orderly stop is no failure.
            return await asyncio.get_running_loop().create_future()
        return error

    # asyncio to trio

    def post(self, action: Callable[[], object]) -> None:
        """Run a function in trio soon."""
        if self._token is not None:
            with contextlib.suppress(trio.RunFinishedError):
                self._token.run_sync_soon(action)

    async def call_bounded(self, work: Callable[..., Awaitable[T]], *arguments: object) -> T:
        """`call` for what takes no deadline of the caller's."""
        try:
            async with asyncio.timeout(CALL_SECONDS):
                return await self.call(work, *arguments)
        except TimeoutError:
            raise TransportError(f"libp2p did not finish {work.__name__} within {CALL_SECONDS:g} s") from None

    async def call(self, work: Callable[..., Awaitable[T]], *arguments: object) -> T:
        """Run `work` in trio and wait for it here; cancelling this cancels that. Raises TransportError."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        scope = trio.CancelScope()

        async def crossing() -> None:
            error: BaseException | None = TransportError("the transport stopped")
            result: T | None = None
            try:
                with scope:
                    result = await work(*arguments)
                    error = None
            except TransportError as refused:
                error = refused
            except Exception as unexpected:
                # Whatever the library raises on a peer's strange behaviour fails this call, not the host.
                log.exception("%s failed", work.__name__)
                error = TransportError(f"{work.__name__} failed: {unexpected!r}")
            finally:
                self.to_loop(loop, _settle, future, result, error)

        def begin() -> None:
            if self._nursery is not None:
                self._nursery.start_soon(crossing)

        self._waiting.add(future)
        if self._ended is not None and self._ended.done():
            _settle(future, None, TransportError("the transport is not running: start it first"))
        self.post(begin)
        try:
            return await future
        finally:
            self._waiting.discard(future)
            if future.cancelled():
                self.post(scope.cancel)

    # trio to asyncio

    @staticmethod
    def to_loop(loop: asyncio.AbstractEventLoop, action: Callable[..., object], *arguments: object) -> None:
        """Run a function in asyncio soon; may be called in any thread."""
        # The loop may close under a process that ends without stop().
        if not loop.is_closed():
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(action, *arguments)

    async def answer(self, what: str, work: Callable[[], Awaitable[bytes]]) -> bytes:
        """In trio: run `work` in asyncio and wait for it. Raises Busy as it did, RequestFailed when it failed."""
        loop, done = self._loop, trio.Event()
        assert loop is not None
        answers: list[bytes | RequestFailed] = []
        tasks: list[asyncio.Future[bytes]] = []

        def begin() -> None:
            task = asyncio.ensure_future(work())
            tasks.append(task)
            self._answering.add(task)
            task.add_done_callback(finish)

        def finish(task: asyncio.Future[bytes]) -> None:
            self._answering.discard(task)
            error = None if task.cancelled() else task.exception()
            if isinstance(error, Busy):
                answers.append(error)
            elif task.cancelled() or error is not None:
                if error is not None:  # what is refused is on the sender's account, and would fill the log
                    log.log(logging.DEBUG if isinstance(error, Rejected) else logging.WARNING, "%s: %r", what, error)
                answers.append(RequestFailed(f"{what} failed"))
            else:
                answers.append(task.result())
            self.post(done.set)

        def cancel() -> None:
            for task in tasks:
                task.cancel()

        self.to_loop(loop, begin)
        try:
            await done.wait()
        finally:
            if not done.is_set():
                self.to_loop(loop, cancel)
        answer = answers[0]
        if isinstance(answer, RequestFailed):
            raise answer
        return answer

    # The thread

    def _cancel_all(self) -> None:
        if self._nursery is not None:
            self._nursery.cancel_scope.cancel()

    def _run(self, main: Callable[[Callable[[], None]], Awaitable[None]], ready: Callable[[], None]) -> None:
        error: BaseException | None = None
        try:
            trio.run(self._main, main, ready)
        except BaseException as died:  # noqa: BLE001 - the thread's last word; delivered by failed()
            error = _first_transport_error(died)
        assert self._loop is not None
        self.to_loop(self._loop, self._finished, error)

    async def _main(self, main: Callable[[Callable[[], None]], Awaitable[None]], ready: Callable[[], None]) -> None:
        self._token = trio.lowlevel.current_trio_token()
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            try:
                await main(ready)
            finally:
                self._nursery = None

    def _finished(self, error: BaseException | None) -> None:
        assert self._ended is not None
        if error is None and not self._stopping:
            error = TransportError(f"the {self._name} thread ended by itself")
        if not self._ended.done():
            self._ended.set_result(error)
        for future in tuple(self._waiting):
            _settle(future, None, TransportError(f"the transport ended: {error!r}"))
        self._tell_ended()


def _settle(future: asyncio.Future[Any], result: object, error: BaseException | None) -> None:
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)


def _first_transport_error(error: BaseException) -> BaseException:
    """The reason we raised ourselves, out of the groups that nurseries wrap around it."""
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            found = _first_transport_error(inner)
            if isinstance(found, TransportError):
                return found
    return error
