"""Chooses the foreign groups of an update: Swarm sAmpling Policy Optimization (SAPO), arXiv 2509.08721.

The paper draws uniformly from the admitted groups whose rewards differ. Here the draw is weighted by the producer's
reputation (and by whatever else the caller weighs), fresh groups come before used ones, and one producer fills at most
a share of the draw (admission rule 12).
"""

import math
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from protocol.rules import producer_quota
from swarm.records import PoolEntry

REMEMBERED_BESIDES = 64
"""Use counts kept of groups that the pool has no more, the latest chosen ones: a power cut may take them from the
database, which is not as safe as the journal that this state is in, and then they are pulled again."""


class Sampler:
    """Draws without replacement. The same state and the same pool give the same choice, so a resume is exact."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._uses: dict[bytes, int] = {}

    def available(self, pool: Sequence[PoolEntry], count: int, *, max_uses: int, max_producer_share: float) -> int:
        """How many of `count` entries `choose` could give of this pool, if no producer's weight is 0."""
        usable = Counter(entry.producer for entry in pool if self._uses.get(entry.digest, 0) < max_uses)
        quota = producer_quota(count, max_producer_share, len(usable))
        return min(count, sum(min(groups, quota) for groups in usable.values()))

    def choose(
        self,
        pool: Sequence[PoolEntry],
        count: int,
        *,
        max_uses: int,
        max_producer_share: float,
        weight: Callable[[PoolEntry], float],
    ) -> list[PoolEntry]:
        """At most `count` entries, each used fewer than `max_uses` times so far; counts the use.

        `pool` is everything that may be used now: what is not in it has expired, and is not chosen again.
        `max_producer_share` of `count` is the most that one producer gets, but never less than an even split among
        those that have groups to give. An entry of weight 0 is not chosen. Order of the pool does not matter.
        """
        ranked = []
        for entry in sorted(pool, key=lambda entry: entry.digest):
            uses, chance = self._uses.get(entry.digest, 0), weight(entry)
            if uses < max_uses and chance > 0:
                # the smallest of independent exponentials with rates w_i is the i-th with probability w_i / sum(w)
                ranked.append((uses, -math.log(1.0 - self._random.random()) / chance, entry))
        ranked.sort(key=lambda candidate: candidate[:2])

        quota = producer_quota(count, max_producer_share, len({entry.producer for _, _, entry in ranked}))
        taken: Counter[str] = Counter()
        chosen: list[PoolEntry] = []
        for uses, _, entry in ranked:
            if len(chosen) == count:
                break
            if taken[entry.producer] < quota:
                taken[entry.producer] += 1
                self._uses.pop(entry.digest, None)  # so that the dict stays ordered by latest use
                self._uses[entry.digest] = uses + 1
                chosen.append(entry)
        self._forget(pool)
        return chosen

    def _forget(self, pool: Sequence[PoolEntry]) -> None:
        """Drop counts that no choice needs any more: the state is written with every update."""
        held = {entry.digest for entry in pool}
        gone = [digest for digest in self._uses if digest not in held]
        for digest in gone[: max(0, len(gone) - REMEMBERED_BESIDES)]:
            del self._uses[digest]

    def state(self) -> dict[str, Any]:
        """Everything the next choice depends on besides the pool, as JSON values."""
        version, internal, gauss = self._random.getstate()
        return {
            "random": [version, list(internal), gauss],
            "uses": [[digest.hex(), uses] for digest, uses in self._uses.items()],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state`. Raises KeyError, TypeError or ValueError when it is not one."""
        version, internal, gauss = state["random"]
        self._random.setstate((version, tuple(internal), gauss))
        self._uses = {bytes.fromhex(digest): uses for digest, uses in state["uses"]}
