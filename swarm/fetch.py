"""Pulls bytes by their hash: a group's body, resumed elsewhere when a stream breaks, or a swarm's manifest."""

import hashlib
import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence

import msgspec

from protocol.messages import (
    BATCH_PROTOCOL,
    GROUPS_PROTOCOL,
    MANIFEST_PROTOCOL,
    MAX_MANIFEST_BYTES,
    BatchRequest,
    ManifestRequest,
)
from swarm.newest import remember
from swarm.transport import AnswerTooLarge, Busy, Transport, TransportError

MAX_REQUESTS = 6
"""Requests for one group before it is given up for now."""
NEIGHBOURS = 2
"""Connected peers asked, besides those that should hold a group."""
SHUN_SECONDS = 60.0
"""A holder that failed is asked last for this long, so that a dead one costs few deadlines."""
SLOW = 4
"""A holder that takes more than one in so many parts of its deadline counts as failed, though it gave the bytes: it
could hold up everything for long at no cost."""
MAX_SHUNNED = 1024


class FetchFailed(Exception):
    """Nobody gave the bytes that were asked for; the message says what each peer did instead."""


class HoldersBusy(FetchFailed):
    """Nobody gave them now, but a holder may after `seconds`."""

    def __init__(self, message: str, seconds: float) -> None:
        super().__init__(message)
        self.seconds = seconds


