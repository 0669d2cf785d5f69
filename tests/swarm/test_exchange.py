"""The exchange over the in-memory hub: what travels, and what hostile or broken peers cannot do."""

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
import pytest

from protocol.assignment import own_task
from protocol.envelope import Domain, digest_of, seal
from protocol.identity import Identity
from protocol.manifest import Caps, EnvironmentSpec, make_manifest
from protocol.messages import (
    BATCH_PROTOCOL,
    GROUPS_PROTOCOL,
    LIVE_PROTOCOL,
    MANIFEST_PROTOCOL,
    BatchRequest,
    GroupRequest,
    LiveRequest,
    announce_topic,
)
from protocol.rollout import Completion, RolloutGroup, TaskRef, Turn
from protocol.rules import Rejected
from swarm.exchange import (
    Exchange,
    FetchFailed,
    ScoringUnavailable,
    UnknownEnvironment,
    announcement_of,
    fetch_manifest,
)
from swarm.experience import ExperienceStore, StoreFull
from swarm.memory import MemoryHub, MemoryTransport
from swarm.transport import RequestFailed, TransportError

MANIFEST = make_manifest(
    "test",
    time.time() - 100,
    (EnvironmentSpec("chain_sum", "1", 1, {"max_tokens": 16}),),
    epoch_seconds=3600,
    slots_per_epoch=512,
    caps=Caps(max_group_bytes=64 * 1024),
)
TOPIC = announce_topic(MANIFEST.digest, 0)


def who(name: str) -> Identity:
    return Identity.from_seed(name.encode().ljust(32, b"."))


def make_group(by: Identity, slot: int, *, rewards: tuple[float, ...] = (0.0, 1.0), **changes) -> RolloutGroup:
    """Completions that score what their text says: see `truthful`."""
    epoch = MANIFEST.epoch_at(time.time())
    completions = tuple(
        Completion((Turn("assistant", f"{reward} padding {slot} {i} " * 3),), "stop", 8, reward)
        for i, reward in enumerate(rewards)
    )
    task = own_task(MANIFEST, epoch, by.peer_id, slot)
    group = RolloutGroup(epoch, task, "tiny", b"", 0, completions)
    return msgspec.structs.replace(group, **changes)


async def truthful(group: RolloutGroup) -> list[float]:
    return [float(completion.text.split()[0]) for completion in group.completions]


def sealed(producer: Identity, content: RolloutGroup, **changes) -> tuple[bytes, bytes]:
    """(sealed group, sealed announcement), the latter with `changes`."""
    now = time.time()
    body = seal(producer, Domain.group, msgspec.msgpack.encode(content), issued=now, expires=now + 600)
    announcement = msgspec.structs.replace(announcement_of(content, body, MANIFEST.digest), **changes)
    raw = seal(producer, Domain.announcement, msgspec.msgpack.encode(announcement), issued=now, expires=now + 600)
    return body, raw


