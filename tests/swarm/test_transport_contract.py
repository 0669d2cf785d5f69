"""What every `swarm.transport.Transport` promises, held against the in-memory hub and against libp2p."""

import asyncio
import time
from ipaddress import ip_address

import pytest

from swarm.transport import (
    Message,
    PeerConnected,
    PeerDisconnected,
    PeerUnreachable,
    TransportError,
)

TOPIC = "/shoal/test/announce/0"


async def test_connect_is_seen_on_both_sides(network, read):
    a, b = await network.start(2)
    seen_a, seen_b = read(a), read(b)
    assert await a.connect(b.addresses()[0], timeout=5) == b.peer_id == network.identity(1).peer_id
    assert a.peers() == (b.peer_id,)
    await seen_a.saw(PeerConnected(b.peer_id))
    await seen_b.saw(PeerConnected(a.peer_id))
    assert b.peers() == (a.peer_id,)
    assert await a.connect(b.addresses()[0], timeout=5) == b.peer_id
    assert {peer: known.direction for peer, known in a.connections().items()} == {b.peer_id: "outbound"}
    assert {peer: known.direction for peer, known in b.connections().items()} == {a.peer_id: "inbound"}
    for end in (a, b):
        (known,) = end.connections().values()
        assert ip_address(known.host).is_private
    await asyncio.sleep(0.1)
    assert seen_a.events == [PeerConnected(b.peer_id)]


async def test_an_address_names_its_peer(network):
    (a,) = await network.start(1)
    assert a.addresses()
    assert all(address.endswith(f"/p2p/{a.peer_id}") for address in a.addresses())


async def test_connect_to_nobody_is_unreachable_in_time(network):
    a, b = await network.start(2)
    address = b.addresses()[0]
    await b.stop()
    begin = time.monotonic()
    with pytest.raises(PeerUnreachable, match=b.peer_id):
        await a.connect(address, timeout=2)
    assert time.monotonic() - begin < 3


@pytest.mark.parametrize("address", ["", "/ip4/127.0.0.1/tcp/4001", "nonsense", "/ip4/127.0.0.1/tcp/4001/p2p/"])
async def test_connect_to_what_names_no_peer(network, address):
    (a,) = await network.start(1)
    with pytest.raises(PeerUnreachable, match="peer"):
        await a.connect(address, timeout=1)


async def test_disconnect_is_seen_on_both_sides(network, read):
    a, b = await network.line(2)
    seen_a, seen_b = read(a), read(b)
    await a.disconnect(b.peer_id)
    assert a.peers() == ()
    assert a.connections() == {}
    await seen_a.saw(PeerDisconnected(b.peer_id))
    await seen_b.saw(PeerDisconnected(a.peer_id))
    assert b.peers() == ()
    await a.disconnect(b.peer_id)


async def test_a_peer_that_stops_is_seen_to_leave_and_may_come_back(network, read, wait_until):
    a, b = await network.line(2)
    seen = read(a)
    await b.stop()
    await seen.saw(PeerDisconnected(b.peer_id))
    await b.start()
    await b.connect(a.addresses()[0], timeout=5)
    await wait_until(lambda: len(seen.events) >= 3)
    assert seen.events == [PeerConnected(b.peer_id), PeerDisconnected(b.peer_id), PeerConnected(b.peer_id)]


async def test_gossip_goes_both_ways(network, read):
    a, b = await network.line(2)
    seen_a, seen_b = read(a), read(b)
    await a.subscribe(TOPIC)
    await b.subscribe(TOPIC)
    await asyncio.sleep(0.2)
    await a.publish(TOPIC, b"from a")
    await b.publish(TOPIC, b"from b")
    await seen_b.saw(Message(TOPIC, a.peer_id, b"from a"))
    await seen_a.saw(Message(TOPIC, b.peer_id, b"from b"))
    assert seen_a.messages == [b"from b"]
    assert a.stats().messages_out == 1
    assert a.stats().messages_in == 1


async def test_gossip_is_relayed_once(network, read, wait_until):
    a, b, c = await network.line(3)
    seen_b, seen_c = read(b), read(c)
    for transport in (a, b, c):
        await transport.subscribe(TOPIC)
    await asyncio.sleep(0.2)
    for number in range(5):
        await a.publish(TOPIC, b"%d" % number)
    await wait_until(lambda: len(seen_c.messages) >= 5 and len(seen_b.messages) >= 5)
    await asyncio.sleep(0.1)
    assert sorted(seen_b.messages) == sorted(seen_c.messages) == [b"0", b"1", b"2", b"3", b"4"]


async def test_a_message_that_fails_the_check_is_not_delivered(network, read):
    a, b = await network.line(2)
    seen, checked = read(b), []

    def check(forwarder: str, data: bytes) -> bool:
        checked.append((forwarder, data))
        return data == b"good"

    await a.subscribe(TOPIC)
    await b.subscribe(TOPIC, check)
    await asyncio.sleep(0.2)
    await a.publish(TOPIC, b"bad")
    await a.publish(TOPIC, b"good")
    await seen.saw(Message(TOPIC, a.peer_id, b"good"))
    assert seen.messages == [b"good"]
    assert sorted(checked) == sorted([(a.peer_id, b"bad"), (a.peer_id, b"good")])


