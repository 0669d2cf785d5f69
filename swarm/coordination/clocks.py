"""Tells of a coordinator whose clock is ahead of this machine's: what it signs is not taken."""

from collections.abc import Callable

from protocol.manifest import Manifest
from protocol.rejection import Rejected
from protocol.rounds import LIFETIME, open_round
from swarm.allowance import Allowance

QUIET_SECONDS = 60.0
"""Between two times that the same coordinator is told of."""


class Ahead:
    """`me`: the peer id here, of which nothing is told."""

    def __init__(
        self, manifest: Manifest, me: str, clock: Callable[[], float], on_event: Callable[[str, str], None]
    ) -> None:
        self._manifest, self._me, self._clock, self._on_event = manifest, me, clock, on_event
        self._told = Allowance(1 / QUIET_SECONDS, 1, clock)

    def tell(self, sealed: bytes) -> None:
        """Of who signed this record, which was refused as one from the future. Anybody may hand in anything: it counts
        only if a coordinator signed it."""
        now = self._clock()
        try:
            opened, _ = open_round(sealed, self._manifest, now + LIFETIME // 2)
        except Rejected:
            return
        if opened.producer != self._me and self._told.take(opened.producer):
            said = f"{opened.producer[-8:]} is {opened.issued - now:.0f} s ahead of this machine's"
            self._on_event(
                "clock", f"the clock of coordinator {said}: its rounds are not taken here until one of them is set"
            )
