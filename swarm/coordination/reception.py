"""Lets peers in for a coordinator: by invite, and into an open swarm so many an hour of one network."""

from collections.abc import Callable

from protocol.manifest import Manifest
from protocol.rounds import Pace
from swarm.allowance import Allowance
from swarm.coordination.attendance import Attendance
from swarm.coordination.chain import Chain
from swarm.coordination.membership import Membership, NotAdmitted, network_of
from swarm.coordination.reports import Reports
from swarm.transport import Busy, Transport

IDLE_ROUNDS = 4
"""Rounds in which a member of an open swarm supplied nothing, after which it makes room where the list is full."""
NETWORK_SECONDS = 3600.0
"""In which one network may bring so many new members as `from_network` says."""


class Reception:
    """Who may come in, and who makes room for that."""

    def __init__(
        self,
        transport: Transport,
        manifest: Manifest,
        chain: Chain,
        membership: Membership,
        reports: Reports,
        attendance: Attendance,
        clock: Callable[[], float],
        pace: Pace,
        *,
        from_network: int,
    ) -> None:
        self._transport, self._manifest, self._chain = transport, manifest, chain
        self._membership, self._reports, self._attendance = membership, reports, attendance
        self._clock, self._pace = clock, pace
        self._newcomers = Allowance(from_network / NETWORK_SECONDS, from_network, clock) if from_network else None
        """By network."""

    def let_in(self, peer: str, token: bytes) -> str:
        """The peer's role. Raises NotAdmitted, Busy, StoreError."""
        newcomer = self._membership.role_of(peer) is None
        if token or not newcomer or self._manifest.listed_only or self._newcomers is None:
            return self._membership.enter(peer, token, self.idle)
        connection = self._transport.connections().get(peer)
        if connection is None or not connection.host:
            raise Busy(1.0)  # it has only just connected
        network = network_of(connection.host)
        if not self._newcomers.take(network):
            raise NotAdmitted(f"many peers of {network} came in lately; ask later, or with an invite")
        try:
            return self._membership.enter(peer, token, self.idle)
        except NotAdmitted:
            self._newcomers.spend(network, -1)
            raise

    def idle(self) -> list[str]:
        """Members that supplied nothing for IDLE_ROUNDS: who never earned credit and is not there comes first."""
        number = self._chain.round.number if self._chain.round else 1
        supplied = set(self._attendance.supplied(number - IDLE_ROUNDS, number))
        supplied |= self._reports.reporters(number) | self._reports.reporters(number - 1)
        since = self._clock() - IDLE_ROUNDS * (self._pace.round_seconds + self._pace.answer_seconds)
        board = self._chain.board
        credited = {one.peer for one in board.standings if one.credit} if board else set()
        members = self._membership.members()
        present = self._attendance.present(one.peer for one in members)
        idle = [one for one in members if one.since <= since and one.peer not in supplied]
        return [
            one.peer for one in sorted(idle, key=lambda one: (one.peer in credited, one.peer in present, one.since))
        ]
