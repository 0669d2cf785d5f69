"""Kademlia as Shoal needs it: a rendezvous for peers and provider records of groups, both bounded.

Two traps of py-libp2p 0.8.1: connecting to a peer does not put it in the routing table, and `find_providers` asks
nobody once the local store has any record for the key, its own included.
"""

from collections import deque

from libp2p.abc import IHost
from libp2p.kad_dht.kad_dht import DHTMode, KadDHT
from libp2p.peer.id import ID
from multiaddr import Multiaddr

from protocol.identity import IdentityError, public_key_of

MAX_PROVIDED_KEYS = 512
"""Own keys that are republished; older ones expire at their holders (48 h)."""
MAX_STORED_KEYS = 20_000
"""Keys that others may store with us."""
MAX_PROVIDERS = 32
"""Looked at in one answer: py-libp2p keeps 20 for a key, and who makes more up must not fill what we remember."""
ADDRESS_SECONDS = 24 * 3600


class Dht:
    """Wraps the library's DHT. Callers hold the deadlines."""

    def __init__(self, host: IHost) -> None:
        self.service = KadDHT(host, DHTMode.SERVER, enable_values=False)
        self._host = host
        self._provided: deque[bytes] = deque()

    async def meet(self, peer: ID) -> None:
        """Put a connected peer in the routing table."""
        await self.service.add_peer(peer)

    def drop(self, peer: ID) -> None:
        self.service.routing_table.remove_peer(peer)

    async def refresh(self) -> None:
        """Look up ourselves and a random key per bucket, so that a node that knows one peer soon knows all."""
        await self.service.refresh_routing_table()
        stored = self.service.provider_store.providers
        while len(stored) > MAX_STORED_KEYS:
            del stored[next(iter(stored))]

    async def addresses_of(self, peer: ID) -> list[Multiaddr]:
        found = await self.service.find_peer(peer)
        return list(found.addrs) if found is not None else []

    async def provide(self, key: bytes) -> None:
        if key in self._provided:
            self._provided.remove(key)
        self._provided.append(key)
        if len(self._provided) > MAX_PROVIDED_KEYS:
            self.service.provider_store.providing_keys.discard(self._provided.popleft())
        await self.service.provider_store.provide(key)

    def stored_providers(self, key: bytes) -> list[str]:
        found = [str(record.peer_id) for record in self.service.provider_store.get_providers(key)]
        return [peer for peer in found if _can_sign(peer)]

    async def closest(self, key: bytes) -> list[ID]:
        return await self.service.peer_routing.find_closest_peers_network(key)

    async def ask(self, holder: ID, key: bytes) -> list[str]:
        """Providers that one peer knows; their addresses go to the peerstore, so that the id alone can be dialled.

        Only the first MAX_PROVIDERS, and of them those that can take part: anything can be made up.
        """
        found, _ = await self.service.provider_store._get_providers_from_peer_with_closers(holder, key)
        found = [provider for provider in found[:MAX_PROVIDERS] if _can_sign(str(provider.peer_id))]
        for provider in found:
            if provider.addrs and provider.peer_id != self._host.get_id():
                self._host.get_peerstore().add_addrs(provider.peer_id, provider.addrs, ADDRESS_SECONDS)
        return [str(provider.peer_id) for provider in found]


def _can_sign(peer: str) -> bool:
    """Whether this is the peer id of an Ed25519 key: others cannot be peers of a swarm."""
    try:
        public_key_of(peer)
    except IdentityError:
        return False
    return True
