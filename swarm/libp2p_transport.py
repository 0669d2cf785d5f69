"""`swarm.transport.Transport` over libp2p: the asyncio side of the host that runs in `swarm.bridge`'s thread.

Events come through the bounded `EventQueue`; requests to serve are bounded by the host's stream limits.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence

from libp2p.peer.id import ID

from protocol.identity import Identity
from protocol.messages import MAX_ANNOUNCEMENT_BYTES
from swarm.bridge import TrioThread
from swarm.events import EventQueue
from swarm.libp2p_host import Calls, Libp2pHost
from swarm.libp2p_setup import HostSettings
from swarm.throttle import Throttle
from swarm.transport import (
    EVENT_LIMIT,
    Connection,
    Event,
    Handler,
    PeerUnreachable,
    RequestFailed,
    TransportError,
    TransportStats,
)

GOODBYE_SECONDS = 1.0
"""To close connections in order, so that peers notice at once."""
STOP_SECONDS = 2.0
"""After that, for the thread to end."""


class Libp2pTransport:
    """Used from one asyncio loop; may be started again after `stop`."""

    def __init__(
        self,
        identity: Identity,
        listen: Sequence[str],
        *,
        announce: Sequence[str] = (),
        psk: bytes | None = None,
        event_limit: int = EVENT_LIMIT,
        throttle: Throttle | None = None,
    ) -> None:
        """`listen`: multiaddrs like `/ip4/127.0.0.1/tcp/0`. `announce`: what to tell others instead, where the
        listen addresses cannot be dialled. `psk`: 32 bytes that every node of a private swarm shares; with a wrong
        one, dialling only times out. `throttle`: how fast streams and gossip may be.
        Raises ValueError for a key of another length.
        """
        if psk is not None and len(psk) != 32:
            raise ValueError(f"a private-swarm key has 32 bytes, not {len(psk)}")
        self._peer_id = identity.peer_id
        self._settings = HostSettings(identity.private_bytes, tuple(listen), tuple(announce), psk)
        self._handlers: dict[str, tuple[Handler, int]] = {}
        self._throttle = throttle or Throttle()
        self._event_limit = event_limit
        self._events = EventQueue(event_limit)
        self._addresses: tuple[str, ...] = ()
        self._last_stats = TransportStats()
        self._thread = TrioThread("libp2p", lambda: self._events.close())
        self._host: Libp2pHost | None = None

    @property
    def peer_id(self) -> str:
        return self._peer_id

    async def start(self) -> None:
        if not self._thread.started:
            self._events = EventQueue(self._event_limit)
            await self._thread.start(self._run_host)

    async def _run_host(self, ready: Callable[[], None]) -> None:
        """In trio."""
        host = Libp2pHost(self._settings, Calls(self._events.put, self._answer), self._throttle)
        for protocol, (_, max_request) in self._handlers.items():
            host.serve(protocol, max_request)

        def up() -> None:
            self._addresses = host.addresses()
            self._host = host
            ready()

        await host.run(up)

    async def _answer(self, protocol: str, peer: str, data: bytes) -> bytes:
        """In trio."""
        return await self._thread.answer(
            f"serving {protocol} to {peer}", lambda: self._handlers[protocol][0](peer, data)
        )

    async def stop(self) -> None:
        if not self._thread.started:
            return
        if self._host is not None:
            with contextlib.suppress(TransportError, TimeoutError):
                await asyncio.wait_for(self._thread.call(self._host.connections.close_all), GOODBYE_SECONDS)
        await self._thread.stop(STOP_SECONDS)
        self._events.close()
        self._last_stats = self.stats()
        self._host = None

    async def failed(self) -> BaseException:
        return await self._thread.failed()

    def addresses(self) -> tuple[str, ...]:
        return self._addresses

    def peers(self) -> tuple[str, ...]:
        return tuple(self._host.connections.connected) if self._host is not None else ()

    def connections(self) -> Mapping[str, Connection]:
        return dict(self._host.connections.connected) if self._host is not None else {}

    async def connect(self, multiaddr: str, *, timeout: float) -> str:
        try:
            async with asyncio.timeout(timeout):
                return await self._thread.call(self._running().connections.connect, multiaddr)
        except TimeoutError:
            raise PeerUnreachable(
                f"no connection to {multiaddr} within {timeout:g} s: not there, or in a private swarm with another key"
            ) from None

    async def disconnect(self, peer: str) -> None:
        await self._thread.call_bounded(self._running().connections.disconnect, peer)

    def ban(self, peer: str) -> None:
        ID.from_base58(peer)  # raises here, not in the host's thread; a peer's key need not be of our kind
        connections = self._running().connections
        self._thread.post(lambda: connections.ban(peer))

    def lift_ban(self, peer: str) -> None:
        ID.from_base58(peer)
        connections = self._running().connections
        self._thread.post(lambda: connections.lift_ban(peer))

    async def subscribe(self, topic: str, check: Callable[[str, bytes], bool] | None = None) -> None:
        await self._thread.call_bounded(self._running().subscribe, topic, check)

    async def publish(self, topic: str, data: bytes) -> None:
        if len(data) > MAX_ANNOUNCEMENT_BYTES:
            raise TransportError(
                f"message of {len(data)} bytes on {topic!r} is over the limit of {MAX_ANNOUNCEMENT_BYTES}"
            )
        await self._thread.call_bounded(self._running().publish, topic, data)

    def serve(self, protocol: str, handler: Handler, *, max_request: int) -> None:
        self._handlers[protocol] = (handler, max_request)
        if self._host is not None:
            host = self._host
            self._thread.post(lambda: host.serve(protocol, max_request))

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
                await self._thread.call(
                    self._running().request,
                    peer,
                    protocol,
                    data,
                    max_bytes,
                    lambda piece: self._thread.to_loop(loop, extend, piece),
                )
        except TimeoutError:
            raise RequestFailed(f"{peer} did not answer {protocol} within {timeout:g} s") from None
        finally:
            open_ = False
        return bytes(arrived[begin:])

    def events(self) -> AsyncIterator[Event]:
        return self._events

    async def provide(self, key: bytes) -> None:
        await self._thread.call_bounded(self._running().provide, key)

    async def find_providers(self, key: bytes, *, timeout: float) -> tuple[str, ...]:
        if self._host is None:
            return ()
        return await self._thread.call_bounded(self._host.find_providers, key, timeout)

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

    def _running(self) -> Libp2pHost:
        if self._host is None or self._thread.stopping:
            raise TransportError("the transport is not running: start it first")
        return self._host
