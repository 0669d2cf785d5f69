"""Discovery over both transports: one known address is enough, and a lost peer is found again."""

import asyncio
import time
from contextlib import asynccontextmanager
from itertools import pairwise

import pytest

from swarm.memory import MemoryHub
from swarm.peers import DIALS_AT_ONCE, ENOUGH, GIVE_UP_SECONDS, MAX_STRANGERS, Discovery
from swarm.transport import PeerUnreachable, TransportError

RENDEZVOUS = bytes(range(32))


@asynccontextmanager
async def running(*discoveries: Discovery):
    tasks = [asyncio.create_task(discovery.run()) for discovery in discoveries]
    try:
        yield
        assert not any(task.done() for task in tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def discovery(transport, bootstrap=(), **settings) -> Discovery:
    settings = {"clock": time.monotonic, "tick": 0.05, **settings}
    return Discovery(transport, bootstrap, RENDEZVOUS, **settings)


async def test_who_knows_one_soon_knows_all(network, wait_until):
    hub, *others = await network.start(4)
    first = hub.addresses()[:1]
    async with running(discovery(hub), *(discovery(other, first) for other in others)):
        everyone = {hub.peer_id, *(other.peer_id for other in others)}
        await wait_until(
            lambda: all(set(t.peers()) == everyone - {t.peer_id} for t in (hub, *others)),
            timeout=60,
        )
        assert sum(len(t.peers()) for t in (hub, *others)) == 12


async def test_a_bootstrap_peer_that_comes_up_late_is_found(network, wait_until):
    late, early = await network.start(2)
    address = late.addresses()[0]
    await late.stop()
    if network.kind == "libp2p":
        late = network.transport(0, listen=address.partition("/p2p/")[0])
    service = discovery(early, [address])
    async with running(service):
        await wait_until(lambda: service.last_error is not None)
        assert late.peer_id in service.last_error
        assert service.unreached() == f"1 tried: {service.last_error}"
        assert early.peers() == ()
        await late.start()
        await wait_until(lambda: early.peers() == (late.peer_id,))
        await wait_until(lambda: service.last_error is None)
        await wait_until(lambda: service.unreached() == "")


async def test_a_lost_peer_is_dialled_again_though_it_dialled_us(network, wait_until):
    a, b = await network.start(2)
    async with running(discovery(a)):
        await b.connect(a.addresses()[0], timeout=5)
        await wait_until(lambda: a.peers() == (b.peer_id,))
        # Long enough for identify to have told where b listens.
        await asyncio.sleep(0.5)
        await b.disconnect(a.peer_id)
        await wait_until(lambda: b.peers() == ())
        await wait_until(lambda: b.peers() == (a.peer_id,))
        await wait_until(lambda: a.peers() == (b.peer_id,))
        assert b.peers() == (a.peer_id,), "a dialled it: b has no discovery"


async def test_no_more_than_max_peers_are_dialled():
    hub = MemoryHub()
    transports = [hub.transport(name) for name in "abcdef"]
    for transport in transports:
        await transport.start()
    service = discovery(transports[0], [t.addresses()[0] for t in transports], max_peers=3)
    async with running(service):
        await asyncio.sleep(0.3)
        assert len(transports[0].peers()) == 3
        assert len(service._known) == 5


class Unreachable:
    """Every dial fails; the rendezvous knows far too many peers."""

    peer_id = "me"

    def __init__(self, flood: int = 0, failure: type[TransportError] = PeerUnreachable) -> None:
        self.flood, self.failure = flood, failure
        self.dialled: list[tuple[float, str]] = []
        self.now = 0.0

    def peers(self) -> tuple[str, ...]:
        return ("friend",)

    async def connect(self, multiaddr: str, *, timeout: float) -> str:
        self.dialled.append((self.now, multiaddr))
        raise self.failure(f"cannot reach {multiaddr}")

    async def provide(self, key: bytes) -> None:
        assert key == RENDEZVOUS

    async def find_providers(self, key: bytes, *, timeout: float) -> tuple[str, ...]:
        return tuple(f"peer {self.now:.0f} {number}" for number in range(self.flood))


@pytest.mark.parametrize("failure", [PeerUnreachable, TransportError])
async def test_dials_back_off_but_never_end(failure: type[TransportError]):
    transport = Unreachable(failure=failure)
    service = discovery(transport, ["/ip4/10.0.0.1/tcp/1/p2p/boot"], clock=lambda: transport.now)
    while transport.now < 3 * 3600:
        await service.step()
        transport.now += 0.25
    times = [at for at, address in transport.dialled if address.endswith("/boot")]
    gaps = [later - earlier for earlier, later in pairwise(times)]
    assert 0.25 <= gaps[0] <= 1
    assert max(gaps) <= 30 * 1.25 + 0.25
    assert min(gaps[10:]) >= 30 * 0.75
    assert times[-1] > 3 * 3600 - 40


@pytest.mark.parametrize(("count", "most"), [(2, 130), (32, 26)])
async def test_look_ups_become_rarer_in_a_large_swarm_and_no_change_there_hurries_them(count: int, most: int):
    transport = Unreachable()
    connected = [f"friend {number}" for number in range(count)]
    transport.peers = lambda: tuple(connected)
    looked_up: list[float] = []

    async def provide(key: bytes) -> None:
        looked_up.append(transport.now)

    transport.provide = provide
    service = discovery(transport, clock=lambda: transport.now, tick=0.5)
    while transport.now < 3600:
        await service.step()
        transport.now += 0.5
        if count > ENOUGH and transport.now % 20 == 0:  # somebody comes, somebody goes
            connected.append(connected.pop(0) + "'")
    assert most // 2 < len(looked_up) <= most
    assert looked_up[:4] == [0.0, 1.0, 3.0, 7.0]
    del connected[1:]
    await service.step()
    assert looked_up[-1] == 3600, "with next to nobody left it looks at once"


async def test_a_flood_of_ids_is_bounded():
    transport = Unreachable(flood=1000)
    service = discovery(transport, clock=lambda: transport.now)
    while transport.now < 60:
        await service.step()
        transport.now += 0.5
    assert len(service._known) == 1 + MAX_STRANGERS
    assert len(transport.dialled) <= 120 * DIALS_AT_ONCE


async def test_made_up_peers_do_not_keep_the_places_of_real_ones():
    """A holder names ever new peers that nobody can reach; a real one comes to the rendezvous later."""
    transport = Unreachable(flood=1000)
    service = discovery(transport, clock=lambda: transport.now)
    while transport.now < 60:
        await service.step()
        transport.now += 0.5
    made_up = transport.find_providers

    async def with_a_real_one(key: bytes, *, timeout: float) -> tuple[str, ...]:
        return ("real", *await made_up(key, timeout=timeout))

    transport.find_providers = with_a_real_one  # type: ignore[method-assign]
    while transport.now < 120:
        await service.step()
        transport.now += 0.5
    assert any(address == "/p2p/real" for _, address in transport.dialled)


async def test_a_peer_that_stays_away_is_forgotten():
    transport = Unreachable(flood=3)
    service = discovery(transport, clock=lambda: transport.now)
    await service.step()
    assert len(service._known) == 4
    transport.flood = 0
    transport.now += GIVE_UP_SECONDS + 1
    await service.step()
    assert len(service._known) == 1


async def test_own_address_among_the_bootstrap_peers_is_left_out():
    transport = MemoryHub().transport("me")
    assert not discovery(transport, ["/ip4/127.0.0.1/tcp/1/p2p/me"])._known


@pytest.mark.parametrize("address", ["nonsense", "/ip4/127.0.0.1/tcp/1"])
async def test_a_broken_bootstrap_address_is_reported_and_harmless(network, address, wait_until):
    (a,) = await network.start(1)
    service = discovery(a, [address])
    async with running(service):
        await wait_until(lambda: service.last_error is not None)
    assert address in service.last_error
