"""What every `swarm.transport.Transport` promises of requests, held against the in-memory hub and against libp2p."""

import asyncio
import time

import pytest

from swarm.transport import (
    LEAST_WAIT_SECONDS,
    MAX_STREAMS_PER_PEER,
    Busy,
    OversizeRequest,
    PeerUnreachable,
    RequestFailed,
)

ECHO = "/shoal/echo/1.0.0"
BODY = bytes(range(256)) * 40_000


async def echo(peer: str, data: bytes) -> bytes:
    return data


async def body_from(peer: str, data: bytes) -> bytes:
    return BODY[int.from_bytes(data, "big") :]


async def silent(peer: str, data: bytes) -> bytes:
    await asyncio.sleep(3600)
    return b""


async def test_request_and_answer(network):
    a, b = await network.line(2)

    async def whoami(peer: str, data: bytes) -> bytes:
        return peer.encode() + data

    b.serve("/shoal/whoami/1.0.0", whoami, max_request=100)
    answer = await a.request(b.peer_id, "/shoal/whoami/1.0.0", b"!", max_bytes=1000, timeout=5)
    assert answer == a.peer_id.encode() + b"!"
    b.serve(ECHO, echo, max_request=0)
    assert await a.request(b.peer_id, ECHO, b"", max_bytes=0, timeout=5) == b""


async def test_request_in_both_directions_of_a_connection(network):
    a, b = await network.line(2)
    a.serve(ECHO, echo, max_request=100)
    assert await b.request(a.peer_id, ECHO, b"back", max_bytes=100, timeout=5) == b"back"


async def test_request_to_a_stranger_is_unreachable(network):
    (a,) = await network.start(1)
    with pytest.raises(PeerUnreachable):
        await a.request(network.identity(99).peer_id, ECHO, b"", max_bytes=1, timeout=2)


async def test_unknown_protocol_fails(network):
    a, b = await network.line(2)
    with pytest.raises(RequestFailed, match="/shoal/none"):
        await a.request(b.peer_id, "/shoal/none/1.0.0", b"", max_bytes=1, timeout=5)


async def test_a_handler_that_raises_fails_the_request_only(network):
    a, b = await network.line(2)

    async def broken(peer: str, data: bytes) -> bytes:
        raise ValueError("no such thing")

    b.serve("/shoal/broken/1.0.0", broken, max_request=10)
    b.serve(ECHO, echo, max_request=10)
    with pytest.raises(RequestFailed, match="/shoal/broken"):
        await a.request(b.peer_id, "/shoal/broken/1.0.0", b"", max_bytes=1, timeout=5)
    assert await a.request(b.peer_id, ECHO, b"still here", max_bytes=10, timeout=5) == b"still here"


async def test_a_handler_may_ask_to_wait(network):
    a, b = await network.line(2)
    waits = [2.5, 0.6004, 0.0004, 1e9]

    async def sometimes(peer: str, data: bytes) -> bytes:
        if waits:
            raise Busy(waits.pop(0))
        return data

    b.serve(ECHO, sometimes, max_request=10)
    told = []
    for _ in range(4):
        with pytest.raises(Busy) as caught:
            await a.request(b.peer_id, ECHO, b"now?", max_bytes=10, timeout=5)
        told.append(caught.value.seconds)
    if network.kind == "libp2p":
        assert told == [2.5, 0.601, LEAST_WAIT_SECONDS, 60.0], "to the millisecond, and never longer than a minute"
        assert b._host.streams._serving.total() == 1, "the stream is used again"
    else:
        assert told == [2.5, 0.6004, LEAST_WAIT_SECONDS, 1e9]
    assert await a.request(b.peer_id, ECHO, b"now?", max_bytes=10, timeout=5) == b"now?"


async def test_a_silent_handler_costs_the_timeout_and_is_cancelled(network, wait_until):
    a, b = await network.line(2)
    ended = []

    async def watched(peer: str, data: bytes) -> bytes:
        try:
            return await silent(peer, data)
        finally:
            ended.append(True)

    b.serve("/shoal/silent/1.0.0", watched, max_request=10)
    begin = time.monotonic()
    with pytest.raises(RequestFailed, match=r"within 0\.3 s"):
        await a.request(b.peer_id, "/shoal/silent/1.0.0", b"", max_bytes=1, timeout=0.3)
    assert 0.25 < time.monotonic() - begin < 1.5
    await b.stop()
    await wait_until(lambda: bool(ended))


