"""The seam between experience exchange and a network.

Two implementations pass one contract test (tests/swarm/test_*_contract.py): `swarm.memory` (a hub in
this process with seeded latency, loss and partitions) and `swarm.libp2p_transport` (a host in trio, behind
`swarm.bridge`).
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

MAX_STREAMS_PER_PEER = 32
"""Requests of one peer served at a time; one more is reset unread."""
EVENT_LIMIT = 2048
"""Events that wait for the reader before gossip is dropped and counted."""


class TransportError(Exception):
    """The network did not do what was asked: unreachable peer, refused protocol, deadline, oversize answer."""


class PeerUnreachable(TransportError):
    """No connection to the peer could be had."""


class NoAddress(PeerUnreachable):
    """Nobody knows where the peer may be dialled."""


class RequestFailed(TransportError):
    """The stream was opened but the answer did not come whole: refused, reset, timed out or over its cap."""


class AnswerTooLarge(RequestFailed):
    """The answer is over its cap: the asker may have been told a wrong size, so the peer need not be at fault."""


LEAST_WAIT_SECONDS = 0.5


class Busy(RequestFailed):
    """The peer gave us our share for now and asks to wait `seconds`. Nobody's fault. Handlers raise it to say so.

    Askers get LEAST_WAIT_SECONDS at least: a peer that always says `soon` must not be asked at line speed.
    """

    def __init__(self, seconds: float) -> None:
        super().__init__(f"asks to wait {seconds:.1f} s")
        self.seconds = seconds


@dataclass(frozen=True, slots=True)
class PeerConnected:
    peer: str


@dataclass(frozen=True, slots=True)
class PeerDisconnected:
    peer: str


@dataclass(frozen=True, slots=True)
class Message:
    """One gossip message. `forwarder` handed it to us; who made it is for the envelope inside to prove."""

    topic: str
    forwarder: str
    data: bytes


@dataclass(frozen=True, slots=True)
class Connection:
    """What is known of the connection to a peer."""

    direction: Literal["inbound", "outbound"] | None
    """Who dialled: the peer, or this node; None where the library cannot tell."""
    latency: float | None = None
    """Seconds of the last ping's round trip; None where none was made."""
    host: str = ""
    """IP address of the other end; empty where it is not known."""


@dataclass(frozen=True, slots=True)
class OversizeRequest:
    """A peer asked with more bytes than `protocol` takes, and they were not read. No honest peer does so."""

    peer: str
    protocol: str


Event = PeerConnected | PeerDisconnected | Message | OversizeRequest

Handler = Callable[[str, bytes], Awaitable[bytes]]
"""Serves one stream request: (verified peer id, request bytes) -> response bytes.

Raising Busy tells the requester to wait; raising anything else closes the stream.
"""


@dataclass(frozen=True, slots=True)
class TransportStats:
    """Counters since start; drops are events or messages lost to a full bounded queue."""

    bytes_in: int = 0
    bytes_out: int = 0
    messages_in: int = 0
    messages_out: int = 0
    dropped_events: int = 0
    dropped_publishes: int = 0


class Transport(Protocol):
    """A running connection to a swarm. Every method that waits has a deadline of its own or takes one."""

    @property
    def peer_id(self) -> str:
        """Own libp2p peer id."""

    async def start(self) -> None:
        """Listen and begin. Raises TransportError (naming the address) when a port is taken."""

    async def stop(self) -> None:
        """Close every connection and end the background thread. Idempotent."""

    async def failed(self) -> BaseException:
        """Wait until the transport dies by itself and return why; a daemon awaits this beside its services."""

    def addresses(self) -> tuple[str, ...]:
        """Own multiaddrs with `/p2p/<peer id>`, once started."""

    def peers(self) -> tuple[str, ...]:
        """Peers connected now."""

    def connections(self) -> Mapping[str, Connection]:
        """The same peers, with what is known of each connection."""

    async def connect(self, multiaddr: str, *, timeout: float) -> str:
        """Dial a multiaddr ending in `/p2p/<id>` and return that id. Raises PeerUnreachable."""

    async def disconnect(self, peer: str) -> None:
        """Close all connections to a peer; no error when there is none."""

    def ban(self, peer: str) -> None:
        """Refuse this peer from now on: disconnect it, relay nothing of it, do not dial it."""

    def lift_ban(self, peer: str) -> None:
        """Take a ban back; no error when there is none."""

    async def subscribe(self, topic: str, check: Callable[[str, bytes], bool] | None = None) -> None:
        """Join a topic; its messages come as events. `check(forwarder, data)` False: not delivered, not relayed.

        `check` may run in another thread: it must be quick and touch only what is safe to share.
        """

    async def publish(self, topic: str, data: bytes) -> None:
        """Gossip at most 2 KiB, paced by us under the library's spam limit. Best effort: loss is silent."""

    def serve(self, protocol: str, handler: Handler, *, max_request: int) -> None:
        """Answer stream requests on `protocol`; a request over `max_request` bytes closes the stream unread."""

    async def request(
        self, peer: str, protocol: str, data: bytes, *, max_bytes: int, timeout: float, sink: bytearray | None = None
    ) -> bytes:
        """One request, one answer of at most `max_bytes`. Handlers may see a request twice.

        `sink`, when given, is filled as bytes arrive, so that a caller can resume elsewhere after a failure;
        the answer is then `bytes(sink)` as far as this call appended to it. `timeout` (seconds) bounds the
        whole call, so a peer that accepts a stream and says nothing costs at most that.
        Raises PeerUnreachable or RequestFailed, of which Busy says when to ask again.
        """

    def events(self) -> AsyncIterator[Event]:
        """Connections and gossip, in order, from a bounded queue (overflow counted in `stats`). One reader."""

    async def provide(self, key: bytes) -> None:
        """Tell the DHT that this node holds `key` (best effort)."""

    async def find_providers(self, key: bytes, *, timeout: float) -> tuple[str, ...]:
        """Peer ids that hold `key` as far as the DHT knows, likeliest first, without repeats; empty when none
        answered."""

    def stats(self) -> TransportStats: ...
