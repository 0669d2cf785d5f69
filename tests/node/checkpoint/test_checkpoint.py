"""What a new process finds of what the last one kept."""

from pathlib import Path
from typing import Any

import pytest

from node.checkpoint import CheckpointError, CheckpointStore, damage


def test_a_new_directory_starts_from_the_initial_model(tmp_path: Path, reached: Any) -> None:
    assert reached(tmp_path / "new") == (0, [], [])


def test_without_a_checkpoint_the_journal_starts_at_the_initial_model(
    store: CheckpointStore, train: Any, reached: Any
) -> None:
    train(store, 1, 3)
    assert reached(store.directory) == (0, [1, 2, 3], [])


def test_records_come_back_as_they_were(store: CheckpointStore, record: Any) -> None:
    records = [record(1), record(2, foreign=4)]
    for one in records:
        store.append(one)
    assert CheckpointStore(store.directory, 2).latest().records == records


def test_a_checkpoint_and_the_steps_after_it(store: CheckpointStore, train: Any, reached: Any) -> None:
    train(store, 1, 17)
    assert reached(store.directory) == (15, [16, 17], [])
    assert store.base == 15


def test_as_many_checkpoints_are_kept_as_asked_and_the_journals_that_lead_on_from_them(
    store: CheckpointStore, train: Any, names: Any
) -> None:
    train(store, 1, 17)
    assert names(store.directory) == ["journal-10.bin", "journal-15.bin", "step-10", "step-15"]


def test_recovering_twice_changes_nothing(store: CheckpointStore, train: Any, reached: Any) -> None:
    train(store, 1, 17)
    assert reached(store.directory) == reached(store.directory)


def test_a_recovered_store_goes_on_in_the_same_journal(store: CheckpointStore, train: Any, reached: Any) -> None:
    train(store, 1, 7)
    again = CheckpointStore(store.directory, 2)
    again.latest()
    assert again.base == 5
    train(again, 8, 9)
    assert reached(store.directory) == (5, [6, 7, 8, 9], [])


def test_a_checkpoint_that_is_there_is_not_written_again(
    store: CheckpointStore, write: Any, train: Any, reached: Any
) -> None:
    train(store, 1, 6)
    store.save(5, write(99), {"taken": 99})
    store.save(0, write(99), {"taken": 99})
    assert reached(store.directory) == (5, [6], [])
    assert not (store.directory / "step-0").exists()


def test_entries_and_find(store: CheckpointStore, write: Any, train: Any) -> None:
    train(store, 1, 10)
    store.save_best(7, 0.4, write(7))
    entries = store.entries()
    assert [(entry.name, entry.step, entry.score) for entry in entries] == [
        ("step-5", 5, None),
        ("step-10", 10, None),
        ("best", 7, 0.4),
    ]
    assert entries[0].size > 100
    assert store.find("latest").step == 10
    assert store.find("5").path == store.directory / "step-5"
    assert store.find("best").score == 0.4
    with pytest.raises(CheckpointError, match="there is: step-5, step-10, best"):
        store.find("7")


def test_best_is_replaced(store: CheckpointStore, write: Any, names: Any) -> None:
    store.save_best(3, 0.2, write(3))
    store.save_best(6, 0.3, write(6))
    assert store.find("best").step == 6
    assert names(store.directory) == ["best"]
    assert damage(store.directory / "best") is None


def test_a_directory_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file")
    with pytest.raises(CheckpointError, match=f"{tmp_path / 'checkpoints'} cannot be read"):
        CheckpointStore(tmp_path / "checkpoints", 2).latest()


def test_a_damaged_best_one_is_not_listed(store: CheckpointStore, write: Any) -> None:
    store.save_best(7, 0.4, write(7))
    for damaged in ("", "{}", "[]"):
        (store.directory / "best" / "best.json").write_text(damaged)
        assert store.entries() == []