async def test_an_answer_over_the_cap_is_not_read(network):
    a, b = await network.line(2)
    b.serve(ECHO, echo, max_request=10_000)
    sink = bytearray(b"before")
    with pytest.raises(RequestFailed, match="1001 bytes"):
        await a.request(b.peer_id, ECHO, bytes(1001), max_bytes=1000, timeout=5, sink=sink)
    assert sink == b"before"
    assert len(await a.request(b.peer_id, ECHO, bytes(1000), max_bytes=1000, timeout=5)) == 1000


async def test_a_request_over_the_cap_is_not_served_and_told(network, read):
    a, b = await network.line(2)
    seen = read(b)
    served = []

    async def count(peer: str, data: bytes) -> bytes:
        served.append(len(data))
        return b""

    b.serve("/shoal/count/1.0.0", count, max_request=100)
    with pytest.raises(RequestFailed):
        await a.request(b.peer_id, "/shoal/count/1.0.0", bytes(101), max_bytes=10, timeout=5)
    await a.request(b.peer_id, "/shoal/count/1.0.0", bytes(100), max_bytes=10, timeout=5)
    assert served == [100]
    await seen.saw(OversizeRequest(a.peer_id, "/shoal/count/1.0.0"))


async def test_a_broken_answer_is_resumed_elsewhere(network, wait_until):
    a, b, c = await network.start(3)
    for holder in (b, c):
        holder.serve("/shoal/body/1.0.0", body_from, max_request=8)
        await a.connect(holder.addresses()[0], timeout=5)
    sink = bytearray()
    pull = asyncio.create_task(
        a.request(b.peer_id, "/shoal/body/1.0.0", b"", max_bytes=len(BODY), timeout=20, sink=sink)
    )
    await wait_until(lambda: len(sink) > 0)
    await b.stop()
    with pytest.raises(RequestFailed):
        await pull
    have = len(sink)
    assert 0 < have < len(BODY)
    await asyncio.sleep(0.1)
    assert len(sink) == have
    rest = await a.request(
        c.peer_id, "/shoal/body/1.0.0", have.to_bytes(4, "big"), max_bytes=len(BODY), timeout=20, sink=sink
    )
    assert rest == BODY[have:]
    assert sink == BODY


async def test_requests_run_side_by_side(network):
    a, b = await network.line(2)

    async def slow(peer: str, data: bytes) -> bytes:
        await asyncio.sleep(0.3)
        return data * 1000

    b.serve("/shoal/slow/1.0.0", slow, max_request=10)
    begin = time.monotonic()
    answers = await asyncio.gather(
        *(a.request(b.peer_id, "/shoal/slow/1.0.0", b"%02d" % i, max_bytes=10_000, timeout=20) for i in range(20))
    )
    assert answers == [b"%02d" % i * 1000 for i in range(20)]
    assert time.monotonic() - begin < 20 * 0.3


async def test_one_peer_cannot_take_every_stream(network):
    a, b = await network.line(2)
    b.serve("/shoal/silent/1.0.0", silent, max_request=10)
    begin = time.monotonic()
    outcomes = await asyncio.gather(
        *(
            a.request(b.peer_id, "/shoal/silent/1.0.0", b"", max_bytes=1, timeout=3)
            for _ in range(MAX_STREAMS_PER_PEER + 5)
        ),
        return_exceptions=True,
    )
    assert time.monotonic() - begin < 6
    refused = [outcome for outcome in outcomes if "within 3 s" not in str(outcome)]
    assert all(isinstance(outcome, RequestFailed) for outcome in outcomes)
    assert len(refused) == 5


async def test_bytes_are_counted(network):
    a, b = await network.line(2)
    b.serve(ECHO, echo, max_request=5000)
    await a.request(b.peer_id, ECHO, bytes(5000), max_bytes=5000, timeout=5)
    assert a.stats().bytes_out == 5000
    assert a.stats().bytes_in == 5000
    assert b.stats().bytes_in == 5000
