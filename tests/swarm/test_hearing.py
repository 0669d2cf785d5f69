"""Which announcements are noted, counted against whom, and passed on."""

import asyncio
import time

import msgspec
import pytest

from protocol.assignment import own_task
from protocol.envelope import Domain, digest_of, seal
from protocol.rollout import TaskRef
from swarm.exchange import announcement_of
from swarm.transport import PeerUnreachable
from tests.swarm.world import MANIFEST, TOPIC, World, announce, join, make_group, sealed, until, who


async def test_garbage_announcements_are_counted_and_their_sender_banned(world: World) -> None:
    a, b, bad = await world.node("a"), await world.node("b"), await world.peer("bad")
    await join(a, b)
    await join(bad, b)
    for garbage in (b"", b"garbage", bytes(2000), b"\x97\x02" + bytes(100)):
        await bad.publish(TOPIC, garbage)
    digest = a.exchange.publish(make_group(a.identity, 0))
    await until(lambda: digest in b.pool())
    await until(lambda: b.count("rejected") == {"malformed": 4})
    assert b.verdicts(bad.peer_id) == {"malformed": 4}
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


async def test_an_unassigned_task_is_rejected_before_it_is_pulled(world: World) -> None:
    b = await world.node("b")
    other = own_task(MANIFEST, MANIFEST.epoch_at(time.time()), who("other").peer_id, 0)
    bad, _ = await announce(world, b, "bad", make_group(who("bad"), 0, task=other))
    await until(lambda: b.count("rejected") == {"unassigned_task": 1})
    assert b.count("fetched") == 0
    assert b.verdicts(bad.peer_id) == {"unassigned_task": 1}


async def test_whoever_passes_on_what_every_node_refuses_is_blamed_too(world: World) -> None:
    b, relay = await world.node("b"), await world.peer("relay")
    await join(relay, b)
    other = own_task(MANIFEST, MANIFEST.epoch_at(time.time()), who("other").peer_id, 0)
    await relay.publish(TOPIC, sealed(who("bad"), make_group(who("bad"), 0, task=other))[1])
    await until(lambda: b.count("rejected") == {"unassigned_task": 1})
    assert b.verdicts(relay.peer_id) == b.verdicts(who("bad").peer_id) == {"unassigned_task": 1}


async def test_of_two_groups_for_one_task_the_first_counts_and_the_second_is_not_even_pulled(world: World) -> None:
    b = await world.node("b", heal_seconds=100)
    first, raw = sealed(who("a"), make_group(who("a"), 0))
    second, raw_second = sealed(who("a"), make_group(who("a"), 0, rewards=(1.0, 0.0)))
    peer = await world.peer("a", {digest_of(first): first, digest_of(second): second})
    await join(peer, b)
    await peer.publish(TOPIC, raw)
    await peer.publish(TOPIC, raw_second)  # before the first can have been judged
    await until(lambda: b.count("rejected") == {"equivocation": 1})
    await until(lambda: b.pool() == {digest_of(first)})
    before = b.exchange.weight(peer.peer_id)
    assert before > b.exchange.weight("a stranger")
    for _ in range(5):
        await peer.publish(TOPIC, raw)
        await peer.publish(TOPIC, raw_second)
    _, once_more = sealed(who("a"), make_group(who("a"), 0, rewards=(0.5, 0.0)))
    await peer.publish(TOPIC, once_more)
    await until(lambda: b.count("rejected") == {"equivocation": 2})
    assert (b.count("fetched"), b.count("heard")) == (1, 1)
    assert b.exchange.weight(peer.peer_id) == pytest.approx(before, rel=1e-3)
    assert ("rejected", f"{peer.peer_id[-8:]}: equivocation: announces a second group for chain_sum 0 of epoch 0: "
            "the first one counts") in b.events  # fmt: skip
    await b.stop()
    world.nodes.remove(b)
    b = await world.node("b", heal_seconds=100)
    await join(peer, b)
    await peer.publish(TOPIC, raw_second)
    await until(lambda: b.count("rejected") == {"equivocation": 1})


async def test_announcing_the_same_group_again_is_no_offence(world: World) -> None:
    b = await world.node("b", heal_seconds=100)
    peer, digest = await announce(world, b, "a", make_group(who("a"), 0))
    await until(lambda: digest in b.pool())
    body = b.store.body(digest) or b""
    announcement = announcement_of(make_group(who("a"), 0), body, MANIFEST.digest)
    now = time.time()
    again = seal(who("a"), Domain.announcement, msgspec.msgpack.encode(announcement), issued=now, expires=now + 900)
    heard = b.transport.stats().messages_in
    await peer.publish(TOPIC, again)
    await until(lambda: b.transport.stats().messages_in == heard + 1)
    await asyncio.sleep(0.05)
    assert (b.count("heard"), b.count("fetched"), b.count("rejected")) == (1, 1, {})


async def test_a_node_killed_after_it_shared_a_step_answers_its_tasks_anew_and_tells_nobody(world: World) -> None:
    a, b = await world.node("a"), await world.node("b")
    await join(a, b)
    first = a.exchange.publish(make_group(a.identity, 0))
    await until(lambda: first in b.pool())
    assert a.running is not None
    a.running.cancel()  # as kill -9 would: nothing is closed, and the journal knows nothing of the step
    await a.transport.stop()
    again = await world.node("a")
    world.nodes.remove(a)
    await join(again, b)
    assert again.exchange.publish(make_group(again.identity, 0, rewards=(1.0, 0.0))) == first
    other = again.exchange.publish(make_group(again.identity, 1))
    await until(lambda: b.pool() == {first, other})
    assert b.count("rejected") == {}


async def test_a_ban_ends_when_its_offences_have_faded(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm.exchange.TIDY_SECONDS", 0.05)
    b, bad = await world.node("b"), await world.peer("bad")
    await join(bad, b)
    for number in range(4):
        await bad.publish(TOPIC, b"garbage %d" % number)
    await until(lambda: bad.peer_id not in b.transport.peers())
    with pytest.raises(PeerUnreachable):
        await bad.connect(b.transport.addresses()[0], timeout=1)
    monkeypatch.setattr("swarm.reputation.HALF_LIFE", 0.01)
    await until(lambda: ("unbanned", f"{bad.peer_id} is no longer banned: its offences are long ago") in b.events)
    await join(bad, b)
    assert bad.peer_id in b.transport.peers()


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


async def test_what_was_refused_is_not_counted_at_every_healing(world: World) -> None:
    """Another ban list judges otherwise, and so may a peer that heard another group first."""
    a, b = await world.node("a", heal_seconds=100), await world.node("b", heal_seconds=0.05)
    _, raw = sealed(who("twice"), make_group(who("twice"), 0))
    _, raw_second = sealed(who("twice"), make_group(who("twice"), 0, rewards=(1.0, 0.0)))
    for node, said in ((a, raw), (b, raw_second)):
        teller = await world.peer(f"teller of {node.identity.peer_id[-4:]}")
        await join(teller, node)
        await teller.publish(TOPIC, said)
        await until(lambda node=node: node.count("heard") == 1)
    await join(a, b)
    await until(lambda: b.count("rejected") == {"equivocation": 1})
    await asyncio.sleep(0.3)
    assert b.count("rejected") == {"equivocation": 1}
