"""Decides within a fraction of a millisecond whether a gossip message is delivered and relayed at all.

Runs where the transport calls it, maybe in another thread: it touches nothing but its own counters and what it was
given. What it found is handed over by `drain`, to be counted against the peer at fault.
"""

from collections import deque
from collections.abc import Callable, Collection

from protocol.envelope import Domain, unseal
from protocol.manifest import Manifest
from protocol.messages import MAX_ANNOUNCEMENT_BYTES
from protocol.rules import Rejected, check_announcement

RATE = 256.0
"""Announcements a second taken from one forwarder in the long run, and at once after a silence: BURST."""
BURST = 1024.0
MAX_FORWARDERS = 1024
MAX_OFFENCES = 1024


class AnnouncementGate:
    """The `check` of a subscription. `banned` is called from the transport's thread."""

    def __init__(
        self,
        manifest: Manifest,
        clock: Callable[[], float],
        *,
        environments: Collection[tuple[str, str]],
        banned: Callable[[str], bool],
    ) -> None:
        self._manifest, self._clock, self._environments, self._banned = manifest, clock, environments, banned
        self._allowances: dict[str, tuple[float, float]] = {}
        self._offences: deque[tuple[str, Rejected]] = deque(maxlen=MAX_OFFENCES)
        self.dropped = 0
        """Messages over a forwarder's rate. They come back by healing, if they were worth it."""

    def check(self, forwarder: str, data: bytes) -> bool:
        """Rules 1-6 on a sealed announcement, and the forwarder's rate. False: neither deliver nor relay it."""
        now = self._clock()
        if self._banned(forwarder):
            return False
        if not self._within_rate(forwarder, now):
            self.dropped += 1
            return False
        try:
            check_announcement(data, self._manifest, now, environments=self._environments, banned=self._banned)
        except Rejected as rejected:
            self._offences.append((culprit(data, forwarder, now), rejected))
            return False
        return True

    def drain(self) -> list[tuple[str, Rejected]]:
        """(peer at fault, what it did) since the last call; the oldest are forgotten when there are too many."""
        found = []
        while self._offences:
            found.append(self._offences.popleft())
        return found

    def _within_rate(self, forwarder: str, now: float) -> bool:
        """Token bucket."""
        left, at = self._allowances.pop(forwarder, (BURST, now))
        left = min(BURST, left + max(0.0, now - at) * RATE)
        if len(self._allowances) >= MAX_FORWARDERS:
            del self._allowances[next(iter(self._allowances))]
        self._allowances[forwarder] = (max(0.0, left - 1), now)
        return left >= 1


def culprit(data: bytes, forwarder: str, now: float) -> str:
    """Who answers for a bad announcement: its signer where the signature proves one, else who passed it on.

    An honest node relays nothing that it did not verify.
    """
    try:
        return unseal(data, Domain.announcement, max_bytes=MAX_ANNOUNCEMENT_BYTES, now=now).producer
    except Rejected:
        return forwarder
