"""A node of a benchmark between processes: an identity, a store, and a transport on loopback."""

import hashlib
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from node.config import LimitsConfig
from protocol.identity import Identity
from swarm.experience import ExperienceStore
from swarm.libp2p_transport import Libp2pTransport

LISTEN = "/ip4/127.0.0.1/tcp/0"


@dataclass(frozen=True, slots=True)
class BenchNode:
    identity: Identity
    store: ExperienceStore
    transport: Libp2pTransport


@asynccontextmanager
async def bench_node(role: str, directory: Path) -> AsyncIterator[BenchNode]:
    """A started one."""
    identity = Identity.from_seed(hashlib.sha256(f"shoal bench {role}".encode()).digest())
    store = ExperienceStore(directory / "node.db", LimitsConfig().store_mb << 20, time.time)
    transport = Libp2pTransport(identity, [LISTEN])
    await transport.start()
    try:
        yield BenchNode(identity, store, transport)
    finally:
        await transport.stop()
        store.close()
