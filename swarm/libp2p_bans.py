"""Whom the libp2p host refuses. swarm.bans bounds it."""

from libp2p.peer.id import ID
from libp2p.pubsub.pubsub import Pubsub


class Bans:
    """Peer ids, and with them the gossip blacklist."""

    def __init__(self, pubsub: Pubsub) -> None:
        self._pubsub = pubsub
        self._peers: set[str] = set()

    def __contains__(self, peer: str) -> bool:
        return peer in self._peers

    def add(self, peer: str) -> None:
        self._peers.add(peer)
        # Not Pubsub.add_to_blacklist: its background clean-up races with that of the closing connection.
        self._pubsub.blacklisted_peers.add(ID.from_base58(peer))

    def lift(self, peer: str) -> None:
        """Take a ban back; no error when there is none."""
        if peer in self._peers:
            self._peers.remove(peer)
            self._pubsub.blacklisted_peers.discard(ID.from_base58(peer))
