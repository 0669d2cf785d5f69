"""Public swarms are found through any node of one of them, whatever some of them answer."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from protocol.identity import Identity
from protocol.listing import Listing, directory_key, seal_listing, shard_of
from protocol.manifest import Manifest, embedded_manifest
from protocol.messages import LISTING_PROTOCOL
from swarm.directory import discover, list_in_directory
from swarm.libp2p_transport import Libp2pTransport
from swarm.memory import MemoryHub
from swarm.transport import Busy, Transport, TransportError
from tests.swarm.world import until, who

REEF, LAGOON = embedded_manifest("reef", time.time() - 86400), embedded_manifest("lagoon", time.time())


@asynccontextmanager
async def listing(
    transport: Transport, identity: Identity, manifest: Manifest, members: int, addresses: tuple[str, ...] = ()
) -> AsyncIterator[None]:
    service = asyncio.create_task(
        list_in_directory(
            transport,
            identity,
            manifest,
            clock=time.time,
            addresses=lambda: addresses or (at(identity),),
            members=lambda: members,
        )
    )
    try:
        yield
    finally:
        service.cancel()


def at(identity: Identity) -> str:
    return f"/ip4/192.0.2.1/tcp/7946/p2p/{identity.peer_id}"


class World:
    """Nodes by name on one hub; all know the one that is called `way`."""

    def __init__(self) -> None:
        self.hub = MemoryHub(seed=0)

    async def join(self, name: str) -> Transport:
        transport = self.hub.transport(who(name))
        await transport.start()
        if name != "way":
            await transport.connect(at(who("way")), timeout=5)
        return transport

    def holds(self, transport: Transport, manifest: Manifest) -> bool:
        """Whether the directory knows of this node."""
        return transport.peer_id in self.hub.providers(directory_key(shard_of(manifest)), who("way").peer_id)


@pytest.fixture
def world() -> World:
    return World()


async def test_swarms_are_found_and_what_their_nodes_say_is_put_together(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swarm.directory.RETRY_SECONDS", 0.05)
    await world.join("way")
    a, b, c, me = [await world.join(name) for name in ("a", "b", "c", "me")]
    async with listing(a, who("a"), REEF, 3), listing(b, who("b"), REEF, 5), listing(c, who("c"), LAGOON, 4):
        for manifest, transport in ((REEF, a), (REEF, b), (LAGOON, c)):
            await until(lambda m=manifest, t=transport: world.holds(t, m))
        found, problems = await discover(me, [at(who("way"))], clock=time.time, timeout=20)
    assert not problems
    assert [(one.manifest.name, one.members, one.listed_by) for one in found] == [("reef", 5, 2), ("lagoon", 4, 1)]
    assert set(found[0].listing.invite().bootstrap) == {at(who("a")), at(who("b"))}


async def test_who_answers_rubbish_costs_only_its_own_answer(world: World) -> None:
    await world.join("way")
    honest, liar, other, silent, me = [await world.join(name) for name in ("a", "liar", "other", "silent", "me")]

    async def rubbish(peer: str, data: bytes) -> bytes:
        return b"\xff" * 100

    async def of_somebody_else(peer: str, data: bytes) -> bytes:
        return seal_listing(who("a"), Listing(LAGOON, (at(who("a")),), 10**12), time.time())

    liar.serve(LISTING_PROTOCOL, rubbish, max_request=1)
    other.serve(LISTING_PROTOCOL, of_somebody_else, max_request=1)
    for transport in (liar, other, silent):
        await transport.provide(directory_key(shard_of(REEF)))
    async with listing(honest, who("a"), REEF, 3):
        await until(lambda: world.holds(honest, REEF))
        found, problems = await discover(me, [at(who("way"))], clock=time.time, timeout=20)
    assert [(one.manifest.name, one.members) for one in found] == [("reef", 3)]
    assert len(problems) == 3
    assert {problem.split(":")[0] for problem in problems} == {t.peer_id for t in (liar, other, silent)}


@pytest.mark.parametrize(
    ("way_host", "kept"),
    [
        ("8.8.8.8", ["/ip4/1.1.1.1/tcp/7946"]),
        ("192.168.1.2", ["/ip4/192.168.1.1/tcp/8080", "/dns4/router.example/tcp/7946", "/ip4/1.1.1.1/tcp/7946"]),
    ],
)
async def test_a_hostile_listing_sends_nobody_into_their_own_network(
    world: World, way_host: str, kept: list[str]
) -> None:
    way = world.hub.transport(who("way"), host=way_host)
    await way.start()
    liar, trap, me = [await world.join(name) for name in ("liar", "trap", "me")]
    here = f"/p2p/{liar.peer_id}"
    told = (
        "/ip4/192.168.1.1/tcp/8080", "/ip4/127.0.0.1/tcp/8420", "/ip6/::1/tcp/8420", "/ip4/0.0.0.0/tcp/7946",
        "/ip4/169.254.169.254/tcp/8080", "/dns4/router.example/tcp/7946", "/ip4/1.1.1.1/tcp/22",
        "/ip4/1.1.1.1/tcp/7946",
    )  # fmt: skip
    inside = f"/ip4/127.0.0.1/tcp/8420/p2p/{trap.peer_id}"
    for transport, name, addresses in ((liar, "liar", [one + here for one in told]), (trap, "trap", [inside])):
        sealed = seal_listing(who(name), Listing(REEF, tuple(addresses), 3), time.time())
        transport.serve(LISTING_PROTOCOL, lambda peer, data, sealed=sealed: asyncio.sleep(0, sealed), max_request=1)
        await transport.provide(directory_key(shard_of(REEF)))
    found, problems = await discover(me, [at(who("way"))], clock=time.time, timeout=20)
    assert [one.addresses for one in found] == [[one + here for one in kept]]
    assert problems == [f"{trap.peer_id}: none of its addresses can be dialled from here: {inside}"]


async def test_nobody_is_answered_without_end(world: World) -> None:
    await world.join("way")
    node, me = await world.join("a"), await world.join("me")
    async with listing(node, who("a"), REEF, 3):
        await asyncio.sleep(0.05)
        answers = [me.request(node.peer_id, LISTING_PROTOCOL, b"", max_bytes=1 << 20, timeout=5) for _ in range(8)]
        outcomes = await asyncio.gather(*answers, return_exceptions=True)
    assert sum(isinstance(outcome, bytes) for outcome in outcomes) == 5
    assert sum(isinstance(outcome, Busy) for outcome in outcomes) == 3


async def test_without_a_way_in_there_is_nothing_to_find(world: World) -> None:
    me = world.hub.transport(who("me"))
    await me.start()
    with pytest.raises(TransportError, match="no connection"):
        await discover(me, [at(who("nobody"))], clock=time.time, timeout=20)


async def test_over_libp2p_a_swarm_is_found_through_a_node_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm.directory.RETRY_SECONDS", 0.2)
    nodes = [Libp2pTransport(who(name), ["/ip4/127.0.0.1/tcp/0"]) for name in ("x", "y", "z")]
    for node in nodes:
        await node.start()
    x, y, z = nodes
    try:
        await y.connect(x.addresses()[0], timeout=10)
        async with listing(x, who("x"), REEF, 2, x.addresses()), listing(y, who("y"), LAGOON, 1, y.addresses()):
            async with asyncio.timeout(60):
                while True:
                    found, _ = await discover(z, [x.addresses()[0]], clock=time.time, timeout=20)
                    if len(found) == 2:
                        break
                    await asyncio.sleep(5)  # nobody is answered more often
        assert {one.manifest.name: one.addresses for one in found} == {
            "reef": list(x.addresses()), "lagoon": list(y.addresses()),
        }  # fmt: skip
    finally:
        for node in nodes:
            await node.stop()
