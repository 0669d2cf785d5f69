"""Limits of the bytes a second that a node's streams take, all its peers together: one bucket a direction.

A transport passes bytes on in pieces and waits after each until it is worked off, so any two pieces are as far apart
as the limit says, and the other end is held back by its own window. Who comes while others wait is asked to come back:
a request that could only fail at its deadline must not begin.
"""

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from swarm.transport import Busy

BYTES_PER_KBIT = 125
"""1 kbit is 1000 bits."""
PIECE_SECONDS = 0.25
"""Bytes are passed on in pieces that take about so long."""
LEAST_PIECE, MOST_PIECE = 1024, 64 * 1024
BUSY_SECONDS = 4.0
"""Nothing more is begun while what is on its way takes longer than this."""
LONGEST_WAIT = 60.0
"""Nobody is asked to come back later than this: the limit may change meanwhile."""
GOSSIP_SECONDS = 2.0
"""What gossip may hold up the rest by. It cannot be slowed, and must neither stop the streams of a node for ever nor
count for longer than the limit stands."""


class Bucket:
    """`rate` bytes a second, 0: no limit. The rate may be set from any thread, the rest is used from one."""

    def __init__(self, rate: float = 0.0) -> None:
        self.rate = rate
        self._free_at = float("-inf")

    @property
    def piece(self) -> int:
        """Bytes to pass on at a time."""
        rate = self.rate
        return min(MOST_PIECE, max(LEAST_PIECE, int(rate * PIECE_SECONDS))) if rate else MOST_PIECE

    def wait(self, now: float) -> float:
        """Seconds until what has passed is worked off."""
        return max(0.0, self._free_at - now) if self.rate else 0.0

    def spend(self, size: int, now: float, most: float = float("inf")) -> float:
        """So many bytes pass; the seconds until they, and what passed before, are worked off.

        They add to these seconds up to `most`, and not beyond.
        """
        rate = self.rate
        if not rate:
            return 0.0
        free_at = max(self._free_at, now)
        self._free_at = max(free_at, min(free_at + size / rate, now + most))
        return self._free_at - now


@dataclass(frozen=True, slots=True)
class Throttle:
    """Of one node. Changed while it runs by `limit`."""

    up: Bucket = field(default_factory=Bucket)
    down: Bucket = field(default_factory=Bucket)

    def limit(self, upload_kbps: int, download_kbps: int) -> None:
        """Set both in kbit/s; 0: no limit."""
        self.up.rate, self.down.rate = upload_kbps * BYTES_PER_KBIT, download_kbps * BYTES_PER_KBIT


@dataclass(slots=True)
class Lane:
    """A bucket with the clock and the sleep of the event loop that uses it."""

    bucket: Bucket
    now: Callable[[], float]
    sleep: Callable[[float], Awaitable[None]]
    ahead: int = 0
    """Bytes of answers that have begun and not passed yet."""

    @property
    def piece(self) -> int:
        return self.bucket.piece

    def check(self) -> None:
        """Raises Busy when so much is on its way that nothing more should begin."""
        rate = self.bucket.rate
        wait = self.bucket.wait(self.now()) + (self.ahead / rate if rate else 0.0)
        if wait > BUSY_SECONDS:
            raise Busy(min(wait, LONGEST_WAIT))

    @contextmanager
    def answering(self, size: int) -> Iterator[None]:
        """An answer of so many bytes passes inside. Raises Busy."""
        self.check()
        self.ahead += size
        try:
            yield
        finally:
            self.ahead -= size

    def gossiped(self, size: int) -> None:
        """So many bytes of gossip have passed, and what passes next waits for them, up to GOSSIP_SECONDS."""
        self.bucket.spend(size, self.now(), GOSSIP_SECONDS)

    async def passed(self, size: int) -> None:
        """So many bytes have passed; returns when they are worked off."""
        if seconds := self.bucket.spend(size, self.now()):
            await self.sleep(seconds)
