"""What of the coordinators' log is kept, in which order it is told, and that all of it is bounded."""

import hashlib
from pathlib import Path

import msgspec
import pytest

from protocol.board import Board, Member, MemberList, Report, list_bytes
from protocol.manifest import Coordination, embedded_manifest
from protocol.messages import ReportRequest, Trained
from protocol.rounds import Facts, Pace, Round, State, commitment_of, first, open_round, seal_round
from swarm.coordination import round_log
from swarm.coordination.chain import Chain
from swarm.coordination.membership import Membership, NoSuchMember, NotAdmitted
from swarm.coordination.reports import Reports
from swarm.coordination.round_log import Fault, RoundLog
from tests.swarm.world import who

NOW = 1_800_000_000.0
LEAD, SPARE = who("lead"), who("spare")
MANIFEST = embedded_manifest("log", NOW, Coordination((LEAD.peer_id, SPARE.peer_id), listed_only=True))
FIRST = first(MANIFEST, Facts(b"m" * 32, 0, 0, 0, b"", (1, 1, 1, 1)), Pace(1, 1, 1, 1.0, 0, 1, 1))


def add(log: RoundLog, record: Round) -> bytes:
    """Its digest."""
    sealed = seal_round(LEAD if record.term % 2 == 0 else SPARE, record, NOW)
    opened, read = open_round(sealed, MANIFEST, NOW)
    log.add(opened, read, sealed)
    return opened.digest


def chain(log: RoundLog, count: int, **changes: object) -> list[bytes]:
    digests = [b""]
    for revision in range(count):
        record = msgspec.structs.replace(FIRST, revision=revision, previous=digests[-1], **changes)
        digests.append(add(log, record))
    return digests[1:]


def test_records_are_told_in_order_from_the_one_that_is_known(tmp_path: Path) -> None:
    log = RoundLog(tmp_path / "node.db", MANIFEST.digest)
    assert log.last() is None
    assert log.after(b"", 5) == []
    digests = chain(log, 6)
    named = [hashlib.sha256(sealed).digest() for sealed in log.after(digests[1], 10)]
    assert named == digests[2:]
    assert [hashlib.sha256(sealed).digest() for sealed in log.after(b"?" * 32, 2)] == digests[-2:]
    assert len(log.after(digests[0], 3)) == 3
    last = log.last()
    assert last is not None
    assert (last.digest, last.coordinator, last.record.revision) == (digests[-1], LEAD.peer_id, 5)
    later = add(log, msgspec.structs.replace(FIRST, term=1, previous=digests[0]))
    last = log.last()
    assert last is not None
    assert last.digest == later  # a higher term is later than all of a lower one
    log.close()
    assert RoundLog(tmp_path / "node.db", MANIFEST.digest).last() == last


def test_who_is_at_fault_is_passed_over_and_the_first_proof_is_kept(tmp_path: Path) -> None:
    log = RoundLog(tmp_path / "node.db", MANIFEST.digest)
    chain(log, 2)
    spare = add(log, msgspec.structs.replace(FIRST, term=1))
    assert log.add_fault(Fault(SPARE.peer_id, "equivocation", "why", b"one", b"two"))
    assert not log.add_fault(Fault(SPARE.peer_id, "broken_chain", "", b"three", b""))
    last, any_ = log.last(), log.last(honest=False)
    assert last is not None
    assert any_ is not None
    assert (last.coordinator, any_.digest) == (LEAD.peer_id, spare)
    assert [fault.first for fault in log.faults()] == [b"one"]
    assert len(log.after(b"", 10)) == 2


def test_records_and_lists_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(round_log, "MAX_RECORDS", 5)
    monkeypatch.setattr(round_log, "LATE_RECORDS", 3)
    monkeypatch.setattr(round_log, "MAX_LISTS", 3)
    log = RoundLog(tmp_path / "node.db", MANIFEST.digest)
    chain(log, 20)
    assert len(log.after(b"", 100)) == 5
    for number in range(10):
        log.add_list(bytes([number]) * 32, b"list", [b"\x00" * 32])
    held = [number for number in range(10) if log.list_body(bytes([number]) * 32)]
    assert held == [0, 7, 8, 9]  # the named one and the last three


