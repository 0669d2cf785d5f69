"""Nodes over the in-memory hub that serve and pull a leader's policy, and a leader that signs what a test wants."""

import asyncio
import hashlib
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from protocol.envelope import Domain, seal
from protocol.identity import Identity
from protocol.policy import (
    LEAST_PIECE_BYTES,
    PIECES_PROTOCOL,
    PolicyHead,
    PolicyItem,
    PolicyRecord,
)
from swarm import policy_pulling
from swarm.accounts import Accounts
from swarm.experience import ExperienceStore
from swarm.memory import MemoryHub, MemoryTransport
from swarm.policies import PolicyServing, PolicyStore
from swarm.policy_pulling import PolicyPuller, Pulled
from swarm.reputation import Reputation
from tests.swarm.world import who

SWARM = b"s" * 32
PIECE = LEAST_PIECE_BYTES


def state(version: int) -> bytes:
    return hashlib.sha256(b"weights of %d" % version).digest()


class Leader:
    """Signs heads and makes records of whatever bytes a test wants."""

    def __init__(self, store: PolicyStore, identity: Identity) -> None:
        self.store, self.identity, self.items = store, identity, list[PolicyItem]()
        self.signed = time.time() - 1000

    def offer(self, version: int, base: int | None, content: bytes, **changes: Any) -> PolicyRecord:
        size, pieces = self.store.cut([content], PIECE)
        base_state = b"" if base is None else state(base)
        record = PolicyRecord(version, base, base_state, "bfloat16", state(version), size, PIECE, pieces)
        record = msgspec.structs.replace(record, **changes)
        raw = msgspec.msgpack.encode(record)
        self.items.append(PolicyItem(version, base, self.store.put(raw), len(raw), record.size))
        self.sign()
        return record

    def sign(self, **changes: Any) -> None:
        self.signed += 1
        head = msgspec.structs.replace(PolicyHead(SWARM, "mark", tuple(self.items)), **changes)
        payload = msgspec.msgpack.encode(head)
        self.store.keep_head(
            seal(self.identity, Domain.policy, payload, issued=self.signed, expires=self.signed + 9999)
        )


class Peer:
    """A node that serves its store; `follow` has it pull what a leader publishes."""

    def __init__(self, hub: MemoryHub, path: Path, name: str, leader: str = "") -> None:
        self.identity = who(name)
        self.transport = hub.transport(self.identity)
        self.store = PolicyStore(path / name)
        self.experience = ExperienceStore(path / f"{name}.db", 1 << 20, time.time)
        self.told: list[str] = []
        self.accounts = Accounts(
            self.transport, Reputation(self.experience, time.time), time.time, lambda kind, said: self.told.append(said)
        )
        self.leader = leader or self.identity.peer_id
        self.serving = PolicyServing(self.store, self.leader, self.accounts, time.time)
        self.pulled: list[Pulled] = []
        self.running: asyncio.Task[None] | None = None

    async def start(self) -> "Peer":
        await self.transport.start()
        self.serving.serve_on(self.transport)
        return self

    def follow(self, have: tuple[int, bytes] | None = None, **options: Any) -> PolicyPuller:
        async def arrived(pulled: Pulled) -> None:
            self.pulled.append(pulled)
            self.puller.have = pulled.version, pulled.records[-1].state

        async def may_take(records: Sequence[PolicyRecord], size: int | None) -> None:
            pass

        options = {"model": "mark", "dtype": "bfloat16", "max_bytes": 64 << 20, "request_timeout": 1.0, **options}
        self.puller = PolicyPuller(
            self.transport, self.store, self.accounts, time.time,
            leader=self.leader, swarm=SWARM, poll_seconds=0.05, **{"arrived": arrived, "may_take": may_take, **options},
        )  # fmt: skip
        self.puller.have = have
        self.running = asyncio.create_task(self.puller.run())
        return self.puller

    def content(self, pulled: Pulled) -> list[bytes]:
        return [b"".join(self.store.pieces_of(record)) for record in pulled.records]

    def verdicts(self, peer: str) -> dict[str, int]:
        return self.experience.peers.verdicts([peer]).get(peer, {})

    async def stop(self) -> None:
        if self.running is not None:
            assert not self.running.done(), self.running
            self.running.cancel()
            await asyncio.gather(self.running, return_exceptions=True)
        await self.transport.stop()
        self.experience.close()


class Place:
    def __init__(self, path: Path) -> None:
        self.path, self.hub, self.peers = path, MemoryHub(), list[Peer]()
        self.others: list[MemoryTransport] = []

    async def stop(self) -> None:
        for peer in self.peers:
            await peer.stop()
        for other in self.others:
            await other.stop()

    async def peer(self, name: str, leader: str = "") -> Peer:
        self.peers.append(Peer(self.hub, self.path, name, leader))
        return await self.peers[-1].start()

    async def leader(self) -> tuple[Peer, Leader]:
        peer = await self.peer("leader")
        return peer, Leader(peer.store, peer.identity)

    async def liar(self, name: str, answer: Callable[[str, bytes], Awaitable[bytes]]) -> MemoryTransport:
        """A peer that says that it holds the leader's policy and answers for pieces what the test wants."""
        transport = self.hub.transport(who(name))
        await transport.start()
        transport.serve(PIECES_PROTOCOL, answer, max_request=4096)
        self.hub.provide(policy_pulling.rendezvous(SWARM, who("leader").peer_id), transport.peer_id)
        self.others.append(transport)
        return transport


async def join(a: Peer, b: Peer | MemoryTransport) -> None:
    there = b.transport if isinstance(b, Peer) else b
    await a.transport.connect(there.addresses()[0], timeout=1)


WHOLE = os.urandom(5 * PIECE + 17)
CHANGE = os.urandom(1000)


def held(peer: Peer) -> set[str]:
    return {path.name for path in (peer.store.directory / "pieces").iterdir()}
