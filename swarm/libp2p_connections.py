"""The libp2p host's connections: who dials, who counts as connected, and who is given up.

In trio, as the host is (swarm.libp2p_host, whose docstring says what py-libp2p needs).
"""

import logging
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from typing import Literal

import trio
from libp2p.abc import IHost, INetConn
from libp2p.exceptions import BaseLibp2pError
from libp2p.peer.id import ID
from libp2p.peer.peerinfo import PeerInfo
from libp2p.peer.peerstore import PeerStoreError
from libp2p.rcmgr import Direction
from multiaddr import Multiaddr

from swarm.libp2p_addresses import ADDRESSES_PER_PEER, AddressBook, parse, without_peer
from swarm.libp2p_bans import Bans
from swarm.libp2p_dht import Dht
from swarm.libp2p_dialling import DialGate
from swarm.libp2p_ping import ping
from swarm.libp2p_streams import Runtime
from swarm.transport import Connection, Event, NoAddress, PeerConnected, PeerDisconnected, PeerUnreachable

PING_INTERVAL = 15.0
"""A peer that vanished without closing its connection is given up after this long and the deadlines of its PINGS."""
PINGS = 2
"""In a row, before a peer that answers none is parted from."""
ADDRESS_SECONDS = 24 * 3600
CLOSE_SECONDS = 1.0
"""For a stream or a connection to be closed in good order."""
RESOLVE_SECONDS = 3.0

log = logging.getLogger(__name__)


async def contained(work: Callable[..., Awaitable[None]], *arguments: object) -> None:
    """Whatever the library raises over one peer must not end the host for all of them."""
    try:
        await work(*arguments)
    except Exception:
        log.exception("%s%r failed", work.__name__, arguments)


async def resolve(name: str) -> list[str]:
    """Its IP addresses, as of now."""
    with trio.move_on_after(RESOLVE_SECONDS), suppress(OSError):  # no such host
        entries = await trio.socket.getaddrinfo(name, None, type=trio.socket.SOCK_STREAM)
        return [where[0] for *_, where in entries if "%" not in where[0]]
    return []


class Connections:
    """Which peers are connected, and every way in which that changes. `connected` may be read from any thread."""

    def __init__(
        self,
        host: IHost,
        runtime: Runtime,
        dht: Dht,
        banned: Bans,
        listen: Iterable[str],
        *,
        emit: Callable[[Event], None],
        spawn: Callable[..., None],
        met: Callable[[], None],
        forget: Callable[[str], None],
    ) -> None:
        """`spawn`: begin work (a coroutine function and its arguments) that the caller does not wait for. `met`: a new
        peer is in the DHT's routing table. `forget`: a peer is gone, before it is said so.
        """
        self._host = host
        self._network = host.get_network()
        self._peerstore = host.get_peerstore()
        self._runtime = runtime
        self._dht = dht
        self._banned = banned
        self._emit = emit
        self._spawn = spawn
        self._met = met
        self._forget = forget
        self._dialling = DialGate(self._network, listen, resolve)
        self._book = AddressBook()
        self.connected: dict[str, Connection] = {}

    def joined(self, peer: str) -> None:
        """There is a connection, and Noise has proven its peer id."""
        if peer in self._banned:
            self._spawn(self.disconnect, peer)
        elif peer not in self.connected:
            self._spawn(self._welcome, peer)

    def left(self, peer: str) -> None:
        """A connection is gone; another to the same peer may be left."""
        if peer in self.connected and not self._network.get_connections(ID.from_base58(peer)):
            del self.connected[peer]
            self._forget(peer)
            # Else the library skips identify when it comes back, and goes on dialling an address it may have left.
            self._peerstore.clear_protocol_data(ID.from_base58(peer))
            self._emit(PeerDisconnected(peer))

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
        self._emit(PeerConnected(peer))
        with trio.move_on_after(10):
            while peer in self.connected and not self._stored_addresses(peer_id):  # noqa: ASYNC110 - identify has no event
                await trio.sleep(0.05)
        self._book.add(peer, self._stored_addresses(peer_id))
        await self._dht.meet(peer_id)
        self._met()

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
        if not candidates:
            raise NoAddress(f"cannot reach {multiaddr}: no address of it is known")
        self._peerstore.add_addrs(peer_id, candidates, ADDRESS_SECONDS)
        raise PeerUnreachable(f"cannot reach {multiaddr}: none of its {len(candidates)} addresses answers") from failure

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
                except self._runtime.errors as error:
                    log.debug("hanging up on %s: %r", peer, error)

        with trio.move_on_after(3 * CLOSE_SECONDS):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(hang_up, self._network.get_connections(peer_id))
                await self._network.close_peer(peer_id)
                nursery.cancel_scope.cancel()
        self.left(peer)

    async def close_all(self) -> None:
        """Say goodbye to all peers at once, so that they need not find out."""
        async with trio.open_nursery() as nursery:
            for peer in tuple(self.connected):
                nursery.start_soon(contained, self.disconnect, peer)

    def ban(self, peer: str) -> None:
        self._banned.add(peer)
        self._dht.drop(ID.from_base58(peer))
        self._book.forget(peer)
        self._spawn(self.disconnect, peer)

    def lift_ban(self, peer: str) -> None:
        self._banned.lift(peer)

    async def keep_alive(self) -> None:
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
                    nursery.start_soon(contained, check, peer)
