import hashlib
import time
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from protocol.messages import BATCH_PROTOCOL, GROUPS_PROTOCOL, BatchRequest, GroupRequest
from swarm.fetch import MAX_REQUESTS, SHUN_SECONDS, Fetcher, FetchFailed, HoldersBusy
from swarm.memory import MemoryHub, MemoryTransport
from swarm.transport import LEAST_WAIT_SECONDS, Busy

BODIES = [bytes([n + 1]) * (1000 + n) for n in range(5)]
DIGESTS = [hashlib.sha256(body).digest() for body in BODIES]


class Peers:
    """Peers on one hub; `asked` is who was asked for what offset, in order."""

    def __init__(self, clock: Any) -> None:
        self.hub, self.all = MemoryHub(), []
        self.asked: list[tuple[str, int]] = []
        self.mismatches: list[str] = []
        self.clock = clock

    async def add(self, name: str, body: bytes = b"") -> MemoryTransport:
        """A peer that answers every request for a group with `body` from the offset on."""
        peer = self.hub.transport(name)
        await peer.start()

        async def serve(asker: str, data: bytes) -> bytes:
            offset = msgspec.msgpack.decode(data, type=GroupRequest).offset
            self.asked.append((name, offset))
            return body[offset:]

        peer.serve(GROUPS_PROTOCOL, serve, max_request=4096)
        self.all.append(peer)
        return peer

    async def fetcher(self, *connected: str) -> Fetcher:
        self.me = await self.add("me")
        for name in connected:
            await self.me.connect(f"/p2p/{name}", timeout=1)
        return Fetcher(
            self.me, self.clock, request_timeout=1.0, on_mismatch=lambda peer, body: self.mismatches.append(peer)
        )


@pytest.fixture
async def peers(clock: Any) -> AsyncIterator[Peers]:
    peers = Peers(clock)
    yield peers
    for peer in peers.all:
        await peer.stop()


async def test_the_likeliest_holder_is_asked_first_and_nobody_else(peers: Peers) -> None:
    for name in "abc":
        await peers.add(name, BODIES[0])
    fetcher = await peers.fetcher("a", "b", "c")
    assert await fetcher.fetch(DIGESTS[0], 1000, ["b", "a"]) == BODIES[0]
    assert peers.asked == [("b", 0)]


async def test_a_broken_pull_resumes_elsewhere_at_its_offset(peers: Peers) -> None:
    for name in "ab":
        await peers.add(name, BODIES[0])
    fetcher = await peers.fetcher("a", "b")
    peers.hub.break_next_answer("a", 700)
    assert await fetcher.fetch(DIGESTS[0], 1000, ["a", "b"]) == BODIES[0]
    assert peers.asked == [("a", 0), ("b", 700)]


async def test_the_only_holder_is_asked_again_where_it_broke_off(peers: Peers) -> None:
    await peers.add("a", BODIES[0])
    fetcher = await peers.fetcher("a")
    peers.hub.break_next_answer("a", 700)
    assert await fetcher.fetch(DIGESTS[0], 1000, ["a"]) == BODIES[0]
    assert peers.asked == [("a", 0), ("a", 700)]


async def test_who_sent_bytes_of_another_hash_is_named(peers: Peers) -> None:
    await peers.add("liar", bytes(1000))
    await peers.add("honest", BODIES[0])
    fetcher = await peers.fetcher("liar", "honest")
    assert await fetcher.fetch(DIGESTS[0], 1000, ["liar", "honest"]) == BODIES[0]
    assert peers.mismatches == ["liar"]


async def test_a_mixture_blames_nobody_until_each_sent_the_whole(peers: Peers) -> None:
    await peers.add("liar", bytes(1000))
    await peers.add("honest", BODIES[0])
    fetcher = await peers.fetcher("liar", "honest")
    peers.hub.break_next_answer("liar", 10)
    assert await fetcher.fetch(DIGESTS[0], 1000, ["liar", "honest"]) == BODIES[0]
    assert set(peers.mismatches) <= {"liar"}


async def test_the_dht_is_asked_when_those_near_have_nothing(peers: Peers) -> None:
    await peers.add("near")
    far = await peers.add("far", BODIES[0])
    await far.connect("/p2p/near", timeout=1)
    await far.provide(DIGESTS[0])
    fetcher = await peers.fetcher("near")
    assert await fetcher.fetch(DIGESTS[0], 1000, ["near", "gone"]) == BODIES[0]
    assert peers.asked == [("near", 0), ("far", 0)]


async def test_failure_says_what_each_did_and_is_bounded(peers: Peers) -> None:
    for n in range(20):
        await peers.add(f"peer{n}")
    fetcher = await peers.fetcher(*(f"peer{n}" for n in range(20)))
    with pytest.raises(FetchFailed, match="peer0: not held; gone: no connection"):
        await fetcher.fetch(DIGESTS[0], 1000, ["peer0", "gone"])
    with pytest.raises(FetchFailed):
        await fetcher.fetch(DIGESTS[0], 1000, [f"peer{n}" for n in range(20)])
    assert len(peers.asked) <= 2 * MAX_REQUESTS