async def test_gossip_is_small(network):
    (a,) = await network.start(1)
    await a.subscribe(TOPIC)
    await a.publish(TOPIC, bytes(2048))
    with pytest.raises(TransportError, match=r"2049 bytes.*limit of 2048"):
        await a.publish(TOPIC, bytes(2049))


async def test_a_banned_peer_is_gone_and_cannot_return(network, read, wait_until):
    a, b = await network.line(2)
    seen_a, seen_b = read(a), read(b)
    await a.subscribe(TOPIC)
    await b.subscribe(TOPIC)
    a.ban(b.peer_id)
    await seen_a.saw(PeerDisconnected(b.peer_id))
    await seen_b.saw(PeerDisconnected(a.peer_id))
    with pytest.raises(PeerUnreachable):
        await b.connect(a.addresses()[0], timeout=2)
    with pytest.raises(PeerUnreachable, match=b.peer_id):
        await a.connect(b.addresses()[0], timeout=2)
    await b.publish(TOPIC, b"heard?")
    await asyncio.sleep(0.3)
    assert seen_a.messages == []
    assert a.peers() == b.peers() == ()


async def test_a_ban_that_is_lifted_is_over(network, read, wait_until):
    a, b = await network.line(2)
    for transport in (a, b):
        await transport.subscribe(TOPIC)
    a.ban(b.peer_id)
    await wait_until(lambda: a.peers() == b.peers() == ())
    a.lift_ban(b.peer_id)
    a.lift_ban(network.identity(99).peer_id)
    await b.connect(a.addresses()[0], timeout=5)
    await wait_until(lambda: a.peers() == (b.peer_id,))
    seen = read(a)
    async with asyncio.timeout(20):
        while not seen.messages:  # what is published before they are in each other's mesh is lost
            await b.publish(TOPIC, b"back %f" % asyncio.get_running_loop().time())
            await asyncio.sleep(0.2)


async def test_events_are_bounded_and_drops_are_counted(network, wait_until):
    a, b = network.transport(0), network.transport(1, event_limit=8)
    await a.start()
    await b.start()
    await a.subscribe(TOPIC)
    await b.subscribe(TOPIC)
    await a.connect(b.addresses()[0], timeout=5)
    async with asyncio.timeout(20):
        while not b.stats().messages_in:  # what is published before they are in each other's mesh is lost
            await a.publish(TOPIC, b"first %f" % asyncio.get_running_loop().time())
            await asyncio.sleep(0.2)
    before = b.stats().messages_in
    for number in range(30):
        await a.publish(TOPIC, b"%d" % number)
    await wait_until(lambda: b.stats().messages_in == before + 30)
    dropped = before + 30 - 7  # the queue holds 8 events, the first is the connection
    assert b.stats().dropped_events == dropped
    await a.stop()
    await wait_until(lambda: b.peers() == ())
    await b.stop()
    events = [event async for event in b.events()]
    # The disconnect took the place of the oldest message: connections are never lost to gossip.
    assert events[0] == PeerConnected(a.peer_id)
    assert events[-1] == PeerDisconnected(a.peer_id)
    assert [type(event) for event in events[1:-1]] == [Message] * 6
    assert b.stats().dropped_events == dropped + 1


async def test_providers_are_found(network, wait_until):
    a, b, c = await network.line(3)
    key = bytes(range(32))
    assert await c.find_providers(key, timeout=5) == ()
    await a.provide(key)
    await b.provide(key)
    found: tuple[str, ...] = ()
    for _ in range(20):
        found = await c.find_providers(key, timeout=5)
        if len(found) == 2:
            break
        await asyncio.sleep(0.2)
        await a.provide(key)
    assert sorted(found) == sorted([a.peer_id, b.peer_id])
    assert a.peer_id not in await a.find_providers(key, timeout=5)


async def test_stop_is_idempotent_quick_and_no_failure(network):
    a, _ = await network.line(2)
    failed = asyncio.create_task(a.failed())
    begin = time.monotonic()
    await a.stop()
    await a.stop()
    assert time.monotonic() - begin < 3
    await asyncio.sleep(0.1)
    assert not failed.done()
    failed.cancel()
    assert a.peers() == ()
    assert await a.find_providers(b"k" * 32, timeout=1) == ()
    with pytest.raises(TransportError, match="not running"):
        await a.publish(TOPIC, b"late")
    await network.transport(7).stop()


async def test_a_taken_address_is_named(network):
    (a,) = await network.start(1)
    if network.kind == "memory":
        second = network.transport(0)
    else:
        second = network.transport(1, listen=a.addresses()[0].partition("/p2p/")[0])
    with pytest.raises(TransportError, match=r"is taken|is in use"):
        await second.start()
    await second.stop()
