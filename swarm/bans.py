"""Whom the transport refuses, and on whose word: the only place that bans and lifts bans there.

The coordinator's kicks (swarm.access) and this node's own verdicts (swarm.accounts) may be of the same peer. It stays
banned while one of them holds it so.
"""

from typing import Literal

from swarm.transport import Transport

By = Literal["coordinator", "reputation"]


class Bans:
    """Bounded by who calls: at most the kicked of a list, and the peers that a reputation remembers."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._held: dict[By, set[str]] = {"coordinator": set(), "reputation": set()}

    def of(self, by: By) -> frozenset[str]:
        return frozenset(self._held[by])

    def ban(self, peer: str, by: By) -> None:
        """Refuse a peer; once more where the transport may have forgotten it."""
        self._held[by].add(peer)
        self._transport.ban(peer)

    def lift(self, peer: str, by: By) -> None:
        """Take this one's ban back; the peer is let in again when no other holds."""
        self._held[by].discard(peer)
        if not any(peer in held for held in self._held.values()):
            self._transport.lift_ban(peer)