def test_old_records_that_are_told_again_push_no_new_ones_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(round_log, "MAX_RECORDS", 5)
    monkeypatch.setattr(round_log, "LATE_RECORDS", 3)
    log = RoundLog(tmp_path / "node.db", MANIFEST.digest)
    chain(log, 20)
    newest = log.last()
    assert newest is not None
    for revision in range(12):
        add(log, msgspec.structs.replace(FIRST, revision=revision, previous=bytes([9, revision]) * 16))
        found = log.rival(msgspec.structs.replace(FIRST, revision=revision, previous=b"q" * 32), LEAD.peer_id)
        assert found is not None, "what came last is there for a while: it may be half of a proof"
    assert log.last() == newest
    assert len(log.after(b"", 100)) == 5 + 3


def test_where_the_newest_board_is_lost_the_one_before_it_counts_and_stays(tmp_path: Path) -> None:
    log, boards = RoundLog(tmp_path / "node.db", MANIFEST.digest), []
    for number in (1, 2):
        boards.append(list_bytes(Board(MANIFEST.digest, number, ())))
        evaluated = {"state": State.evaluated, "commitment": commitment_of(b"s" * 32), "seed": b"s" * 32}
        add(log, msgspec.structs.replace(FIRST, number=number, board=boards[-1][0], **evaluated))
    (old, body), newest = boards
    log.add_list(old, body, [])
    followed = Chain(log, MANIFEST, lambda: NOW)
    assert followed.board is not None
    assert followed.board.number == 1
    assert (newest[0], Board) in followed.missing_lists()
    for number in range(2 * round_log.MAX_LISTS):
        followed.keep_list(*list_bytes(MemberList(MANIFEST.digest, (Member(str(number), "member"),))))
    assert log.list_body(old) == body
    followed.keep_list(*newest)
    assert followed.board.number == 2


@pytest.mark.parametrize("at_fault", [False, True])
def test_after_a_restart_the_last_member_list_that_is_here_holds_on(tmp_path: Path, at_fault: bool) -> None:
    log = RoundLog(tmp_path / "node.db", MANIFEST.digest)
    members = MemberList(MANIFEST.digest, (Member(who("anna").peer_id, "member"),))
    named, body = list_bytes(members)
    add(log, msgspec.structs.replace(FIRST, members=named))
    add(log, msgspec.structs.replace(FIRST, revision=1))
    log.add_list(named, body, [])
    if at_fault:
        log.add_fault(Fault(LEAD.peer_id, "equivocation", "why", b"one", b"two"))
    followed = Chain(log, MANIFEST, lambda: NOW)
    assert followed.members == members
    assert (followed.head is None) is at_fault


def test_a_record_that_names_a_board_as_the_member_list_changes_no_list(tmp_path: Path) -> None:
    log, told = RoundLog(tmp_path / "node.db", MANIFEST.digest), list[str]()
    members, board = MemberList(MANIFEST.digest, ()), list_bytes(Board(MANIFEST.digest, 1, ()))
    first_one = add(log, msgspec.structs.replace(FIRST, members=list_bytes(members)[0]))
    for one in (list_bytes(members), board):
        log.add_list(*one, [])
    followed = Chain(log, MANIFEST, lambda: NOW, on_event=lambda kind, said: told.append(said))
    false = msgspec.structs.replace(FIRST, revision=1, previous=first_one, members=board[0])
    assert followed.take(seal_round(LEAD, false, NOW))
    assert followed.members == members
    followed.keep_list(*board)
    assert len(told) == 1
    assert "a list that cannot be read: MemberList" in told[0]
    assert Chain(log, MANIFEST, lambda: NOW).members is None  # a restart


