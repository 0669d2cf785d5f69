"""What a coordinator hears is counted for members only, once, within a share, and is there again after a restart."""

from pathlib import Path

import pytest

from protocol.board import Member, MemberList
from swarm.coordination import attendance
from swarm.coordination.access import Access
from swarm.coordination.attendance import PRESENT_SECONDS, Attendance
from swarm.coordination.reports import Reports
from swarm.memory import MemoryHub
from tests.swarm.coordinated import Clock, manifest_of
from tests.swarm.world import who

LEAD, ANNA, BERT, EVE = (who(name).peer_id for name in ("lead", "anna", "bert", "eve"))


class Desk:
    """Attendance over a database, and the list it goes by."""

    def __init__(self, path: Path) -> None:
        self.path, self.clock, self.manifest = path, Clock(), manifest_of("lead", listed_only=False)
        self.access = Access(MemoryHub().transport(who("lead")), self.manifest, self.clock)
        self.list(ANNA, BERT)
        self.start()

    def list(self, *members: str) -> None:
        listed = tuple(Member(peer, "member") for peer in sorted(members))
        self.access.take(MemberList(self.manifest.digest, listed))

    def start(self) -> None:
        self.reports = Reports(self.path, self.manifest.digest)
        self.attendance = Attendance(self.reports, self.access, (LEAD,), self.clock)

    def announce(self, producer: str, count: int, first: int = 0) -> None:
        for n in range(first, first + count):
            self.attendance.announced(producer, f"{producer}{n}".encode())


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path / "lead.db")


def test_strangers_leave_no_trace(desk: Desk) -> None:
    for number in range(100):
        desk.announce(who(f"stranger {number}").peer_id, 1)
        desk.attendance.saw(who(f"stranger {number}").peer_id)
    desk.announce(ANNA, 2)
    desk.attendance.saw(LEAD)
    desk.attendance.write(1)
    assert desk.reports.heard(1, 1) == {ANNA: 2}
    assert set(desk.attendance._seen) == {ANNA, LEAD}
    assert desk.attendance.present([ANNA, BERT, EVE]) == {ANNA}
    desk.clock.ahead += PRESENT_SECONDS + 1
    assert desk.attendance.present([ANNA, BERT, EVE]) == set()


def test_one_member_takes_no_room_from_others(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attendance, "MAX_COUNTED", 20)
    desk.announce(ANNA, 100)
    desk.announce(BERT, 7)
    desk.announce(BERT, 7)  # the same ones
    assert desk.attendance.supplied(1, 1) == {ANNA: 10, BERT: 7}
    desk.attendance.write(1)
    assert desk.attendance.supplied(1, 1) == {ANNA: 10, BERT: 7}
    desk.attendance.begin_round()
    desk.announce(ANNA, 3)
    desk.attendance.write(2)
    assert desk.reports.heard(2, 2) == {ANNA: 3}


def test_counts_are_there_after_a_restart_and_are_forgotten_round_by_round(desk: Desk) -> None:
    desk.announce(ANNA, 3)
    desk.attendance.write(4)
    desk.attendance.begin_round()
    desk.announce(ANNA, 2)
    desk.announce(BERT, 1)
    desk.attendance.write(5)
    for _ in range(2):
        assert desk.reports.heard(5, 5) == {ANNA: 2, BERT: 1}
        assert desk.reports.heard(4, 5) == {ANNA: 5, BERT: 1}
        desk.reports.close()
        desk.start()
    desk.reports.forget_before(5, heard=5)
    assert desk.reports.heard(1, 9) == {ANNA: 2, BERT: 1}
    assert desk.reports._db.all("SELECT number, groups FROM coordinator_heard ORDER BY peer") == sorted(
        [(5, 2), (5, 1)], key=lambda row: {2: ANNA, 1: BERT}[row[1]]
    )


def test_what_is_counted_twice_a_second_is_not_read_from_disk(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    desk.announce(ANNA, 3)
    desk.attendance.write(1)
    monkeypatch.setattr(desk.reports._db, "all", None)
    assert desk.reports.heard(1, 1) == {ANNA: 3}
