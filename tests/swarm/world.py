"""Nodes with their exchange running on one in-memory hub, and bare peers whose every answer a test decides."""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from protocol.assignment import own_task
from protocol.envelope import Domain, digest_of, seal
from protocol.identity import Identity
from protocol.manifest import Caps, EnvironmentSpec, make_manifest
from protocol.messages import GROUPS_PROTOCOL, GroupRequest, announce_topic
from protocol.rollout import Completion, RolloutGroup, Turn
from swarm.exchange import Exchange, announcement_of
from swarm.experience import ExperienceStore
from swarm.memory import MemoryHub, MemoryTransport
from swarm.records import Scored

MANIFEST = make_manifest(
    "test",
    time.time() - 100,
    (EnvironmentSpec("chain_sum", "1", 1, {"max_tokens": 16}),),
    epoch_seconds=3600,
    slots_per_epoch=512,
    caps=Caps(max_group_bytes=64 * 1024),
)
TOPIC = announce_topic(MANIFEST.digest, 0)


def who(name: str) -> Identity:
    return Identity.from_seed(name.encode().ljust(32, b"."))


def make_group(by: Identity, slot: int, *, rewards: tuple[float, ...] = (0.0, 1.0), **changes) -> RolloutGroup:
    """Completions that score what their text says: see `truthful`."""
    epoch = MANIFEST.epoch_at(time.time())
    completions = tuple(
        Completion((Turn("assistant", f"{reward} padding {slot} {i} " * 3),), "stop", 8, reward)
        for i, reward in enumerate(rewards)
    )
    task = own_task(MANIFEST, epoch, by.peer_id, slot)
    group = RolloutGroup(epoch, task, "tiny", b"", 0, completions)
    return msgspec.structs.replace(group, **changes)


async def truthful(group: RolloutGroup) -> list[Scored]:
    return [Scored(float(completion.text.split()[0])) for completion in group.completions]


def sealed(producer: Identity, content: RolloutGroup, **changes) -> tuple[bytes, bytes]:
    """(sealed group, sealed announcement), the latter with `changes`."""
    now = time.time()
    body = seal(producer, Domain.group, msgspec.msgpack.encode(content), issued=now, expires=now + 600)
    announcement = msgspec.structs.replace(announcement_of(content, body, MANIFEST.digest), **changes)
    raw = seal(producer, Domain.announcement, msgspec.msgpack.encode(announcement), issued=now, expires=now + 600)
    return body, raw


async def until(condition: Callable[[], object], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"waited {seconds} s in vain"
        await asyncio.sleep(0.01)


class Node:
    """One node with its exchange running."""

    def __init__(self, hub: MemoryHub, path: Path, name: str, **options) -> None:
        self.identity = who(name)
        self.transport = hub.transport(self.identity, throttle=options.pop("throttle", None))
        self.store = ExperienceStore(path / f"{name}.db", options.pop("max_bytes", 64 << 20), time.time)
        self.events: list[tuple[str, str]] = []
        options = {"heal_seconds": 0.2, "request_timeout": 5.0, **options}
        rescore = options.pop("rescore", truthful)
        self.exchange = Exchange(
            self.transport, self.store, self.identity, MANIFEST, rescore, time.time,
            on_event=lambda kind, message: self.events.append((kind, message)), **options,
        )  # fmt: skip
        self.running: asyncio.Task[None] | None = None

    async def start(self) -> "Node":
        await self.transport.start()
        self.running = asyncio.create_task(self.exchange.run())
        await asyncio.sleep(0)
        return self

    async def stop(self) -> None:
        if self.running is not None:
            assert not self.running.done(), self.running
            self.running.cancel()
            await asyncio.gather(self.running, return_exceptions=True)
        await self.transport.stop()
        self.store.close()

    def count(self, name: str):
        return self.exchange.counters()[name]

    def verdicts(self, peer: str) -> dict[str, int]:
        """How often each verdict fell on a peer."""
        return self.store.peers.verdicts([peer]).get(peer, {})

    def verdict(self, digest: bytes) -> str:
        return self.store.find(digest.hex()).verdict

    def pool(self) -> set[bytes]:
        return {entry.digest for entry in self.store.pool(time.time())}


class World:
    """Makes nodes on one hub, and bare peers whose every answer the test decides."""

    def __init__(self, path: Path) -> None:
        self.path, self.hub, self.nodes = path, MemoryHub(), []
        self.peers: list[MemoryTransport] = []

    async def node(self, name: str, **options) -> Node:
        node = Node(self.hub, self.path, name, **options)
        self.nodes.append(node)
        return await node.start()

    async def peer(self, name: str, bodies: dict[bytes, bytes] | None = None) -> MemoryTransport:
        """A peer that serves these bodies by digest, to the letter of the request."""
        transport = self.hub.transport(who(name))
        await transport.start()
        await transport.subscribe(TOPIC)
        held = bodies if bodies is not None else {}

        async def serve(peer: str, data: bytes) -> bytes:
            request = msgspec.msgpack.decode(data, type=GroupRequest)
            return held.get(request.group, b"")[request.offset :]

        transport.serve(GROUPS_PROTOCOL, serve, max_request=4096)
        self.peers.append(transport)
        return transport

    async def stop(self) -> None:
        for node in self.nodes:
            await node.stop()
        for peer in self.peers:
            await peer.stop()


async def join(a: Node | MemoryTransport, b: Node | MemoryTransport) -> None:
    here, there = (x.transport if isinstance(x, Node) else x for x in (a, b))
    await here.connect(there.addresses()[0], timeout=1)
    await asyncio.sleep(0.02)


async def announce(
    world: World, node: Node, name: str, group: RolloutGroup, body: bytes | None = None, **changes
) -> tuple[MemoryTransport, bytes]:
    """A bare peer announces a group, holds its body and serves it; returns it and the group's digest."""
    true_body, raw = sealed(who(name), group, **changes)
    digest = digest_of(true_body)
    peer = await world.peer(name, {digest: true_body if body is None else body})
    await join(peer, node)
    await peer.publish(TOPIC, raw)
    return peer, digest
