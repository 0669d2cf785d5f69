"""Who may take part: what the coordinator's member list says, enforced by every member on its own connections.

A peer proves its id when it connects (libp2p's identify); whoever is not on the list is not listened to, served or
relayed at once, and parted from after a grace in which it may have become a member. Whoever was kicked is refused.
"""

import asyncio
import contextlib
from collections.abc import Callable

from protocol.board import MemberList
from protocol.manifest import Manifest
from swarm.bans import Bans
from swarm.transport import Transport, TransportError

GRACE_SECONDS = 20.0
"""For a connected peer that is not listed yet: the list may be on its way."""
LOOK_SECONDS = 2.0


class Access:
    """`refused` and `barred` may be called from any thread: they read sets that are only ever replaced."""

    def __init__(
        self,
        transport: Transport,
        manifest: Manifest,
        clock: Callable[[], float],
        *,
        grace: float = GRACE_SECONDS,
        on_event: Callable[[str, str], None] = lambda kind, message: None,
    ) -> None:
        self._transport, self._clock, self._grace, self._on_event = transport, clock, grace, on_event
        self.bans = Bans(transport)
        self._listed_only = manifest.listed_only
        self._always = frozenset((transport.peer_id, *manifest.coordinators))
        self._listed: frozenset[str] = frozenset()
        self._observers: frozenset[str] = frozenset()
        self._kicked: frozenset[str] = frozenset()
        self._since: dict[str, float] = {}
        """Since when each connected peer that is not listed is connected."""

    def refused(self, peer: str) -> bool:
        """Whether nothing is taken from this peer and nothing given to it."""
        if peer in self._always:
            return False
        return peer in self._kicked or (self._listed_only and peer not in self._listed)

    def barred(self, producer: str) -> bool:
        """Whether groups of this producer are not taken."""
        return self.refused(producer) or producer in self._observers

    def takes_part(self, peer: str) -> bool:
        """Whether this peer is a listed member, and no observer."""
        return peer in self._listed and peer not in self._observers

    @property
    def members(self) -> int:
        """How many are listed."""
        return len(self._listed)

    def take(self, members: MemberList) -> None:
        """A new list."""
        kicked = frozenset(members.kicked) - self._always
        for peer in sorted(kicked - self._kicked):
            self.bans.ban(peer, "coordinator")
            self._on_event("kicked", f"{peer} was kicked by the coordinator")
        for peer in self._kicked - kicked:
            self.bans.lift(peer, "coordinator")
        self._kicked = kicked
        self._listed = frozenset(member.peer for member in members.members)
        self._observers = frozenset(member.peer for member in members.members if member.role == "observer")

    def admit(self, peer: str, role: str) -> None:
        """One more member, before there is a list that names it."""
        self._listed |= {peer}
        if role == "observer":
            self._observers |= {peer}

    async def run(self) -> None:
        """Part from those who stay without being listed."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            await self.look()

    async def look(self) -> None:
        now, outside = self._clock(), [peer for peer in self._transport.peers() if self.refused(peer)]
        self._since = {peer: self._since.get(peer, now) for peer in outside}
        for peer, since in self._since.items():
            if now - since >= self._grace:
                self._on_event("unlisted", f"{peer} is not on the coordinator's member list: parted from")
                with contextlib.suppress(TransportError):  # it is looked at again
                    await self._transport.disconnect(peer)
