"""Averagers of other nodes: found over the swarm's own connections, and never at somebody else's host."""

import time
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from protocol.averagers import AVERAGER_PROTOCOL, AveragerPlace, AveragerRequest
from protocol.identity import Identity
from swarm.accounts import Accounts
from swarm.averager_finding import ASK_AGAIN_SECONDS, ASKS_A_MINUTE, MAX_PLACES, AveragerFinding, address_of
from swarm.averaging import Averager
from swarm.averaging_wire import Setup
from swarm.experience import ExperienceStore
from swarm.memory import MemoryHub
from swarm.reputation import Reputation
from swarm.transport import Connection, RequestFailed
from tests.swarm.world import who

SWARM = b"s" * 32
ID = "12D3KooWLNuf28DAByCpJaXmvkCK8WCvLY6xc1X2mrg9P8DoNF3P"


class Known(Averager):
    """An averager that runs already, as far as anybody can tell."""

    def __init__(self, place: Path, addresses: tuple[str, ...]) -> None:
        super().__init__(
            Setup("rounds", "/ip4/127.0.0.1/tcp/0", (), str(place), 4, 2), place / "log", "none", say=lambda *_: None
        )
        self.addresses = addresses
        self.met: list[tuple[str, ...]] = []

    def meet(self, addresses: tuple[str, ...]) -> None:
        self.met.append(addresses)


class Nodes:
    def __init__(self, path: Path) -> None:
        self.path, self.hub, self.now = path, MemoryHub(), time.time()
        self.stores: list[ExperienceStore] = []

    async def node(
        self, identity: Identity, addresses: tuple[str, ...] = (), rounds: str = "rounds"
    ) -> AveragerFinding:
        transport = self.hub.transport(identity)
        store = ExperienceStore(self.path / f"{len(self.stores)}.db", 1 << 20, time.time)
        self.stores.append(store)
        accounts = Accounts(transport, Reputation(store, time.time), time.time, lambda kind, said: None)
        made = AveragerFinding(
            transport, Known(self.path, addresses), accounts, lambda: self.now, swarm=SWARM, rounds=rounds,
            request_timeout=1.0,
        )  # fmt: skip
        made.serve_on(transport)
        await transport.start()
        # as libp2p knows it of a connection; the hub has no hosts
        real = transport.connections
        transport.connections = lambda: {  # type: ignore[method-assign]
            peer: Connection(one.direction, one.latency, "10.0.0.7") for peer, one in real().items()
        }
        return made


@pytest.fixture
async def nodes(tmp_path: Path) -> AsyncIterator[Nodes]:
    made = Nodes(tmp_path)
    yield made
    for store in made.stores:
        store.close()


def met(finding: AveragerFinding) -> list[tuple[str, ...]]:
    assert isinstance(finding._averager, Known)
    return finding._averager.met


async def connected(one: AveragerFinding, *others: AveragerFinding) -> None:
    for other in others:
        await one._transport.connect(other._transport.addresses()[0], timeout=1)


async def test_an_averager_is_found_at_the_host_of_its_node(nodes: Nodes) -> None:
    here = await nodes.node(who("a"))
    there = await nodes.node(who("b"), (f"/ip4/192.168.1.9/tcp/4100/p2p/{ID}",))
    silent = await nodes.node(who("c"))
    other_model = await nodes.node(who("d"), (f"/ip4/192.168.1.9/tcp/4200/p2p/{ID}",), rounds="others")
    await connected(here, there, silent, other_model)
    await here.look()
    assert met(here) == [(f"/ip4/10.0.0.7/tcp/4100/p2p/{ID}",)]
    await here.look()
    assert len(met(here)) == 1
    assert isinstance(there._averager, Known)
    there._averager.addresses = (f"/ip4/192.168.1.9/tcp/4101/p2p/{ID}",)  # it was started anew
    nodes.now += ASK_AGAIN_SECONDS
    await here.look()
    assert met(here)[1:] == [(f"/ip4/10.0.0.7/tcp/4101/p2p/{ID}",)]


async def test_what_is_said_wrongly_is_noted_and_nothing_is_dialled(nodes: Nodes) -> None:
    here = await nodes.node(who("a"))
    for number, answer in enumerate(
        (
            b"\xc1",
            {"port": 0, "peer": ID},
            {"port": 1, "peer": "12D3KooW/../x" * 4},
            {"port": 1, "peer": ID, "host": "x"},
        )
    ):
        liar = nodes.hub.transport(who(f"liar {number}"))

        async def lie(peer: str, data: bytes, answer: object = answer) -> bytes:
            return answer if isinstance(answer, bytes) else msgspec.msgpack.encode(answer)

        liar.serve(AVERAGER_PROTOCOL, lie, max_request=999)
        await liar.start()
        await here._transport.connect(liar.addresses()[0], timeout=1)
    await here.look()
    assert met(here) == []
    assert here._accounts.counters.rejected == {"malformed": 4}


async def test_an_asker_is_answered_so_often_and_garbage_is_noted(nodes: Nodes) -> None:
    here = await nodes.node(who("a"), (f"/ip4/127.0.0.1/tcp/4100/p2p/{ID}",))
    asker = nodes.hub.transport(who("b"))
    await asker.start()
    await asker.connect(here._transport.addresses()[0], timeout=1)

    async def ask(data: bytes) -> bytes:
        return await asker.request(here._transport.peer_id, AVERAGER_PROTOCOL, data, max_bytes=999, timeout=1)

    wrong = msgspec.msgpack.encode(AveragerRequest(SWARM, b"x" * 32))
    assert await ask(wrong) == b""  # who does not know the rounds' name learns nothing
    with pytest.raises(RequestFailed):
        await ask(b"\xc1")
    assert here._accounts.counters.rejected == {"malformed": 1}
    for _ in range(ASKS_A_MINUTE - 2):
        await ask(wrong)
    with pytest.raises(RequestFailed, match="asks to wait"):
        await ask(wrong)


async def test_places_are_bounded(nodes: Nodes) -> None:
    here = await nodes.node(who("a"))
    there = [
        await nodes.node(who(f"{number}"), (f"/ip4/10.0.0.9/tcp/{5000 + number}/p2p/{ID}",))
        for number in range(MAX_PLACES + 3)
    ]
    await connected(here, *there)
    await here.look()
    assert len(met(here)[-1]) == MAX_PLACES


def test_an_address_of_either_kind() -> None:
    assert address_of("::1", AveragerPlace(9, ID)) == f"/ip6/::1/tcp/9/p2p/{ID}"
