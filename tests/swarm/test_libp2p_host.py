"""What only libp2p has: real addresses, a private network key, raw streams, a thread that can die."""

import asyncio
import logging
import time
from types import SimpleNamespace

import pytest
import trio
from libp2p.custom_types import TProtocol
from libp2p.peer.id import ID
from libp2p.pubsub.pb import rpc_pb2
from multiaddr import Multiaddr

from swarm import libp2p_connections, libp2p_host, libp2p_ping, libp2p_streams
from swarm.framing import FrameError, FrameRefused, read_answer, read_frame, write_frame, write_wait
from swarm.libp2p_addresses import BOOK_PEERS, AddressBook, expand_unspecified
from swarm.libp2p_bans import Bans
from swarm.libp2p_gossip import FORWARDER_BURST, FORWARDER_RATE, Inbox
from swarm.libp2p_transport import Libp2pTransport
from swarm.transport import PeerUnreachable, TransportError

pytestmark = pytest.mark.network
TOPIC = "/shoal/test/announce/0"
ECHO = "/shoal/echo/1.0.0"
LISTEN = "/ip4/127.0.0.1/tcp/0"


async def echo(peer: str, data: bytes) -> bytes:
    return data


async def test_the_peer_id_is_that_of_the_identity(libp2p):
    (a,) = await libp2p.start(1)
    assert a.peer_id == libp2p.identity(0).peer_id == a._host.peer_id
    assert a.addresses()[0].startswith("/ip4/127.0.0.1/tcp/")


async def test_a_port_in_use_names_the_port_the_setting_and_the_fix(libp2p):
    (a,) = await libp2p.start(1)
    address = a.addresses()[0].partition("/p2p/")[0]
    port = address.rpartition("/")[2]
    second = Libp2pTransport(libp2p.identity(1), [address])
    words = (
        rf"^port {port} of 127\.0\.0\.1 is in use \(network\.listen\) ; .*{port}.* shoal config set network\.listen "
    )
    with pytest.raises(TransportError, match=words + r"/ip4/127\.0\.0\.1/tcp/N$"):
        await second.start()
    await second.stop()


async def test_a_peer_two_hops_away_is_dialled_by_its_id_alone(libp2p, wait_until):
    a, b, c = await libp2p.start(3)
    await b.connect(a.addresses()[0], timeout=5)
    await c.connect(a.addresses()[0], timeout=5)
    await b.provide(b"k" * 32)
    for _ in range(50):
        if b.peer_id in await c.find_providers(b"k" * 32, timeout=5):
            break
        await asyncio.sleep(0.1)
    assert await c.connect(f"/p2p/{b.peer_id}", timeout=5) == b.peer_id
    await wait_until(lambda: set(c.peers()) == {a.peer_id, b.peer_id})


async def test_the_library_dials_nobody_of_its_own_accord(libp2p):
    a, b = await libp2p.start(2)
    b_id, where = ID.from_base58(b.peer_id), Multiaddr(b.addresses()[0].partition("/p2p/")[0])
    network = a._host._host.get_network()

    async def look_around() -> None:
        network.peerstore.add_addrs(b_id, [where], 60)
        await network.auto_connector.maybe_connect()

    await a._thread.call(look_around)
    assert not network.get_connections(b_id)


async def test_the_latency_is_that_of_the_last_ping(libp2p, wait_until, monkeypatch):
    monkeypatch.setattr(libp2p_connections, "PING_INTERVAL", 0.1)
    a, b = await libp2p.line(2)
    first = a.connections()[b.peer_id].latency
    assert first is not None
    assert 0 < first < 5
    await wait_until(lambda: a.connections()[b.peer_id].latency != first)


async def test_a_burst_of_announcements_arrives_whole(libp2p, read, wait_until):
    a, b = await libp2p.line(2)
    seen = read(b)
    await a.subscribe(TOPIC)
    await b.subscribe(TOPIC)
    await asyncio.sleep(0.5)
    sent = [b"%03d" % number + bytes(1500) for number in range(200)]
    for data in sent:
        await a.publish(TOPIC, data)
    await wait_until(lambda: len(seen.messages) >= 200, timeout=20)
    assert sorted(seen.messages) == sent
    assert a.stats().dropped_publishes == 0


