"""Experience travels: own groups are announced and served, others' announced groups chosen, pulled, judged, kept.

Announce by gossip, pull by stream: traffic grows with what this node trains on, not with the size of the swarm.
Gossip loses messages, so peers also ask each other for live announcements that they lack (swarm.healing). Nothing
that a peer sends or fails to send ends the service: it is counted, with its reason (swarm.accounts).
"""

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import msgspec

from protocol.envelope import Domain, digest_of, seal
from protocol.identity import Identity
from protocol.manifest import Manifest
from protocol.messages import Announcement, announce_topic, rounds_topic
from protocol.rollout import RolloutGroup
from protocol.rules import Reason, Rejected, check_group
from swarm.accounts import Accounts
from swarm.admission import Admission, Rescore, ScoringUnavailable
from swarm.coordination.access import Access
from swarm.coordination.log_sync import LogSync
from swarm.experience import ExperienceStore, StoreError
from swarm.fetch import FetchFailed, fetch_manifest
from swarm.gate import AnnouncementGate
from swarm.healing import Healer
from swarm.hearing import Hearing
from swarm.pulling import Puller
from swarm.records import ADMITTED, GroupRecord
from swarm.reputation import Reputation
from swarm.serving import Serving
from swarm.transport import Message, OversizeRequest, PeerConnected, Transport, TransportError

__all__ = ["Exchange", "FetchFailed", "ScoringUnavailable", "announcement_of", "fetch_manifest"]

PULLERS = 4
HEALERS = 2
POOL_TARGET = 32
"""Admitted groups that are kept ahead of the loop; who trains nothing wants none."""
MAX_OUTBOX = 256
MAX_SHARDS = 4
"""Announcement topics followed, where the manifest has more."""
PROVIDE_SECONDS = 1.0
"""Between two DHT records: telling the DHT costs more than pulling a group, and is only the third way to find it."""
DRAIN_SECONDS = 1.0
TIDY_SECONDS = 60.0


