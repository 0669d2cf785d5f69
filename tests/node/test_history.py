import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from node.history import MAX_EVENTS, History
from swarm.database import StoreError, StoreFull
from swarm.experience import ExperienceStore, PeerRecord


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        self.now += 1
        return self.now


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "node.db"


@pytest.fixture
def history(path: Path) -> Iterator[History]:
    opened = History(path, Clock())
    yield opened
    opened.close()


def test_steps_that_were_lost_are_forgotten(history: History) -> None:
    for step in (1, 2, 3):
        history.record_step(step, {"foreign_groups": 2, "reward": 0.5})
        history.record_evaluation(step, {"sums": step / 10})
    history.forget_after(1)
    assert [step["step"] for step in history.steps(0, 9)] == [1]
    assert (history.held_out_latest(), history.best_held_out(), history.trained_foreign()) == (0.1, 0.1, 2)


def test_an_empty_history(history: History) -> None:
    assert (
        history.steps(0, 10) == history.events(0, 10) == history.events(None, 10) == history.evaluations(-1, 10) == []
    )
    assert history.first_step() is history.last_step() is history.held_out_start() is history.best_held_out() is None
    assert history.trained_foreign() == 0


def test_steps(history: History, path: Path) -> None:
    for step in range(1, 6):
        history.record_step(step, {"reward": step / 10, "foreign_groups": step - 1})
    assert history.first_step() == {"step": 1, "at": 1001.0, "reward": 0.1, "foreign_groups": 0}
    assert history.last_step() == {"step": 5, "at": 1005.0, "reward": 0.5, "foreign_groups": 4}
    assert [record["step"] for record in history.steps(2, 2)] == [3, 4]
    assert history.trained_foreign() == 10
    history.close()
    assert [record["reward"] for record in History(path, Clock()).steps(0, 99)] == [0.1, 0.2, 0.3, 0.4, 0.5]


def test_a_replayed_step_is_written_over(history: History) -> None:
    history.record_step(1, {"reward": 0.1, "foreign_groups": 4})
    history.record_step(1, {"reward": 0.2, "foreign_groups": 2})
    assert [record["reward"] for record in history.steps(0, 10)] == [0.2]
    assert history.trained_foreign() == 2
    history.record_step(2, {"reward": 0.2, "foreign_groups": 3})
    history.record_step(3, {"reward": 0.2, "foreign_groups": 1})
    for step, foreign in ((1, 2), (2, 3), (3, 4)):  # a restart replays them, and the last was made anew
        history.record_step(step, {"reward": 0.2, "foreign_groups": foreign})
    assert history.trained_foreign() == 9


def test_evaluations(history: History) -> None:
    history.record_evaluation(0, {"chain_sum": 0.1, "letter_counting": 0.3})
    history.record_evaluation(10, {"chain_sum": 0.5, "letter_counting": 0.7})
    history.record_evaluation(20, {"chain_sum": 0.4, "letter_counting": 0.4})
    assert history.held_out_start() == pytest.approx(0.2)
    assert history.held_out_latest() == pytest.approx(0.4)
    assert history.best_held_out() == pytest.approx(0.6)
    assert history.evaluations(-1, 10)[1] == {
        "step": 10,
        "at": 1002.0,
        "mean": pytest.approx(0.6),
        "scores": {"chain_sum": 0.5, "letter_counting": 0.7},
    }
    assert [found["step"] for found in history.evaluations(0, 1)] == [10]
    assert history.held_out_steps() == (0, 20)


def test_events(history: History) -> None:
    for i in range(5):
        history.event("info", "pause", f"event {i}")
    assert history.events(None, 2) == [
        {"id": 4, "at": 1004.0, "level": "info", "kind": "pause", "message": "event 3"},
        {"id": 5, "at": 1005.0, "level": "info", "kind": "pause", "message": "event 4"},
    ]
    assert [event["id"] for event in history.events(1, 3)] == [2, 3, 4]


def test_old_events_make_room(history: History) -> None:
    for i in range(MAX_EVENTS + 150):
        history.event("debug", "test", str(i))
    kept = history.events(0, 2 * MAX_EVENTS)
    assert MAX_EVENTS <= len(kept) < MAX_EVENTS + 150
    assert kept[-1]["message"] == str(MAX_EVENTS + 149)


