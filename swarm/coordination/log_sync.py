"""Keeps the coordinators' log in step with the network: hears records by gossip, pulls what is missing, serves it all.

The proof of a fault is passed on. Without a coordinator to follow, a node goes on by the clock's epochs as it does
without any.
"""

import asyncio
import hashlib
import random
from collections import deque
from collections.abc import Callable

import msgspec

from protocol.board import Board, MemberList, read_list
from protocol.messages import (
    LISTS_PROTOCOL,
    MAX_ANNOUNCEMENT_BYTES,
    MAX_LIST_BYTES,
    MAX_PROOFS,
    MAX_REQUEST_BYTES,
    MAX_ROUNDS,
    ROUNDS_PROTOCOL,
    ListRequest,
    RoundsRequest,
    RoundsResponse,
    rounds_topic,
)
from protocol.rejection import Reason, Rejected
from swarm.allowance import Allowance
from swarm.coordination.chain import Chain
from swarm.database import StoreError
from swarm.gate import JUDGED_ALIKE
from swarm.requests import charge, decoded
from swarm.transport import Transport, TransportError

SYNC_SECONDS = 30.0
ASKERS = 2
"""The first one asks coordinators only: peers that never answer must not keep a standby from its leader."""
MAX_WAITING = 256
"""Peers to ask; coordinators besides."""
MAX_ANSWER_BYTES = (MAX_ROUNDS + 2 * MAX_PROOFS) * (MAX_ANNOUNCEMENT_BYTES + 8) + 64
SYNC_ROUNDS = 8
"""Answers taken from one peer at a time."""
GOSSIP_RATE, GOSSIP_BURST = 8.0, 64.0
"""Records a second taken from one forwarder, and at once after a silence."""
ANSWER_RATE, ANSWER_BURST = 256 * 1024.0, 4 * 1024 * 1024.0
"""Bytes that one peer is answered with, in the long run and at once: a few boards of the largest swarm."""
LIST_TRIES = 4


