"""A node of `shoal bench policy`: a transport, and accounts for what its peers do wrong."""

import hashlib
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from protocol.identity import Identity
from swarm.accounts import Accounts
from swarm.experience import ExperienceStore
from swarm.libp2p_transport import Libp2pTransport
from swarm.reputation import Reputation

LISTEN = "/ip4/127.0.0.1/tcp/0"
SWARM = hashlib.sha256(b"shoal bench policy").digest()


@dataclass(frozen=True, slots=True)
class PolicyNode:
    identity: Identity
    transport: Libp2pTransport
    accounts: Accounts


@asynccontextmanager
async def policy_node(role: str, directory: Path) -> AsyncIterator[PolicyNode]:
    """A started one."""
    identity = Identity.from_seed(hashlib.sha256(f"shoal bench {role}".encode()).digest())
    store = ExperienceStore(directory / "node.db", 16 << 20, time.time)
    transport = Libp2pTransport(identity, [LISTEN])
    await transport.start()
    accounts = Accounts(transport, Reputation(store, time.time), time.time, lambda kind, message: None)
    try:
        yield PolicyNode(identity, transport, accounts)
    finally:
        await transport.stop()
        store.close()
