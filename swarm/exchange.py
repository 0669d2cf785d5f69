"""Experience travels: own groups are announced and served, others' announced groups chosen, pulled, judged, kept.

Announce by gossip, pull by stream: traffic grows with what this node trains on, not with the size of the swarm.
Gossip loses messages, so peers also ask each other, on meeting and from time to time, for live announcements that
they lack (healing). Nothing that a peer sends or fails to send ends the service: it is counted, with its reason.
"""

import asyncio
import math
import random
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, field
from typing import Any

import msgspec

from protocol.envelope import Domain, digest_of, seal
from protocol.identity import Identity
from protocol.manifest import Manifest
from protocol.messages import (
    GROUPS_PROTOCOL,
    LIVE_PROTOCOL,
    MANIFEST_PROTOCOL,
    MAX_ANNOUNCEMENT_BYTES,
    MAX_REQUEST_BYTES,
    Announcement,
    GroupRequest,
    LiveRequest,
    LiveResponse,
    ManifestRequest,
    announce_topic,
)
from protocol.rollout import RolloutGroup
from protocol.rules import Reason, Rejected, check_announcement, check_group, producer_quota
from swarm.admission import Admission, Rescore, ScoringUnavailable, UnknownEnvironment
from swarm.experience import ADMITTED, ANNOUNCED, ExperienceStore, GroupRecord, StoreError
from swarm.fetch import Fetcher, FetchFailed, fetch_manifest
from swarm.gate import AnnouncementGate, culprit
from swarm.reputation import Reputation
from swarm.transport import Message, PeerConnected, Transport, TransportError
from swarm.wanted import Candidate, Wanted

__all__ = ["Counters", "Exchange", "FetchFailed", "ScoringUnavailable", "UnknownEnvironment", "fetch_manifest"]

PULLERS = 4
HEALERS = 2
MAX_WANTED = 1024
MAX_OUTBOX = 256
MAX_HEALS = 256
MAX_SHARDS = 4
"""Announcement topics followed, where the manifest has more."""
MAX_HAVE = 1024
MAX_LIVE = 64
MAX_LIVE_BYTES = MAX_LIVE * (MAX_ANNOUNCEMENT_BYTES + 8) + 64
HEAL_ROUNDS = 32
"""Answers of at most MAX_LIVE announcements taken from one peer at a meeting."""
POLL_SECONDS = 0.5
"""How often the pool is looked at for room, besides when something arrives."""
DRAIN_SECONDS = 1.0
TIDY_SECONDS = 60.0
STORE_PAUSE_SECONDS = 5.0
QUIET_SECONDS = 60.0
"""The same kind of event about the same peer is told once in this time."""
MAX_QUIET = 1024


@dataclass(slots=True)
class Counters:
    """Since start. What was lost to a full queue or a rate limit is in the `dropped_*` ones."""

    published: int = 0
    heard: int = 0
    """Announcements of others that were new and valid."""
    healed: int = 0
    """Of them, those that came by asking a peer."""
    uninformative: int = 0
    """Announced with equal rewards, so not pulled."""
    fetched: int = 0
    fetch_failures: int = 0
    admitted: int = 0
    rejected: dict[str, int] = field(default_factory=dict)
    unscored: int = 0
    """Given up because the scorer did not answer."""
    served: int = 0
    bytes_in: int = 0
    """Of group bodies."""
    bytes_out: int = 0
    dropped_announcements: int = 0
    """Over a forwarder's rate."""
    dropped_wanted: int = 0
    """Worth pulling, but pushed out by better ones or unreachable."""
    dropped_outbox: int = 0
    """Own announcements not gossiped; they heal."""
    store_errors: int = 0


