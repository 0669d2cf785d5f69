"""What the exchange did, and what its peers did wrong: counters, verdicts on peers, and events for people."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from protocol.rules import Reason, Rejected
from swarm.bans import Bans
from swarm.database import StoreError
from swarm.newest import remember
from swarm.reputation import Reputation
from swarm.transport import Transport

QUIET_SECONDS = 60.0
"""The same kind of event about the same peer is told once in this time."""
MAX_QUIET = 1024


@dataclass(slots=True)
class Counters:
    """Since start. What was lost to a full queue or a rate limit is in the `dropped_*` ones."""

    published: int = 0
    heard: int = 0
    """Announcements of others that were new and valid."""
    healed: int = 0
    """Of them, those that came by asking a peer."""
    uninformative: int = 0
    """Announced with equal rewards, so not pulled."""
    fetched: int = 0
    fetch_failures: int = 0
    admitted: int = 0
    rejected: dict[str, int] = field(default_factory=dict)
    """By reason: announcements, groups and answers alike."""
    unscored: int = 0
    """Times that the scorer did not answer for a group; it is pulled again later."""
    served: int = 0
    turned_away: int = 0
    """Requests answered with `wait`: their peers were over their allowance."""
    put_off: int = 0
    """Times that a peer asked this node to wait."""
    bytes_in: int = 0
    """Of group bodies."""
    bytes_out: int = 0
    dropped_announcements: int = 0
    """Over a forwarder's rate."""
    dropped_wanted: int = 0
    """Worth pulling, but pushed out by better ones or unreachable."""
    dropped_outbox: int = 0
    """Own announcements not gossiped; they heal."""
    dropped_provides: int = 0
    """Groups held but not made known to the DHT."""
    store_errors: int = 0


class Accounts:
    """Counts, blames, bans, and tells `on_event(kind, message)` without repeating itself."""

    def __init__(
        self,
        transport: Transport,
        reputation: Reputation,
        clock: Callable[[], float],
        on_event: Callable[[str, str], None],
        bans: Bans | None = None,
    ) -> None:
        """`bans`: those of the node, where another one bans too."""
        self._transport, self._clock, self._on_event = transport, clock, on_event
        self._bans = bans or Bans(transport)
        self.reputation = reputation
        self.counters = Counters()
        self._told: dict[tuple[str, str], float] = {}

    def offence(self, rejected: Rejected, *peers: str) -> None:
        """One more rejection, on the account of each of these peers; enough of them ban a peer. Raises StoreError."""
        reason = str(rejected.reason)
        self.counters.rejected[reason] = self.counters.rejected.get(reason, 0) + 1
        for peer in peers:
            if peer == self._transport.peer_id:  # our own announcement, come back broken
                continue
            newly_banned = self.reputation.record(peer, reason)
            if rejected.reason is not Reason.uninformative:
                self.tell("rejected", peer + reason, f"{peer[-8:]}: {reason}: {rejected.detail}")
            if newly_banned:
                self.refuse(peer)
                self._on_event("banned", f"{peer} is banned: too many offences, the last one {reason}")

    def note(self, rejected: Rejected, *peers: str) -> None:
        """`offence`, where whoever calls has no use for a database that cannot be written: that is told, too."""
        try:
            self.offence(rejected, *peers)
        except StoreError as error:
            self.store_trouble(error)

    def refuse(self, peer: str) -> None:
        """Have the transport refuse a banned peer."""
        self._bans.ban(peer, "reputation")

    def lift_bans(self) -> None:
        """Let in again whose ban has faded (swarm.reputation). To be called from time to time."""
        for peer in self._bans.of("reputation"):
            if not self.reputation.is_banned(peer):
                self._bans.lift(peer, "reputation")
                self._on_event("unbanned", f"{peer} is no longer banned: its offences are long ago")

    def store_trouble(self, error: StoreError) -> None:
        """The database failed a service, which goes on: a full disk may be emptied."""
        self.counters.store_errors += 1
        self.tell("store", "", str(error))

    def tell(self, kind: str, about: str, message: str) -> None:
        now = self._clock()
        if now - self._told.get((kind, about), -math.inf) < QUIET_SECONDS:
            return
        remember(self._told, (kind, about), now, MAX_QUIET)
        self._on_event(kind, message)