class Fetcher:
    """Pulls group bodies, or what else `protocol` names by its hash. `on_mismatch(peer, bytes)` is told of a peer that
    alone sent bytes of another hash."""

    def __init__(
        self,
        transport: Transport,
        clock: Callable[[], float],
        *,
        request_timeout: float,
        on_mismatch: Callable[[str, bytes], None],
        protocol: str = GROUPS_PROTOCOL,
    ) -> None:
        self._transport, self._clock, self._timeout, self._protocol = transport, clock, request_timeout, protocol
        self._on_mismatch = on_mismatch
        self._failed_at: dict[str, float] = {}
        self._busy_until: dict[str, float] = {}

    async def fetch(self, digest: bytes, size: int, first: Sequence[str], *, key: bytes | None = None) -> bytes:
        """The `size` bytes whose SHA-256 is `digest`.

        Asks `first` in order, then a few connected peers, then whoever the DHT knows to hold them (under `key`, where
        that is not their own digest), each for what is still missing. Raises FetchFailed, after at most MAX_REQUESTS
        deadlines; HoldersBusy when one asked to wait.
        """
        # by rendezvous hash, so that not every node asks the same neighbours
        others = sorted(
            set(self._transport.peers()).difference(first),
            key=lambda peer: hashlib.sha256(digest + peer.encode()).digest(),
        )
        holders = deque(self._unshunned_first(dict.fromkeys((*first, *others[:NEIGHBOURS]))))
        asked_dht, mixed, problems, waits = False, False, [], list[float]()
        sink, senders = bytearray(), set[str]()
        for _ in range(MAX_REQUESTS):
            if not holders and not asked_dht and not waits:  # who asks to wait has it
                asked_dht = True
                providers = await self._transport.find_providers(key or digest, timeout=self._timeout)
                holders.extend(peer for peer in providers if peer not in first)
            if not holders:
                break
            peer = holders.popleft()
            if peer == self._transport.peer_id:
                continue
            asked = self._clock()
            problem = await self._ask(peer, digest, size, sink, senders)
            if self._clock() - asked > self._timeout / SLOW:
                self._shun(peer)
            if wait := self.wait(peer):
                waits.append(wait)
            if problem:
                problems.append(f"{peer[-8:]}: {problem}")
            if len(sink) < size:
                if problem and peer in senders:  # it broke off, but it had the body
                    holders.append(peer)
                if mixed:
                    sink, senders = bytearray(), set()
                continue
            body = bytes(sink)
            if len(body) == size and hashlib.sha256(body).digest() == digest:
                return body
            if senders == {peer}:
                problems.append(f"{peer[-8:]}: bytes of another hash")
                self._shun(peer)
                self._on_mismatch(peer, body)
            else:  # one of several sent rubbish: from now on each is asked for the whole
                mixed = True
                holders.extendleft(sorted(senders - {peer}))
                holders.appendleft(peer)
            sink, senders = bytearray(), set()
        message = "; ".join(problems) or "no peer to ask"
        if waits:
            raise HoldersBusy(message, min(waits))
        raise FetchFailed(message)

    async def fetch_batch(self, peer: str, wanted: Sequence[tuple[bytes, int]]) -> dict[bytes, bytes]:
        """Bodies by digest of those (digest, size) that `peer` gave over one stream; `fetch` is for the rest.

        A body of another size than announced shifts all after it, so nobody is blamed for a mismatch here.
        """
        sink = bytearray()
        try:
            await self._transport.request(
                peer,
                BATCH_PROTOCOL,
                msgspec.msgpack.encode(BatchRequest(tuple(digest for digest, _ in wanted))),
                max_bytes=sum(size for _, size in wanted),
                timeout=self._timeout,
                sink=sink,
            )
        except AnswerTooLarge:
            pass  # what was announced may be wrong: `fetch` finds out which
        except Busy as busy:
            self._let_wait(peer, busy.seconds)
        except TransportError:
            self._shun(peer)
        bodies, offset = {}, 0
        for digest, size in wanted:
            body = bytes(sink[offset : offset + size])
            if hashlib.sha256(body).digest() == digest:
                bodies[digest] = body
            offset += size
        return bodies

    async def _ask(self, peer: str, digest: bytes, size: int, sink: bytearray, senders: set[str]) -> str:
        """One request for what is missing, into `sink`; what went wrong, or ''."""
        if wait := self.wait(peer):
            return f"asked to wait, {wait:.1f} s more"
        offset, problem = len(sink), ""
        request = msgspec.msgpack.encode((digest, offset))  # GroupRequest, PieceRequest
        try:
            await self._transport.request(
                peer, self._protocol, request, max_bytes=size - offset, timeout=self._timeout, sink=sink
            )
        except Busy as busy:
            problem = str(busy)
            self._let_wait(peer, busy.seconds)
        except TransportError as error:
            problem = str(error) or type(error).__name__
            if not isinstance(error, AnswerTooLarge):  # a lie about a group's size must not discredit its holders
                self._shun(peer)
        if len(sink) > offset:
            senders.add(peer)
        elif not problem:
            problem = "not held"
        return problem

    def _shun(self, peer: str) -> None:
        remember(self._failed_at, peer, self._clock(), MAX_SHUNNED)

    def _let_wait(self, peer: str, seconds: float) -> None:
        remember(self._busy_until, peer, self._clock() + seconds, MAX_SHUNNED)

    def wait(self, peer: str) -> float:
        """Seconds that the peer asked to wait and that are not over; 0: ask."""
        return max(0.0, self._busy_until.get(peer, -math.inf) - self._clock())

    def shunned(self, peer: str) -> bool:
        """Whether the peer failed lately."""
        return self._clock() - self._failed_at.get(peer, -math.inf) < SHUN_SECONDS

    def _unshunned_first(self, peers: Iterable[str]) -> list[str]:
        return sorted(peers, key=lambda peer: self.shunned(peer) or self.wait(peer) > 0)


async def fetch_manifest(transport: Transport, digest: bytes, peers: Sequence[str], timeout: float) -> bytes:
    """The manifest's bytes from the first of `peers` (ids, connected) that has it; `timeout` (s) is for each.

    Raises FetchFailed, naming what each peer did.
    """
    problems = []
    for peer in peers:
        try:
            raw = await transport.request(
                peer,
                MANIFEST_PROTOCOL,
                msgspec.msgpack.encode(ManifestRequest(digest)),
                max_bytes=MAX_MANIFEST_BYTES,
                timeout=timeout,
            )
        except TransportError as error:
            problems.append(f"{peer[-8:]}: {error}")
            continue
        if hashlib.sha256(raw).digest() == digest:
            return raw
        problems.append(f"{peer[-8:]}: {'bytes of another hash' if raw else 'not held'}")
    raise FetchFailed(f"nobody has the manifest {digest.hex()[:12]}: {'; '.join(problems) or 'no peer to ask'}")
