"""Who takes part, as a coordinator hears it itself: when each peer was heard of, and the groups that it announced."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from protocol.board import MAX_MEMBERS
from swarm.coordination.access import Access
from swarm.coordination.reports import Reports
from swarm.newest import remember

PRESENT_SECONDS = 150.0
"""A member that was not heard of for so long is not present. Each asks for the log every 30 s (log_sync.py)."""
MAX_COUNTED = 1 << 18
"""Groups counted in one round."""
MOST_OF_ONE = 4096
"""Of them, groups of one producer; fewer where many members must share."""


class Attendance:
    """Counts are kept in `reports`, where a kill loses none of them. Of peers that are neither listed members nor
    coordinators nothing is noted: their ids are free, and there is no end to them."""

    def __init__(
        self, reports: Reports, access: Access, coordinators: Sequence[str], clock: Callable[[], float]
    ) -> None:
        self._reports, self._access, self._clock = reports, access, clock
        self._coordinators = frozenset(coordinators)
        self._seen: dict[str, float] = {}
        """When each peer was last heard of."""
        self._announced: Counter[str] = Counter()
        """Groups by producer that are not counted on disk yet."""
        self._counted: set[bytes] = set()
        """Groups that were counted in this round."""
        self._of: Counter[str] = Counter()
        """How many of them are of each producer."""

    def saw(self, peer: str) -> None:
        if not (peer in self._coordinators or self._access.takes_part(peer)):
            return
        remember(self._seen, peer, self._clock(), 2 * MAX_MEMBERS)

    def last_seen(self, peer: str) -> float:
        """Unix seconds; -inf: never."""
        return self._seen.get(peer, -math.inf)

    def set_clock(self, now: float) -> None:
        """The clock was set: who was heard of at a time that is still to come was heard of before."""
        self._seen = {peer: min(at, now) for peer, at in self._seen.items()}

    def present(self, peers: Iterable[str]) -> set[str]:
        """Those of them that were heard of lately."""
        now = self._clock()
        return {peer for peer in peers if now - self.last_seen(peer) <= PRESENT_SECONDS}

    def announced(self, producer: str, group: bytes) -> None:
        """Count a group of a member, once in a round, and of each only so many that there is room for all."""
        if not self._access.takes_part(producer):
            return
        self.saw(producer)
        most = min(MOST_OF_ONE, MAX_COUNTED // self._access.members)
        if group not in self._counted and len(self._counted) < MAX_COUNTED and self._of[producer] < most:
            self._counted.add(group)
            self._of[producer] += 1
            self._announced[producer] += 1

    def supplied(self, first: int, last: int) -> dict[str, int]:
        """Groups by producer in the rounds `first` to `last`, and those not written yet. Raises StoreError."""
        return Counter(self._reports.heard(first, last)) + self._announced

    def write(self, number: int) -> None:
        """Have on disk what was counted in this round. Raises StoreError."""
        if self._announced:
            self._reports.hear(number, self._announced)
            self._announced.clear()

    def begin_round(self) -> None:
        """The same group counts again from here on."""
        self._counted.clear()
        self._of.clear()
