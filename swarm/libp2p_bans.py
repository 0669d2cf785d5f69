"""Whom the libp2p host refuses. Bounded: identities are free, and so are bans."""

from libp2p.peer.id import ID
from libp2p.pubsub.pubsub import Pubsub

MAX_BANNED = 16_384
"""Bans held here, the latest; the exchange bans again whom it knows of when it connects."""


class Bans:
    """Peer ids, and with them the gossip blacklist."""

    def __init__(self, pubsub: Pubsub) -> None:
        self._pubsub = pubsub
        self._peers: dict[str, None] = {}

    def __contains__(self, peer: str) -> bool:
        return peer in self._peers

    def __len__(self) -> int:
        return len(self._peers)

    def add(self, peer: str) -> None:
        if peer not in self._peers and len(self._peers) >= MAX_BANNED:
            self.lift(next(iter(self._peers)))
        self._peers[peer] = None
        # Not Pubsub.add_to_blacklist: its background clean-up races with that of the closing connection.
        self._pubsub.blacklisted_peers.add(ID.from_base58(peer))

    def lift(self, peer: str) -> None:
        """Take a ban back; no error when there is none."""
        if self._peers.pop(peer, self) is not self:
            self._pubsub.blacklisted_peers.discard(ID.from_base58(peer))
