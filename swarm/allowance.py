"""Token buckets, one a peer: how much of something each may have in the long run, and at once after a silence."""

from collections.abc import Callable

from swarm.newest import remember

MAX_PEERS = 1024
"""Buckets kept, those of the peers that asked last. Far more than can be connected at a time."""


class Allowance:
    """`rate` a second, up to `burst`, by a `clock` in seconds.

    `take` is for what comes in units. `wait` and `spend` are for what has a size that is known late, and may be larger
    than the burst: a peer may spend while anything is left, and works off what it owes afterwards.
    """

    def __init__(self, rate: float, burst: float, clock: Callable[[], float]) -> None:
        self._rate, self._burst, self._clock = rate, burst, clock
        self._left: dict[str, tuple[float, float]] = {}
        self.refused = 0
        """How often `take` said no and `wait` said later."""

    def __len__(self) -> int:
        return len(self._left)

    def wait(self, peer: str) -> float:
        """Seconds until the peer may spend again; 0: now. Counted as a refusal when not 0."""
        left, _ = self._now(peer)
        if left > 0:
            return 0.0
        self.refused += 1
        # a millisecond on top, so that whoever waits so long finds something left
        return -left / self._rate + 0.001

    def spend(self, peer: str, amount: float) -> None:
        """Take off so much, whatever is left."""
        left, now = self._now(peer)
        remember(self._left, peer, (left - amount, now), MAX_PEERS)

    def take(self, peer: str) -> bool:
        """Take one, if there is one."""
        left, _ = self._now(peer)
        if left < 1:
            self.refused += 1
            return False
        self.spend(peer, 1)
        return True

    def forget(self, peer: str) -> None:
        """The peer is gone, and begins anew when it comes back."""
        self._left.pop(peer, None)

    def _now(self, peer: str) -> tuple[float, float]:
        now = self._clock()
        left, at = self._left.get(peer, (self._burst, now))
        return min(self._burst, left + max(0.0, now - at) * self._rate), now