async def test_a_private_key_keeps_others_out():
    def transport(number: int, psk: bytes | None) -> Libp2pTransport:
        from protocol.identity import Identity

        return Libp2pTransport(Identity.from_seed(bytes([number]) * 32), [LISTEN], psk=psk)

    a, b = transport(1, b"a" * 32), transport(2, b"a" * 32)
    wrong, none = transport(3, b"b" * 32), transport(4, None)
    everyone = [a, b, wrong, none]
    try:
        await asyncio.gather(*(t.start() for t in everyone))
        address = a.addresses()[0]
        assert await b.connect(address, timeout=5) == a.peer_id
        for stranger in (wrong, none):
            with pytest.raises(PeerUnreachable, match=a.peer_id):
                await stranger.connect(address, timeout=1)
        assert a.peers() == (b.peer_id,)
        b.serve(ECHO, echo, max_request=100)
        assert await a.request(b.peer_id, ECHO, b"private", max_bytes=100, timeout=5) == b"private"
    finally:
        await asyncio.gather(*(t.stop() for t in everyone))


def test_a_private_key_of_another_length_is_refused():
    from protocol.identity import Identity

    with pytest.raises(ValueError, match="32 bytes, not 5"):
        Libp2pTransport(Identity.generate(), [LISTEN], psk=b"short")


async def raw_request(client: Libp2pTransport, server: str, written: bytes) -> bytes:
    """Write bytes that are no proper request and read until the server ends the stream."""
    host = client._host

    async def in_trio() -> bytes:
        stream = await host._host.new_stream(ID.from_base58(server), [TProtocol(ECHO)])
        await stream.write(written)
        answer = b""
        with trio.move_on_after(10):
            try:
                while piece := await stream.read(100):
                    answer += piece
            except libp2p_host.STREAM_ERRORS:
                return answer
        return b"the server held on"

    return await client._thread.call(in_trio)


async def test_a_requester_that_dawdles_is_cut_off(libp2p, monkeypatch, wait_until):
    monkeypatch.setattr(libp2p_streams, "REQUEST_READ_SECONDS", 0.3)
    a, b = await libp2p.line(2)
    b.serve(ECHO, echo, max_request=100)
    begin = time.monotonic()
    assert await raw_request(a, b.peer_id, b"\x00\x00") == b""
    assert time.monotonic() - begin < 3
    assert await raw_request(a, b.peer_id, b"\x00\x00\x00\x09half") == b""
    await wait_until(lambda: b._host.streams._serving.total() == 0)


async def test_a_stream_is_used_again_and_given_back(libp2p, monkeypatch, wait_until):
    monkeypatch.setattr(libp2p_host, "IDLE_SECONDS", 0.2)
    monkeypatch.setattr(libp2p_streams, "IDLE_SECONDS", 0.2)
    a, b = await libp2p.line(2)
    b.serve(ECHO, echo, max_request=100)
    for number in range(20):
        assert await a.request(b.peer_id, ECHO, b"%d" % number, max_bytes=100, timeout=5) == b"%d" % number
        assert b._host.streams._serving.total() == 1
    await wait_until(lambda: b._host.streams._serving.total() == 0)
    assert await a.request(b.peer_id, ECHO, b"later", max_bytes=100, timeout=5) == b"later"


async def test_a_stream_that_the_server_gave_up_is_replaced(libp2p, monkeypatch, wait_until):
    monkeypatch.setattr(libp2p_streams, "REQUEST_READ_SECONDS", 0.2)
    a, b = await libp2p.line(2)
    b.serve(ECHO, echo, max_request=100)
    assert await a.request(b.peer_id, ECHO, b"first", max_bytes=100, timeout=5) == b"first"
    await wait_until(lambda: b._host.streams._serving.total() == 0)
    assert await a.request(b.peer_id, ECHO, b"second", max_bytes=100, timeout=5) == b"second"


async def test_a_length_over_the_cap_is_refused_before_the_body(libp2p):
    a, b = await libp2p.line(2)
    b.serve(ECHO, echo, max_request=100)
    begin = time.monotonic()
    assert await raw_request(a, b.peer_id, b"\xff\xff\xff\xff") == b""
    assert time.monotonic() - begin < 2


async def test_a_crash_in_the_trio_thread_surfaces(libp2p):
    a, b = await libp2p.line(2)
    b.serve(ECHO, echo, max_request=100)
    failed = asyncio.create_task(a.failed())

    async def crash() -> None:
        raise RuntimeError("the host broke")

    a._thread.post(lambda: a._thread._nursery.start_soon(crash))
    error = await asyncio.wait_for(failed, 5)
    assert "the host broke" in repr(error)
    with pytest.raises(TransportError):
        await a.request(b.peer_id, ECHO, b"", max_bytes=1, timeout=5)
    # The reader of events ends too, instead of waiting for ever.
    async with asyncio.timeout(5):
        async for _ in a.events():
            pass
    await a.stop()


