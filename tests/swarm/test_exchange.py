"""The exchange over the in-memory hub: what travels, and what outlives a restart or a full disk."""

import asyncio
import math
import time

import pytest

from protocol.rollout import TaskRef
from protocol.rules import Reason, Rejected
from swarm.experience import ExperienceStore, StoreFull
from tests.swarm.world import World, join, make_group, until


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
    assert b.verdicts(a.identity.peer_id) == {"announced": 1, "admitted": 1}
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
    assert not a.store.announcements.digests(time.time(), 10), "nothing is announced that is not held"
    full = False
    digest = a.exchange.publish(make_group(a.identity, 0))
    full = True
    await until(lambda: b.count("store_errors") >= 1)
    full = False
    assert ("store", "no room for node.db: free some disk") in b.events
    await until(lambda: digest in b.pool())


async def test_a_withdrawn_group_is_its_producers_and_enough_of_them_a_ban(world: World) -> None:
    a, b = await world.node("a"), await world.node("b")
    await join(a, b)
    digests = [a.exchange.publish(make_group(a.identity, slot)) for slot in range(5)]
    await until(lambda: b.pool() == set(digests))
    late = Rejected(Reason.stale_policy, "of version 1, this is 9")
    b.exchange.withdraw(digests[0], a.identity.peer_id, late)
    assert b.pool() == set(digests[1:])
    assert b.verdicts(a.identity.peer_id)["stale_policy"] == 1
    before = b.exchange.weight(a.identity.peer_id)
    for digest in digests[1:]:
        b.exchange.withdraw(digest, a.identity.peer_id, Rejected(Reason.logprob_mismatch, "0.9 nats apart"))
    assert before > b.exchange.weight(a.identity.peer_id) == 0
    assert b.count("rejected") == {"stale_policy": 1, "logprob_mismatch": 4}
    assert b.verdict(digests[1]) == "logprob_mismatch"
    assert any(kind == "banned" for kind, _ in b.events)


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