def test_nothing_of_one_swarm_is_taken_into_another(tmp_path: Path) -> None:
    path, other = tmp_path / "node.db", b"o" * 32
    log, reports = RoundLog(path, MANIFEST.digest), Reports(path, MANIFEST.digest)
    members = Membership(path, MANIFEST.digest, lambda: NOW, listed_only=True)
    chain(log, 2)
    log.add_list(b"l" * 32, b"list", [])
    log.add_fault(Fault(SPARE.peer_id, "equivocation", "why", b"one", b"two"))
    token = members.invite(uses=9, expires=NOW + 9, role="member")
    anna, eve = who("anna").peer_id, who("eve").peer_id
    members.enter(anna, token)
    members.enter(eve, token)
    members.kick(eve, "why")
    reports.hear(1, {"anna": 2})
    for one in (log, reports, members):
        one.close()
    assert RoundLog(path, MANIFEST.digest).last() is not None  # the same swarm again
    log, reports = RoundLog(path, other), Reports(path, other)
    members = Membership(path, other, lambda: NOW, listed_only=True)
    assert (log.last(), log.faults(), log.list_body(b"l" * 32), reports.heard(0, 9)) == (None, [], None, {})
    assert (members.members(), members.kicked()) == ([], [])
    with pytest.raises(NotAdmitted, match="does not know the invite"):
        members.enter(anna, token)


def test_a_standby_adopts_the_list_and_keeps_what_it_knew(tmp_path: Path) -> None:
    here = Membership(tmp_path / "node.db", MANIFEST.digest, lambda: NOW, listed_only=True)
    token = here.invite(uses=2, expires=NOW + 1, role="member")
    anna, bert, carl, eve = (who(name).peer_id for name in ("anna", "bert", "carl", "eve"))
    here.enter(anna, token)
    here.enter(bert, token)
    listed = MemberList(
        MANIFEST.digest, tuple(sorted((Member(anna, "member"), Member(carl, "observer")), key=str)), (eve,)
    )
    here.adopt(listed)
    assert {(one.peer, one.role, one.invite) for one in here.members()} == {
        (anna, "member", 1),
        (carl, "observer", None),
    }
    assert here.signed_list().kicked == (eve,)
    # whom the other one forgave is not kept out here
    here.adopt(MemberList(MANIFEST.digest, listed.members))
    assert here.signed_list().kicked == ()
    # another process writes: the next look sees it
    other = Membership(tmp_path / "node.db", MANIFEST.digest, lambda: NOW, listed_only=True)
    other.kick(anna, "")
    assert [one.peer for one in here.members()] == [carl]
    with pytest.raises(NoSuchMember):
        other.forgive(anna + "x")
    assert list_bytes(here.signed_list()) == list_bytes(other.signed_list())


def test_reports_are_kept_until_their_round_is_long_over(tmp_path: Path) -> None:
    reports = Reports(tmp_path / "node.db", MANIFEST.digest)
    report = ReportRequest(MANIFEST.digest, 1, ("4", None), (Trained(LEAD.peer_id, 2),))
    body = msgspec.msgpack.encode(report)
    assert reports.add("anna", report, body)
    assert not reports.add("anna", report, b"another")
    assert reports.add("bert", report, body)
    reports.keep_scores(1, "bert", Report((1.0, None), ()))
    reports.keep_scores(1, "bert", Report((1.0, None), ()))
    assert reports.waiting_bytes == len(body), "what is scored waits no more"
    assert Reports(tmp_path / "node.db", MANIFEST.digest).waiting_bytes == len(body), "after a restart, too"
    assert list(reports.unscored(1)) == ["anna"]
    assert reports.report(1, "anna") == report
    assert list(reports.unscored(2)) == []
    reports.hear(1, {"anna": 2})
    reports.hear(1, {"anna": 3})
    reports.hear(2, {"anna": 1})
    assert (reports.heard(1, 1), reports.heard(1, 2)) == ({"anna": 5}, {"anna": 6})
    reports.forget_before(2, heard=2)
    assert reports.waiting_bytes == 0
    assert reports.reporters(1) == set()
    assert reports.heard(1, 2) == {"anna": 1}
