"""Bytes a second, per direction and over all peers: arithmetic, the hub by a virtual clock, libp2p by a real one."""

import asyncio
import time
from collections.abc import Awaitable, Callable

import pytest

from swarm.memory import MemoryHub
from swarm.throttle import BUSY_SECONDS, GOSSIP_SECONDS, LONGEST_WAIT, Bucket, Lane, Throttle
from swarm.transport import Busy, RequestFailed, Transport
from tests.swarm.world import World, announce, make_group, until, who

SEND = "/shoal/send/1.0.0"
RATE = 16_000
"""Bytes a second: 128 kbit/s."""
KBPS = 128
NONE, UP, DOWN = (0, 0), (KBPS, 0), (0, KBPS)


class VirtualLoop(asyncio.SelectorEventLoop):
    """Nothing is waited for: where it would sleep, its clock jumps."""

    def __init__(self) -> None:
        super().__init__()
        self._virtual = 0.0
        select = self._selector.select

        def jump(timeout: float | None = None):
            self._virtual += timeout or 0.0
            return select(0)

        self._selector.select = jump

    def time(self) -> float:
        return self._virtual


def virtually(work: Callable[[], Awaitable[None]]) -> None:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(work())


def throttle(upload: int, download: int) -> Throttle:
    made = Throttle()
    made.limit(upload, download)
    return made


async def answers(peer: str, data: bytes) -> bytes:
    return bytes(int(data))


async def ask_for(seconds: float, a: Transport, b: Transport, *, size: int, streams: int, timeout: float = 20.0) -> int:
    """Bytes that came of whole answers when so many streams ask one after the other for so long."""
    now = asyncio.get_running_loop().time
    end, came = now() + seconds, 0

    async def stream() -> None:
        nonlocal came
        while now() < end:
            try:
                got = await a.request(b.peer_id, SEND, b"%d" % size, max_bytes=size, timeout=timeout)
            except Busy as busy:
                await asyncio.sleep(busy.seconds)
            else:
                came += len(got)

    await asyncio.gather(*(stream() for _ in range(streams)))
    return came


def test_pieces_are_as_far_apart_as_the_rate_says() -> None:
    bucket = Bucket(1000.0)
    assert [bucket.spend(250, 10.0) for _ in range(3)] == [0.25, 0.5, 0.75]
    assert bucket.wait(10.5) == 0.25
    assert bucket.spend(100, 20.0) == pytest.approx(0.1)  # what was not used before is not made up for
    bucket.rate = 100.0
    assert bucket.spend(100, 21.0) == 1.0
    bucket.rate = 0.0
    assert (bucket.spend(10**9, 21.0), bucket.wait(21.0)) == (0.0, 0.0)


def test_gossip_holds_streams_up_for_two_seconds_at_most() -> None:
    lane = Lane(Bucket(8_000.0), lambda: 100.0, asyncio.sleep)
    for _ in range(1000):
        lane.gossiped(2000)
    assert lane.bucket.wait(100.0) == GOSSIP_SECONDS
    lane.check()  # and nobody is turned away because of it
    assert lane.bucket.spend(32_000, 100.0) == GOSSIP_SECONDS + 4.0
    lane.gossiped(2000)
    assert lane.bucket.wait(100.0) == GOSSIP_SECONDS + 4.0, "what streams owe stays"
    lane.ahead = 10**9
    with pytest.raises(Busy) as busy:
        lane.check()
    assert busy.value.seconds == LONGEST_WAIT


@pytest.mark.parametrize(("rate", "piece"), [(0, 65536), (8_000, 2000), (100, 1024), (10**9, 65536)])
def test_a_piece_is_a_quarter_of_a_second(rate: float, piece: int) -> None:
    assert Bucket(rate).piece == piece


@pytest.mark.parametrize("size", [300, 5000, 60_000])
@pytest.mark.parametrize(("server", "asker"), [(UP, NONE), (NONE, DOWN), (UP, DOWN)])
def test_the_hub_is_as_fast_as_its_slower_end(server: tuple[int, int], asker: tuple[int, int], size: int) -> None:
    async def run() -> None:
        hub = MemoryHub()
        a, b = hub.transport("a", throttle=throttle(*asker)), hub.transport("b", throttle=throttle(*server))
        await a.start()
        await b.start()
        b.serve(SEND, answers, max_request=10)
        loop = asyncio.get_running_loop()
        begin = loop.time()
        came = await ask_for(30.0, a, b, size=size, streams=4)
        assert came / (loop.time() - begin) == pytest.approx(RATE, rel=0.1)

    virtually(run)


