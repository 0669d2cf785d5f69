"""The libp2p host, in trio: TCP + Noise + Yamux, GossipSub, Kademlia, one request per stream (swarm/framing.py).

Lives in the bridge's thread and speaks to it only through `Calls` and plain values. py-libp2p 0.8.1 needs care:
its listener shares a taken port (SO_REUSEPORT), it dials one TCP address per peer, it refuses to dial a peer that
failed for a minute, and a peer that vanishes without a FIN is never noticed.
"""

import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass

import trio
from libp2p.abc import INetStream
from libp2p.exceptions import BaseLibp2pError
from libp2p.peer.id import ID
from libp2p.tools.anyio_service import background_trio_service
from multiaddr import Multiaddr

from swarm.framing import FrameError
from swarm.libp2p_bans import Bans
from swarm.libp2p_connections import CLOSE_SECONDS, Connections, contained
from swarm.libp2p_dht import Dht
from swarm.libp2p_gossip import MESH_DEGREE, Inbox, new_pubsub
from swarm.libp2p_setup import ConnectionEvents, HostSettings, check_port_is_free, configured_host
from swarm.libp2p_streams import IDLE_SECONDS, Runtime, Streams
from swarm.throttle import Lane, Throttle
from swarm.transport import Event, Message, OversizeRequest, TransportError