def test_old_steps_and_scores_are_thinned_out(history: History, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("node.history.KEPT_STEPS", 1_000)
    monkeypatch.setattr("node.history.SCORED", 500)
    for step in range(1, 2_301):
        history.record_step(step, {"foreign_groups": 1})
        if step % 10 == 0:
            history.record_evaluation(step, {"a": 0.9 if step == 640 else 0.1})
    kept = [record["step"] for record in history.steps(0, 10_000)]
    assert kept == [1, *range(100, 1_301, 100), *range(1_301, 2_301)]
    assert history.trained_foreign() == 2_300
    scored = [found["step"] for found in history.evaluations(-1, 10_000)]
    assert scored == [10, 500, 640, 1_000, *range(1_310, 2_301, 10)]
    assert history.best_held_out() == 0.9


def test_a_history_of_the_first_version_is_taken_over(path: Path) -> None:
    with sqlite3.connect(path) as database:
        database.executescript(
            "CREATE TABLE history_version (version INTEGER NOT NULL); INSERT INTO history_version VALUES (1);"
            "CREATE TABLE steps (step INTEGER PRIMARY KEY, at REAL NOT NULL, record TEXT NOT NULL,"
            " foreign_groups INTEGER NOT NULL); CREATE INDEX steps_foreign ON steps (foreign_groups);"
            "CREATE TABLE evaluations (step INTEGER PRIMARY KEY, at REAL NOT NULL, mean REAL NOT NULL,"
            " scores TEXT NOT NULL);"
            "CREATE TABLE events (id INTEGER PRIMARY KEY AUTOINCREMENT, at REAL NOT NULL, level TEXT NOT NULL,"
            " kind TEXT NOT NULL, message TEXT NOT NULL);"
            """INSERT INTO steps VALUES (1, 5.0, '{"reward": 0.5}', 4), (2, 6.0, '{"reward": 0.25}', 3);"""
        )
    opened = History(path, Clock())
    assert opened.steps(0, 10) == [{"step": 1, "at": 5.0, "reward": 0.5}, {"step": 2, "at": 6.0, "reward": 0.25}]
    assert opened.trained_foreign() == 7
    opened.record_step(3, {"foreign_groups": 1})
    assert opened.trained_foreign() == 8
    opened.close()
    assert History(path, Clock()).trained_foreign() == 8


def test_it_shares_its_file_with_the_experience(history: History, path: Path) -> None:
    store = ExperienceStore(path, 16 << 20, Clock())
    history.record_step(1, {"foreign_groups": 0})
    store.peers.save(PeerRecord("12D3KooWpeer", 1.0, 0.0, 1.0, False, "m", 1.0, 1.0))
    history.event("info", "test", "both write")
    assert [peer.peer for peer in store.peers.all()] == ["12D3KooWpeer"]
    store.close()
    assert history.events(0, 10)[0]["message"] == "both write"


def test_a_newer_schema_is_refused(history: History, path: Path) -> None:
    history.close()
    with sqlite3.connect(path) as database:
        database.execute("UPDATE history_version SET version = 9")
    with pytest.raises(StoreError, match="history_version is of version 9, this Shoal reads version 3"):
        History(path, Clock())


def test_a_file_that_is_no_database_is_named(path: Path) -> None:
    path.write_bytes(b"no database at all, but long enough to have a header" * 40)
    with pytest.raises(StoreError, match=str(path)):
        History(path, Clock())


def test_a_full_disk_refuses_a_step_and_lets_an_event_into_the_log(
    history: History, caplog: pytest.LogCaptureFixture
) -> None:
    pages = history._database.one("PRAGMA page_count")
    assert pages is not None
    history._database.execute(f"PRAGMA max_page_count = {pages[0]}")
    long = {"foreign_groups": 0, "text": "x" * 1000}
    with pytest.raises(StoreFull, match="no room for"):
        all(history.record_step(step, long) is None for step in range(100))
    kept = len(history.steps(0, 1000))
    for i in range(20):
        history.event("error", "checkpoint", "y" * 1000 + str(i))
    assert "the event is in this log only" in caplog.text
    history._database.execute("PRAGMA max_page_count = 1000")
    history.record_step(500, {"foreign_groups": 0})
    assert len(history.steps(0, 1000)) == kept + 1


def test_a_database_that_another_process_holds_is_an_error_after_a_while(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swarm.database.BUSY_SECONDS", 0.05)
    history = History(path, Clock())
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreError, match="database is locked"):
        history.record_step(1, {"foreign_groups": 0})
    other.execute("ROLLBACK")
    history.record_step(1, {"foreign_groups": 0})
    assert len(history.steps(0, 10)) == 1
    history.close()
    other.close()
