"""Follows a leader's policy: learns of new versions, and pulls what leads to the newest one for the fewest bytes.

The leader is asked for its head from time to time; when it does not answer, whoever else follows it is, because a
head is signed. Records and pieces are named by their hashes and come from several holders at once; what has come
stays, so a pull goes on where it was, in this process or the next. What the pieces are is for node/federation to say.
"""

import asyncio
import contextlib
import hashlib
import math
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import msgspec

from protocol.identity import public_key_of
from protocol.policy import (
    MAX_HEAD_BYTES,
    PIECES_PROTOCOL,
    POLICY_PROTOCOL,
    KnownHead,
    PolicyItem,
    PolicyRecord,
    PolicyRequest,
    check_head,
    check_record,
    is_newer,
    leads,
    rendezvous,
    way_to,
)
from protocol.rejection import Reason, Rejected
from swarm.accounts import Accounts
from swarm.database import StoreError
from swarm.fetch import Fetcher, FetchFailed, HoldersBusy
from swarm.policies import PolicyStore
from swarm.transport import Busy, Transport, TransportError

AT_ONCE = 4
"""Pieces pulled at a time."""
LOOKUP_SECONDS = 60.0
"""Between two look-ups of others that hold this policy."""
PROVIDE_SECONDS = 600.0
ASKED_BESIDES = 3
"""Peers asked for the head when the leader does not answer."""
MAX_HOLDERS = 16
GIVE_UP_ATTEMPTS = 8
"""Times that holders of a piece may ask to wait, or fail, before the pull begins anew with the next head."""


_NOBODYS_FAULT = {Reason.stale, Reason.from_future}
"""Of who gives such a head: followers keep that of a leader that is gone, which says what their pieces are, and clocks
differ."""


class NoWay(Exception):
    """The newest version cannot be had; the message says why, and what to do."""


@dataclass(frozen=True, slots=True)
class Pulled:
    """What leads from the weights that were there to the newest version, every piece of it in the store."""

    records: tuple[PolicyRecord, ...]
    """To be applied in order; the first may be a whole."""
    seconds: float
    bytes_in: int
    """That had to be pulled for it."""
    signed: int
    """When the leader signed for it, unix seconds of its clock."""

    @property
    def version(self) -> int:
        return self.records[-1].version


Arrived = Callable[[Pulled], Awaitable[None]]
MayTake = Callable[[Sequence[PolicyRecord], int | None], Awaitable[None]]
"""Awaited with what is to be pulled and its bytes that are not here yet, and again, with None, before each piece and
before `arrived`: returns once this may go on, however long that is. Raises NoWay where there is no room."""


