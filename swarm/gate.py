"""Decides within a fraction of a millisecond whether a gossip message is delivered and relayed at all.

Runs where the transport calls it, maybe in another thread: it touches nothing but its own counters and what it was
given. What it found is handed over by `drain`, to be counted against the peers at fault.
"""

from collections import deque
from collections.abc import Callable

from protocol.envelope import Domain, unseal
from protocol.manifest import Manifest
from protocol.messages import MAX_ANNOUNCEMENT_BYTES
from protocol.rules import Reason, Rejected, check_announcement
from swarm.allowance import Allowance

RATE = 256.0
"""Announcements a second taken from one forwarder in the long run, and at once after a silence: BURST."""
BURST = 1024.0
MAX_OFFENCES = 1024

JUDGED_ALIKE = frozenset(
    (Reason.too_large, Reason.malformed, Reason.bad_signature, Reason.wrong_swarm, Reason.unassigned_task)
)
"""Every node of a swarm refuses these, whatever its clock, ban list and version: whoever passes one on is at fault too.
"""


class AnnouncementGate:
    """The `check` of a subscription. `banned` is called from the transport's thread."""

    def __init__(self, manifest: Manifest, clock: Callable[[], float], *, banned: Callable[[str], bool]) -> None:
        self._manifest, self._clock, self._banned = manifest, clock, banned
        self._allowance = Allowance(RATE, BURST, clock)
        self._offences: deque[tuple[Rejected, tuple[str, ...]]] = deque(maxlen=MAX_OFFENCES)

    @property
    def dropped(self) -> int:
        """Messages over a forwarder's rate. They come back by healing, if they were worth it."""
        return self._allowance.refused

    def check(self, forwarder: str, data: bytes) -> bool:
        """Rules 1-6 on a sealed announcement, and the forwarder's rate. False: neither deliver nor relay it."""
        now = self._clock()
        if self._banned(forwarder) or not self._allowance.take(forwarder):
            return False
        try:
            check_announcement(data, self._manifest, now, banned=self._banned)
        except Rejected as rejected:
            self._offences.append((rejected, culprits(data, forwarder, rejected, now)))
            return False
        return True

    def drain(self) -> list[tuple[Rejected, tuple[str, ...]]]:
        """(what was done, peers at fault) since the last call; the oldest are forgotten when there are too many."""
        found = []
        while self._offences:
            found.append(self._offences.popleft())
        return found


def culprits(data: bytes, forwarder: str, rejected: Rejected, now: float) -> tuple[str, ...]:
    """Who answers for a bad announcement: its signer where the signature proves one, and whoever passed it on where
    nobody is proven, or where every node judges it alike.

    An honest node relays nothing that it did not verify. But its clock, its ban list or its version may differ.
    """
    try:
        signer = unseal(data, Domain.announcement, max_bytes=MAX_ANNOUNCEMENT_BYTES, now=now).producer
    except Rejected:
        return (forwarder,)
    if signer == forwarder or rejected.reason not in JUDGED_ALIKE:
        return (signer,)
    return (signer, forwarder)
