from typing import Any

import pytest

from protocol.rollout import TaskRef
from swarm.announcements import Announcements
from swarm.experience import ExperienceStore

NOW = 1_800_000_000.0


def task(slot: int) -> TaskRef:
    return TaskRef("chain_sum", "1", 7, slot)


def add(announcements: Announcements, n: int, producer: str, sealed: bytes, expires: float, **changes: Any) -> bool:
    """The announcement of group `n`, for the task of that number."""
    facts = {"epoch": 3, "task": task(n), "heard_at": NOW, **changes}
    return announcements.add(bytes([n]) * 32, producer, sealed=sealed, expires_at=expires, **facts)


def test_a_flood_of_one_producer_pushes_out_its_own(store: ExperienceStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm.announcements.MAX_PRODUCER_ANNOUNCEMENTS", 3)
    known = store.announcements
    assert add(known, 99, "alice", b"honest", NOW + 50)
    for n in (2, 5, 1, 4, 3):
        add(known, n, "mallory", b"sealed", NOW + n)
    assert {digest[0] for digest in known.digests(NOW, 10)} == {3, 4, 5, 99}
    assert not add(known, 2, "mallory", b"sealed", NOW + 2), "nor does it come back"


def test_they_are_live_newest_first_and_filtered(store: ExperienceStore) -> None:
    known = store.announcements
    for n, producer in enumerate(("alice", "bob", "alice", "carol")):
        assert add(known, n, producer, b"sealed%d" % n, NOW + 10 * n)
    assert not add(known, 1, "bob", b"again", NOW + 10)
    assert add(known, 1, "mallory", b"not mine", NOW + 10), "each says it for itself"
    assert known.live(NOW, 10) == [b"not mine", b"sealed3", b"sealed2", b"sealed1"]
    assert known.live(NOW, 1) == [b"not mine"]
    live = known.live(NOW, 10, without={bytes([2]) * 32}, banned={"carol", "mallory"}.__contains__)
    assert live == [b"sealed1"]
    assert [digest[0] for digest in known.digests(NOW + 10, 10)] == [3, 2]


def test_young_ones_can_be_left_out(store: ExperienceStore) -> None:
    for n in range(5):
        add(store.announcements, n, "alice", b"sealed%d" % n, NOW + 100, heard_at=NOW + n)
    assert store.announcements.live(NOW + 4, 10, heard_by=NOW + 1) == [b"sealed1", b"sealed0"]
    assert len(store.announcements.live(NOW - 1, 10)) == 5, "a clock that went back hides none"


def test_the_group_announced_for_a_task_is_found(store: ExperienceStore) -> None:
    known = store.announcements
    add(known, 1, "alice", b"sealed", NOW + 100)
    assert known.of_task("alice", 3, task(1)) == bytes([1]) * 32
    for other in (("bob", 3, task(1)), ("alice", 4, task(1)), ("alice", 3, task(2))):
        assert known.of_task(*other) is None
