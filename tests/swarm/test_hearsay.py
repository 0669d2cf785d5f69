"""What peers say of addresses must not send a node about its owner's own network."""

import asyncio
import socket
from collections.abc import Awaitable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from libp2p.peer.id import ID
from multiaddr import Multiaddr

from swarm.hearsay import Reach, Scope, scope_of
from swarm.libp2p_dialling import MAX_GIVEN, DialGate
from swarm.libp2p_transport import Libp2pTransport
from tests.swarm.world import who


@pytest.mark.parametrize(
    ("host", "scope"),
    [
        ("1.1.1.1", Scope.public), ("2606:4700::1", Scope.public), ("::ffff:1.1.1.1", Scope.public),
        ("10.0.0.7", Scope.private), ("172.20.1.1", Scope.private), ("192.168.1.1", Scope.private),
        ("100.64.0.1", Scope.private), ("fd00::1", Scope.private), ("::ffff:192.168.1.1", Scope.private),
        ("64:ff9b::c0a8:101", Scope.private), ("127.0.0.1", Scope.machine), ("127.9.9.9", Scope.machine),
        ("::1", Scope.machine), ("::ffff:127.0.0.1", Scope.machine), ("64:ff9b::7f00:1", Scope.machine),
        ("0.0.0.0", None), ("::", None), ("169.254.169.254", None), ("fe80::1", None), ("fe80::1%eth0", None),
        ("224.0.0.1", None), ("ff02::1", None), ("255.255.255.255", None), ("240.0.0.1", None),
        ("2002:c0a8:101::1", None), ("2001:0:4136:e378:8000:63bf:3fff:fdd2", None),
    ],
)  # fmt: skip
def test_how_far_an_address_leads(host: str, scope: Scope | None) -> None:
    assert scope_of(host) is scope


@pytest.mark.parametrize(
    ("given", "allowed"),
    [
        ((), {"public"}),
        (("8.8.8.8", "", "reef.example"), {"public"}),
        (("192.168.1.5",), {"public", "private", "name"}),
        (("127.0.0.1",), {"public", "private", "machine", "name"}),
    ],
)
def test_what_is_dialled_on_hearsay_follows_what_the_owner_gave(given: tuple[str, ...], allowed: set[str]) -> None:
    told = {
        "public": "/ip4/1.1.1.1/tcp/7946",
        "private": "/ip4/192.168.1.1/tcp/7946",
        "machine": "/ip6/::1/tcp/8420",
        "name": "/dns4/reef.example/tcp/7946",
        "any": "/ip4/0.0.0.0/tcp/7946",
        "cloud": "/ip4/169.254.169.254/tcp/8080",
    }
    reach = Reach(given)
    assert {name for name, address in told.items() if reach.allows(address)} == allowed


@pytest.mark.parametrize(
    ("rest", "allowed"),
    [
        ("tcp/1024", True), ("tcp/443/p2p/x", True), ("tcp/22", False), ("tcp/0", False), ("tcp/25", False),
        ("udp/7946", False), ("tcp/x", False), ("tcp/", False), ("tcp/-1", False), ("", False), ("tcp/²", False),
    ],
)  # fmt: skip
def test_ports_of_other_services_and_what_is_no_address(rest: str, allowed: bool) -> None:
    assert Reach().allows(f"/ip4/1.1.1.1/{rest}") is allowed


@pytest.mark.parametrize("text", ["", "/", "//", "/ip4", "/ip4//tcp/7946", "/ip4/x/tcp/7946", "/ip6/1.1.1.1/tcp/7946"])
def test_rubbish_is_not_dialled(text: str) -> None:
    assert not Reach(("127.0.0.1",)).allows(text)


async def test_host_names_are_dialled_as_what_they_lead_to_and_what_was_given_as_it_is() -> None:
    asked: list[str] = []

    async def resolve(name: str) -> list[str]:
        asked.append(name)
        return ["192.168.1.1", "1.1.1.1", "2606:4700::1", "127.0.0.1"]

    chosen = SimpleNamespace(transport_for_dialing=lambda address: "tcp")
    network: Any = SimpleNamespace(transport_manager=chosen)
    gate = DialGate(network, ["/ip4/0.0.0.0/tcp/0", "/ip6/::/tcp/0"], resolve)
    told = [Multiaddr(f"/dns4/n{n}.example/tcp/7946") for n in range(9)]
    assert list(map(str, await gate.dialled([*told, Multiaddr("/ip4/10.0.0.1/tcp/7946")]))) == [
        "/ip4/1.1.1.1/tcp/7946", "/ip6/2606:4700::1/tcp/7946",
    ]  # fmt: skip
    assert asked == [f"n{n}.example" for n in range(4)]
    name = Multiaddr("/dns4/mine.example/tcp/80")
    assert chosen.transport_for_dialing(name) is None
    gate.give(name)
    assert chosen.transport_for_dialing(name) == "tcp"
    assert chosen.transport_for_dialing(Multiaddr("/ip4/10.0.0.1/tcp/7946")) is None
    for n in range(MAX_GIVEN):
        gate.give(Multiaddr(f"/ip4/1.1.{n // 256}.{n % 256}/tcp/80"))
    assert chosen.transport_for_dialing(name) is None  # bounded
    gate.give(Multiaddr("/ip4/10.0.0.2/tcp/22"))
    assert chosen.transport_for_dialing(Multiaddr("/ip4/10.0.0.1/tcp/7946")) == "tcp"
    assert chosen.transport_for_dialing(Multiaddr("/ip4/10.0.0.1/tcp/22")) is None


@pytest.fixture
def trap() -> Iterator[socket.socket]:
    """A service of the owner's own machine, that nobody is to be sent to."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        yield server


@pytest.mark.network
@pytest.mark.parametrize("by", ["connect", "library"])
async def test_a_lie_in_the_peerstore_dials_nothing_of_this_machine(trap: socket.socket, by: str) -> None:
    """As after a DHT answer, or an identify, that names the victim's own services as a peer's address."""
    node = Libp2pTransport(who("node"), ["/ip4/0.0.0.0/tcp/0"])
    await node.start()
    peer = who("made up").peer_id
    lie = Multiaddr(f"/ip4/127.0.0.1/tcp/{trap.getsockname()[1]}")

    async def attempt() -> None:
        connections = node._running().connections
        connections._peerstore.add_addrs(ID.from_base58(peer), [lie], 60)
        if by == "connect":
            await connections.connect(f"/p2p/{peer}")
        else:
            await connections._network.dial_peer(ID.from_base58(peer))

    async def touched() -> bool:
        try:
            trap.accept()[0].close()
        except BlockingIOError:
            return False
        return True

    try:
        with pytest.raises(Exception, match=r"no address of it|[Nn]o .*addresses|transport|address") as refused:
            await asyncio.wait_for(node._thread.call(attempt), 20)
        assert not isinstance(refused.value, TimeoutError)
        assert not await touched()
        # whose owner gave an address of this machine may be sent there
        node._running().connections._dialling.known.include("127.0.0.1")
        task = asyncio.create_task(_quietly(node._thread.call(attempt)))
        for _ in range(100):
            if await touched():
                break
            await asyncio.sleep(0.05)
        else:
            pytest.fail("the test itself dials nothing")
        task.cancel()
    finally:
        await node.stop()


async def _quietly(doing: Awaitable[None]) -> None:
    try:
        await doing
    except Exception:  # noqa: BLE001 - what a trap answers is no matter
        return
