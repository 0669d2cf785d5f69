"""A swarm inside one process: the `Transport` seam over a hub with seeded latency, loss and partitions.

It behaves as libp2p does where that matters to the code above it: gossip is relayed hop by hop between
connected subscribers and lost silently, events wait in a bounded queue, requests have deadlines, an answer
arrives in chunks and can break in the middle.
"""

import asyncio
import random
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Protocol

from protocol.messages import MAX_ANNOUNCEMENT_BYTES
from swarm.events import EventQueue
from swarm.throttle import Lane, Throttle
from swarm.transport import (
    EVENT_LIMIT,
    LEAST_WAIT_SECONDS,
    MAX_STREAMS_PER_PEER,
    AnswerTooLarge,
    Busy,
    Connection,
    Event,
    Handler,
    Message,
    OversizeRequest,
    PeerConnected,
    PeerDisconnected,
    PeerUnreachable,
    RequestFailed,
    TransportError,
    TransportStats,
)

SEEN_LIMIT = 4096
"""Gossip message numbers a peer remembers, so that it delivers and relays each once."""


class HasPeerId(Protocol):
    @property
    def peer_id(self) -> str: ...


class MemoryHub:
    """The wires. `latency` (seconds, one way, +-50 %) and `loss` (share of gossip hops lost) are drawn from `seed`."""

    def __init__(self, seed: int = 0, latency: float = 0.0, loss: float = 0.0) -> None:
        self._random = random.Random(seed)
        self._latency = latency
        self._loss = loss
        self._running: dict[str, MemoryTransport] = {}
        self._cut: set[frozenset[str]] = set()
        self._providers: dict[bytes, dict[str, None]] = {}
        self._breaks: dict[str, int] = {}
        self._published = 0
        self._made = 0

    def transport(
        self,
        owner: HasPeerId | str,
        *,
        event_limit: int = EVENT_LIMIT,
        throttle: Throttle | None = None,
        host: str = "",
    ) -> "MemoryTransport":
        """A transport for this identity (or peer id), not started. `host`: its IP address; else in a network of its
        own."""
        peer_id = owner if isinstance(owner, str) else owner.peer_id
        self._made += 1
        host = host or f"10.{self._made >> 8 & 255}.{self._made & 255}.1"
        return MemoryTransport(self, peer_id, host, event_limit, throttle or Throttle())

    def partition(self, a: str, b: str) -> None:
        """Cut the wire between two peers: both see a disconnect, and neither can dial the other until `heal`."""
        self._cut.add(frozenset((a, b)))
        if a in self._running:
            self._running[a].unlink(b)

    def heal(self) -> None:
        """Mend every cut wire. Peers have to connect again by themselves."""
        self._cut.clear()

    def break_next_answer(self, peer: str, after: int) -> None:
        """Reset the next answer that `peer` serves once `after` bytes of it have arrived."""
        self._breaks[peer] = after

    def delay(self) -> float:
        return self._latency * self._random.uniform(0.5, 1.5) if self._latency else 0.0

    def lost(self) -> bool:
        return self._loss > 0 and self._random.random() < self._loss

    def reachable(self, a: str, b: str) -> "MemoryTransport | None":
        """The running transport of `b`, when the wire from `a` to it is whole and neither bans the other."""
        there = self._running.get(b)
        if there is None or a == b or frozenset((a, b)) in self._cut or there.refuses(a):
            return None
        return there

    def next_number(self) -> int:
        self._published += 1
        return self._published

    def enter(self, transport: "MemoryTransport") -> None:
        if transport.peer_id in self._running:
            raise TransportError(
                f"{transport.addresses()[0]} is taken: a transport of this peer id already runs; stop it first"
            )
        self._running[transport.peer_id] = transport

    def leave(self, peer: str) -> None:
        self._running.pop(peer, None)
        for holders in self._providers.values():
            holders.pop(peer, None)

    def provide(self, key: bytes, peer: str) -> None:
        self._providers.setdefault(key, {})[peer] = None

    def providers(self, key: bytes, seeker: str) -> tuple[str, ...]:
        """Holders that the seeker could learn of: those it is joined to, over any number of peers."""
        joined, frontier = {seeker}, [seeker]
        while frontier:
            neighbours = set(self._running[frontier.pop()].peers()) - joined
            joined |= neighbours
            frontier.extend(neighbours)
        return tuple(peer for peer in self._providers.get(key, ()) if peer in joined and peer != seeker)

    def take_break(self, peer: str) -> int | None:
        return self._breaks.pop(peer, None)