async def until(condition: Callable[[], object], seconds: float = 5.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"waited {seconds} s in vain"
        await asyncio.sleep(0.01)


class Node:
    """One node with its exchange running."""

    def __init__(self, hub: MemoryHub, path: Path, name: str, **options) -> None:
        self.identity = who(name)
        self.transport = hub.transport(self.identity)
        self.store = ExperienceStore(path / f"{name}.db", options.pop("max_bytes", 64 << 20), time.time)
        self.events: list[tuple[str, str]] = []
        options = {"heal_seconds": 0.2, "request_timeout": 5.0, **options}
        rescore = options.pop("rescore", truthful)
        self.exchange = Exchange(
            self.transport, self.store, self.identity, MANIFEST, rescore, time.time,
            on_event=lambda kind, message: self.events.append((kind, message)), **options,
        )  # fmt: skip
        self.running: asyncio.Task[None] | None = None

    async def start(self) -> "Node":
        await self.transport.start()
        self.running = asyncio.create_task(self.exchange.run())
        await asyncio.sleep(0)
        return self

    async def stop(self) -> None:
        if self.running is not None:
            assert not self.running.done(), self.running
            self.running.cancel()
            await asyncio.gather(self.running, return_exceptions=True)
        await self.transport.stop()
        self.store.close()

    def count(self, name: str):
        return self.exchange.counters()[name]

    def verdict(self, digest: bytes) -> str:
        return self.store.find(digest.hex()).verdict

    def pool(self) -> set[bytes]:
        return {entry.digest for entry in self.store.pool(time.time())}


class World:
    """Makes nodes on one hub, and bare peers whose every answer the test decides."""

    def __init__(self, path: Path) -> None:
        self.path, self.hub, self.nodes = path, MemoryHub(), []
        self.peers: list[MemoryTransport] = []

    async def node(self, name: str, **options) -> Node:
        node = Node(self.hub, self.path, name, **options)
        self.nodes.append(node)
        return await node.start()

    async def peer(self, name: str, bodies: dict[bytes, bytes] | None = None) -> MemoryTransport:
        """A peer that serves these bodies by digest, to the letter of the request."""
        transport = self.hub.transport(who(name))
        await transport.start()
        await transport.subscribe(TOPIC)
        held = bodies if bodies is not None else {}

        async def serve(peer: str, data: bytes) -> bytes:
            request = msgspec.msgpack.decode(data, type=GroupRequest)
            return held.get(request.group, b"")[request.offset :]

        transport.serve(GROUPS_PROTOCOL, serve, max_request=4096)
        self.peers.append(transport)
        return transport

    async def stop(self) -> None:
        for node in self.nodes:
            await node.stop()
        for peer in self.peers:
            await peer.stop()


async def join(a: Node | MemoryTransport, b: Node | MemoryTransport) -> None:
    here, there = (x.transport if isinstance(x, Node) else x for x in (a, b))
    await here.connect(there.addresses()[0], timeout=1)
    await asyncio.sleep(0.02)


@pytest.fixture
async def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    monkeypatch.setattr("swarm.exchange.DRAIN_SECONDS", 0.02)
    monkeypatch.setattr("swarm.exchange.PROVIDE_SECONDS", 0.02)
    world = World(tmp_path)
    yield world
    await world.stop()


# -- what works ----------------------------------------------------------------------------------------------


async def test_a_published_group_is_pulled_scored_and_kept(world: World) -> None:
    a, b = await world.node("a"), await world.node("b")
    await join(a, b)
    group = make_group(a.identity, 0)
    digest = a.exchange.publish(group)
    await until(lambda: digest in b.pool())
    record = b.store.find(digest.hex())
    assert (record.origin, record.producer, record.verdict, record.local) == (
        "foreign", a.identity.peer_id, "admitted", (0.0, 1.0),
    )  # fmt: skip
    assert b.store.group_body(digest) == group
    assert (a.count("published"), a.count("served")) == (1, 1)
    assert (b.count("fetched"), b.count("admitted"), b.count("rejected")) == (1, 1, {})
    assert b.count("bytes_in") == a.count("bytes_out") == record.size
    assert b.exchange.weight(a.identity.peer_id) > b.exchange.weight("a stranger")
    assert b.store.verdicts() == {a.identity.peer_id: {"announced": 1, "admitted": 1}}
    await until(lambda: len(world.hub._providers.get(digest, ())) == 2)


async def test_publishing_is_idempotent_over_a_restart(world: World) -> None:
    a = await world.node("a")
    digest = a.exchange.publish(make_group(a.identity, 0))
    assert a.exchange.publish(make_group(a.identity, 0, rewards=(1.0, 0.0))) == digest
    await a.stop()
    world.nodes.remove(a)
    a = await world.node("a")
    assert a.exchange.publish(make_group(a.identity, 0)) == digest
    assert a.count("published") == 0
    b = await world.node("b")
    await join(a, b)
    await until(lambda: digest in b.pool())


async def test_what_every_peer_would_reject_is_not_published(world: World) -> None:
    a = await world.node("a")
    for bad, reason in (
        (make_group(a.identity, 0, task=TaskRef("chain_sum", "1", 1, 1)), "unassigned_task"),
        (make_group(a.identity, 0, rewards=(math.nan, 1.0)), "malformed"),
        (make_group(a.identity, 0, epoch=10**6), "from_future"),
    ):
        with pytest.raises(Rejected) as caught:
            a.exchange.publish(bad)
        assert caught.value.reason == reason
    assert a.store.summaries(None, 10) == []


async def test_lost_announcements_heal(world: World) -> None:
    world.hub = MemoryHub(seed=1, loss=1.0)
    a, b = await world.node("a"), await world.node("b", pool_target=1000)
    await join(a, b)
    digests = {a.exchange.publish(make_group(a.identity, slot)) for slot in range(150)}
    await until(lambda: b.pool() == digests, 15)
    assert b.count("healed") == 150
    assert b.transport.stats().messages_in == 0


async def test_a_late_joiner_hears_of_what_is_live_and_a_peer_of_a_peer_too(world: World) -> None:
    a, b = await world.node("a"), await world.node("b")
    await join(a, b)
    digest = a.exchange.publish(make_group(a.identity, 0))
    await until(lambda: digest in b.pool())
    world.hub.partition(a.identity.peer_id, who("c").peer_id)
    c = await world.node("c", heal_seconds=100)
    await join(b, c)
    await until(lambda: digest in c.pool())
    assert b.count("served") == 1, "the producer cannot be reached: its group comes from who told of it"


async def test_only_what_is_needed_is_pulled(world: World) -> None:
    a, b = await world.node("a"), await world.node("b", pool_target=3)
    await join(a, b)
    for slot in range(10):
        a.exchange.publish(make_group(a.identity, slot))
    await until(lambda: b.count("heard") == 10 and b.count("admitted") == 3)
    await asyncio.sleep(0.6)
    assert b.count("fetched") == 3
    b.store.mark_used([entry.digest for entry in b.store.pool(time.time())][:2])
    await until(lambda: b.count("admitted") == 5)


async def test_groups_that_announce_equal_rewards_are_not_pulled(world: World) -> None:
    a, b = await world.node("a"), await world.node("b")
    await join(a, b)
    a.exchange.publish(make_group(a.identity, 0, rewards=(1.0, 1.0)))
    digest = a.exchange.publish(make_group(a.identity, 1))
    await until(lambda: digest in b.pool())
    assert (b.count("heard"), b.count("uninformative"), b.count("fetched")) == (2, 1, 1)


async def test_after_a_restart_announced_groups_are_still_wanted(world: World) -> None:
    a, b = await world.node("a"), await world.node("b", pool_target=0, heal_seconds=100)
    await join(a, b)
    digest = a.exchange.publish(make_group(a.identity, 0))
    await until(lambda: b.count("heard") == 1)
    await b.stop()
    world.nodes.remove(b)
    b = await world.node("b", heal_seconds=100)
    await join(b, a)
    await until(lambda: digest in b.pool())
    assert b.count("heard") == 0


async def test_a_broken_stream_is_resumed_where_it_broke(world: World) -> None:
    a, b = await world.node("a"), await world.node("b", pool_target=0)
    await join(a, b)
    digest = a.exchange.publish(make_group(a.identity, 0))
    size = a.store.find(digest.hex()).size
    await until(lambda: b.count("heard") == 1)
    c = await world.node("c", heal_seconds=100, pool_target=0)
    world.hub.partition(c.identity.peer_id, a.identity.peer_id)
    d = await world.node("d", heal_seconds=100, pool_target=0)
    for node in (c, d):  # two holders besides the producer
        node.store.add(a.store.find(digest.hex()), a.store.body(digest) or b"")
    e = await world.node("e", heal_seconds=100)
    await join(e, c)
    await join(e, d)
    world.hub.break_next_answer(c.identity.peer_id, 100)
    world.hub.break_next_answer(d.identity.peer_id, 50)
    world.hub.partition(e.identity.peer_id, a.identity.peer_id)
    await join(e, b)
    await until(lambda: digest in e.pool())
    served = c.count("bytes_out") + d.count("bytes_out")
    assert e.count("bytes_in") == size
    assert served < 3 * size, "what had arrived was not sent again"
    assert e.count("rejected") == {}


async def test_groups_of_one_producer_are_pulled_together(world: World) -> None:
    a, b = await world.node("a"), await world.node("b", heal_seconds=100)
    digests = {a.exchange.publish(make_group(a.identity, slot)) for slot in range(20)}
    streams = 0
    request = b.transport.request

    async def counted(peer: str, protocol: str, *arguments, **options) -> bytes:
        nonlocal streams
        streams += protocol in (GROUPS_PROTOCOL, BATCH_PROTOCOL)
        return await request(peer, protocol, *arguments, **options)

    b.transport.request = counted  # type: ignore[method-assign]
    await join(a, b)
    await until(lambda: b.pool() == digests)
    assert streams <= 10
    assert b.count("fetched") == a.count("served") == 20


async def test_a_batch_is_answered_up_to_what_is_not_held(world: World) -> None:
    a, asker = await world.node("a"), await world.peer("asker")
    await join(asker, a)
    first, second = (a.exchange.publish(make_group(a.identity, slot)) for slot in range(2))

    async def ask(*digests: bytes) -> bytes:
        request = msgspec.msgpack.encode(BatchRequest(digests))
        return await asker.request(a.identity.peer_id, BATCH_PROTOCOL, request, max_bytes=1 << 20, timeout=1)

    one, two = a.store.body(first) or b"", a.store.body(second) or b""
    assert await ask(first, second) == one + two
    assert await ask(second, bytes(32), first) == two
    assert await ask(bytes(32)) == b""


async def test_the_manifest_is_fetched_by_its_digest(world: World) -> None:
    a = await world.node("a")
    liar, joiner = await world.peer("liar"), await world.peer("joiner")

    async def lie(peer: str, data: bytes) -> bytes:
        return MANIFEST.to_bytes()[:-1] + b"\x00"

    liar.serve(MANIFEST_PROTOCOL, lie, max_request=4096)
    await join(joiner, a)
    await join(joiner, liar)
    peers = [who("nobody").peer_id, liar.peer_id, a.identity.peer_id]
    assert await fetch_manifest(joiner, MANIFEST.digest, peers, 1.0) == MANIFEST.to_bytes()
    with pytest.raises(FetchFailed, match=r"no connection.*another hash") as caught:
        await fetch_manifest(joiner, MANIFEST.digest, peers[:2], 1.0)
    assert MANIFEST.digest.hex()[:12] in str(caught.value)
    with pytest.raises(FetchFailed, match="not held"):
        await fetch_manifest(joiner, bytes(32), peers[2:], 1.0)


# -- what hostile and broken peers cannot do -----------------------------------------------------------------


async def test_garbage_announcements_are_counted_and_their_sender_banned(world: World) -> None:
    a, b, bad = await world.node("a"), await world.node("b"), await world.peer("bad")
    await join(a, b)
    await join(bad, b)
    for garbage in (b"", b"garbage", bytes(2000), b"\x97\x01" + bytes(100)):
        await bad.publish(TOPIC, garbage)
    digest = a.exchange.publish(make_group(a.identity, 0))
    await until(lambda: digest in b.pool())
    await until(lambda: b.count("rejected") == {"malformed": 4})
    assert b.store.verdicts()[bad.peer_id] == {"malformed": 4}
    assert bad.peer_id not in b.transport.peers()
    assert a.count("rejected") == {}, "garbage is not relayed"
    kinds = [kind for kind, _ in b.events]
    assert kinds == ["rejected", "banned"], "told once, and that it is banned"


async def test_a_flood_of_messages_is_dropped(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm.gate.BURST", 10.0)
    monkeypatch.setattr("swarm.gate.RATE", 1.0)
    a, b = await world.node("a"), await world.node("b", heal_seconds=100)
    await join(a, b)
    for slot in range(30):
        a.exchange.publish(make_group(a.identity, slot))
    await until(lambda: b.count("dropped_announcements") == 20)
    await until(lambda: b.count("heard") == 10)
    assert a.identity.peer_id in b.transport.peers()


async def announce(
    world: World, node: Node, name: str, group: RolloutGroup, body: bytes | None = None, **changes
) -> tuple[MemoryTransport, bytes]:
    """A bare peer announces a group, holds its body and serves it; returns it and the group's digest."""
    true_body, raw = sealed(who(name), group, **changes)
    digest = digest_of(true_body)
    peer = await world.peer(name, {digest: true_body if body is None else body})
    await join(peer, node)
    await peer.publish(TOPIC, raw)
    return peer, digest


async def test_an_unassigned_task_is_rejected_before_it_is_pulled(world: World) -> None:
    b = await world.node("b")
    other = own_task(MANIFEST, MANIFEST.epoch_at(time.time()), who("other").peer_id, 0)
    bad, _ = await announce(world, b, "bad", make_group(who("bad"), 0, task=other))
    await until(lambda: b.count("rejected") == {"unassigned_task": 1})
    assert b.count("fetched") == 0
    assert b.store.verdicts()[bad.peer_id] == {"unassigned_task": 1}


async def test_wrong_rewards_are_rejected_and_kept_for_people(world: World) -> None:
    b = await world.node("b")
    group = make_group(who("bad"), 0)
    lie = tuple(msgspec.structs.replace(completion, reward=1 - completion.reward) for completion in group.completions)
    lying = msgspec.structs.replace(group, completions=lie)
    bad, digest = await announce(world, b, "bad", lying)
    await until(lambda: b.count("rejected") == {"reward_mismatch": 1})
    record = b.store.find(digest.hex())
    assert (record.verdict, record.claimed, record.local) == ("reward_mismatch", (1.0, 0.0), (0.0, 1.0))
    assert record.detail == "completion 0 claims reward 1, scored 0 here"
    assert b.store.group_body(digest) == lying
    assert b.pool() == set()
    assert b.store.body(digest) is None, "not served to others"
    assert b.exchange.weight(bad.peer_id) < b.exchange.weight("a stranger")


async def test_a_body_over_its_announced_size_or_the_cap_is_not_taken(world: World) -> None:
    b = await world.node("b")
    await announce(world, b, "long", make_group(who("long"), 0), body=bytes(60_000))
    await until(lambda: b.count("fetch_failures") == 1)
    await announce(world, b, "huge", make_group(who("huge"), 0), size=MANIFEST.caps.max_group_bytes + 1)
    await until(lambda: b.count("rejected") == {"too_large": 1})
    assert (b.count("fetched"), b.store.summaries(None, 10)) == (0, [])
    kind, message = b.events[0]
    assert kind == "fetch"
    assert "over the cap" in message


async def test_a_body_of_another_hash_is_taken_from_another_holder(world: World) -> None:
    b = await world.node("b", heal_seconds=100)
    body, raw = sealed(who("a"), make_group(who("a"), 0))
    liar = await world.peer("liar", {digest_of(body): bytes(len(body))})
    good = await world.peer("good", {digest_of(body): body})
    await join(liar, b)
    await join(good, b)
    await liar.publish(TOPIC, raw)
    await until(lambda: digest_of(body) in b.pool())
    assert b.count("rejected") == {"hash_mismatch": 1}
    assert b.store.verdicts()[liar.peer_id] == {"hash_mismatch": 1}
    assert b.store.verdicts()[who("a").peer_id] == {"announced": 1, "admitted": 1}, "its producer is not to blame"


async def test_a_part_that_was_rubbish_does_not_blame_who_sent_the_rest(world: World) -> None:
    b = await world.node("b", heal_seconds=100)
    body, raw = sealed(who("a"), make_group(who("a"), 0))
    liar = await world.peer("liar", {digest_of(body): bytes(40)})  # a short answer, so the rest is asked elsewhere
    good = await world.peer("good", {digest_of(body): body})
    await join(liar, b)
    await join(good, b)
    await liar.publish(TOPIC, raw)
    await until(lambda: digest_of(body) in b.pool())
    assert b.count("rejected") == {}


async def test_a_peer_that_says_nothing_costs_one_deadline(world: World) -> None:
    b = await world.node("b", heal_seconds=100, request_timeout=1.0)
    body, raw = sealed(who("silent"), make_group(who("silent"), 0))
    silent, good = await world.peer("silent"), await world.peer("good", {digest_of(body): body})

    async def hang(peer: str, data: bytes) -> bytes:
        await asyncio.sleep(60)
        return b""

    silent.serve(GROUPS_PROTOCOL, hang, max_request=4096)
    silent.serve(LIVE_PROTOCOL, hang, max_request=4096)
    await join(silent, b)
    await join(good, b)
    begin = time.monotonic()
    await silent.publish(TOPIC, raw)
    await until(lambda: digest_of(body) in b.pool())
    assert 1.0 <= time.monotonic() - begin < 4.0
    second, raw = sealed(who("silent"), make_group(who("silent"), 1))
    good.serve(GROUPS_PROTOCOL, lambda peer, data: asyncio.sleep(0, second), max_request=4096)
    begin = time.monotonic()
    await silent.publish(TOPIC, raw)
    await until(lambda: digest_of(second) in b.pool())
    assert time.monotonic() - begin < 0.9, "it is asked last for a while"


async def test_what_nobody_holds_is_given_up(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm.wanted.RETRY_SECONDS", 0.05)
    b = await world.node("b")
    await announce(world, b, "bad", make_group(who("bad"), 0), body=b"")
    await until(lambda: b.count("dropped_wanted") == 1)
    assert b.count("fetch_failures") == 3
    assert b.count("rejected") == {}


async def test_an_unknown_environment_version_is_rejected(world: World) -> None:
    b = await world.node("b", environments=[("chain_sum", "2")])
    await announce(world, b, "old", make_group(who("old"), 0))
    await until(lambda: b.count("rejected") == {"unknown_environment": 1})
    assert b.count("fetched") == 0

    async def cannot(group: RolloutGroup) -> list[float]:
        raise UnknownEnvironment("chain_sum 1 is not installed")

    c = await world.node("c", rescore=cannot)
    _, digest = await announce(world, c, "other", make_group(who("other"), 0))
    await until(lambda: c.count("rejected") == {"unknown_environment": 1})
    assert c.store.find(digest.hex()).detail == "chain_sum 1 is not installed"
    assert c.exchange.weight(who("other").peer_id) == c.exchange.weight("a stranger"), "no offence"


async def test_a_scorer_that_is_away_rejects_nobody(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm.admission.SCORE_RETRY_SECONDS", 0.01)
    away = 2

    async def sometimes(group: RolloutGroup) -> list[float]:
        nonlocal away
        away -= 1
        if away >= 0:
            raise ScoringUnavailable("scorer restarts")
        return await truthful(group)

    a, b = await world.node("a"), await world.node("b", rescore=sometimes)
    await join(a, b)
    digest = a.exchange.publish(make_group(a.identity, 0))
    await until(lambda: digest in b.pool())
    away = 3
    a.exchange.publish(make_group(a.identity, 1))
    await until(lambda: b.count("unscored") == 1)
    assert b.count("rejected") == {}
    assert ("scorer", "groups cannot be scored: scorer restarts") in b.events


@pytest.mark.parametrize("scores", [(0.0,), (0.0, math.nan), (0.0, math.inf)])
async def test_scores_that_are_none_admit_nothing(world: World, scores: tuple[float, ...]) -> None:
    async def broken(group: RolloutGroup) -> tuple[float, ...]:
        return scores

    b = await world.node("b", rescore=broken)
    await announce(world, b, "a", make_group(who("a"), 0))
    await until(lambda: b.count("rejected") == {"scorer_failed": 1})


async def test_over_budget_and_uninformative_groups_are_kept_but_not_trained_on(world: World) -> None:
    b = await world.node("b")
    group = make_group(who("long"), 0)
    longer = tuple(msgspec.structs.replace(completion, token_count=17) for completion in group.completions)
    _, over = await announce(world, b, "long", msgspec.structs.replace(group, completions=longer))
    _, equal = await announce(world, b, "equal", make_group(who("equal"), 0, rewards=(1.0, 1.0)), reward_std=0.5)
    await until(lambda: b.count("rejected") == {"over_budget": 1, "uninformative": 1})
    assert (b.verdict(over), b.verdict(equal), b.pool()) == ("over_budget", "uninformative", set())


async def test_a_replay_changes_nothing_and_a_second_group_for_a_task_is_rejected(world: World) -> None:
    b = await world.node("b", heal_seconds=100)
    first, raw = sealed(who("a"), make_group(who("a"), 0))
    again, raw_again = sealed(who("a"), make_group(who("a"), 0, rewards=(1.0, 0.0)))
    peer = await world.peer("a", {digest_of(first): first, digest_of(again): again})
    await join(peer, b)
    await peer.publish(TOPIC, raw)
    await until(lambda: digest_of(first) in b.pool())
    for _ in range(5):
        await peer.publish(TOPIC, raw)
    await peer.publish(TOPIC, raw_again)
    await until(lambda: b.count("rejected") == {"replayed": 1})
    assert (b.count("fetched"), b.count("heard")) == (1, 2)
    assert b.pool() == {digest_of(first)}


async def test_two_groups_for_one_task_at_once_give_one(world: World) -> None:
    b = await world.node("b", heal_seconds=100)
    pairs = [sealed(who("a"), make_group(who("a"), 0, rewards=rewards)) for rewards in ((0.0, 1.0), (1.0, 0.0))]
    peer = await world.peer("a", {digest_of(body): body for body, _ in pairs})
    await join(peer, b)
    for _, raw in pairs:
        await peer.publish(TOPIC, raw)
    await until(lambda: b.count("fetched") == 2)
    await until(lambda: b.count("rejected") == {"replayed": 1})
    assert len(b.pool()) == 1


async def test_announcing_anothers_group_takes_nothing_from_its_producer(world: World) -> None:
    b = await world.node("b", heal_seconds=100)
    body, raw = sealed(who("a"), make_group(who("a"), 0))
    thief, honest = await world.peer("thief", {digest_of(body): body}), await world.peer("a", {digest_of(body): body})
    await join(thief, b)
    await join(honest, b)
    _, stolen = sealed(who("thief"), make_group(who("thief"), 0), group=digest_of(body), size=len(body))
    await thief.publish(TOPIC, stolen)
    await until(lambda: b.count("rejected") == {"wrong_producer": 1})
    assert b.store.verdicts()[thief.peer_id]["wrong_producer"] == 1
    await honest.publish(TOPIC, raw)
    await until(lambda: digest_of(body) in b.pool())


async def test_a_flood_from_one_producer_leaves_room_for_others(world: World) -> None:
    flood, b = await world.node("flood"), await world.node("b", pool_target=8)
    a = await world.node("a")
    await join(flood, b)
    for slot in range(200):
        flood.exchange.publish(make_group(flood.identity, slot))
    await until(lambda: b.count("heard") >= 200)
    await join(a, b)
    honest = {a.exchange.publish(make_group(a.identity, slot)) for slot in range(4)}
    assert b.count("admitted") <= 8
    b.store.mark_used(list(b.pool())[:4])
    await until(lambda: honest <= b.pool())
    assert b.store.unused(time.time()) == {flood.identity.peer_id: 4, a.identity.peer_id: 4}


async def test_peers_that_never_answer_leave_pullers_for_others(world: World) -> None:
    b = await world.node("b", heal_seconds=100, request_timeout=1.0)

    async def hang(peer: str, data: bytes) -> bytes:
        await asyncio.sleep(60)
        return b""

    for name in ("sybil0", "sybil1", "sybil2", "sybil3"):
        sybil = await world.peer(name)
        for protocol in (GROUPS_PROTOCOL, BATCH_PROTOCOL, LIVE_PROTOCOL):
            sybil.serve(protocol, hang, max_request=1 << 16)
        await join(sybil, b)
        for slot in range(20):
            await sybil.publish(TOPIC, sealed(who(name), make_group(who(name), slot))[1])
    await until(lambda: b.count("heard") == 80)
    a = await world.node("a")
    await join(a, b)
    honest = {a.exchange.publish(make_group(a.identity, slot)) for slot in range(8)}
    await until(lambda: honest <= b.pool(), seconds=4.0)  # about one deadline; it would be 16 of each puller


async def test_a_banned_peer_is_refused_and_its_announcements_go_no_further(world: World) -> None:
    b, c = await world.node("b"), await world.node("c")
    await join(b, c)
    bad = await world.peer("bad")
    await join(bad, b)
    for slot in range(4):
        group = make_group(who("bad"), slot, task=TaskRef("chain_sum", "1", slot, 0))
        await bad.publish(TOPIC, sealed(who("bad"), group)[1])
    await until(lambda: b.exchange.reputation.is_banned(bad.peer_id))
    assert bad.peer_id not in b.transport.peers()
    assert ("banned", f"{bad.peer_id} is banned: too many offences, the last one unassigned_task") in b.events
    relay = await world.peer("relay")
    await join(relay, b)
    heard = c.count("heard")
    await relay.publish(TOPIC, sealed(who("bad"), make_group(who("bad"), 10))[1])  # a good one, but of a banned peer
    await until(lambda: b.count("rejected").get("banned") == 1)
    assert c.count("heard") == heard
    assert relay.peer_id in b.transport.peers()
    await b.stop()
    world.nodes.remove(b)
    b = await world.node("b")
    with pytest.raises(Exception, match="no connection"):
        await bad.connect(b.transport.addresses()[0], timeout=1)


async def test_broken_requests_and_answers_end_nothing(world: World) -> None:
    a, b = await world.node("a"), await world.node("b")
    bad = await world.peer("bad")

    async def garbage(peer: str, data: bytes) -> bytes:
        return b"\xff" * 100

    bad.serve(LIVE_PROTOCOL, garbage, max_request=1 << 16)
    await join(bad, b)
    for protocol in (GROUPS_PROTOCOL, BATCH_PROTOCOL, LIVE_PROTOCOL, MANIFEST_PROTOCOL):
        for request in (b"", b"garbage", b"\xc1" * 1000, msgspec.msgpack.encode([b"x" * 32, [b"y" * 32] * 1025])):
            with pytest.raises(TransportError):  # reset, and once it is banned, not even reached
                await bad.request(b.identity.peer_id, protocol, request, max_bytes=1000, timeout=1)
    await until(lambda: b.exchange.reputation.is_banned(bad.peer_id))
    assert set(b.count("rejected")) == {"malformed"}
    await join(a, b)
    digest = a.exchange.publish(make_group(a.identity, 0))
    await until(lambda: digest in b.pool())


async def test_broken_requests_are_counted_and_their_sender_is_banned(world: World) -> None:
    b = await world.node("b", heal_seconds=100)
    bad = await world.peer("bad")
    await join(bad, b)
    other_swarm = msgspec.msgpack.encode(LiveRequest(b"s" * 32, ()))
    for protocol, request in (
        (LIVE_PROTOCOL, other_swarm),
        (GROUPS_PROTOCOL, b"garbage"),
        (BATCH_PROTOCOL, b""),
        (LIVE_PROTOCOL, b"\x91" * 5000),
        (GROUPS_PROTOCOL, msgspec.msgpack.encode([b"x" * 32, -1])),
    ):
        with pytest.raises(RequestFailed):
            await bad.request(b.identity.peer_id, protocol, request, max_bytes=1000, timeout=1)
    assert b.count("rejected") == {"wrong_swarm": 1, "malformed": 4}
    assert b.exchange.reputation.is_banned(bad.peer_id)
    assert bad.peer_id not in b.transport.peers()


async def test_what_was_refused_is_not_counted_at_every_healing(world: World) -> None:
    a = await world.node("a")
    b = await world.node("b", environments=[("chain_sum", "2")], heal_seconds=0.05)
    a.exchange.publish(make_group(a.identity, 0))
    await join(a, b)
    await until(lambda: b.count("rejected") == {"unknown_environment": 1})
    await asyncio.sleep(0.3)
    assert b.count("rejected") == {"unknown_environment": 1}


async def test_one_bad_record_never_drops_another(world: World) -> None:
    b = await world.node("b")
    bodies: dict[bytes, bytes] = {}
    peer = await world.peer("a", bodies)
    await join(peer, b)
    good, wrong = set(), set()
    for slot in range(12):
        group = make_group(who("a"), slot)
        if slot % 4 == 3:
            group = msgspec.structs.replace(group, completions=group.completions[::-1] + group.completions[:1])
            lie = msgspec.structs.replace(group.completions[0], reward=0.5)
            group = msgspec.structs.replace(group, completions=(lie, *group.completions[1:]))
        body, raw = sealed(who("a"), group)
        bodies[digest_of(body)] = body
        (wrong if slot % 4 == 3 else good).add(digest_of(body))
        await peer.publish(TOPIC, raw)
    await until(lambda: b.pool() == good)
    await until(lambda: b.count("rejected") == {"reward_mismatch": 3})
    assert {b.verdict(digest) for digest in wrong} == {"reward_mismatch"}


async def test_a_full_disk_is_told_and_passes(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm.pulling.STORE_PAUSE_SECONDS", 0.05)
    a, b = await world.node("a"), await world.node("b")
    await join(a, b)
    full = True
    original = ExperienceStore.add

    def no_room(store: ExperienceStore, *arguments) -> bool:
        if full:
            raise StoreFull("no room for node.db: free some disk")
        return original(store, *arguments)

    monkeypatch.setattr(ExperienceStore, "add", no_room)
    with pytest.raises(StoreFull):
        a.exchange.publish(make_group(a.identity, 0))
    assert a.store.live_digests(time.time(), 10) == [], "nothing is announced that is not held"
    full = False
    digest = a.exchange.publish(make_group(a.identity, 0))
    full = True
    await until(lambda: b.count("store_errors") >= 1)
    full = False
    assert ("store", "no room for node.db: free some disk") in b.events
    await until(lambda: digest in b.pool())


async def test_an_outbox_that_is_full_drops_and_heals(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm.exchange.MAX_OUTBOX", 5)
    a, b = await world.node("a"), await world.node("b", pool_target=100)
    await join(a, b)
    digests = {a.exchange.publish(make_group(a.identity, slot)) for slot in range(20)}
    assert a.count("dropped_outbox") == 15
    await until(lambda: b.pool() == digests)


@pytest.mark.slow
async def test_a_hundred_groups_a_second(world: World) -> None:
    """Announced, pulled, verified, scored and stored, both ends in this one process."""
    a, b = await world.node("a", heal_seconds=1), await world.node("b", heal_seconds=1, pool_target=10_000)
    await join(a, b)
    begin = time.process_time()
    for slot in range(300):
        a.exchange.publish(make_group(a.identity, slot))
        await asyncio.sleep(0)
    await until(lambda: b.count("admitted") == 300, 20)
    assert time.process_time() - begin < 3.0