async def test_a_holder_that_gives_slowly_is_asked_last_for_a_while(peers: Peers) -> None:
    slow = await peers.add("a", BODIES[0])
    await peers.add("b", BODIES[0])
    fetcher = await peers.fetcher("a", "b")

    async def drip(asker: str, data: bytes) -> bytes:
        peers.asked.append(("a", 0))
        peers.clock.now += 0.3
        return BODIES[0]

    slow.serve(GROUPS_PROTOCOL, drip, max_request=4096)
    for _ in range(2):
        assert await fetcher.fetch(DIGESTS[0], 1000, ["a", "b"]) == BODIES[0]
    assert peers.asked == [("a", 0), ("b", 0)]


async def test_with_no_peer_at_all_it_fails_at_once(peers: Peers) -> None:
    fetcher = await peers.fetcher()
    with pytest.raises(FetchFailed, match="no peer to ask"):
        await fetcher.fetch(DIGESTS[0], 1000, ["me"])


async def test_a_peer_that_failed_is_asked_last_for_a_while(peers: Peers) -> None:
    for name in "ab":
        await peers.add(name, BODIES[0])
    fetcher = await peers.fetcher("a", "b")
    peers.hub.break_next_answer("a", 0)
    await fetcher.fetch(DIGESTS[0], 1000, ["a", "b"])
    assert fetcher.shunned("a")
    peers.asked.clear()
    await fetcher.fetch(DIGESTS[0], 1000, ["a", "b"])
    assert peers.asked == [("b", 0)]
    peers.clock.now += SHUN_SECONDS
    await fetcher.fetch(DIGESTS[0], 1000, ["a", "b"])
    assert peers.asked == [("b", 0), ("a", 0)]


@pytest.mark.parametrize(
    ("answer", "kept"),
    [
        (BODIES, [0, 1, 2, 3, 4]),
        (BODIES[:3], [0, 1, 2]),
        ([*BODIES[:2], BODIES[2][:-1], *BODIES[3:]], [0, 1]),
        ([bytes(1000), *BODIES[1:]], [1, 2, 3, 4]),
        ([], []),
    ],
    ids=["whole", "short", "shifted", "wrong", "nothing"],
)
async def test_of_a_batch_what_matches_its_digest_is_taken(peers: Peers, answer: list[bytes], kept: list[int]) -> None:
    a = await peers.add("a")

    async def serve(asker: str, data: bytes) -> bytes:
        assert msgspec.msgpack.decode(data, type=BatchRequest).groups == tuple(DIGESTS)
        return b"".join(answer)

    a.serve(BATCH_PROTOCOL, serve, max_request=4096)
    fetcher = await peers.fetcher("a")
    bodies = await fetcher.fetch_batch("a", [(digest, len(body)) for digest, body in zip(DIGESTS, BODIES, strict=True)])
    assert bodies == {DIGESTS[n]: BODIES[n] for n in kept}
    assert peers.mismatches == []


async def test_of_a_broken_batch_the_whole_bodies_are_kept(peers: Peers) -> None:
    a = await peers.add("a")
    a.serve(BATCH_PROTOCOL, lambda asker, data: wait(b"".join(BODIES)), max_request=4096)

    async def wait(value: bytes) -> bytes:
        return value

    fetcher = await peers.fetcher("a")
    peers.hub.break_next_answer("a", 2500)
    begin = time.monotonic()
    bodies = await fetcher.fetch_batch("a", [(digest, len(body)) for digest, body in zip(DIGESTS, BODIES, strict=True)])
    assert set(bodies) == set(DIGESTS[:2])
    assert time.monotonic() - begin < 1.0
    assert fetcher.shunned("a")


async def test_a_lie_about_a_size_does_not_discredit_the_holder(peers: Peers) -> None:
    await peers.add("a", BODIES[0])
    fetcher = await peers.fetcher("a")
    for size in (999, 1001):
        with pytest.raises(FetchFailed):
            await fetcher.fetch(DIGESTS[0], size, ["a"])
    assert not fetcher.shunned("a")
    assert peers.mismatches == []
    assert await fetcher.fetch(DIGESTS[0], 1000, ["a"]) == BODIES[0]


@pytest.mark.parametrize(("told", "kept"), [(3.0, 3.0), (0.0, LEAST_WAIT_SECONDS)])
async def test_a_holder_that_asks_to_wait_is_left_alone_and_not_discredited(
    peers: Peers, told: float, kept: float
) -> None:
    a = await peers.add("a", BODIES[0])
    asked = 0

    async def later(asker: str, data: bytes) -> bytes:
        nonlocal asked
        asked += 1
        raise Busy(told)

    serve = a._handlers[GROUPS_PROTOCOL][0]
    for protocol in (GROUPS_PROTOCOL, BATCH_PROTOCOL):
        a.serve(protocol, later, max_request=4096)
    fetcher = await peers.fetcher("a")
    assert await fetcher.fetch_batch("a", [(DIGESTS[0], 1000), (DIGESTS[1], 1001)]) == {}
    for _ in range(3):
        with pytest.raises(HoldersBusy) as caught:
            await fetcher.fetch(DIGESTS[0], 1000, ["a"])
        assert caught.value.seconds == pytest.approx(kept, abs=0.01)
    assert asked == 1
    assert not fetcher.shunned("a")
    a.serve(GROUPS_PROTOCOL, serve, max_request=4096)
    peers.clock.now += kept + 0.001
    assert fetcher.wait("a") == 0
    assert await fetcher.fetch(DIGESTS[0], 1000, ["a"]) == BODIES[0]
