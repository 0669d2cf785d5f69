import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from protocol.identity import Identity
from swarm.experience import ExperienceStore
from swarm.memory import MemoryHub
from swarm.throttle import Throttle
from swarm.transport import Event, Message, Transport
from tests.swarm.coordinated import Hall
from tests.swarm.world import World

LOOPBACK = "/ip4/127.0.0.1/tcp/0"


async def until(condition: Callable[[], bool], timeout: float = 10.0) -> None:
    async with asyncio.timeout(timeout):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.01)


class Reader:
    """Reads a transport's events into a list."""

    def __init__(self, transport: Transport) -> None:
        self.events: list[Event] = []
        self._task = asyncio.create_task(self._read(transport))

    async def _read(self, transport: Transport) -> None:
        async for event in transport.events():
            self.events.append(event)

    @property
    def messages(self) -> list[bytes]:
        return [event.data for event in self.events if isinstance(event, Message)]

    async def saw(self, event: Event, timeout: float = 10.0) -> None:
        await until(lambda: event in self.events, timeout)


class Network:
    """Makes transports of one kind, and stops them at the end of the test."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.hub = MemoryHub(seed=1, latency=0.001)
        self._started: list[Transport] = []

    def identity(self, seed: int) -> Identity:
        return Identity.from_seed(hashlib.sha256(f"{self.kind} {seed}".encode()).digest())

    def transport(
        self, seed: int, *, listen: str = LOOPBACK, event_limit: int = 1024, throttle: Throttle | None = None
    ) -> Transport:
        if self.kind == "memory":
            transport = self.hub.transport(self.identity(seed), event_limit=event_limit, throttle=throttle)
        else:
            from swarm.libp2p_transport import Libp2pTransport

            transport = Libp2pTransport(self.identity(seed), [listen], event_limit=event_limit, throttle=throttle)
        self._started.append(transport)
        return transport

    async def start(self, count: int) -> list[Transport]:
        """Strangers."""
        transports = [self.transport(seed) for seed in range(count)]
        await asyncio.gather(*(transport.start() for transport in transports))
        return transports

    async def line(self, count: int) -> list[Transport]:
        """Each connected to the next."""
        transports = await self.start(count)
        for here, there in pairwise(transports):
            await here.connect(there.addresses()[0], timeout=5)
            await until(lambda here=here, there=there: here.peer_id in there.peers())
        return transports

    async def close(self) -> None:
        await asyncio.gather(*(transport.stop() for transport in self._started))


@pytest.fixture(params=["memory", pytest.param("libp2p", marks=pytest.mark.network)])
async def network(request: pytest.FixtureRequest) -> AsyncIterator[Network]:
    network = Network(request.param)
    yield network
    await network.close()


@pytest.fixture
async def libp2p() -> AsyncIterator[Network]:
    network = Network("libp2p")
    yield network
    await network.close()


@pytest.fixture
def read() -> type[Reader]:
    return Reader


@pytest.fixture
def wait_until() -> Callable[..., object]:
    return until


@pytest.fixture
def store(tmp_path: Path, clock: Callable[[], float]) -> Iterator[ExperienceStore]:
    store = ExperienceStore(tmp_path / "node.db", 1 << 20, clock)
    yield store
    store.close()


@pytest.fixture
async def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    monkeypatch.setattr("swarm.exchange.DRAIN_SECONDS", 0.02)
    monkeypatch.setattr("swarm.exchange.PROVIDE_SECONDS", 0.02)
    monkeypatch.setattr("swarm.healing.SETTLED_SECONDS", 0)
    world = World(tmp_path)
    yield world
    await world.stop()


@pytest.fixture
async def hall(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Hall]:
    monkeypatch.setattr("swarm.coordination.coordinator.TICK_SECONDS", 0.02)
    monkeypatch.setattr("swarm.coordination.coordinator.REVISE_SECONDS", 0.0)
    monkeypatch.setattr("swarm.coordination.access.LOOK_SECONDS", 0.05)
    monkeypatch.setattr("swarm.coordination.coordinator.ASK_RATE", 100.0)
    hall = Hall(tmp_path)
    yield hall
    await hall.stop()