def test_the_limit_is_that_of_all_peers_together_and_can_change() -> None:
    async def run() -> None:
        hub, limited = MemoryHub(), throttle(*UP)
        b = hub.transport("b", throttle=limited)
        peers = [hub.transport(name) for name in "cde"]
        for one in (b, *peers):
            await one.start()
        b.serve(SEND, answers, max_request=10)
        loop = asyncio.get_running_loop()
        for kbps in (KBPS, 4 * KBPS, KBPS // 2):
            limited.limit(kbps, 0)
            begin = loop.time()
            came = sum(await asyncio.gather(*(ask_for(20.0, peer, b, size=4000, streams=2) for peer in peers)))
            assert came / (loop.time() - begin) == pytest.approx(125 * kbps, rel=0.1)

    virtually(run)


def test_too_many_at_once_are_asked_to_come_back_and_the_others_are_in_time() -> None:
    async def run() -> None:
        hub = MemoryHub()
        a, b = hub.transport("a"), hub.transport("b", throttle=throttle(64, 0))
        await a.start()
        await b.start()
        b.serve(SEND, answers, max_request=10)
        asked = [a.request("b", SEND, b"8000", max_bytes=8000, timeout=20.0) for _ in range(30)]
        done = await asyncio.gather(*asked, return_exceptions=True)
        waits = [error.seconds for error in done if isinstance(error, Busy)]
        whole = [answer for answer in done if isinstance(answer, bytes)]
        assert len(waits) + len(whole) == 30
        assert len(whole) == 1 + BUSY_SECONDS
        assert min(waits) > BUSY_SECONDS

    virtually(run)


def test_what_cannot_be_had_in_time_fails_at_its_deadline_with_what_came() -> None:
    async def run() -> None:
        hub = MemoryHub()
        a, b = hub.transport("a", throttle=throttle(*DOWN)), hub.transport("b")
        await a.start()
        await b.start()
        b.serve(SEND, answers, max_request=10)
        sink, loop = bytearray(), asyncio.get_running_loop()
        begin = loop.time()
        with pytest.raises(RequestFailed, match="did not answer"):
            await a.request("b", SEND, b"500000", max_bytes=500_000, timeout=5.0, sink=sink)
        assert loop.time() - begin == pytest.approx(5.0)
        assert len(sink) == pytest.approx(5 * RATE, rel=0.1)

    virtually(run)


def test_gossip_counts() -> None:
    async def run() -> None:
        hub = MemoryHub()
        a, b = hub.transport("a", throttle=throttle(*UP)), hub.transport("b", throttle=throttle(*DOWN))
        for one in (a, b):
            await one.start()
            await one.subscribe("t")
        b.serve(SEND, answers, max_request=10)
        await a.connect(b.addresses()[0], timeout=1)
        for _ in range(8):
            await a.publish("t", b"." * 2000)
        loop = asyncio.get_running_loop()
        begin = loop.time()
        assert await a.request("b", SEND, b"10", max_bytes=10, timeout=5) == bytes(10)
        # a second's worth of gossip went before
        assert loop.time() - begin == pytest.approx(1.0, abs=0.1)

    virtually(run)


@pytest.mark.network
@pytest.mark.parametrize(("server", "asker"), [(UP, NONE), (NONE, DOWN)])
async def test_libp2p_keeps_to_the_limit(libp2p, server: tuple[int, int], asker: tuple[int, int]) -> None:
    a, b = libp2p.transport(0, throttle=throttle(*asker)), libp2p.transport(1, throttle=throttle(*server))
    b.serve(SEND, answers, max_request=10)
    await a.start()
    await b.start()
    await a.connect(b.addresses()[0], timeout=5)
    begin = time.monotonic()
    came = await ask_for(3.0, a, b, size=3000, streams=8)
    # never faster but for the first answer of each stream; how much slower is a matter of the machine (the hub above
    # keeps to it in virtual time)
    assert 0 < came < 1.2 * RATE * (time.monotonic() - begin) + 8 * 3000


async def test_a_limited_node_still_gets_its_groups(world: World) -> None:
    node = await world.node("limited", throttle=throttle(64, 64))
    _, digest = await announce(world, node, "producer", make_group(who("producer"), 0))
    await until(lambda: digest in node.pool())
    assert node.count("fetch_failures") == 0