PUBLISH_INTERVAL = 0.005
"""Seconds between two gossip messages of ours: a peer's 32 slots drain faster than that."""
PUBLISH_QUEUE = 512
DHT_REFRESH_SECONDS, DHT_LOOKUP_SECONDS = 60.0, 20.0
STREAM_ERRORS = (
    BaseLibp2pError,
    FrameError,
    trio.TooSlowError,
    trio.BrokenResourceError,
    trio.ClosedResourceError,
    OSError,
)
"""What a broken stream or connection raises, whoever broke it."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Calls:
    """How the host speaks to the other thread."""

    emit: Callable[[Event], None]
    answer: Callable[[str, str, bytes], Awaitable[bytes]]
    """Run the handler of (protocol, peer, request) over there; raises Busy as it did, RequestFailed if it failed."""


class Libp2pHost:
    """One libp2p host. Made and used in one trio run; counters may be read from any thread."""

    def __init__(self, settings: HostSettings, calls: Calls, throttle: Throttle) -> None:
        self._settings = settings
        self._calls = calls
        self._host = configured_host(settings)
        self._pubsub = new_pubsub(self._host)
        self._up, self._down = (Lane(way, trio.current_time, trio.sleep) for way in (throttle.up, throttle.down))
        self._inbox = Inbox(self._host.get_id(), self._heard, trio.current_time)
        self._dht = Dht(self._host)
        self._dht_stale = trio.Event()
        self._publish_send, self._publish_receive = trio.open_memory_channel[tuple[str, bytes]](PUBLISH_QUEUE)
        self._nursery: trio.Nursery | None = None
        self._banned = Bans(self._pubsub)
        self._runtime = Runtime(trio.current_time, trio.fail_after, self._finish, STREAM_ERRORS, self._up, self._down)
        self.streams = Streams(
            self._host,
            self._runtime,
            calls.answer,
            self._banned.__contains__,
            lambda peer, protocol: calls.emit(OversizeRequest(peer, protocol)),
        )
        self.connections = Connections(
            self._host,
            self._runtime,
            self._dht,
            self._banned,
            settings.listen,
            emit=calls.emit,
            spawn=self._spawn,
            met=lambda: self._dht_stale.set(),
            forget=self._forget,
        )
        self.published = self.published_bytes = self.dropped_publishes = 0

    @property
    def peer_id(self) -> str:
        return str(self._host.get_id())

    @property
    def received(self) -> tuple[int, int]:
        """Gossip messages delivered, and their bytes."""
        return self._inbox.messages, self._inbox.bytes

    def addresses(self) -> tuple[str, ...]:
        return tuple(str(address) for address in self._host.get_addrs())

    async def run(self, ready: Callable[[], None]) -> None:
        """Serve until cancelled. Raises TransportError when it cannot listen."""
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self._host.run([]))
            for address in self._settings.listen:
                await self._listen(Multiaddr(address))
            for service in (self._pubsub.router, self._pubsub, self._dht.service):
                await stack.enter_async_context(background_trio_service(service))
            await self._pubsub.wait_until_ready()
            self._host.get_network().register_notifee(ConnectionEvents(self.connections.joined, self.connections.left))
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                nursery.start_soon(self._publish_paced)
                nursery.start_soon(self._keep_dht_fresh)
                nursery.start_soon(self.connections.keep_alive)
                nursery.start_soon(self._close_idle_streams)
                ready()

    async def _listen(self, address: Multiaddr) -> None:
        check_port_is_free(address)
        if not await self._host.get_network().listen(address):
            raise TransportError(
                f"cannot listen on {address} (network.listen) ; choose another: shoal config set network.listen ADDRESS"
            )

    def _spawn(self, work: Callable[..., Awaitable[None]], *arguments: object) -> None:
        if self._nursery is not None and not self._nursery.cancel_scope.cancel_called:
            self._nursery.start_soon(contained, work, *arguments)

    def _forget(self, peer: str) -> None:
        self._inbox.forget(peer)
        self.streams.forget(peer)

    # Gossip

    async def subscribe(self, topic: str, check: Callable[[str, bytes], bool] | None) -> None:
        self._pubsub.set_topic_validator(topic, self._inbox.validator(topic, check), False)
        subscription = await self._pubsub.subscribe(topic)

        async def drain() -> None:
            async for _ in subscription:
                pass  # delivered by the validator already

        self._spawn(drain)

    def _heard(self, message: Message) -> None:
        self._calls.emit(message)
        self._down.gossiped(len(message.data))
        self._up.gossiped(len(message.data) * (self._copies - 1))

    @property
    def _copies(self) -> int:
        """About how many peers a message goes to: those of the mesh, as the library does not say."""
        return max(1, min(len(self.connections.connected), MESH_DEGREE))

    async def publish(self, topic: str, data: bytes) -> None:
        try:
            self._publish_send.send_nowait((topic, data))
        except trio.WouldBlock:
            self.dropped_publishes += 1

    async def _publish_paced(self) -> None:
        async for topic, data in self._publish_receive:
            await contained(self._pubsub.publish, topic, data)
            self.published += 1
            self.published_bytes += len(data)
            await self._up.passed(len(data) * self._copies)
            await trio.sleep(PUBLISH_INTERVAL)

    # Streams

    def serve(self, protocol: str, max_request: int) -> None:
        self.streams.serve(protocol, max_request)

    async def request(
        self, peer: str, protocol: str, data: bytes, max_bytes: int, arrived: Callable[[bytes], None]
    ) -> None:
        """One request, dialling first where needed; see Transport.request. The caller holds the deadline."""
        if peer not in self.connections.connected:
            await self.connections.connect(f"/p2p/{peer}")
        await self.streams.request(peer, protocol, data, max_bytes, arrived)

    async def _close_idle_streams(self) -> None:
        while True:
            await trio.sleep(IDLE_SECONDS)
            await contained(self.streams.close_idle)

    async def _finish(self, stream: INetStream, whole: bool) -> None:
        # Shielded: a cancelled request must still free its stream at the other end.
        with trio.move_on_after(CLOSE_SECONDS) as scope:
            scope.shield = True
            try:
                await (stream.close() if whole else stream.reset())
            except STREAM_ERRORS as error:
                log.debug("closing a stream: %r", error)

    # DHT

    async def _keep_dht_fresh(self) -> None:
        """Refresh soon after a new peer and from time to time; the library does it every 10 minutes."""
        while True:
            self._dht_stale = trio.Event()
            with trio.move_on_after(DHT_LOOKUP_SECONDS):
                await contained(self._dht.refresh)
            await trio.sleep(1.0)
            with trio.move_on_after(DHT_REFRESH_SECONDS):
                await self._dht_stale.wait()

    async def provide(self, key: bytes) -> None:
        with trio.move_on_after(DHT_LOOKUP_SECONDS):
            await self._dht.provide(key)

    async def find_providers(self, key: bytes, timeout: float) -> tuple[str, ...]:
        """Whom most holders name first: a provider tells all of them, and one that lies is alone with it."""
        named = Counter(self._dht.stored_providers(key))

        async def ask(holder: ID) -> None:
            named.update(set(await self._dht.ask(holder, key)))

        with trio.move_on_after(timeout):
            holders = await self._dht.closest(key)
            async with trio.open_nursery() as nursery:
                for holder in holders:
                    nursery.start_soon(contained, ask, holder)
        return tuple(peer for peer, _ in named.most_common() if peer != self.peer_id and peer not in self._banned)
