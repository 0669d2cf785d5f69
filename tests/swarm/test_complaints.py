"""Trouble is told when it begins or changes; what a peer does wrong once a minute, and is banned when it goes on."""

import pytest

from protocol.rejection import Reason, Rejected
from swarm.bans import Bans
from swarm.coordination.complaints import OFFENCES, QUIET_SECONDS, TROUBLES, Complaints
from swarm.memory import MemoryHub
from tests.swarm.coordinated import Clock
from tests.swarm.world import who

LEAD, EVE = who("lead").peer_id, who("eve").peer_id


class Book:
    def __init__(self) -> None:
        self.events: list[tuple[str, str]] = []
        self.clock, self.bans = Clock(), Bans(MemoryHub().transport(who("lead")))
        self.complaints = Complaints(
            self.bans, (LEAD,), self.clock, lambda kind, message: self.events.append((kind, message))
        )


@pytest.fixture
def book() -> Book:
    return Book()


def test_a_disk_that_stays_full_is_told_once(book: Book) -> None:
    for _ in range(1000):
        book.complaints.trouble("store", "no room")
        book.clock.ahead += 0.5
    assert book.events == [("store", "no room")]
    book.complaints.trouble("evaluate", "the scorer is gone")
    book.complaints.trouble("store", "the disk is gone")
    assert book.events[1:] == [("evaluate", "the scorer is gone"), ("store", "the disk is gone")]
    book.complaints.over("store")
    book.complaints.trouble("store", "the disk is gone")  # again
    assert len(book.events) == 4


def test_trouble_that_comes_and_goes_does_not_push_out_all_other_events(book: Book) -> None:
    seconds = 600
    for number in range(2 * seconds):
        book.complaints.trouble("evaluate", f"the scorer died as process {number}")
        book.complaints.over("evaluate")
        book.clock.ahead += 0.5
    assert TROUBLES < len(book.events) <= TROUBLES + seconds / QUIET_SECONDS + 1


def test_offences_are_told_once_a_minute_and_end_in_a_ban_but_of_coordinators(book: Book) -> None:
    for peer in (LEAD, EVE):
        for _ in range(OFFENCES + 1):
            book.complaints.note(Rejected(Reason.malformed, "rubbish"), peer)
    assert book.events == [
        ("rejected", f"{EVE[-8:]}: malformed: rubbish"),
        ("banned", f"{EVE} is banned: too many offences, the last one malformed"),
    ]
    assert book.bans.of("reputation") == {EVE}
