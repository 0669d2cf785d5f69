"""The coordinators' log as this node has verified it: who leads, which round it is, who is a member, who is at fault.

A coordinator that is proven to have signed what it must not is named in an event and not followed any more.
"""

from collections.abc import Callable

from protocol.board import Board, MemberList, read_list
from protocol.envelope import Domain, unseal
from protocol.manifest import Manifest
from protocol.messages import MAX_ANNOUNCEMENT_BYTES
from protocol.rejection import Reason, Rejected
from protocol.rounds import Round, check_successor, open_round
from swarm.coordination.clocks import Ahead
from swarm.coordination.round_log import Fault, Kept, RoundLog


class Chain:
    """The log of one swarm, whether it is followed (swarm/coordination/log_sync.py) or only read from disk."""

    def __init__(
        self,
        log: RoundLog,
        manifest: Manifest,
        clock: Callable[[], float],
        *,
        me: str = "",
        on_event: Callable[[str, str], None] = lambda kind, message: None,
    ) -> None:
        """`me`: the peer id of who reads it."""
        self.log, self.manifest, self._me = log, manifest, me
        self._clock, self._on_event = clock, on_event
        self._ahead = Ahead(manifest, me, clock, on_event)
        self._heard: dict[str, float] = {}
        """When each coordinator last said something itself."""
        self.faults: dict[str, Fault] = {fault.coordinator: fault for fault in log.faults()}
        self._proofs = {name: (fault.first, fault.second) for name, fault in self.faults.items()}
        """Sealed records, by who signed them. Replaced as a whole: it is read from another thread."""
        self.head: Kept | None = log.last()
        self.members: MemberList | None = None
        """The newest one known."""
        self.board: Board | None = None
        self._read_members: bytes | None = None
        self._read_board: bytes | None = None
        """Digests of these two."""
        self.on_members: Callable[[MemberList], None] = lambda members: None
        self._take_lists()

    @property
    def round(self) -> Round | None:
        """The newest record of a coordinator that may be followed."""
        return self.head.record if self.head else None

    @property
    def leader(self) -> str | None:
        """Who leads now, as far as is known; the primary before the first record."""
        if self.head is not None:
            return self.head.coordinator
        primary = self.manifest.coordinators[0]
        return None if primary in self.faults else primary

    def heard_from(self, coordinator: str) -> float | None:
        """When it last answered or signed something new; None: not since the start."""
        return self._heard.get(coordinator)

    def heard(self) -> dict[str, float]:
        """The same of all other coordinators that have."""
        others = (one for one in self.manifest.coordinators if one != self._me)
        return {one: self._heard[one] for one in others if one in self._heard}

    def note_heard(self, peer: str) -> None:
        """It has just answered, or signed. Of others than coordinators nobody asks, and there may be any number."""
        if peer in self.manifest.coordinators:
            self._heard[peer] = self._clock()

    # -- records ---------------------------------------------------------------------------------------------

    def take(self, sealed: bytes) -> bool:
        """Take note of a record. True when it was valid and new. Raises StoreError."""
        try:
            opened, record = open_round(sealed, self.manifest, self._clock())
        except Rejected as rejected:
            if rejected.reason is Reason.from_future:
                self._ahead.tell(sealed)
            if rejected.reason is Reason.broken_commitment:  # it proves itself
                self._fault(Fault(self._signer(sealed), str(rejected.reason), rejected.detail, sealed, b""))
            return False
        coordinator = opened.producer
        if coordinator in self.faults or self.log.find(opened.digest) is not None:
            return False
        rival = self.log.rival(record, coordinator)
        if rival is not None:
            if rival.record != record:
                detail = f"signed two records for {record.state.name} of round {record.number}, term {record.term}"
                self._fault(Fault(coordinator, str(Reason.equivocation), detail, rival.sealed, sealed))
            return False
        kept = Kept(opened.digest, coordinator, record, sealed)
        before = self.log.find(record.previous)
        if before is not None and self._breaks(before, kept):
            return False
        self.log.add(opened, record, sealed)
        for after in self.log.naming(opened.digest):  # records overtake each other
            self._breaks(kept, after)
        if coordinator in self.faults:
            return True
        if self.head is None or record.position > self.head.record.position:
            self.note_heard(coordinator)  # an old record may be told by anybody at any time
            self._move(kept)
        return True

    def may_relay(self, sealed: bytes) -> bool:
        """Whether to pass a record on to others. From any thread. Raises Rejected.

        Of a coordinator at fault only the proof is: who has not heard of the fault needs those records and no others.
        """
        try:
            signer = open_round(sealed, self.manifest, self._clock())[0].producer
        except Rejected as rejected:
            if rejected.reason is not Reason.broken_commitment:  # that one proves itself
                raise
            signer = self._signer(sealed)
        return signer not in self._proofs or sealed in self._proofs[signer]

    def _signer(self, sealed: bytes) -> str:
        """Of a record that opens."""
        return unseal(sealed, Domain.round, max_bytes=MAX_ANNOUNCEMENT_BYTES, now=self._clock()).producer

    def _breaks(self, before: Kept, after: Kept) -> bool:
        """Whether `after` names `before` and may not follow it: its coordinator is at fault."""
        try:
            check_successor(before.record, after.record)
        except Rejected as rejected:
            self._fault(Fault(after.coordinator, str(rejected.reason), rejected.detail, before.sealed, after.sealed))
            return True
        return False

    def _move(self, head: Kept | None) -> None:
        before, self.head = self.head, head
        self._take_lists()
        if head and (before is None or before.coordinator != head.coordinator):
            self._on_event("coordinator", f"{head.coordinator} leads, round {head.record.number}")

    def _fault(self, fault: Fault) -> None:
        if fault.coordinator in self.faults:
            return
        self.log.add_fault(fault)
        self.faults[fault.coordinator] = fault
        self._proofs = {**self._proofs, fault.coordinator: (fault.first, fault.second)}
        self._on_event(
            "coordinator_fault",
            f"coordinator {fault.coordinator}: {fault.reason}: {fault.detail}; it is not followed any more",
        )
        self._move(self.log.last())

    # -- lists -----------------------------------------------------------------------------------------------

    def missing_lists(self) -> list[tuple[bytes, type[MemberList] | type[Board]]]:
        """Digests of lists that the log names and that are not here."""
        named: list[tuple[bytes, type[MemberList] | type[Board]]] = []
        if self.head is not None:
            named = [(self.head.record.members, MemberList), (self.log.newest_board() or b"", Board)]
        return [(digest, kind) for digest, kind in named if digest and self.log.list_body(digest) is None]

    def _take_lists(self) -> None:
        """Read what the log names and the store has, where it was not read yet."""
        named = self.head.record.members if self.head else None
        if self.members is None and (named is None or self.log.list_body(named) is None):
            named = self.log.newest_held("members")  # as before a restart: the last one that was read holds on
        body = self.log.list_body(named) if named and named != self._read_members else None
        if body is not None:
            self._read_members = named
            members = self._read(body, MemberList)
            if isinstance(members, MemberList):
                self.members = members
                self.on_members(members)
        board = self.log.newest_board()
        if self.board is None and board and self.log.list_body(board) is None:
            board = self.log.newest_held("board")  # the next one is made from it: without any, all credit were lost
        body = self.log.list_body(board) if board and board != self._read_board else None
        if body is not None:
            self._read_board = board
            found = self._read(body, Board)
            self.board = found if isinstance(found, Board) else self.board

    def _read(self, body: bytes, kind: type[MemberList] | type[Board]) -> MemberList | Board | None:
        """None: what a record names as such a list is one of the other kind."""
        try:
            return read_list(body, kind, self.manifest.digest)
        except Rejected as rejected:
            self._on_event("coordinator_fault", f"{self.leader}: a list that cannot be read: {rejected.detail}")
            return None

    def keep_list(self, digest: bytes, body: bytes) -> None:
        """Have a good list that a record is about to name, or names."""
        named = [digest, *([self.head.record.members, self.log.newest_board()] if self.head else [])]
        # what is read stays until what is newer is here
        self.log.add_list(digest, body, [one for one in (*named, self._read_members, self._read_board) if one])
        self._take_lists()
