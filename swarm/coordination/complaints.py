"""What a coordinator tells of what goes wrong, once: what no honest peer sends, and trouble of its own."""

from collections.abc import Callable, Sequence

from protocol.rejection import Rejected
from swarm.allowance import Allowance
from swarm.bans import Bans

OFFENCES = 8
"""Of one peer in an hour, and at once, before it is banned."""
QUIET_SECONDS = 60.0
"""Between two events about one peer, and about one kind of trouble where it comes and goes."""
TROUBLES = 4
"""Events about one kind of trouble at once."""


class Complaints:
    """Events go to `on_event(kind, message)`."""

    def __init__(
        self, bans: Bans, coordinators: Sequence[str], clock: Callable[[], float], on_event: Callable[[str, str], None]
    ) -> None:
        self._bans, self._coordinators, self._on_event = bans, coordinators, on_event
        self._told = Allowance(1 / QUIET_SECONDS, 1, clock)
        self._offences = Allowance(OFFENCES / 3600, OFFENCES, clock)
        self._troubles = Allowance(1 / QUIET_SECONDS, TROUBLES, clock)
        self._wrong: dict[str, str] = {}
        """What was told last of each kind of trouble that is not over."""

    def note(self, rejected: Rejected, peer: str) -> None:
        """What no honest peer sends is told once a minute, and banned until the next start when it goes on."""
        if peer in self._coordinators:
            return
        if self._told.take(peer):
            self._on_event("rejected", f"{peer[-8:]}: {rejected.reason}: {rejected.detail}")
        if not self._offences.take(peer):
            self._on_event("banned", f"{peer} is banned: too many offences, the last one {rejected.reason}")
            self._bans.ban(peer, "reputation")

    def trouble(self, kind: str, message: str) -> None:
        """Tell what is wrong here when it is something else than before: it is tried again twice a second, and events
        are kept in a bounded number."""
        if self._wrong.get(kind) != message and self._troubles.take(kind):
            self._wrong[kind] = message
            self._on_event(kind, message)

    def over(self, kind: str) -> None:
        """It went well again."""
        self._wrong.pop(kind, None)