class LogSync:
    """Of one swarm's log. `run` until cancelled; `hear` and `met` are called by who reads the transport's events."""

    def __init__(
        self,
        transport: Transport,
        chain: Chain,
        clock: Callable[[], float],
        *,
        request_timeout: float = 20.0,
        sync_seconds: float = SYNC_SECONDS,
        seed: int = 0,
        on_event: Callable[[str, str], None] = lambda kind, message: None,
    ) -> None:
        self.chain, self._manifest, self._transport = chain, chain.manifest, transport
        self._timeout, self._sync_seconds, self._on_event = request_timeout, sync_seconds, on_event
        self._random = random.Random(f"{seed}{transport.peer_id}")
        self._gossip = Allowance(GOSSIP_RATE, GOSSIP_BURST, clock)
        self._allowance = Allowance(ANSWER_RATE, ANSWER_BURST, clock)
        self._waiting: dict[str, None] = {}
        """Whom to ask."""
        self._wake = asyncio.Event()
        self.on_asked: Callable[[str], None] = lambda peer: None
        """Told of every peer that asks for the log. May raise Busy."""
        self.on_offence: Callable[[Rejected, str], None] = lambda rejected, peer: None
        """Told of what no honest peer sends, and who did. May raise StoreError."""
        self._offences: deque[tuple[Rejected, str]] = deque(maxlen=MAX_WAITING)
        """Of gossip, as the transport's thread found them."""

    # -- hearing ---------------------------------------------------------------------------------------------

    def check(self, forwarder: str, data: bytes) -> bool:
        """For gossip, in the transport's thread: whether to deliver and relay."""
        if not self._gossip.take(forwarder):
            return False
        try:
            return self.chain.may_relay(data)
        except Rejected as rejected:
            if rejected.reason in JUDGED_ALIKE:
                self._offences.append((rejected, forwarder))
            return False

    def hear(self, sealed: bytes, peer: str) -> bool:
        """Take note of a record that a peer told. True when it was valid and new. Raises StoreError."""
        before, new = self.chain.head, self.chain.take(sealed)
        if self.chain.head is not before and self.chain.missing_lists():
            self._soon(peer)
        return new

    # -- asking ----------------------------------------------------------------------------------------------

    def met(self, peer: str) -> None:
        """Ask a new peer as soon as it is its turn."""
        self._soon(peer)

    def _soon(self, peer: str) -> None:
        if peer == self._transport.peer_id:
            return
        if peer in self._manifest.coordinators or len(self._waiting) < MAX_WAITING:
            self._waiting[peer] = None
            self._wake.set()

    async def run(self) -> None:
        """Follow until cancelled. Whoever reads the transport's events hands them on."""
        await self._transport.subscribe(rounds_topic(self._manifest.digest), self.check)
        for peer in self._transport.peers():
            self._soon(peer)
        async with asyncio.TaskGroup() as tasks:
            for i in range(ASKERS):
                tasks.create_task(self._ask_waiting(coordinators_only=i == 0), name=f"rounds: ask {i}")
            tasks.create_task(self._remind(), name="rounds: remind")

    async def _remind(self) -> None:
        """The leader is asked from time to time, and one other peer: what gossip lost, and whether it is there."""
        while True:
            await asyncio.sleep(self._sync_seconds * self._random.uniform(0.75, 1.25))
            self._tell_offences()
            if self.chain.leader is not None:
                self._soon(self.chain.leader)
            if peers := self._transport.peers():
                self._soon(self._random.choice(peers))

    def _tell_offences(self) -> None:
        try:
            while self._offences:
                self.on_offence(*self._offences.popleft())
        except StoreError as error:
            self._on_event("store", str(error))

    def _next(self, *, coordinators_only: bool) -> str | None:
        """Whom to ask: the leader first, since a standby must not take its own slowness for the leader's silence."""
        if self.chain.leader in self._waiting:
            return self.chain.leader
        others = (one for one in self._waiting if one in self._manifest.coordinators)
        return next(others, None if coordinators_only else next(iter(self._waiting), None))

    async def _ask_waiting(self, *, coordinators_only: bool) -> None:
        while True:
            peer = self._next(coordinators_only=coordinators_only)
            if peer is None:
                self._wake.clear()
                await self._wake.wait()
                continue
            del self._waiting[peer]
            try:
                await self.ask(peer)
            except TransportError:
                continue  # it left, or is busy; there are others, and another time
            except StoreError as error:
                self._on_event("store", str(error))

    async def ask(self, peer: str) -> None:
        """Bring the log up to what this peer has. Raises TransportError, StoreError."""
        for _ in range(SYNC_ROUNDS):
            request = RoundsRequest(self._manifest.digest, self.chain.head.digest if self.chain.head else b"")
            raw = await self._transport.request(
                peer,
                ROUNDS_PROTOCOL,
                msgspec.msgpack.encode(request),
                max_bytes=MAX_ANSWER_BYTES,
                timeout=self._timeout,
            )
            try:
                answer = msgspec.msgpack.decode(raw, type=RoundsResponse)
            except (msgspec.DecodeError, RecursionError) as error:
                self.on_offence(Rejected(Reason.malformed, f"RoundsResponse: {error}"), peer)
                return
            self.chain.note_heard(peer)
            for sealed in answer.proofs:
                self.hear(sealed, peer)
            new = [self.hear(sealed, peer) for sealed in answer.records]
            if not any(new) or len(new) < MAX_ROUNDS:
                break
        for digest, kind in self.chain.missing_lists():
            await self._pull_list(digest, kind, peer)

    async def _pull_list(self, digest: bytes, kind: type[MemberList] | type[Board], peer: str) -> None:
        """A list from this peer, else from the leader or another one."""
        others = self._random.sample(self._transport.peers(), min(LIST_TRIES, len(self._transport.peers())))
        for holder in dict.fromkeys((peer, *([self.chain.leader] if self.chain.leader else []), *others)):
            try:
                body = await self._transport.request(
                    holder,
                    LISTS_PROTOCOL,
                    msgspec.msgpack.encode(ListRequest(digest)),
                    max_bytes=MAX_LIST_BYTES,
                    timeout=self._timeout,
                )
            except TransportError:
                continue
            if hashlib.sha256(body).digest() == digest:
                try:
                    read_list(body, kind, self._manifest.digest)
                except Rejected as rejected:  # the coordinator signed the digest of what is no list
                    self._on_event(
                        "coordinator_fault", f"{self.chain.leader}: a list that cannot be read: {rejected.detail}"
                    )
                else:
                    self.chain.keep_list(digest, body)
                return

    # -- serving ---------------------------------------------------------------------------------------------

    def serve_on(self, transport: Transport) -> None:
        transport.serve(ROUNDS_PROTOCOL, self._answer_rounds, max_request=MAX_REQUEST_BYTES)
        transport.serve(LISTS_PROTOCOL, self._answer_list, max_request=MAX_REQUEST_BYTES)

    async def _answer_rounds(self, peer: str, data: bytes) -> bytes:
        charge(self._allowance, peer)
        request = decoded(data, RoundsRequest, peer, self.on_offence)
        if request.swarm != self._manifest.digest:
            raise Rejected(Reason.wrong_swarm, f"asked about swarm {request.swarm.hex()[:12]}")
        self.on_asked(peer)
        proofs = [sealed for fault in self.chain.faults.values() for sealed in (fault.first, fault.second) if sealed]
        records = self.chain.log.after(request.after, MAX_ROUNDS)
        return self._counted(peer, msgspec.msgpack.encode(RoundsResponse(tuple(records), tuple(proofs))))

    async def _answer_list(self, peer: str, data: bytes) -> bytes:
        charge(self._allowance, peer)
        request = decoded(data, ListRequest, peer, self.on_offence)
        return self._counted(peer, self.chain.log.list_body(request.digest) or b"")

    def _counted(self, peer: str, answer: bytes) -> bytes:
        self._allowance.spend(peer, len(answer))
        return answer

    # -- signing (coordinator.py) ----------------------------------------------------------------------------

    async def publish(self, sealed: bytes) -> None:
        """Keep an own record, then gossip it. Raises StoreError; a network that does not take it is no error."""
        if not self.hear(sealed, self._transport.peer_id):
            raise StoreError("an own record does not fit the log")
        try:
            async with asyncio.timeout(self._timeout):
                await self._transport.publish(rounds_topic(self._manifest.digest), sealed)
        except (TransportError, TimeoutError):
            return  # members ask for it
