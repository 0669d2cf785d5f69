"""What gossip lost comes by asking."""

import asyncio
import time

import msgspec
import pytest

from protocol.envelope import Domain, digest_of, seal
from protocol.messages import LIVE_PROTOCOL, LiveRequest, LiveResponse
from swarm.exchange import announcement_of
from swarm.memory import MemoryHub
from swarm.transport import Busy
from tests.swarm.world import MANIFEST, Node, World, join, make_group, sealed, until, who


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


async def test_what_gossip_may_still_bring_is_not_asked_for(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm.healing.SETTLED_SECONDS", 1)
    world.hub = MemoryHub(seed=1, loss=1.0)
    a, b = await world.node("a", heal_seconds=100), await world.node("b", heal_seconds=0.05)
    settled: list[int] = []
    request = b.transport.request

    async def noted(peer: str, protocol: str, data: bytes, **options) -> bytes:
        if protocol == LIVE_PROTOCOL:
            settled.append(msgspec.msgpack.decode(data, type=LiveRequest).settled)
        return await request(peer, protocol, data, **options)

    b.transport.request = noted  # type: ignore[method-assign]
    await join(a, b)
    await until(lambda: len(settled) > 2)
    assert (settled[0], settled[1]) == (0, 1), "everything on meeting a peer, later what has settled"
    begin = time.monotonic()
    digest = a.exchange.publish(make_group(a.identity, 0))
    await until(lambda: digest in b.pool())
    assert time.monotonic() - begin > 0.9


async def test_the_asker_says_how_settled_it_wants_them(world: World) -> None:
    a, asker = await world.node("a"), await world.peer("asker")
    await join(asker, a)
    a.exchange.publish(make_group(a.identity, 0))

    async def ask(settled: int) -> int:
        request = msgspec.msgpack.encode(LiveRequest(a.exchange.manifest.digest, (), settled))
        answer = await asker.request(a.identity.peer_id, LIVE_PROTOCOL, request, max_bytes=1 << 20, timeout=5)
        return len(msgspec.msgpack.decode(answer, type=LiveResponse).announcements)

    assert [await ask(settled) for settled in (0, 60, 2**63 - 1)] == [1, 0, 0]


async def test_a_meeting_has_one_deadline(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two peers answer at the last moment, always with something new: both healers are with them."""
    monkeypatch.setattr("swarm.healing.MEETING_SECONDS", 0.5)
    b = await world.node("b", heal_seconds=100, pool_target=0)
    raw = [sealed(who("slow"), make_group(who("slow"), slot))[1] for slot in range(512)]

    async def slowly(peer: str, data: bytes) -> bytes:
        await asyncio.sleep(0.2)
        answer, raw[:64] = tuple(raw[:64]), ()
        return msgspec.msgpack.encode(LiveResponse(answer))

    for name in ("slow", "slower"):
        slow = await world.peer(name)
        slow.serve(LIVE_PROTOCOL, slowly, max_request=1 << 16)
        await join(slow, b)
    a = await world.node("a")
    digest = a.exchange.publish(make_group(a.identity, 0))
    await until(lambda: b.count("healed") > 0)
    begin = time.monotonic()
    await join(a, b)
    await until(lambda: digest in b.store.announcements.digests(time.time(), 1000))
    assert time.monotonic() - begin < 3.0, "32 rounds of both would take 6 s at least"
    assert raw, "neither was heard to the end"


async def test_a_peer_that_asks_to_wait_is_asked_again(world: World) -> None:
    b, a = await world.node("b", heal_seconds=100, pool_target=0), await world.peer("a")
    _, raw = sealed(who("a"), make_group(who("a"), 0))
    waits = [0.1, 0.2]

    async def later(peer: str, data: bytes) -> bytes:
        if waits:
            raise Busy(waits.pop())
        return msgspec.msgpack.encode(LiveResponse((raw,)))

    a.serve(LIVE_PROTOCOL, later, max_request=1 << 16)
    begin = time.monotonic()
    await join(a, b)
    await until(lambda: b.count("heard") == 1)
    assert time.monotonic() - begin >= 0.3
    assert (b.count("put_off"), b.count("rejected")) == (2, {})


async def test_a_peer_that_always_says_soon_does_not_keep_a_node_busy(world: World) -> None:
    b, a = await world.node("b", heal_seconds=100), await world.peer("a")
    asked = 0

    async def soon(peer: str, data: bytes) -> bytes:
        nonlocal asked
        asked += 1
        raise Busy(0.0)

    a.serve(LIVE_PROTOCOL, soon, max_request=1 << 16)
    await join(a, b)
    await asyncio.sleep(1.2)
    assert 2 <= asked <= 3


def remember(slot: int, age: int, *nodes: Node) -> bytes:
    """These nodes heard of a group of nobody's when it was made, `age` seconds ago; its digest."""
    group, made = make_group(who("nobody"), slot), time.time() - age
    expires = made + MANIFEST.caps.group_ttl_seconds
    body = seal(who("nobody"), Domain.group, msgspec.msgpack.encode(group), issued=made, expires=expires)
    announcement = announcement_of(group, body, MANIFEST.digest)
    raw = seal(who("nobody"), Domain.announcement, msgspec.msgpack.encode(announcement), issued=made, expires=expires)
    for node in nodes:
        node.store.announcements.add(
            digest_of(body), who("nobody").peer_id, group.epoch, group.task, raw, heard_at=made, expires_at=int(expires)
        )
    return digest_of(body)


async def test_an_old_gap_heals_though_a_request_cannot_name_all_that_is_known(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swarm.healing.MAX_HAVE", 16)
    for name in ("healing", "serving"):
        monkeypatch.setattr(f"swarm.{name}.MAX_LIVE", 8)
    a, b = await world.node("a", heal_seconds=100), await world.node("b", heal_seconds=100, pool_target=0)
    late = await world.node("late", heal_seconds=100, pool_target=0)
    asked: list[LiveRequest] = []
    request = b.transport.request

    async def noted(peer: str, protocol: str, data: bytes, **options) -> bytes:
        asked.append(msgspec.msgpack.decode(data, type=LiveRequest))
        return await request(peer, protocol, data, **options)

    b.transport.request = noted  # type: ignore[method-assign]
    missing = {3, 50, 70}
    digests = [remember(n, 1000 - 10 * n, a, *([b] if n not in missing else [])) for n in range(100)]
    await join(a, b)
    await until(lambda: b.count("healed") == len(missing), 10)
    assert set(b.store.announcements.digests(time.time(), 1000)) == set(digests)
    await asyncio.sleep(0.1)
    assert len(asked) <= 100 // 16 + 1 + len(missing), "each part once, and once more where there was a gap"
    await join(a, late)
    await until(lambda: late.count("healed") == 100, 10)