class MemoryTransport:
    """One peer of a `MemoryHub`; see `swarm.transport.Transport` for what each method promises."""

    def __init__(self, hub: MemoryHub, peer_id: str, host: str, event_limit: int, throttle: Throttle) -> None:
        self._hub, self.host = hub, host
        self._peer_id = peer_id
        self._links: dict[str, MemoryTransport] = {}
        self._dialled: set[str] = set()
        """Of them, those that this peer dialled."""
        self._banned: set[str] = set()
        self._topics: dict[str, Callable[[str, bytes], bool] | None] = {}
        self._handlers: dict[str, tuple[Handler, int]] = {}
        self._streams: Counter[str] = Counter()
        self._serving: set[asyncio.Task[bytes]] = set()
        self._seen: OrderedDict[int, None] = OrderedDict()
        self._event_limit = event_limit
        self._events = EventQueue(event_limit)
        self._running = False
        self._up, self._down = (Lane(way, _now, asyncio.sleep) for way in (throttle.up, throttle.down))
        self._bytes_in = self._bytes_out = self._messages_in = self._messages_out = 0

    @property
    def peer_id(self) -> str:
        return self._peer_id

    async def start(self) -> None:
        self._hub.enter(self)
        self._events = EventQueue(self._event_limit)
        self._running = True

    async def stop(self) -> None:
        if not self._running:
            return
        self._running = False
        for task in tuple(self._serving):
            task.cancel()
        for peer in tuple(self._links):
            self.unlink(peer)
        self._hub.leave(self._peer_id)
        self._events.close()

    async def failed(self) -> BaseException:
        # nothing here runs by itself, so nothing can die by itself
        return await asyncio.get_running_loop().create_future()

    def addresses(self) -> tuple[str, ...]:
        return (f"/memory/{self._peer_id}/p2p/{self._peer_id}",)

    def peers(self) -> tuple[str, ...]:
        return tuple(self._links)

    def connections(self) -> Mapping[str, Connection]:
        return {
            peer: Connection("outbound" if peer in self._dialled else "inbound", host=other.host)
            for peer, other in self._links.items()
        }

    async def connect(self, multiaddr: str, *, timeout: float) -> str:
        _, marker, peer = multiaddr.rpartition("/p2p/")
        if not marker or not peer:
            raise PeerUnreachable(f"{multiaddr!r} names no peer: an address must end in /p2p/<peer id>")
        if peer in self._links:
            return peer
        delay = self._hub.delay()
        await asyncio.sleep(min(delay, timeout))
        there = self._hub.reachable(self._peer_id, peer) if self._running and not self.refuses(peer) else None
        if there is None or delay > timeout:
            raise PeerUnreachable(f"no connection to {multiaddr} within {timeout:g} s")
        self._dialled.add(peer)
        self.link(there)
        return peer

    async def disconnect(self, peer: str) -> None:
        self.unlink(peer)

    def ban(self, peer: str) -> None:
        self._banned.add(peer)
        self.unlink(peer)

    def lift_ban(self, peer: str) -> None:
        self._banned.discard(peer)

    async def subscribe(self, topic: str, check: Callable[[str, bytes], bool] | None = None) -> None:
        self._topics[topic] = check

    async def publish(self, topic: str, data: bytes) -> None:
        if len(data) > MAX_ANNOUNCEMENT_BYTES:
            raise TransportError(
                f"message of {len(data)} bytes on {topic!r} is over the limit of {MAX_ANNOUNCEMENT_BYTES}"
            )
        if not self._running:
            raise TransportError("the transport is not running: start it before publishing")
        number = self._hub.next_number()
        self._remember(number)
        self._messages_out += 1
        self._relay(number, self._peer_id, topic, data, but_not="")

    def serve(self, protocol: str, handler: Handler, *, max_request: int) -> None:
        self._handlers[protocol] = (handler, max_request)

    async def request(
        self, peer: str, protocol: str, data: bytes, *, max_bytes: int, timeout: float, sink: bytearray | None = None
    ) -> bytes:
        arrived = bytearray() if sink is None else sink
        begin = len(arrived)
        try:
            async with asyncio.timeout(timeout):
                there = self._links.get(peer)
                if there is None:
                    await self.connect(f"/p2p/{peer}", timeout=timeout)
                    there = self._links[peer]
                await asyncio.sleep(self._hub.delay())
                self._down.check()
                self._bytes_out += len(data)
                await self._up.passed(len(data))
                answer = await there.answer(self._peer_id, protocol, data)
                if len(answer) > max_bytes:
                    raise AnswerTooLarge(
                        f"{peer} answers {protocol} with {len(answer)} bytes, over the cap {max_bytes}"
                    )
                with there._up.answering(len(answer)):
                    await self._receive(there, answer, arrived)
        except TimeoutError:
            raise RequestFailed(f"{peer} did not answer {protocol} within {timeout:g} s") from None
        return bytes(arrived[begin:])

    async def _receive(self, there: "MemoryTransport", answer: bytes, arrived: bytearray) -> None:
        broken_after = self._hub.take_break(there.peer_id)
        piece = min(there._up.piece, self._down.piece)
        for offset in range(0, len(answer), piece):
            await asyncio.sleep(self._hub.delay())
            if there.peer_id not in self._links:
                raise RequestFailed(f"stream to {there.peer_id} was reset after {offset} of {len(answer)} bytes")
            end = min(offset + piece, len(answer))
            cut = end if broken_after is None else min(end, broken_after)
            arrived += answer[offset:cut]
            self._bytes_in += cut - offset
            there._bytes_out += cut - offset
            await there._up.passed(cut - offset)
            await self._down.passed(cut - offset)
            if cut < end:
                raise RequestFailed(f"stream to {there.peer_id} was reset after {cut} of {len(answer)} bytes")

    def events(self) -> AsyncIterator[Event]:
        return self._events

    async def provide(self, key: bytes) -> None:
        self._hub.provide(key, self._peer_id)

    async def find_providers(self, key: bytes, *, timeout: float) -> tuple[str, ...]:
        if not self._running:
            return ()
        await asyncio.sleep(min(self._hub.delay(), timeout))
        return self._hub.providers(key, self._peer_id)

    def stats(self) -> TransportStats:
        return TransportStats(
            bytes_in=self._bytes_in,
            bytes_out=self._bytes_out,
            messages_in=self._messages_in,
            messages_out=self._messages_out,
            dropped_events=self._events.dropped,
        )

    # What the hub and the other end call.

    def refuses(self, peer: str) -> bool:
        return peer in self._banned

    def link(self, there: "MemoryTransport") -> None:
        """Join two ends; both see the connection."""
        for here, other in ((self, there), (there, self)):
            if other.peer_id not in here._links:
                here._links[other.peer_id] = other
                here._events.put(PeerConnected(other.peer_id))

    def unlink(self, peer: str) -> None:
        """Part two ends; both see it. No error when they are not joined."""
        self._dialled.discard(peer)
        there = self._links.pop(peer, None)
        if there is not None:
            self._events.put(PeerDisconnected(peer))
            there.unlink(self._peer_id)

    async def answer(self, peer: str, protocol: str, data: bytes) -> bytes:
        """Serve one request of `peer`. Raises Busy as libp2p would, RequestFailed where it would reset the stream."""
        if protocol not in self._handlers:
            raise RequestFailed(f"{self._peer_id} does not serve {protocol}")
        handler, max_request = self._handlers[protocol]
        if len(data) > max_request:
            self._events.put(OversizeRequest(peer, protocol))
            raise RequestFailed(f"request of {len(data)} bytes on {protocol} is over the cap {max_request}")
        if self._streams[peer] >= MAX_STREAMS_PER_PEER:
            raise RequestFailed(f"{self._peer_id} serves {peer} on {MAX_STREAMS_PER_PEER} streams already")
        self._bytes_in += len(data)
        await self._down.passed(len(data))
        self._up.check()
        self._streams[peer] += 1
        task = asyncio.ensure_future(handler(peer, data))
        self._serving.add(task)
        try:
            await asyncio.wait({task})
            error = None if task.cancelled() else task.exception()
            if isinstance(error, Busy):
                raise Busy(max(error.seconds, LEAST_WAIT_SECONDS))
            if task.cancelled() or error is not None:
                raise RequestFailed(f"{self._peer_id} reset the stream of {protocol}") from error
            return task.result()
        finally:
            task.cancel()
            self._serving.discard(task)
            self._streams[peer] -= 1

    def deliver(self, number: int, origin: str, forwarder: str, topic: str, data: bytes) -> None:
        """One gossip hop has arrived: check, hand on as an event, relay."""
        if forwarder not in self._links or origin in self._banned or number in self._seen or topic not in self._topics:
            return
        self._remember(number)
        check = self._topics[topic]
        if check is not None and not check(forwarder, data):
            return
        self._messages_in += 1
        self._bytes_in += len(data)
        self._down.gossiped(len(data))
        self._events.put(Message(topic, forwarder, data))
        self._relay(number, origin, topic, data, but_not=forwarder)

    def _relay(self, number: int, origin: str, topic: str, data: bytes, *, but_not: str) -> None:
        loop = asyncio.get_running_loop()
        for peer, there in self._links.items():
            if peer in (but_not, origin) or topic not in there._topics:
                continue
            self._bytes_out += len(data)
            self._up.gossiped(len(data))
            if not self._hub.lost():
                loop.call_later(self._hub.delay(), there.deliver, number, origin, self._peer_id, topic, data)

    def _remember(self, number: int) -> None:
        self._seen[number] = None
        if len(self._seen) > SEEN_LIMIT:
            self._seen.popitem(last=False)


def _now() -> float:
    return asyncio.get_running_loop().time()
