"""The libp2p host, in trio: TCP + Noise + Yamux, GossipSub, Kademlia, one request per stream (swarm/framing.py).

Lives in the bridge's thread and speaks to it only through `Calls` and plain values. py-libp2p 0.8.1 needs care:
its listener shares a taken port (SO_REUSEPORT), it dials one TCP address per peer, it refuses to dial a peer that
failed for a minute, and a peer that vanishes without a FIN is never noticed.
"""

import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from typing import Literal

import trio
from libp2p.abc import INetConn, INetStream
from libp2p.exceptions import BaseLibp2pError
from libp2p.peer.id import ID
from libp2p.peer.peerinfo import PeerInfo
from libp2p.peer.peerstore import PeerStoreError
from libp2p.rcmgr import Direction
from libp2p.tools.anyio_service import background_trio_service
from multiaddr import Multiaddr

from swarm.framing import FrameError
from swarm.libp2p_addresses import ADDRESSES_PER_PEER, AddressBook, parse, without_peer
from swarm.libp2p_bans import Bans
from swarm.libp2p_dht import Dht
from swarm.libp2p_dialling import DialGate
from swarm.libp2p_gossip import MESH_DEGREE, Inbox, new_pubsub
from swarm.libp2p_ping import ping
from swarm.libp2p_setup import ConnectionEvents, HostSettings, check_port_is_free, configured_host
from swarm.libp2p_streams import IDLE_SECONDS, Runtime, Streams
from swarm.throttle import Lane, Throttle
from swarm.transport import (
    Connection,
    Event,
    Message,
    OversizeRequest,
    PeerConnected,
    PeerDisconnected,
    PeerUnreachable,
    TransportError,
)

PUBLISH_INTERVAL = 0.005
"""Seconds between two gossip messages of ours: a peer's 32 slots drain faster than that."""
PUBLISH_QUEUE = 512
PING_INTERVAL = 15.0
PINGS = 2
"""In a row, before a peer that answers none is parted from."""
"""A peer that vanished without closing its connection is given up after this long and a ping's deadline."""
DHT_REFRESH_SECONDS, DHT_LOOKUP_SECONDS = 60.0, 20.0
ADDRESS_SECONDS = 24 * 3600
CLOSE_SECONDS = 1.0
"""For a stream or a connection to be closed in good order."""
RESOLVE_SECONDS = 3.0
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


async def resolve(name: str) -> list[str]:
    """Its IP addresses, as of now."""
    with trio.move_on_after(RESOLVE_SECONDS), suppress(OSError):  # no such host
        entries = await trio.socket.getaddrinfo(name, None, type=trio.socket.SOCK_STREAM)
        return [where[0] for *_, where in entries if "%" not in where[0]]
    return []