class Exchange:
    """The service between a node's loop and its swarm. `run` serves until cancelled; `publish` may be called any time.

    `rescore` regenerates a group's task in this node's scorer. `on_event(kind, message)` is told what people should
    see. `log_sync` and `access`: of a swarm with coordinators, their log and who may take part.
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
        pool_target: int = POOL_TARGET,
        seed: int = 0,
        on_event: Callable[[str, str], None] = lambda kind, message: None,
        log_sync: LogSync | None = None,
        access: Access | None = None,
    ) -> None:
        self.transport, self.store, self.manifest = transport, store, manifest
        self._identity, self._clock, self._timeout = identity, clock, request_timeout
        self.reputation = Reputation(store, clock)
        self._log_sync, self._access = log_sync, access
        if log_sync is not None:
            log_sync.on_offence = lambda rejected, peer: self.accounts.offence(rejected, peer)
        self._rounds_topic = rounds_topic(manifest.digest)
        self.accounts = Accounts(transport, self.reputation, clock, on_event, access.bans if access else None)
        self._gate = AnnouncementGate(manifest, clock, banned=self._barred)
        admission = Admission(store, manifest, rescore, clock, banned=self._barred)
        self._puller = Puller(
            transport,
            store,
            manifest,
            admission,
            self.accounts,
            clock,
            request_timeout=request_timeout,
            pool_target=pool_target,
            seed=seed,
            provide=self._provide,
        )
        self._hearing = Hearing(
            identity.peer_id,
            store,
            manifest,
            self.accounts,
            self._puller.want,
            clock,
            banned=self._barred,
        )
        self._healer = Healer(
            transport,
            store,
            manifest,
            self.accounts,
            clock,
            self._hearing.hear,
            heal_seconds=heal_seconds,
            request_timeout=request_timeout,
            seed=seed,
        )
        self._serving = Serving(
            store,
            manifest,
            self.accounts,
            clock,
            refused=access.refused if access else lambda peer: False,
            banned=self._barred,
        )
        self._outbox: asyncio.Queue[bytes] = asyncio.Queue(MAX_OUTBOX)
        self._to_provide: asyncio.Queue[bytes] = asyncio.Queue(MAX_OUTBOX)

    def _barred(self, producer: str) -> bool:
        """Whether nothing of this producer is taken: it is banned here, or the coordinator's list says so."""
        return self.reputation.is_banned(producer) or (self._access is not None and self._access.barred(producer))

    # -- for the loop and the view ---------------------------------------------------------------------------

    def publish(self, group: RolloutGroup, parts: Sequence[Mapping[str, float]] = ()) -> bytes:
        """Keep an own group, announce it when the network can, and return its digest; never waits.

        `parts`: what its rewards are made of, one mapping a completion.

        A group for a task of an epoch that was published already is not published again: the first one's digest is
        returned. It is on disk before it is announced, so this holds over a kill at any instant, after which the loop
        answers the same tasks anew. Raises Rejected where every peer would reject it, and StoreError.
        """
        me, now = self._identity.peer_id, self._clock()
        known = self.store.group_of(me, group.epoch, group.task)
        if known is not None:
            return known
        expires = now + self.manifest.caps.group_ttl_seconds
        body = seal(self._identity, Domain.group, msgspec.msgpack.encode(group), issued=now, expires=expires)
        announcement = announcement_of(group, body, self.manifest.digest)
        opened, _ = check_group(
            body,
            self.manifest,
            now,
            producer=me,
            announced=announcement,
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
            parts=tuple(parts),
        )
        with self.store.transaction():
            self.store.add(record, body)
            self._hearing.remember(announcement, me, sealed, opened.expires)
        self.accounts.counters.published += 1
        self._post(sealed)
        self._provide(opened.digest)
        return opened.digest

    def weight(self, peer: str) -> float:
        """How far a producer is trusted, in [0, 1); for the sampler."""
        return self.reputation.weight(peer)

    def counters(self) -> dict[str, Any]:
        """`Counters` as JSON values."""
        counters = self.accounts.counters
        counters.dropped_announcements, counters.dropped_wanted = self._gate.dropped, self._puller.wanted.dropped
        counters.turned_away = self._serving.turned_away
        return asdict(counters)

    def withdraw(self, digest: bytes, producer: str, rejected: Rejected) -> None:
        """An admitted group is not to be trained on after all. Raises StoreError."""
        with self.store.transaction():
            self.store.overrule(digest, str(rejected.reason), rejected.detail)
            self.accounts.offence(rejected, producer)

    # -- the service -----------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Serve and exchange until cancelled. The transport has been started. Raises StoreError at start only."""
        self._serving.serve_on(self.transport)
        for peer in self.reputation.banned():
            self.accounts.refuse(peer)
        self._hearing.want_again()
        own_shard = self.manifest.shard_of(self._identity.peer_id)
        for i in range(min(self.manifest.shards, MAX_SHARDS)):
            shard = (own_shard + i) % self.manifest.shards
            await self.transport.subscribe(announce_topic(self.manifest.digest, shard), self._gate.check)
        for peer in self.transport.peers():
            self._greet(peer)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._listen(), name="exchange: listen")
            tasks.create_task(self._send(announce_topic(self.manifest.digest, own_shard)), name="exchange: send")
            tasks.create_task(self._provide_all(), name="exchange: provide")
            tasks.create_task(self._drain(), name="exchange: drain")
            tasks.create_task(self._tidy(), name="exchange: tidy")
            tasks.create_task(self._healer.meet(), name="exchange: meet")
            if self._log_sync is not None:
                self._log_sync.serve_on(self.transport)
                tasks.create_task(self._log_sync.run(), name="exchange: rounds")
            if self._access is not None:
                tasks.create_task(self._access.run(), name="exchange: access")
            for i in range(HEALERS):
                tasks.create_task(self._healer.run(), name=f"exchange: heal {i}")
            for i in range(PULLERS):
                tasks.create_task(self._puller.run(), name=f"exchange: pull {i}")

    async def _listen(self) -> None:
        async for event in self.transport.events():
            try:
                if isinstance(event, Message) and event.topic == self._rounds_topic:
                    if self._log_sync is not None:
                        self._log_sync.hear(event.data, event.forwarder)
                elif isinstance(event, Message):
                    self._hearing.hear(event.data, event.forwarder)
                elif isinstance(event, PeerConnected):
                    self._greet(event.peer)
                elif isinstance(event, OversizeRequest):
                    self.accounts.offence(Rejected(Reason.too_large, f"a request on {event.protocol}"), event.peer)
            except StoreError as error:
                self.accounts.store_trouble(error)
            await asyncio.sleep(0)  # a full queue must not keep the loop to itself

    def _greet(self, peer: str) -> None:
        if self.reputation.is_banned(peer):
            self.accounts.refuse(peer)
            return
        if self._log_sync is not None:
            self._log_sync.met(peer)
        if self._access is not None and self._access.refused(peer):
            return  # it may be listed soon: `swarm.coordination.access` parts from it if not
        self.reputation.seen(peer)
        self._healer.met(peer)

    async def _drain(self) -> None:
        """Count what the gate refused in the transport's thread."""
        while True:
            await asyncio.sleep(DRAIN_SECONDS)
            try:
                for rejected, peers in self._gate.drain():
                    self.accounts.offence(rejected, *peers)
            except StoreError as error:
                self.accounts.store_trouble(error)

    async def _tidy(self) -> None:
        while True:
            await asyncio.sleep(TIDY_SECONDS)
            try:
                self.store.tidy()
                self.accounts.lift_bans()
            except StoreError as error:
                self.accounts.store_trouble(error)

    # -- sending ---------------------------------------------------------------------------------------------

    def _post(self, sealed: bytes) -> None:
        if self._outbox.full():
            self._outbox.get_nowait()
            self.accounts.counters.dropped_outbox += 1
        self._outbox.put_nowait(sealed)

    async def _send(self, topic: str) -> None:
        while True:
            sealed = await self._outbox.get()
            try:
                async with asyncio.timeout(self._timeout):
                    await self.transport.publish(topic, sealed)
            except (TransportError, TimeoutError):
                self.accounts.counters.dropped_outbox += 1

    def _provide(self, digest: bytes) -> None:
        if self._to_provide.full():
            self._to_provide.get_nowait()
            self.accounts.counters.dropped_provides += 1
        self._to_provide.put_nowait(digest)

    async def _provide_all(self) -> None:
        """Best effort: whoever has the announcement can ask its producer and forwarder too."""
        while True:
            digest = await self._to_provide.get()
            try:
                async with asyncio.timeout(self._timeout):
                    await self.transport.provide(digest)
            except (TransportError, TimeoutError):
                self.accounts.counters.dropped_provides += 1
            await asyncio.sleep(PROVIDE_SECONDS)


def announcement_of(group: RolloutGroup, body: bytes, swarm: bytes) -> Announcement:
    """What is announced of a group and its sealed bytes in the swarm of this digest."""
    rewards = group.rewards
    mean = math.fsum(rewards) / max(1, len(rewards))
    return Announcement(
        swarm=swarm,
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
