"""When a standby takes over: the leader has been silent for long, or was proven false, and the members are known."""

import math

from protocol.board import MemberList
from protocol.rounds import next_term
from swarm.coordination.complaints import Complaints
from swarm.coordination.log_sync import LogSync
from swarm.coordination.round_log import Kept
from swarm.transport import Transport

LIST_SECONDS = 30.0
"""Waited for the member list that the log names, besides as long again as for the leader, where only an older one is
here: with that one the last entries and kicks are undone."""


class Succession:
    """`patience`: seconds of the leader's silence after which the next in line takes over."""

    def __init__(self, transport: Transport, sync: LogSync, complaints: Complaints, patience: float) -> None:
        self._transport, self._sync, self._chain = transport, sync, sync.chain
        self._complaints, self._patience = complaints, patience
        self._asked_for = b""
        """The list that all members were asked for last."""

    def due(self, now: float, started: float) -> tuple[Kept, int, MemberList] | None:
        """The record to take over from, the term and the member list to do it with; None: not now. Raises StoreError.

        `started`: before that nobody was listened to.
        """
        chain, me = self._chain, self._transport.peer_id
        last = chain.log.last(honest=False)
        if last is None or me in chain.faults:
            return None
        term = next_term(chain.manifest, me, last.record.term)
        # those next in line have their turn first
        turn = term - last.record.term
        if last.coordinator in chain.faults:
            silent, wait = now - started, self._patience * (turn - 1)
        else:
            heard = chain.heard_from(last.coordinator) or -math.inf
            if heard > now:  # by a clock that was ahead
                heard = -math.inf
            silent, wait = now - max(heard, started), self._patience * turn
        if silent <= wait:
            return None
        missing = self._missing()
        if chain.members is None:
            said = (
                "cannot take over from a silent leader: the member list is not here, and no peer that was asked has it"
            )
            self._complaints.trouble("members", said)
            return None
        self._complaints.over("members")
        if missing and silent <= 2 * wait + LIST_SECONDS:
            return None
        return last, term, chain.members

    def _missing(self) -> bool:
        """Whether the member list that the log names is not here. All members are asked for it then, once: in the long
        run the log is asked for in turn, and the list with it."""
        missing = next((digest for digest, kind in self._chain.missing_lists() if kind is MemberList), b"")
        if missing and missing != self._asked_for:
            self._asked_for = missing
            for peer in self._transport.peers():
                self._sync.met(peer)
        return bool(missing)
