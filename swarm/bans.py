"""Whom the transport refuses, and on whose word: the only place that bans and lifts bans there.

The coordinator's kicks (coordination/access.py) and this node's own verdicts (accounts.py) may be of the same peer. It
stays banned while one of them holds it so.
"""

from typing import Literal

from swarm.transport import Transport

By = Literal["coordinator", "reputation"]


MAX_HELD = 16_384
"""On each one's word, the latest: more than a list has kicked peers, or a reputation remembers any. A coordinator's
verdicts have no other bound, and ids are free."""


class Bans:
    """The oldest ban gives way when there are too many."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._held: dict[By, dict[str, None]] = {"coordinator": {}, "reputation": {}}

    def of(self, by: By) -> frozenset[str]:
        return frozenset(self._held[by])

    def ban(self, peer: str, by: By) -> None:
        """Refuse a peer; once more where the transport may have forgotten it."""
        held = self._held[by]
        if peer not in held and len(held) >= MAX_HELD:
            self.lift(next(iter(held)), by)
        held[peer] = None
        self._transport.ban(peer)

    def lift(self, peer: str, by: By) -> None:
        """Take this one's ban back; the peer is let in again when no other holds."""
        self._held[by].pop(peer, None)
        if not any(peer in held for held in self._held.values()):
            self._transport.lift_ban(peer)