class PolicyPuller:
    """A service: `run` until cancelled.

    `arrived` is awaited with what leads to a newer version: it sets `have`, or calls `refuse`. It may raise OSError.
    """

    def __init__(
        self,
        transport: Transport,
        store: PolicyStore,
        accounts: Accounts,
        clock: Callable[[], float],
        *,
        leader: str,
        swarm: bytes,
        model: str,
        dtype: str,
        max_bytes: int,
        request_timeout: float,
        poll_seconds: float,
        arrived: Arrived,
        may_take: MayTake,
    ) -> None:
        """`leader`: its peer id; `model`: mark of the own base model; `max_bytes`: of all that one version takes."""
        self._transport, self._store, self._accounts, self._clock = transport, store, accounts, clock
        self.leader, self._swarm, self._model, self._dtype = leader, swarm, model, dtype
        self._max_bytes, self._timeout, self._poll = max_bytes, request_timeout, poll_seconds
        self._arrived, self._may_take = arrived, may_take
        self._fetcher = Fetcher(
            transport,
            clock,
            request_timeout=request_timeout,
            on_mismatch=self._mismatch,
            protocol=PIECES_PROTOCOL,
        )
        self._random = random.Random(transport.peer_id)
        self._key = rendezvous(swarm, leader)
        self._holders: tuple[str, ...] = ()
        self._looked_at = -math.inf
        self._holds_some = asyncio.Event()
        self._refused: set[bytes] = set()
        """Records that led to other weights than they said; only of the present head."""
        self._untidy = True
        """Whether pieces may be here that nobody needs: of an earlier process, of a head that was replaced, refused."""
        self.known: KnownHead | None = None
        self.have: tuple[int, bytes] | None = None
        """Version and state of the weights to start from; None: there are none."""
        self.up_to_date = False
        """Whether `have` was the newest version at the last look."""
        self.answered_at: float | None = None
        """When the leader itself answered last, whatever it was."""
        self._amiss = ""
        """What was wrong with that answer, in words; empty: nothing."""
        self.problem = ""
        """Why the newest version is not there, in words; empty: it is, or is on its way."""
        self.bytes_in = 0
        self.missing: int | None = None
        """Bytes still to come of what is being pulled; None: nothing is, and the leader is asked from time to time."""

    def recall(self) -> None:
        """Take up the head that an earlier process kept, whatever its age: it says what the pieces are."""
        sealed = self._store.head()
        for now in (self._clock(), _issued_of(sealed)):
            try:
                self.known = check_head(sealed, leader=self.leader, swarm=self._swarm, now=now)
                return
            except Rejected:
                continue

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._keep_pulling())
            tasks.create_task(self._keep_providing())

    async def _keep_pulling(self) -> None:
        while True:
            try:
                await self._round()
            except NoWay as why:
                self.problem = str(why)
                self._accounts.tell("policy", self.problem, f"the newest policy of {self.leader[-8:]}: {why}")
            except OSError as error:
                self.problem = f"{self._store.directory}: {error}; free some disk"
                self._accounts.tell("policy", "disk", self.problem)
            except StoreError as error:
                self._accounts.store_trouble(error)
            await asyncio.sleep(self._poll * self._random.uniform(0.75, 1.25))

    def refuse(self, pulled: Pulled) -> None:
        """These records did not lead where they say. The weights here may be damaged: the next pull is of a whole; if
        this was one already, it waits for another head."""
        if pulled.records[0].base is None:
            self._refused.update(_name_of(record) for record in pulled.records)
        self.have, self._untidy = None, True

    # -- one round -------------------------------------------------------------------------------------------

    async def _round(self) -> None:
        known = await self._newest()
        if known is None:
            if self._amiss:
                raise NoWay(self._amiss)
            return
        if known.head.model != self._model:
            raise NoWay(
                f"its base model is {known.head.model}, this node's {self._model}; set model.path to the leader's"
            )
        if self._untidy:  # before room is asked for, and while no pull is under way
            await asyncio.to_thread(self._tidy, known)
            self._untidy = False
        started, before = self._clock(), self.bytes_in
        records = await self._records(known)
        self.up_to_date = not records
        if not records:
            self._holds_some.set()
        if records:
            try:
                await self._pieces(records)
                await self._may_take(records, None)
            finally:
                self.missing = None
            taken, seconds = self.bytes_in - before, self._clock() - started
            await self._arrived(Pulled(tuple(records), seconds, taken, known.issued))
        self.problem = self._amiss

    def _tidy(self, known: KnownHead) -> None:
        """Keep what the head names, pulled whole or not, for this node and others, and nothing else: the newest of it,
        as much as one version may take. Raises OSError."""
        kept: set[bytes] = set()
        room = self._max_bytes
        for item in reversed(known.head.items):  # a leader may name any number of wholes
            room -= item.size + item.record_size
            if item.record in self._refused or room < 0:
                continue
            kept.add(item.record)
            if raw := self._store.read(item.record):
                with contextlib.suppress(Rejected):  # malformed: its leader is told of, and blamed, where it is used
                    kept.update(check_record(raw, item).pieces)
        self._store.keep_only(kept)

    async def _newest(self) -> KnownHead | None:
        """The newest head that can be had; None: none was ever heard."""
        asked = [self.leader]
        if not await self._ask_head(self.leader):
            others = [peer for peer in {*await self._find(), *self._transport.peers()} if peer != self.leader]
            self._random.shuffle(others)
            asked += others[:ASKED_BESIDES]
            for peer in asked[1:]:
                await self._ask_head(peer)
        return self.known

    async def _ask_head(self, peer: str) -> bool:
        """Ask a peer for the head and keep it if it is newer. Whether the peer gave a good one."""
        request = msgspec.msgpack.encode(PolicyRequest(public_key_of(self.leader)))
        try:
            sealed = await self._transport.request(
                peer, POLICY_PROTOCOL, request, max_bytes=MAX_HEAD_BYTES, timeout=self._timeout
            )
        except Busy:
            self._answered(peer)
            return True  # it is there
        except TransportError:
            return False
        if not sealed:
            self._answered(peer, "its leader has published nothing yet; see federation.publish there")
            return False
        try:
            found = check_head(sealed, leader=self.leader, swarm=self._swarm, now=self._clock())
        except Rejected as rejected:
            advice = "; see that both clocks are right" if rejected.reason in _NOBODYS_FAULT else ""
            self._answered(peer, f"what its leader gives cannot be used: {rejected.detail}{advice}")
            if rejected.reason not in _NOBODYS_FAULT:
                self._accounts.offence(rejected, peer)
            return False
        self._answered(peer)
        if self.known is None or is_newer(found, self.known, by_leader=peer == self.leader):
            if self.known is None or found.head.items != self.known.head.items:
                self._refused.clear()
                self._untidy = True
            self.known = found
            self._store.keep_head(sealed)
        return True

    def _answered(self, peer: str, amiss: str = "") -> None:
        """Remember of the leader that it is there, and what is wrong with what it gives."""
        if peer == self.leader:
            self.answered_at, self._amiss = self._clock(), amiss

    async def _records(self, known: KnownHead) -> list[PolicyRecord]:
        """The way from what is here to the newest version, empty when it is here. Raises NoWay."""
        items = [item for item in known.head.items if item.record not in self._refused]
        if not items or items[-1].version != known.head.version:
            raise NoWay(f"version {known.head.version} is not what its leader says it is; waiting for another one")
        newest = await self._record(items[-1])
        version, state = self.have or (None, b"")
        if newest.state == state:
            return []
        if newest.dtype != self._dtype:
            raise NoWay(f"it is in {newest.dtype}; set federation.dtype to that")
        for start in (version, None) if version != newest.version else (None,):
            way = way_to(items, start)
            if not way:
                continue
            if sum(item.size for item in way) > self._max_bytes:
                raise NoWay(f"it takes over {self._max_bytes >> 20} MB, more than this model's weights can")
            records = [await self._record(item) for item in way]
            if leads(records, state if start is not None else b""):
                return records
        raise NoWay(f"nothing leads from version {version} to {newest.version}; its leader must offer a whole one")

    async def _record(self, item: PolicyItem) -> PolicyRecord:
        """Raises NoWay."""
        raw = self._store.read(item.record)
        if not raw:
            await self._pull(item.record, item.record_size)
            raw = self._store.read(item.record)
        try:
            return check_record(raw, item)
        except Rejected as rejected:  # its leader signed for it
            self._accounts.offence(rejected, self.leader)
            self._refused.add(item.record)
            raise NoWay(f"version {item.version}: {rejected.detail}") from rejected

    async def _pieces(self, records: Sequence[PolicyRecord]) -> None:
        """Have every piece of these records. Raises NoWay when one cannot be had."""
        sizes = {digest: record.piece_size(number) for record in records for number, digest in enumerate(record.pieces)}
        wanted = [(digest, size) for digest, size in sizes.items() if not self._store.has(digest)]
        self.missing = sum(size for _, size in wanted)
        await self._may_take(records, self.missing)
        if len(wanted) < len(sizes):
            self._holds_some.set()
        missing = iter(wanted)

        async def pull_some() -> None:
            for digest, size in missing:
                await self._may_take(records, None)
                await self._pull(digest, size)
                self.missing = (self.missing or 0) - size
                self._holds_some.set()

        try:
            async with asyncio.TaskGroup() as tasks:
                for _ in range(AT_ONCE):
                    tasks.create_task(pull_some())
        except BaseExceptionGroup as group:
            error: BaseException = group
            while isinstance(error, BaseExceptionGroup):
                error = error.exceptions[0]
            raise error from None

    async def _pull(self, digest: bytes, size: int) -> None:
        """Have one piece or record. Raises NoWay, OSError."""
        problem = ""
        for _ in range(GIVE_UP_ATTEMPTS):
            try:
                piece = await self._fetcher.fetch(digest, size, self._sources(digest), key=self._key)
            except HoldersBusy as busy:
                problem = str(busy)
                await asyncio.sleep(busy.seconds)
            except (FetchFailed, TransportError) as error:
                problem = str(error)
                await self._find()
                await asyncio.sleep(min(1.0, self._poll))
            else:
                self.bytes_in += len(piece)
                await asyncio.to_thread(self._store.put, piece)
                return
        raise NoWay(f"nobody gives its piece {digest.hex()[:12]}: {problem}")

    def _sources(self, digest: bytes) -> list[str]:
        """Who should have it: by rendezvous hash, so that pieces come from all holders; the leader second at most."""

        def turn(peer: str) -> bytes:
            return hashlib.sha256(digest + peer.encode() + self._transport.peer_id.encode()).digest()

        ordered = sorted({self.leader, *self._holders}, key=turn)
        if self.leader not in ordered[:2]:
            ordered.remove(self.leader)
            ordered.insert(1, self.leader)
        return ordered

    async def _find(self) -> tuple[str, ...]:
        """Who else holds this policy, as far as the DHT knows; asked from time to time only."""
        if self._clock() - self._looked_at > LOOKUP_SECONDS:
            self._looked_at = self._clock()
            try:
                found = await self._transport.find_providers(self._key, timeout=self._timeout)
            except TransportError:  # those that were known may do
                return self._holders
            self._holders = tuple(peer for peer in found if peer != self._transport.peer_id)[:MAX_HOLDERS]
        return self._holders

    async def _keep_providing(self) -> None:
        """Say that pieces of this policy are here, from the first one on. Best effort: others ask the leader too.

        Beside the pull: where peers do not answer, it takes the whole deadline.
        """
        await self._holds_some.wait()
        while True:
            try:
                async with asyncio.timeout(self._timeout):
                    await self._transport.provide(self._key)
            except (TransportError, TimeoutError):
                self._accounts.counters.dropped_provides += 1
            await asyncio.sleep(PROVIDE_SECONDS)

    def _mismatch(self, peer: str, piece: bytes) -> None:
        rejected = Rejected(Reason.hash_mismatch, f"sent {len(piece)} bytes of another hash than asked for")
        self._accounts.offence(rejected, peer)


def _name_of(record: PolicyRecord) -> bytes:
    return hashlib.sha256(msgspec.msgpack.encode(record)).digest()


def _issued_of(sealed: bytes) -> float:
    """When sealed bytes say they were issued; 0 where they say nothing."""
    try:
        fields = msgspec.msgpack.decode(sealed)
        return float(fields[3])
    except (msgspec.DecodeError, RecursionError, TypeError, IndexError, ValueError):
        return 0.0