async def test_a_check_that_raises_costs_the_message_only(libp2p, read, caplog, wait_until):
    a, b = await libp2p.line(2)
    seen = read(b)

    def check(forwarder: str, data: bytes) -> bool:
        if data == b"poison":
            raise ZeroDivisionError
        return True

    await a.subscribe(TOPIC)
    await b.subscribe(TOPIC, check)
    await asyncio.sleep(0.3)
    with caplog.at_level(logging.ERROR):
        await a.publish(TOPIC, b"poison")
        await a.publish(TOPIC, b"fine")
        await wait_until(lambda: bool(seen.messages))
    assert seen.messages == [b"fine"]
    assert "the check of a message" in caplog.text


@pytest.mark.parametrize("late", [1, libp2p_connections.PINGS])
async def test_a_peer_whose_first_answers_are_late_is_reached_all_the_same(libp2p, monkeypatch, wait_until, late):
    """At once where one of them came in time; else by the next dial, with the first connection out of the way."""
    a, b = await libp2p.start(2)
    b.serve(ECHO, echo, max_request=10)
    ping, asked = libp2p_connections.ping, 0

    async def slow(host, runtime, peer):
        nonlocal asked
        if peer == b.peer_id:
            asked += 1
            if asked <= late:
                return None  # as after PING_TIMEOUT
        return await ping(host, runtime, peer)

    monkeypatch.setattr(libp2p_connections, "ping", slow)
    address = b.addresses()[0]
    if late == libp2p_connections.PINGS:
        with pytest.raises(PeerUnreachable):
            await a.connect(address, timeout=5)
    await a.connect(address, timeout=5)
    assert await a.request(b.peer_id, ECHO, b"x", max_bytes=10, timeout=5) == b"x"


async def test_a_vanished_peer_is_given_up(libp2p, monkeypatch, wait_until):
    """No FIN, no RST: it only stops answering, as a machine without power does."""
    monkeypatch.setattr(libp2p_connections, "PING_INTERVAL", 0.2)
    a, b = await libp2p.line(2)
    await asyncio.sleep(0.3)
    assert a.peers() == (b.peer_id,)
    monkeypatch.setattr(libp2p_ping, "PING_TIMEOUT", 0.5)
    b._thread.post(lambda: time.sleep(2))
    await wait_until(lambda: a.peers() == (), timeout=5)


async def test_a_vanished_peer_that_can_be_told_nothing_more_is_given_up(libp2p, monkeypatch):
    """Its receive buffer and our send buffer are full, so that not even a goodbye can be written."""
    monkeypatch.setattr(libp2p_connections, "CLOSE_SECONDS", 0.2)
    a, b = await libp2p.line(2)
    host = a._host
    (connection,) = host._host.get_network().get_connections(ID.from_base58(b.peer_id))
    muxed, written = connection.muxed_conn, 0

    async def fill() -> None:
        nonlocal written
        for written in range(1000):  # noqa: B007 - told to `stuck`
            await muxed._write_frame(bytes(60_000))

    async def stuck() -> None:
        host._spawn(fill)
        before = -1
        while written != before:
            before = written
            await trio.sleep(0.5)

    b._thread.post(lambda: time.sleep(4))
    await a._thread.call(stuck)
    begin = time.monotonic()
    await a.disconnect(b.peer_id)
    assert time.monotonic() - begin < 1.5
    assert a.peers() == ()
    assert muxed.is_closed, "and its socket is free"


def test_an_unspecified_listen_address_is_advertised_as_real_ones():
    fixed = Multiaddr("/ip4/127.0.0.1/tcp/4001")
    advertised = expand_unspecified([Multiaddr("/ip4/0.0.0.0/tcp/4001"), fixed])
    assert fixed in advertised
    assert not any("0.0.0.0" in str(address) for address in advertised)
    assert all(str(address).endswith("/tcp/4001") for address in advertised)