class Libp2pHost:
    """One libp2p host. Made and used in one trio run; counters may be read from any thread."""

    def __init__(self, settings: HostSettings, calls: Calls, throttle: Throttle) -> None:
        self._settings = settings
        self._calls = calls
        self._host = configured_host(settings)
        self._network = self._host.get_network()
        self._peerstore = self._host.get_peerstore()
        self._pubsub = new_pubsub(self._host)
        self._up, self._down = (Lane(way, trio.current_time, trio.sleep) for way in (throttle.up, throttle.down))
        self._inbox = Inbox(self._host.get_id(), self._heard, trio.current_time)
        self._dialling = DialGate(self._network, settings.listen, resolve)
        self._dht = Dht(self._host)
        self._dht_stale = trio.Event()
        self._publish_send, self._publish_receive = trio.open_memory_channel[tuple[str, bytes]](PUBLISH_QUEUE)
        self._nursery: trio.Nursery | None = None
        self._book = AddressBook()
        self._banned = Bans(self._pubsub)
        self._runtime = Runtime(trio.current_time, trio.fail_after, self._finish, STREAM_ERRORS, self._up, self._down)
        self.streams = Streams(
            self._host,
            self._runtime,
            calls.answer,
            self._banned.__contains__,
            lambda peer, protocol: calls.emit(OversizeRequest(peer, protocol)),
        )
        self.connected: dict[str, Connection] = {}
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
            self._network.register_notifee(ConnectionEvents(self._joined, self._left))
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                nursery.start_soon(self._publish_paced)
                nursery.start_soon(self._keep_dht_fresh)
                nursery.start_soon(self._keep_alive)
                nursery.start_soon(self._close_idle_streams)
                ready()

    async def _listen(self, address: Multiaddr) -> None:
        check_port_is_free(address)
        if not await self._network.listen(address):
            raise TransportError(
                f"cannot listen on {address} (network.listen) ; choose another: shoal config set network.listen ADDRESS"
            )

    def _spawn(self, work: Callable[..., Awaitable[None]], *arguments: object) -> None:
        if self._nursery is not None and not self._nursery.cancel_scope.cancel_called:
            self._nursery.start_soon(self._contained, work, *arguments)

    async def _contained(self, work: Callable[..., Awaitable[None]], *arguments: object) -> None:
        """Whatever the library raises over one peer must not end the host for all of them."""
        try:
            await work(*arguments)
        except Exception:
            log.exception("%s%r failed", work.__name__, arguments)

    # Connections

    def _joined(self, peer: str) -> None:
        """There is a connection, and Noise has proven its peer id."""
        if peer in self._banned:
            self._spawn(self.disconnect, peer)
        elif peer not in self.connected:
            self._spawn(self._welcome, peer)

    def _left(self, peer: str) -> None:
        """A connection is gone; another to the same peer may be left."""
        if peer in self.connected and not self._network.get_connections(ID.from_base58(peer)):
            del self.connected[peer]
            self._inbox.forget(peer)
            self.streams.forget(peer)
            # Else the library skips identify when it comes back, and goes on dialling an address it may have left.
            self._peerstore.clear_protocol_data(ID.from_base58(peer))
            self._calls.emit(PeerDisconnected(peer))

    async def _welcome(self, peer: str) -> None:
        """Count a peer as connected once it has answered: one that bans us closes instead. Then tell the DHT."""
        peer_id = ID.from_base58(peer)
        took = await self._ping(peer)
        if peer in self.connected or peer in self._banned or not self._network.get_connections(peer_id):
            return
        if took is None:  # it would neither count as connected nor be dialled again as long as the connection stands
            await self.disconnect(peer)
            return
        self.connected[peer] = Connection(self._direction(peer_id), took, self._remote(peer_id))
        self._calls.emit(PeerConnected(peer))
        with trio.move_on_after(10):
            while peer in self.connected and not self._stored_addresses(peer_id):  # noqa: ASYNC110 - identify has no event
                await trio.sleep(0.05)
        self._book.add(peer, self._stored_addresses(peer_id))
        await self._dht.meet(peer_id)
        self._dht_stale.set()

    async def _ping(self, peer: str) -> float | None:
        """Seconds that an answer took; None where none of PINGS came in time: a machine out of breath is late once."""
        took = None
        for _ in range(PINGS):
            if took is None and self._network.get_connections(ID.from_base58(peer)):
                took = await ping(self._host, self._runtime, peer)
        return took

    def _direction(self, peer_id: ID) -> Literal["inbound", "outbound"] | None:
        """Of the oldest connection to a peer."""
        for connection in self._network.get_connections(peer_id):
            if connection.direction in (Direction.INBOUND, Direction.OUTBOUND):
                return "inbound" if connection.direction == Direction.INBOUND else "outbound"
        return None

    def _remote(self, peer_id: ID) -> str:
        """IP address at the other end of a connection to a peer; empty: there is none any more."""
        ends = (connection.muxed_conn.get_remote_address() for connection in self._network.get_connections(peer_id))
        return next((end[0] for end in ends if end), "")

    def _stored_addresses(self, peer_id: ID) -> tuple[Multiaddr, ...]:
        try:
            return tuple(self._peerstore.addrs(peer_id))
        except PeerStoreError:
            return ()

    async def connect(self, multiaddr: str) -> str:
        """Dial; see Transport.connect. The caller holds the deadline."""
        address, peer = parse(multiaddr)
        if peer in self._banned:
            raise PeerUnreachable(f"{peer} is banned here")
        if peer in self.connected:
            return peer
        peer_id = ID.from_base58(peer)
        known = [address] if address is not None else [*self._stored_addresses(peer_id), *self._book.get(peer)]
        if address is not None:
            self._dialling.give(address)
        else:
            known = await self._dialling.dialled(known)
            known = known or await self._dialling.dialled(await self._dht.addresses_of(peer_id))
        candidates = list(dict.fromkeys(without_peer(candidate) for candidate in known))
        failure: BaseLibp2pError | None = None
        # One at a time: of several TCP addresses the library would only dial the first.
        for candidate in candidates[:ADDRESSES_PER_PEER]:
            self._peerstore.clear_addrs(peer_id)
            self._peerstore.add_addrs(peer_id, [candidate], ADDRESS_SECONDS)
            self._network.unblock_peer(peer_id)
            try:
                await self._host.connect(PeerInfo(peer_id, [candidate]))
            except BaseLibp2pError as error:
                failure = error
                continue
            while peer not in self.connected:
                if not self._network.get_connections(peer_id):
                    raise PeerUnreachable(f"{peer} closed the connection: it may be full or refuse this node")
                await trio.sleep(0.002)
            self._book.add(peer, (candidate,))
            if address is not None:  # its owner gave it, maybe by a name
                self._dialling.known.include(self._remote(peer_id))
            return peer
        if candidates:
            self._peerstore.add_addrs(peer_id, candidates, ADDRESS_SECONDS)
        reason = f"none of its {len(candidates)} addresses answers" if candidates else "no address of it is known"
        raise PeerUnreachable(f"cannot reach {multiaddr}: {reason}") from failure

    async def disconnect(self, peer: str) -> None:
        """Close all connections to a peer: in good order, or after CLOSE_SECONDS without a word."""
        peer_id = ID.from_base58(peer)

        async def hang_up(connections: list[INetConn]) -> None:
            # Yamux says goodbye first, and to a peer that vanished that can wait until TCP gives up, in a quarter of
            # an hour. Without its socket the close goes on; cancelled, it would leave the socket, and never be done.
            await trio.sleep(CLOSE_SECONDS)
            for connection in connections:
                try:
                    await connection.muxed_conn.secured_conn.close()
                except STREAM_ERRORS as error:
                    log.debug("hanging up on %s: %r", peer, error)

        with trio.move_on_after(3 * CLOSE_SECONDS):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(hang_up, self._network.get_connections(peer_id))
                await self._network.close_peer(peer_id)
                nursery.cancel_scope.cancel()
        self._left(peer)

    async def close_connections(self) -> None:
        """Say goodbye to all peers at once, so that they need not find out."""
        async with trio.open_nursery() as nursery:
            for peer in tuple(self.connected):
                nursery.start_soon(self._contained, self.disconnect, peer)

    def ban(self, peer: str) -> None:
        self._banned.add(peer)
        self._dht.drop(ID.from_base58(peer))
        self._book.forget(peer)
        self._spawn(self.disconnect, peer)

    def lift_ban(self, peer: str) -> None:
        self._banned.lift(peer)

    async def _keep_alive(self) -> None:
        async def check(peer: str) -> None:
            took = await self._ping(peer)
            if peer not in self.connected:
                return
            if took is None:
                await self.disconnect(peer)
            else:
                peer_id = ID.from_base58(peer)
                self.connected[peer] = Connection(self._direction(peer_id), took, self._remote(peer_id))

        while True:
            await trio.sleep(PING_INTERVAL)
            async with trio.open_nursery() as nursery:
                for peer in tuple(self.connected):
                    nursery.start_soon(self._contained, check, peer)

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
        return max(1, min(len(self.connected), MESH_DEGREE))

    async def publish(self, topic: str, data: bytes) -> None:
        try:
            self._publish_send.send_nowait((topic, data))
        except trio.WouldBlock:
            self.dropped_publishes += 1

    async def _publish_paced(self) -> None:
        async for topic, data in self._publish_receive:
            await self._contained(self._pubsub.publish, topic, data)
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
        if peer not in self.connected:
            await self.connect(f"/p2p/{peer}")
        await self.streams.request(peer, protocol, data, max_bytes, arrived)

    async def _close_idle_streams(self) -> None:
        while True:
            await trio.sleep(IDLE_SECONDS)
            await self._contained(self.streams.close_idle)

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
                await self._contained(self._dht.refresh)
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
                    nursery.start_soon(self._contained, ask, holder)
        return tuple(peer for peer, _ in named.most_common() if peer != self.peer_id and peer not in self._banned)