class Exchange:
    """The service between a node's loop and its swarm. `run` serves until cancelled; `publish` may be called any time.

    `rescore` regenerates a group's task in this node's scorer. `environments` are the (name, version) pairs that
    this node can score; None: all of the manifest. `on_event(kind, message)` is told what people should see.
    """

    def __init__(
        self,
        transport: Transport,
        store: ExperienceStore,
        identity: Identity,
        manifest: Manifest,
        rescore: Rescore,
        clock: Callable[[], float],
        *,
        heal_seconds: float = 15.0,
        request_timeout: float = 20.0,
        pool_target: int = 32,
        seed: int = 0,
        environments: Collection[tuple[str, str]] | None = None,
        on_event: Callable[[str, str], None] = lambda kind, message: None,
    ) -> None:
        self.transport, self.store, self.manifest = transport, store, manifest
        self._identity, self._clock, self._on_event = identity, clock, on_event
        self._heal_seconds, self._timeout, self._pool_target = heal_seconds, request_timeout, pool_target
        if environments is None:
            environments = [(spec.name, spec.version) for spec in manifest.environments]
        self._environments = frozenset(environments)
        self._random = random.Random(seed)
        self.reputation = Reputation(store, clock)
        banned = self.reputation.is_banned
        self._gate = AnnouncementGate(manifest, clock, environments=self._environments, banned=banned)
        self._admission = Admission(store, manifest, rescore, clock, environments=self._environments, banned=banned)
        self._fetcher = Fetcher(transport, clock, request_timeout=request_timeout, on_mismatch=self._mismatch)
        self._wanted = Wanted(MAX_WANTED, seed)
        self._pulling: dict[bytes, str] = {}
        self._unused: dict[str, int] = {}
        self._unused_at = -math.inf
        self._wake = asyncio.Event()
        self._outbox: asyncio.Queue[bytes] = asyncio.Queue(MAX_OUTBOX)
        self._to_provide: asyncio.Queue[bytes] = asyncio.Queue(MAX_OUTBOX)
        self._to_heal: dict[str, None] = {}
        self._heal_wake = asyncio.Event()
        self._told: dict[tuple[str, str], float] = {}
        self._counters = Counters()

    # -- for the loop and the view ---------------------------------------------------------------------------

    def publish(self, group: RolloutGroup) -> bytes:
        """Keep an own group, announce it when the network can, and return its digest; never waits.

        A group for a task of an epoch that was published already, before a restart too, is not published again: the
        first one's digest is returned. Raises Rejected where every peer would reject it, and StoreError.
        """
        me, now = self._identity.peer_id, self._clock()
        known = self.store.own_group(me, group.epoch, group.task)
        if known is not None:
            return known
        expires = now + self.manifest.caps.group_ttl_seconds
        body = seal(self._identity, Domain.group, msgspec.msgpack.encode(group), issued=now, expires=expires)
        announcement = announcement_of(group, body)
        opened, _ = check_group(
            body,
            self.manifest,
            now,
            producer=me,
            announced=announcement,
            environments=self._environments,
            seen=lambda digest: False,
            banned=lambda peer: False,
        )
        sealed = seal(
            self._identity, Domain.announcement, msgspec.msgpack.encode(announcement), issued=now, expires=expires
        )
        record = GroupRecord(
            digest=opened.digest,
            origin="own",
            producer=me,
            epoch=group.epoch,
            task=group.task,
            model=group.model,
            claimed=group.rewards,
            local=group.rewards,
            verdict=ADMITTED,
            detail="",
            received_at=now,
            expires_at=opened.expires,
        )
        with self.store.transaction():
            self.store.add(record, body)
            self.store.add_announcement(opened.digest, me, sealed, opened.expires)
        self._counters.published += 1
        self._post(sealed)
        self._provide(opened.digest)
        return opened.digest

    def weight(self, peer: str) -> float:
        """How far a producer is trusted, in [0, 1); for the sampler."""
        return self.reputation.weight(peer)

    def counters(self) -> dict[str, Any]:
        """`Counters` as JSON values."""
        self._counters.dropped_announcements = self._gate.dropped
        self._counters.dropped_wanted = self._wanted.dropped
        return asdict(self._counters)

    # -- the service -----------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Serve and exchange until cancelled. The transport has been started. Raises StoreError at start only."""
        self.transport.serve(GROUPS_PROTOCOL, self._serve_group, max_request=MAX_REQUEST_BYTES)
        self.transport.serve(LIVE_PROTOCOL, self._serve_live, max_request=MAX_REQUEST_BYTES)
        self.transport.serve(MANIFEST_PROTOCOL, self._serve_manifest, max_request=MAX_REQUEST_BYTES)
        for peer in self.reputation.banned():
            self.transport.ban(peer)
        self._want_again()
        own_shard = self.manifest.shard_of(self._identity.peer_id)
        for i in range(min(self.manifest.shards, MAX_SHARDS)):
            shard = (own_shard + i) % self.manifest.shards
            await self.transport.subscribe(announce_topic(self.manifest.digest, shard), self._gate.check)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._listen(), name="exchange: listen")
            tasks.create_task(self._send(own_shard), name="exchange: send")
            tasks.create_task(self._provide_all(), name="exchange: provide")
            tasks.create_task(self._meet(), name="exchange: meet")
            tasks.create_task(self._drain(), name="exchange: drain")
            tasks.create_task(self._tidy(), name="exchange: tidy")
            for i in range(HEALERS):
                tasks.create_task(self._heal_all(), name=f"exchange: heal {i}")
            for i in range(PULLERS):
                tasks.create_task(self._pull_all(), name=f"exchange: pull {i}")

    async def _listen(self) -> None:
        async for event in self.transport.events():
            try:
                if isinstance(event, Message):
                    self._hear(event.data, event.forwarder)
                elif isinstance(event, PeerConnected):
                    self._greet(event.peer)
            except StoreError as error:
                self._store_trouble(error)
            await asyncio.sleep(0)  # a full queue must not keep the loop to itself

    def _greet(self, peer: str) -> None:
        if self.reputation.is_banned(peer):
            self.transport.ban(peer)
            return
        self.reputation.seen(peer)
        self._heal_soon(peer)

    async def _drain(self) -> None:
        """Count what the gate refused in the transport's thread."""
        while True:
            await asyncio.sleep(DRAIN_SECONDS)
            try:
                for peer, rejected in self._gate.drain():
                    self._count(peer, rejected)
            except StoreError as error:
                self._store_trouble(error)

    async def _tidy(self) -> None:
        while True:
            await asyncio.sleep(TIDY_SECONDS)
            try:
                self.store.tidy()
            except StoreError as error:
                self._store_trouble(error)

    # -- hearing of groups -----------------------------------------------------------------------------------

    def _hear(self, sealed: bytes, forwarder: str) -> bool:
        """Take note of an announcement, from gossip or healing. True when it was valid and new."""
        now = self._clock()
        try:
            opened, announcement = check_announcement(
                sealed, self.manifest, now, environments=self._environments, banned=self.reputation.is_banned
            )
        except Rejected as rejected:
            self._count(culprit(sealed, forwarder, now), rejected)
            return False
        producer, digest = opened.producer, announcement.group
        if producer == self._identity.peer_id:
            return False
        with self.store.transaction():
            if not self.store.add_announcement(digest, producer, sealed, opened.expires):
                return False
            self.reputation.record(producer, ANNOUNCED, announcement.model)
        self._counters.heard += 1
        self._want(Candidate(announcement, producer, opened.expires, forwarder))
        return True

    def _want(self, candidate: Candidate) -> None:
        announcement, producer = candidate.announcement, candidate.producer
        if self.store.has_group(announcement.group):
            return
        if self.store.has_task(producer, announcement.epoch, announcement.task):
            self._count(producer, Rejected(Reason.replayed, "announces a second group for a task that it answered"))
            return
        if announcement.reward_std <= 0:
            self._counters.uninformative += 1
            return
        self._wanted.add(candidate, self.reputation.weight(producer), self._clock())
        self._wake.set()

    def _want_again(self) -> None:
        """After a restart: what was announced and not pulled is still worth having."""
        now, me = self._clock(), self._identity.peer_id
        for _, sealed in reversed(self.store.announcements(now, MAX_WANTED)):
            try:
                opened, announcement = check_announcement(
                    sealed, self.manifest, now, environments=self._environments, banned=self.reputation.is_banned
                )
            except Rejected:  # judged when it came; another swarm's, or not valid any more
                continue
            if opened.producer != me:
                self._want(Candidate(announcement, opened.producer, opened.expires, opened.producer))

    # -- healing ---------------------------------------------------------------------------------------------

    def _heal_soon(self, peer: str) -> None:
        if len(self._to_heal) < MAX_HEALS:
            self._to_heal[peer] = None
            self._heal_wake.set()

    async def _meet(self) -> None:
        """Now and then ask one connected peer, at jittered intervals so that a swarm does not ask in step."""
        while True:
            await asyncio.sleep(self._heal_seconds * self._random.uniform(0.75, 1.25))
            if peers := self.transport.peers():
                self._heal_soon(self._random.choice(peers))

    async def _heal_all(self) -> None:
        while True:
            await self._heal_wake.wait()
            if not self._to_heal:
                self._heal_wake.clear()
                continue
            peer = next(iter(self._to_heal))
            del self._to_heal[peer]
            try:
                await self._heal(peer)
            except TransportError:
                pass  # it left, or is not of this swarm; there are others, and another time
            except StoreError as error:
                self._store_trouble(error)

    async def _heal(self, peer: str) -> None:
        """Ask a peer for live announcements that this node lacks. Raises TransportError, StoreError."""
        for _ in range(HEAL_ROUNDS):
            have = tuple(self.store.live_digests(self._clock(), MAX_HAVE))
            request = msgspec.msgpack.encode(LiveRequest(self.manifest.digest, have))
            answer = await self.transport.request(
                peer, LIVE_PROTOCOL, request, max_bytes=MAX_LIVE_BYTES, timeout=self._timeout
            )
            try:
                announcements = msgspec.msgpack.decode(answer, type=LiveResponse).announcements
            except msgspec.DecodeError as error:
                self._count(peer, Rejected(Reason.malformed, f"answer to {LIVE_PROTOCOL}: {error}"))
                return
            new = 0
            for sealed in announcements:
                new += self._hear(sealed, peer)
                await asyncio.sleep(0)
            self._counters.healed += new
            if len(announcements) < MAX_LIVE or not new:
                return

    # -- pulling ---------------------------------------------------------------------------------------------

    async def _pull_all(self) -> None:
        while True:
            try:
                candidate = self._next_candidate()
                if candidate is None:
                    self._wake.clear()
                    await self._wait_for_room()
                    continue
                self._pulling[candidate.announcement.group] = candidate.producer
                try:
                    await self._pull(candidate)
                finally:
                    del self._pulling[candidate.announcement.group]
            except StoreError as error:
                self._store_trouble(error)
                await asyncio.sleep(STORE_PAUSE_SECONDS)

    async def _wait_for_room(self) -> None:
        try:
            async with asyncio.timeout(POLL_SECONDS):
                await self._wake.wait()
        except TimeoutError:
            self._unused_at = -math.inf  # the loop may have used some meanwhile

    def _next_candidate(self) -> Candidate | None:
        """What to pull now: None while enough unused groups are here or under way, or nothing suits.

        A producer has its share of the pool and no more (rule 12), so that a flood leaves room for others.
        """
        now = self._clock()
        if not len(self._wanted):
            return None
        if not 0 <= now - self._unused_at < POLL_SECONDS:
            self._unused, self._unused_at = self.store.unused(now), now
        held = dict(self._unused)
        for producer in self._pulling.values():
            held[producer] = held.get(producer, 0) + 1
        if sum(held.values()) >= self._pool_target:
            return None
        producers = len(self._wanted.producers() | held.keys())
        quota = producer_quota(self._pool_target, self.manifest.caps.max_producer_share, producers)
        return self._wanted.pop(
            now,
            lambda candidate: (
                held.get(candidate.producer, 0) < quota
                and candidate.announcement.group not in self._pulling
                and not self.reputation.is_banned(candidate.producer)
            ),
        )

    async def _pull(self, candidate: Candidate) -> None:
        """Fetch, judge and keep one group. Raises StoreError."""
        announcement, producer = candidate.announcement, candidate.producer
        if self.store.has_group(announcement.group):
            return
        first = [candidate.forwarder, producer]
        if producer in self.transport.peers():
            first.reverse()
        try:
            body = await self._fetcher.fetch(announcement.group, announcement.size, first)
        except (FetchFailed, TransportError) as error:
            self._counters.fetch_failures += 1
            self._tell("fetch", producer, f"group {announcement.group.hex()[:12]} could not be pulled: {error}")
            self._wanted.retry(candidate, self.reputation.weight(producer), self._clock())
            return
        self._counters.fetched += 1
        self._counters.bytes_in += len(body)
        try:
            record = await self._admission.judge(body, announcement, producer, candidate.expires)
        except ScoringUnavailable as error:
            self._counters.unscored += 1
            self._tell("scorer", "", f"groups cannot be scored: {error}")
            return
        self._keep(record, body)

    def _keep(self, record: GroupRecord, body: bytes) -> None:
        # A group under another's name says nothing about its bytes: whoever made them may still announce them.
        with self.store.transaction():
            if record.verdict != Reason.wrong_producer:
                self.store.add(record, body)
            if record.verdict == ADMITTED:
                self.reputation.record(record.producer, ADMITTED)
        if record.verdict == ADMITTED:
            self._counters.admitted += 1
            self._unused[record.producer] = self._unused.get(record.producer, 0) + 1
            self._provide(record.digest)
        else:
            self._count(record.producer, Rejected(Reason(record.verdict), record.detail))

    # -- sending and serving ---------------------------------------------------------------------------------

    def _post(self, sealed: bytes) -> None:
        if self._outbox.full():
            self._outbox.get_nowait()
            self._counters.dropped_outbox += 1
        self._outbox.put_nowait(sealed)

    def _provide(self, digest: bytes) -> None:
        if not self._to_provide.full():
            self._to_provide.put_nowait(digest)

    async def _send(self, shard: int) -> None:
        topic = announce_topic(self.manifest.digest, shard)
        while True:
            sealed = await self._outbox.get()
            try:
                async with asyncio.timeout(self._timeout):
                    await self.transport.publish(topic, sealed)
            except (TransportError, TimeoutError):
                self._counters.dropped_outbox += 1

    async def _provide_all(self) -> None:
        """Best effort: whoever has the announcement can ask its producer and forwarder too."""
        while True:
            digest = await self._to_provide.get()
            try:
                async with asyncio.timeout(self._timeout):
                    await self.transport.provide(digest)
            except (TransportError, TimeoutError):
                continue

    async def _serve_group(self, peer: str, data: bytes) -> bytes:
        request = msgspec.msgpack.decode(data, type=GroupRequest)
        body = self.store.body(request.group) or b""
        answer = body[request.offset :]
        self._counters.served += bool(answer)
        self._counters.bytes_out += len(answer)
        return answer

    async def _serve_live(self, peer: str, data: bytes) -> bytes:
        request = msgspec.msgpack.decode(data, type=LiveRequest)
        if request.swarm != self.manifest.digest:
            raise Rejected(Reason.wrong_swarm, f"asked about swarm {request.swarm.hex()[:12]}")
        live = self.store.announcements(
            self._clock(), MAX_LIVE, without=set(request.have), banned=set(self.reputation.banned())
        )
        return msgspec.msgpack.encode(LiveResponse(tuple(sealed for _, sealed in live)))

    async def _serve_manifest(self, peer: str, data: bytes) -> bytes:
        request = msgspec.msgpack.decode(data, type=ManifestRequest)
        return self.manifest.to_bytes() if request.digest == self.manifest.digest else b""

    # -- judging peers ---------------------------------------------------------------------------------------

    def _count(self, peer: str, rejected: Rejected) -> None:
        """One more offence of a peer; enough of them ban it. Raises StoreError."""
        reason = str(rejected.reason)
        self._counters.rejected[reason] = self._counters.rejected.get(reason, 0) + 1
        if peer == self._identity.peer_id:
            return
        newly_banned = self.reputation.record(peer, reason)
        if rejected.reason is not Reason.uninformative:
            self._tell("rejected", peer + reason, f"{peer[-8:]}: {reason}: {rejected.detail}")
        if newly_banned:
            self.transport.ban(peer)
            self._on_event("banned", f"{peer} is banned: too many offences, the last one {reason}")

    def _mismatch(self, peer: str, body: bytes) -> None:
        """A holder sent bytes of another hash. They are kept for people to look at, under their own hash."""
        self._count(peer, Rejected(Reason.hash_mismatch, f"sent {len(body)} bytes of another hash than asked for"))

    def _store_trouble(self, error: StoreError) -> None:
        self._counters.store_errors += 1
        self._tell("store", "", str(error))

    def _tell(self, kind: str, about: str, message: str) -> None:
        now = self._clock()
        if now - self._told.pop((kind, about), -math.inf) < QUIET_SECONDS:
            return
        self._told[kind, about] = now
        if len(self._told) > MAX_QUIET:
            del self._told[next(iter(self._told))]
        self._on_event(kind, message)


def announcement_of(group: RolloutGroup, body: bytes) -> Announcement:
    """What is announced of a group and its sealed bytes."""
    rewards = group.rewards
    mean = math.fsum(rewards) / max(1, len(rewards))
    return Announcement(
        swarm=group.swarm,
        group=digest_of(body),
        size=len(body),
        epoch=group.epoch,
        task=group.task,
        model=group.model,
        completions=len(rewards),
        reward_mean=mean,
        reward_std=math.sqrt(math.fsum((reward - mean) ** 2 for reward in rewards) / max(1, len(rewards))),
        tokens=sum(completion.token_count for completion in group.completions),
    )