def test_the_address_book_keeps_the_newest_of_a_bounded_number():
    book = AddressBook()
    for number in range(6):
        book.add(
            "a", (Multiaddr(f"/ip4/10.0.0.{number}/tcp/1/p2p/12D3KooWEfY2TmhEWp1scTkNTgGcB6sBdaeicFJXJjeBmUpFMyg8"),)
        )
    assert [str(address) for address in book.get("a")] == [f"/ip4/10.0.0.{n}/tcp/1" for n in (5, 4, 3, 2)]
    for number in range(BOOK_PEERS):
        book.add(f"peer {number}", (Multiaddr("/ip4/10.0.0.1/tcp/1"),))
    assert book.get("a") == ()
    assert len(book.get(f"peer {BOOK_PEERS - 1}")) == 1


def test_gossip_of_one_forwarder_is_limited():
    now = 0.0
    inbox = Inbox(ID(b"own"), lambda message: None, lambda: now)
    admit = inbox.validator(TOPIC, None)
    message = rpc_pb2.Message(from_id=b"origin", data=b"news")
    assert sum(admit(ID(b"flooder"), message) for _ in range(5000)) == FORWARDER_BURST
    assert admit(ID(b"another"), message)
    now = 1.0
    assert sum(admit(ID(b"flooder"), message) for _ in range(5000)) == FORWARDER_RATE
    assert inbox.messages == FORWARDER_BURST + 1 + FORWARDER_RATE


class Pipe:
    def __init__(self) -> None:
        self.held = bytearray()

    async def write(self, data: bytes) -> None:
        self.held += data

    async def read(self, n: int) -> bytes:
        taken = bytes(self.held[: min(n, 1000)])
        del self.held[: len(taken)]
        return taken


async def test_a_server_may_ask_to_wait_instead_of_answering():
    pipe, got = Pipe(), bytearray()
    await write_wait(pipe, 1.2345)
    assert pipe.held == b"\xff\xff\xff\xff" + (1235).to_bytes(4, "big")
    with pytest.raises(FrameRefused) as caught:
        await read_answer(pipe, 100, got.extend)
    assert (caught.value.seconds, got, pipe.held) == (1.235, b"", b"")
    pipe.held = bytearray(b"\xff" * 8)
    with pytest.raises(FrameRefused) as caught:
        await read_answer(pipe, 100, got.extend)
    assert caught.value.seconds == 60.0
    pipe.held = bytearray(b"\xff" * 8)
    with pytest.raises(FrameError, match="over the cap of 100"):
        await read_frame(pipe, 100, got.extend)  # a requester has nothing to ask for


async def test_frames():
    pipe, got = Pipe(), bytearray()
    body = bytes(range(256)) * 1000
    await write_frame(pipe, body)
    assert pipe.held[:4] == (256_000).to_bytes(4, "big")
    await read_frame(pipe, 256_000, got.extend)
    assert got == body
    await write_frame(pipe, b"12345")
    with pytest.raises(FrameError, match="5 bytes is over the cap of 4"):
        await read_frame(pipe, 4, got.extend)
    pipe.held = bytearray(b"\x00\x00\x00\x09abc")
    with pytest.raises(FrameError, match="after 3 of 9 bytes"):
        await read_frame(pipe, 100, got.extend)


def test_the_host_forgets_no_ban_by_itself():
    """A kicked peer stays out whatever is banned after it: swarm.bans bounds, and knows whose ban gives way."""
    bans = Bans(SimpleNamespace(blacklisted_peers=set()))
    ids = [ID(b"\x12\x20" + number.to_bytes(32)).to_base58() for number in range(20_000)]
    for peer in ids:
        bans.add(peer)
    assert all(peer in bans for peer in ids)
    bans.lift(ids[0])
    bans.lift(ids[0])
    assert [peer in bans for peer in ids[:2]] == [False, True]
    assert len(bans._pubsub.blacklisted_peers) == 19_999


async def test_a_peer_with_a_key_of_another_kind_can_be_banned(libp2p, wait_until):
    """libp2p connects RSA and secp256k1 peers too, and one that gossips rubbish must not cost more than its ban."""
    (a,) = await libp2p.start(1)
    rsa, secp256k1 = (
        "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N",
        "16Uiu2HAmEWQnHq2jLKJypwVnVoQeFCULuyop6atvq2eWjYSUjzNi",
    )
    for peer in (rsa, secp256k1):
        a.ban(peer)
    await wait_until(lambda: rsa in a._host._banned and secp256k1 in a._host._banned)
    a.lift_ban(rsa)
    await wait_until(lambda: rsa not in a._host._banned)
