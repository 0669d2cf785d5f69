"""The announced groups that are worth pulling, in the order to pull them. Bounded."""

import math
import random
from bisect import insort
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

from protocol.messages import Announcement

HALF_LIFE = 120.0
"""Seconds after which an announcement is half as likely to be chosen as a new one."""
MAX_ATTEMPTS = 3
MAX_WAITS = 16
"""How often a holder may ask to wait, or the scorer be away, before the group is given up."""
RETRY_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Candidate:
    """A verified announcement of a group that is not here yet."""

    announcement: Announcement
    producer: str
    expires: float
    forwarder: str
    """Who told us, and so may hold the body."""
    attempts: int = 0
    waits: int = 0
    not_before: float = 0.0


class Wanted:
    """Candidates in random order, likelier first: by their producer's weight, halved with age, shared among a
    producer's candidates so that announcing more does not get more chosen.

    Drawing by exponential races makes the order a fixed key: age multiplies all rates alike, so it can be taken as
    of arrival.
    """

    def __init__(self, bound: int, seed: int) -> None:
        self._bound = bound
        self._random = random.Random(seed)
        self._queue: list[tuple[float, int, Candidate]] = []
        self._count = 0
        self._by_producer: Counter[str] = Counter()
        self.dropped = 0
        """Candidates pushed out by better ones, or given up after MAX_ATTEMPTS or MAX_WAITS."""

    def __len__(self) -> int:
        return len(self._queue)

    def producers(self) -> set[str]:
        return set(self._by_producer)

    def add(self, candidate: Candidate, weight: float, now: float) -> None:
        """Queue a candidate whose producer has this weight (> 0); the least likely one is dropped when full."""
        share = weight / (1 + self._by_producer[candidate.producer])
        key = (
            now * math.log(2) / HALF_LIFE + math.log(share) - math.log(-math.log(1.0 - self._random.random()) + 1e-300)
        )
        self._count += 1
        insort(self._queue, (key, self._count, candidate))
        self._by_producer[candidate.producer] += 1
        if len(self._queue) > self._bound:
            self._take(0)
            self.dropped += 1

    def retry(self, candidate: Candidate, weight: float, now: float) -> None:
        """Queue a candidate again whose pull failed, to be tried later, or drop it when that was the last attempt."""
        attempts = candidate.attempts + 1
        if attempts == MAX_ATTEMPTS:
            self.dropped += 1
            return
        self._again(replace(candidate, attempts=attempts), weight, now, now + RETRY_SECONDS * 2**attempts)

    def put_off(self, candidate: Candidate, weight: float, now: float, *, until: float) -> None:
        """Queue a candidate again whose holder asked to wait, or which could not be scored; too often: drop it."""
        waits = candidate.waits + 1
        if waits == MAX_WAITS:
            self.dropped += 1
            return
        self._again(replace(candidate, waits=waits), weight, now, until)

    def _again(self, candidate: Candidate, weight: float, now: float, not_before: float) -> None:
        if weight <= 0:  # banned since
            self.dropped += 1
            return
        self.add(replace(candidate, not_before=not_before), weight, now)

    def pop(self, now: float, allowed: Callable[[Candidate], bool]) -> Candidate | None:
        """The first candidate that is due and `allowed`; expired ones are forgotten on the way."""
        for i in range(len(self._queue) - 1, -1, -1):
            candidate = self._queue[i][2]
            if candidate.expires <= now:
                self._take(i)
            elif candidate.not_before <= now and allowed(candidate):
                return self._take(i)
        return None

    def _take(self, i: int) -> Candidate:
        candidate = self._queue.pop(i)[2]
        self._by_producer[candidate.producer] -= 1
        if not self._by_producer[candidate.producer]:
            del self._by_producer[candidate.producer]
        return candidate
