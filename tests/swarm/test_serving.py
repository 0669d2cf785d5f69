"""What is answered on streams, to whom, and how much."""

import asyncio

import msgspec
import pytest

from protocol.messages import (
    BATCH_PROTOCOL,
    GROUPS_PROTOCOL,
    LIVE_PROTOCOL,
    MANIFEST_PROTOCOL,
    BatchRequest,
    GroupRequest,
    LiveRequest,
    ManifestRequest,
)
from swarm.exchange import FetchFailed, fetch_manifest
from swarm.serving import LIVE_COST
from swarm.transport import Busy, RequestFailed, TransportError
from tests.swarm.world import MANIFEST, World, join, make_group, until, who


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
        (MANIFEST_PROTOCOL, b"garbage"),
        (LIVE_PROTOCOL, b"\x91" * 5000),
        (GROUPS_PROTOCOL, msgspec.msgpack.encode([b"x" * 32, -1])),
    ):
        with pytest.raises(RequestFailed):
            await bad.request(b.identity.peer_id, protocol, request, max_bytes=1000, timeout=1)
    assert b.count("rejected") == {"wrong_swarm": 1, "malformed": 4}
    assert b.exchange.reputation.is_banned(bad.peer_id)
    assert bad.peer_id not in b.transport.peers()


async def test_a_peer_that_had_its_share_is_asked_to_wait_and_no_other_is(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swarm.serving.ANSWER_BURST", 3000.0)
    monkeypatch.setattr("swarm.serving.ANSWER_RATE", 2000.0)
    a, greedy, other = await world.node("a"), await world.peer("greedy"), await world.peer("other")
    await join(greedy, a)
    await join(other, a)
    digest = a.exchange.publish(make_group(a.identity, 0))
    body, me = a.store.body(digest) or b"", a.identity.peer_id
    request = msgspec.msgpack.encode(GroupRequest(digest))

    async def ask(peer, protocol: str = GROUPS_PROTOCOL, request: bytes = request) -> bytes:
        return await peer.request(me, protocol, request, max_bytes=1 << 20, timeout=5)

    answers = await asyncio.gather(*(ask(greedy) for _ in range(30)), return_exceptions=True)
    given = [answer for answer in answers if answer == body]
    refused = [answer for answer in answers if isinstance(answer, Busy)]
    assert len(given) + len(refused) == 30
    cost = len(body) + 256
    assert len(given) == 3000 // cost + 1, "the last one goes into debt"
    for protocol, other_request in (
        (LIVE_PROTOCOL, msgspec.msgpack.encode(LiveRequest(MANIFEST.digest, ()))),
        (BATCH_PROTOCOL, msgspec.msgpack.encode(BatchRequest((digest,)))),
        (MANIFEST_PROTOCOL, msgspec.msgpack.encode(ManifestRequest(MANIFEST.digest))),
        (GROUPS_PROTOCOL, b"garbage"),
    ):
        with pytest.raises(Busy):
            await ask(greedy, protocol, other_request)
    assert await ask(other) == body
    assert a.count("turned_away") == len(refused) + 4
    assert a.count("rejected") == {}, "what was not read is no offence"
    await asyncio.sleep(max(answer.seconds for answer in refused))
    assert await ask(greedy) == body


async def test_small_questions_that_take_the_database_long_are_not_free(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swarm.serving.ANSWER_BURST", 4 * LIVE_COST)
    monkeypatch.setattr("swarm.serving.ANSWER_RATE", 1.0)
    a, curious = await world.node("a"), await world.peer("curious")
    await join(curious, a)
    request = msgspec.msgpack.encode(LiveRequest(MANIFEST.digest, (), 10**9))

    async def ask() -> bytes:
        return await curious.request(a.identity.peer_id, LIVE_PROTOCOL, request, max_bytes=1000, timeout=5)

    for _ in range(4):
        await ask()
    with pytest.raises(Busy):
        await ask()
