"""asyncio on one side, the libp2p host in its own trio thread on the other (about 0.05 ms a crossing).

Only bytes, strings and frozen dataclasses cross. Towards trio: one task per call, cancelled when its asyncio waiter
is. Towards asyncio: events through the bounded `EventQueue`, requests to serve bounded by the host's stream limits.
"""

import asyncio
import contextlib
import logging
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, TypeVar

import trio

from protocol.identity import Identity, public_key_of
from protocol.messages import MAX_ANNOUNCEMENT_BYTES
from swarm.events import EventQueue
from swarm.libp2p_host import Calls, Libp2pHost
from swarm.libp2p_setup import HostSettings
from swarm.transport import (
    EVENT_LIMIT,
    Event,
    Handler,
    PeerUnreachable,
    RequestFailed,
    TransportError,
    TransportStats,
)

START_SECONDS = 30.0
CALL_SECONDS = 30.0
STOP_SECONDS = 3.0
GOODBYE_SECONDS = 1.0
"""Of those, the time to close connections in order, so that peers notice at once."""

T = TypeVar("T")
log = logging.getLogger(__name__)


class Libp2pTransport:
    """`swarm.transport.Transport` over libp2p. Used from one asyncio loop; may be started again after `stop`."""

    def __init__(
        self,
        identity: Identity,
        listen: Sequence[str],
        *,
        announce: Sequence[str] = (),
        psk: bytes | None = None,
        event_limit: int = EVENT_LIMIT,
    ) -> None:
        """`listen`: multiaddrs like `/ip4/127.0.0.1/tcp/0`. `announce`: what to tell others instead, where the
        listen addresses cannot be dialled. `psk`: 32 bytes that every node of a private swarm shares; with a wrong
        one, dialling only times out. Raises ValueError for a key of another length.
        """
        if psk is not None and len(psk) != 32:
            raise ValueError(f"a private-swarm key has 32 bytes, not {len(psk)}")
        self._peer_id = identity.peer_id
        self._settings = HostSettings(identity.private_bytes, tuple(listen), tuple(announce), psk)
        self._handlers: dict[str, tuple[Handler, int]] = {}
        self._serving: set[asyncio.Future[bytes]] = set()
        self._waiting: set[asyncio.Future[Any]] = set()
        self._event_limit = event_limit
        self._events = EventQueue(event_limit)
        self._addresses: tuple[str, ...] = ()
        self._last_stats = TransportStats()
        self._stopping = False
        # Set while the thread runs.
        self._thread: threading.Thread | None = None
        self._host: Libp2pHost | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._token: trio.lowlevel.TrioToken | None = None
        self._nursery: trio.Nursery | None = None
        self._started: asyncio.Future[None] | None = None
        self._ended: asyncio.Future[BaseException | None] | None = None

    @property
    def peer_id(self) -> str:
        return self._peer_id

    async def start(self) -> None:
        if self._thread is not None:
            return
        self._loop = asyncio.get_running_loop()
        self._started, self._ended = self._loop.create_future(), self._loop.create_future()
        self._stopping = False
        self._events = EventQueue(self._event_limit)
        self._thread = threading.Thread(target=self._run_thread, name="libp2p", daemon=True)
        self._thread.start()
        either: set[asyncio.Future[Any]] = {self._started, self._ended}
        await asyncio.wait(either, timeout=START_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        if self._started.done():
            return
        cause = self._ended.result() if self._ended.done() else None
        await self.stop()
        if isinstance(cause, TransportError):
            raise cause
        raise TransportError(f"the libp2p host did not start within {START_SECONDS:g} s: {cause!r}") from cause

    async def stop(self) -> None:
        if self._thread is None or self._ended is None or self._loop is None:
            return
        deadline = self._loop.time() + STOP_SECONDS
        if self._host is not None and not self._ended.done():
            with contextlib.suppress(TransportError, TimeoutError):
                await asyncio.wait_for(self._call(self._host.close_connections), GOODBYE_SECONDS)
        self._stopping = True
        self._to_trio(self._cancel_all)
        await asyncio.wait({self._ended}, timeout=max(0.0, deadline - self._loop.time()))
        if not self._ended.done():
            log.warning("the libp2p thread did not end within %g s; leaving it", STOP_SECONDS)
        for task in tuple(self._serving):
            task.cancel()
        self._events.close()
        self._last_stats = self.stats()
        self._thread = self._host = None

    async def failed(self) -> BaseException:
        if self._ended is None:
            raise TransportError("the transport is not running: start it first")
        error = await asyncio.shield(self._ended)
        if error is None:
            # An orderly stop is no failure.
            return await asyncio.get_running_loop().create_future()
        return error

    def addresses(self) -> tuple[str, ...]:
        return self._addresses

    def peers(self) -> tuple[str, ...]:
        return tuple(self._host.connected) if self._host is not None else ()

    async def connect(self, multiaddr: str, *, timeout: float) -> str:
        try:
            async with asyncio.timeout(timeout):
                return await self._call(self._running().connect, multiaddr)
        except TimeoutError:
            raise PeerUnreachable(
                f"no connection to {multiaddr} within {timeout:g} s: not there, or in a private swarm with another key"
            ) from None

    async def disconnect(self, peer: str) -> None:
        await self._bounded(self._running().disconnect, peer)

    def ban(self, peer: str) -> None:
        public_key_of(peer)
        host = self._running()
        self._to_trio(lambda: host.ban(peer))

    async def subscribe(self, topic: str, check: Callable[[str, bytes], bool] | None = None) -> None:
        await self._bounded(self._running().subscribe, topic, check)

    async def publish(self, topic: str, data: bytes) -> None:
        if len(data) > MAX_ANNOUNCEMENT_BYTES:
            raise TransportError(
                f"message of {len(data)} bytes on {topic!r} is over the limit of {MAX_ANNOUNCEMENT_BYTES}"
            )
        await self._bounded(self._running().publish, topic, data)

    def serve(self, protocol: str, handler: Handler, *, max_request: int) -> None:
        self._handlers[protocol] = (handler, max_request)
        if self._host is not None:
            host = self._host
            self._to_trio(lambda: host.serve(protocol, max_request))

    async def request(
        self, peer: str, protocol: str, data: bytes, *, max_bytes: int, timeout: float, sink: bytearray | None = None
    ) -> bytes:
        arrived = bytearray() if sink is None else sink
        begin, open_ = len(arrived), True
        loop = asyncio.get_running_loop()

        def extend(piece: bytes) -> None:
            # A piece still on its way after a timeout must not move a sink that the caller resumes from.
            if open_:
                arrived.extend(piece)

        try:
            async with asyncio.timeout(timeout):
                await self._call(
                    self._running().request,
                    peer,
                    protocol,
                    data,
                    max_bytes,
                    lambda piece: self._to_loop(loop, extend, piece),
                )
        except TimeoutError:
            raise RequestFailed(f"{peer} did not answer {protocol} within {timeout:g} s") from None
        finally:
            open_ = False
        return bytes(arrived[begin:])

    def events(self) -> AsyncIterator[Event]:
        return self._events

    async def provide(self, key: bytes) -> None:
        await self._bounded(self._running().provide, key)

    async def find_providers(self, key: bytes, *, timeout: float) -> tuple[str, ...]:
        if self._host is None:
            return ()
        return await self._bounded(self._host.find_providers, key, timeout)

    def stats(self) -> TransportStats:
        host = self._host
        if host is None:
            return self._last_stats
        messages, message_bytes = host.received
        return TransportStats(
            bytes_in=host.streams.bytes_in + message_bytes,
            bytes_out=host.streams.bytes_out + host.published_bytes,
            messages_in=messages,
            messages_out=host.published,
            dropped_events=self._events.dropped,
            dropped_publishes=host.dropped_publishes,
        )

    # The crossing, asyncio to trio

    def _running(self) -> Libp2pHost:
        if self._host is None or self._stopping:
            raise TransportError("the transport is not running: start it first")
        return self._host

    def _to_trio(self, action: Callable[[], object]) -> None:
        if self._token is not None:
            with contextlib.suppress(trio.RunFinishedError):
                self._token.run_sync_soon(action)

    async def _bounded(self, work: Callable[..., Awaitable[T]], *arguments: object) -> T:
        try:
            async with asyncio.timeout(CALL_SECONDS):
                return await self._call(work, *arguments)
        except TimeoutError:
            raise TransportError(f"libp2p did not finish {work.__name__} within {CALL_SECONDS:g} s") from None

    async def _call(self, work: Callable[..., Awaitable[T]], *arguments: object) -> T:
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
                self._to_loop(loop, self._settle, future, result, error)

        def begin() -> None:
            if self._nursery is not None:
                self._nursery.start_soon(crossing)

        self._waiting.add(future)
        if self._ended is not None and self._ended.done():
            self._settle(future, None, TransportError("the transport is not running: start it first"))
        self._to_trio(begin)
        try:
            return await future
        finally:
            self._waiting.discard(future)
            if future.cancelled():
                self._to_trio(scope.cancel)

    @staticmethod
    def _settle(future: asyncio.Future[Any], result: object, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)

    # The crossing, trio to asyncio

    @staticmethod
    def _to_loop(loop: asyncio.AbstractEventLoop, action: Callable[..., object], *arguments: object) -> None:
        # The loop may close under a process that ends without stop().
        if not loop.is_closed():
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(action, *arguments)

    async def _answer(self, protocol: str, peer: str, data: bytes) -> bytes:
        """In trio: run a handler in asyncio and wait for it. Raises RequestFailed."""
        loop, done = self._loop, trio.Event()
        assert loop is not None
        answers: list[bytes | None] = []
        tasks: list[asyncio.Future[bytes]] = []

        def begin() -> None:
            task = asyncio.ensure_future(self._handlers[protocol][0](peer, data))
            tasks.append(task)
            self._serving.add(task)
            task.add_done_callback(finish)

        def finish(task: asyncio.Future[bytes]) -> None:
            self._serving.discard(task)
            if not task.cancelled() and (error := task.exception()) is not None:
                log.warning("serving %s to %s failed: %r", protocol, peer, error)
            answers.append(None if task.cancelled() or task.exception() is not None else task.result())
            self._to_trio(done.set)

        def cancel() -> None:
            for task in tasks:
                task.cancel()

        self._to_loop(loop, begin)
        try:
            await done.wait()
        finally:
            if not done.is_set():
                self._to_loop(loop, cancel)
        answer = answers[0]
        if answer is None:
            raise RequestFailed(f"the handler of {protocol} failed")
        return answer

    # The thread

    def _cancel_all(self) -> None:
        if self._nursery is not None:
            self._nursery.cancel_scope.cancel()

    def _run_thread(self) -> None:
        error: BaseException | None = None
        try:
            trio.run(self._main)
        except BaseException as died:  # noqa: BLE001 - the thread's last word; delivered by failed()
            error = _first_transport_error(died)
        assert self._loop is not None
        self._to_loop(self._loop, self._finished, error)

    def _finished(self, error: BaseException | None) -> None:
        assert self._ended is not None
        if error is None and not self._stopping:
            error = TransportError("the libp2p thread ended by itself")
        if not self._ended.done():
            self._ended.set_result(error)
        for future in tuple(self._waiting):
            self._settle(future, None, TransportError(f"the transport ended: {error!r}"))
        self._events.close()

    async def _main(self) -> None:
        loop, started = self._loop, self._started
        assert loop is not None
        assert started is not None
        self._token = trio.lowlevel.current_trio_token()
        # Through a lambda: `_events` is replaced at each start.
        events = self._events
        host = Libp2pHost(self._settings, Calls(events.put, self._answer))
        for protocol, (_, max_request) in self._handlers.items():
            host.serve(protocol, max_request)

        def ready() -> None:
            self._addresses = host.addresses()
            self._host = host
            self._to_loop(loop, self._settle, started, None, None)

        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            try:
                await host.run(ready)
            finally:
                self._nursery = None


def _first_transport_error(error: BaseException) -> BaseException:
    """The reason we raised ourselves, out of the groups that nurseries wrap around it."""
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            found = _first_transport_error(inner)
            if isinstance(found, TransportError):
                return found
    return error
