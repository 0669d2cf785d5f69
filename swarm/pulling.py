"""Pulls announced groups: which and when, from whom, and what becomes of them."""

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Iterable

from protocol.manifest import Manifest
from protocol.messages import MAX_BATCH_BYTES
from protocol.rules import Reason, Rejected, producer_quota
from swarm.accounts import Accounts
from swarm.admission import Admission, ScoringUnavailable
from swarm.experience import ExperienceStore, StoreError
from swarm.fetch import Fetcher, FetchFailed, HoldersBusy
from swarm.records import ADMITTED, GroupRecord
from swarm.transport import Transport, TransportError
from swarm.wanted import Candidate, Wanted

MAX_WANTED = 1024
MAX_BATCH = 16
"""Groups pulled over one stream."""
POLL_SECONDS = 0.5
"""How often the pool is looked at for room, besides when something arrives."""
GATHER_SECONDS = 0.02
"""Waited after something arrives: more of the same producer may follow, and be pulled with it."""
STORE_PAUSE_SECONDS = 5.0
UNSCORED_SECONDS = 30.0
"""Until a group that could not be scored is pulled again: a scorer that is away comes back, or needs help."""


class Puller:
    """Keeps `pool_target` admitted groups that no update has used yet, as far as others announce them.

    `provide(digest)` is told of every group that can now be served to others.
    """

    def __init__(
        self,
        transport: Transport,
        store: ExperienceStore,
        manifest: Manifest,
        admission: Admission,
        accounts: Accounts,
        clock: Callable[[], float],
        *,
        request_timeout: float,
        pool_target: int,
        seed: int,
        provide: Callable[[bytes], None],
    ) -> None:
        self._transport, self._store, self._manifest = transport, store, manifest
        self._admission, self._accounts, self._clock = admission, accounts, clock
        self._reputation = accounts.reputation
        self._pool_target, self._provide = pool_target, provide
        self._fetcher = Fetcher(transport, clock, request_timeout=request_timeout, on_mismatch=self._mismatch)
        self.wanted = Wanted(MAX_WANTED, seed)
        self._pulling: dict[bytes, str] = {}
        self._doubtful: set[bytes] = set()
        """Of those, what is asked of a peer that failed lately."""
        self._unused: dict[str, int] = {}
        self._unused_at = -math.inf
        self._wake = asyncio.Event()

    def want(self, candidate: Candidate) -> None:
        """Queue an announced group, if it is new and there is something to learn from it. Raises StoreError."""
        announcement, producer = candidate.announcement, candidate.producer
        if self._store.has_group(announcement.group):
            return
        if announcement.reward_std <= 0:
            self._accounts.counters.uninformative += 1
            return
        self.wanted.add(candidate, self._reputation.weight(producer), self._clock())
        self._wake.set()

    async def run(self) -> None:
        """One puller; several may run."""
        while True:
            try:
                batch = self._next()
                if not batch:
                    await self._wait_for_room()
                    continue
                await self._pull(batch)
            except StoreError as error:
                self._accounts.store_trouble(error)
                await asyncio.sleep(STORE_PAUSE_SECONDS)

    async def _wait_for_room(self) -> None:
        self._wake.clear()
        try:
            async with asyncio.timeout(POLL_SECONDS):
                await self._wake.wait()
            await asyncio.sleep(GATHER_SECONDS)
        except TimeoutError:
            self._unused_at = -math.inf  # the loop may have used some meanwhile

    def _next(self) -> list[Candidate]:
        """What to pull now from one holder: nothing while enough unused groups are here or under way, or none suits.

        A producer has its share of the pool and no more (rule 12), so that a flood leaves room for others. One puller
        at a time waits for peers that failed lately, so that those that never answer leave pullers for others.
        """
        if not len(self.wanted):
            return []
        now = self._clock()
        if not 0 <= now - self._unused_at < POLL_SECONDS:
            self._unused, self._unused_at = self._store.unused(now), now
        held = Counter(self._unused)
        held.update(self._pulling.values())
        room = self._pool_target - held.total()
        quota = producer_quota(
            self._pool_target, self._manifest.caps.max_producer_share, len(self.wanted.producers() | held.keys())
        )
        batch: list[Candidate] = []
        size = 0

        def allowed(candidate: Candidate) -> bool:
            announcement, holder = candidate.announcement, self._holders(candidate)[0]
            if batch and (holder != self._holders(batch[0])[0] or size + announcement.size > MAX_BATCH_BYTES):
                return False
            if self._fetcher.wait(holder) or (self._fetcher.shunned(holder) and (batch or self._doubtful)):
                return False
            return (
                held[candidate.producer] < quota
                and announcement.group not in self._pulling
                and not self._reputation.is_banned(candidate.producer)
            )

        while len(batch) < min(room, MAX_BATCH):
            candidate = self.wanted.pop(now, allowed)
            if candidate is None:
                break
            batch.append(candidate)
            size += candidate.announcement.size
            held[candidate.producer] += 1
            self._pulling[candidate.announcement.group] = candidate.producer
            if self._fetcher.shunned(self._holders(candidate)[0]):
                self._doubtful.add(candidate.announcement.group)
        return batch

    def _holders(self, candidate: Candidate) -> list[str]:
        """Who should have the body, likeliest first, but whoever asked to wait last."""
        holders = [candidate.forwarder, candidate.producer]
        if candidate.producer in self._transport.peers():
            holders.reverse()
        return sorted(holders, key=lambda peer: self._fetcher.wait(peer) > 0)

    async def _pull(self, batch: list[Candidate]) -> None:
        """Fetch, judge and keep what `_next` gave. What a StoreError or a silent peer leaves undone is wanted again."""
        left = list(batch)
        try:
            bodies: dict[bytes, bytes] = {}
            holder = self._holders(batch[0])[0]
            if len(batch) > 1:
                wanted = [(candidate.announcement.group, candidate.announcement.size) for candidate in batch]
                bodies = await self._fetcher.fetch_batch(holder, wanted)
                busy = self._fetcher.wait(holder) > 0
                self._accounts.counters.put_off += busy
                if busy or self._fetcher.shunned(holder):  # or each that is missing would cost a deadline here
                    left = [candidate for candidate in batch if candidate.announcement.group in bodies]
                    self._put_back(candidate for candidate in batch if candidate.announcement.group not in bodies)
            while left:
                digest = left[0].announcement.group
                await self._pull_one(left[0], bodies.get(digest))
                self._done(digest)
                del left[0]
        finally:
            self._put_back(left)

    def _put_back(self, candidates: Iterable[Candidate]) -> None:
        for candidate in candidates:
            self._done(candidate.announcement.group)
            if not self._reputation.is_banned(candidate.producer):
                self.wanted.add(candidate, self._reputation.weight(candidate.producer), self._clock())

    def _done(self, digest: bytes) -> None:
        del self._pulling[digest]
        self._doubtful.discard(digest)

    async def _pull_one(self, candidate: Candidate, body: bytes | None) -> None:
        announcement, producer, counters = candidate.announcement, candidate.producer, self._accounts.counters
        if self._store.has_group(announcement.group):
            return
        if body is None:
            try:
                body = await self._fetcher.fetch(announcement.group, announcement.size, self._holders(candidate))
            except HoldersBusy as busy:
                counters.put_off += 1
                later = self._clock() + busy.seconds
                self.wanted.put_off(candidate, self._reputation.weight(producer), self._clock(), until=later)
                return
            except (FetchFailed, TransportError) as error:
                counters.fetch_failures += 1
                name = announcement.group.hex()[:12]
                self._accounts.tell("fetch", producer, f"group {name} could not be pulled: {error}")
                self.wanted.retry(candidate, self._reputation.weight(producer), self._clock())
                return
        counters.fetched += 1
        counters.bytes_in += len(body)
        try:
            record = await self._admission.judge(body, announcement, producer, candidate.expires)
        except ScoringUnavailable as error:
            counters.unscored += 1
            self._accounts.tell("scorer", "", f"groups cannot be scored: {error}")
            later = self._clock() + UNSCORED_SECONDS
            self.wanted.put_off(candidate, self._reputation.weight(producer), self._clock(), until=later)
            return
        self._keep(record, body)

    def _keep(self, record: GroupRecord, body: bytes) -> None:
        if record.verdict == ADMITTED:
            with self._store.transaction():
                self._store.add(record, body)
                self._reputation.record(record.producer, ADMITTED)
            self._accounts.counters.admitted += 1
            self._unused[record.producer] = self._unused.get(record.producer, 0) + 1
            self._provide(record.digest)
            return
        # a group under another's name says nothing about its bytes: who made them may still announce them
        if record.verdict != Reason.wrong_producer:
            self._store.add(record, body)
        self._accounts.offence(Rejected(Reason(record.verdict), record.detail), record.producer)

    def _mismatch(self, peer: str, body: bytes) -> None:
        rejected = Rejected(Reason.hash_mismatch, f"sent {len(body)} bytes of another hash than asked for")
        self._accounts.offence(rejected, peer)
