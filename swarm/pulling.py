"""Pulls announced groups: which and when, from whom, and what becomes of them."""

import asyncio
import math
from collections.abc import Callable

from protocol.manifest import Manifest
from protocol.rules import Reason, Rejected, producer_quota
from swarm.accounts import Accounts
from swarm.admission import Admission, ScoringUnavailable
from swarm.experience import ADMITTED, ExperienceStore, GroupRecord, StoreError
from swarm.fetch import Fetcher, FetchFailed
from swarm.transport import Transport, TransportError
from swarm.wanted import Candidate, Wanted

MAX_WANTED = 1024
POLL_SECONDS = 0.5
"""How often the pool is looked at for room, besides when something arrives."""
STORE_PAUSE_SECONDS = 5.0


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
        self._unused: dict[str, int] = {}
        self._unused_at = -math.inf
        self._wake = asyncio.Event()

    def want(self, candidate: Candidate) -> None:
        """Queue an announced group, if it is new and there is something to learn from it. Raises StoreError."""
        announcement, producer = candidate.announcement, candidate.producer
        if self._store.has_group(announcement.group):
            return
        if self._store.has_task(producer, announcement.epoch, announcement.task):
            second = Rejected(Reason.replayed, "announces a second group for a task that it answered")
            self._accounts.offence(producer, second)
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
                candidate = self._next()
                if candidate is None:
                    await self._wait_for_room()
                    continue
                self._pulling[candidate.announcement.group] = candidate.producer
                try:
                    await self._pull(candidate)
                finally:
                    del self._pulling[candidate.announcement.group]
            except StoreError as error:
                self._accounts.store_trouble(error)
                await asyncio.sleep(STORE_PAUSE_SECONDS)

    async def _wait_for_room(self) -> None:
        self._wake.clear()
        try:
            async with asyncio.timeout(POLL_SECONDS):
                await self._wake.wait()
        except TimeoutError:
            self._unused_at = -math.inf  # the loop may have used some meanwhile

    def _next(self) -> Candidate | None:
        """What to pull now: None while enough unused groups are here or under way, or nothing suits.

        A producer has its share of the pool and no more (rule 12), so that a flood leaves room for others.
        """
        if not len(self.wanted):
            return None
        now = self._clock()
        if not 0 <= now - self._unused_at < POLL_SECONDS:
            self._unused, self._unused_at = self._store.unused(now), now
        held = dict(self._unused)
        for producer in self._pulling.values():
            held[producer] = held.get(producer, 0) + 1
        if sum(held.values()) >= self._pool_target:
            return None
        producers = len(self.wanted.producers() | held.keys())
        quota = producer_quota(self._pool_target, self._manifest.caps.max_producer_share, producers)
        return self.wanted.pop(
            now,
            lambda candidate: (
                held.get(candidate.producer, 0) < quota
                and candidate.announcement.group not in self._pulling
                and not self._reputation.is_banned(candidate.producer)
            ),
        )

    async def _pull(self, candidate: Candidate) -> None:
        """Fetch, judge and keep one group. Raises StoreError."""
        announcement, producer, counters = candidate.announcement, candidate.producer, self._accounts.counters
        if self._store.has_group(announcement.group):
            return
        first = [candidate.forwarder, producer]
        if producer in self._transport.peers():
            first.reverse()
        try:
            body = await self._fetcher.fetch(announcement.group, announcement.size, first)
        except (FetchFailed, TransportError) as error:
            counters.fetch_failures += 1
            self._accounts.tell(
                "fetch", producer, f"group {announcement.group.hex()[:12]} could not be pulled: {error}"
            )
            self.wanted.retry(candidate, self._reputation.weight(producer), self._clock())
            return
        counters.fetched += 1
        counters.bytes_in += len(body)
        try:
            record = await self._admission.judge(body, announcement, producer, candidate.expires)
        except ScoringUnavailable as error:
            counters.unscored += 1
            self._accounts.tell("scorer", "", f"groups cannot be scored: {error}")
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
        self._accounts.offence(record.producer, Rejected(Reason(record.verdict), record.detail))

    def _mismatch(self, peer: str, body: bytes) -> None:
        rejected = Rejected(Reason.hash_mismatch, f"sent {len(body)} bytes of another hash than asked for")
        self._accounts.offence(peer, rejected)
