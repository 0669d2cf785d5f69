"""Checkpoints and journals that are damaged: what is said, and what can be reached."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from node.checkpoint import CheckpointError, CheckpointStore


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("how", ["flipped", "missing", "short", "listing", "no listing"])
def test_a_damaged_newest_checkpoint_costs_no_step(
    store: CheckpointStore, how: str, train: Any, reached: Any, names: Any
) -> None:
    train(store, 1, 12)
    newest = store.directory / "step-10"
    if how == "flipped":
        flip(newest / "model.safetensors", 50)
    elif how == "missing":
        (newest / "trainer.json").unlink()
    elif how == "short":
        os.truncate(newest / "model.safetensors", 99)
    elif how == "listing":
        (newest / "files.json").write_text("[1")
    else:
        (newest / "files.json").unlink()
    step, records, problems = reached(store.directory)
    assert (step, records) == (5, [6, 7, 8, 9, 10, 11, 12])
    assert len(problems) == 1
    assert "checkpoint step-10 is damaged" in problems[0]
    assert reached(store.directory) == (5, records, [])  # said once

    again = CheckpointStore(store.directory, 2)
    again.latest()
    train(again, 13, 15)
    assert reached(store.directory) == (15, [], [])
    assert names(store.directory) == ["journal-10.bin", "journal-5.bin", "step-15", "step-5"]


def test_a_damaged_checkpoint_is_evidence_for_one_run(
    store: CheckpointStore, train: Any, reached: Any, names: Any
) -> None:
    train(store, 1, 12)
    flip(store.directory / "step-10" / "model.safetensors", 0)
    found = CheckpointStore(store.directory, 2)
    for _ in range(2):  # a trainer that is lost has the same process recover again
        assert found.latest().step == 5
        assert "damaged-step-10" in names(store.directory)
    assert reached(store.directory) == (5, [6, 7, 8, 9, 10, 11, 12], [])
    assert names(store.directory) == ["journal-10.bin", "journal-5.bin", "step-5"]


def test_what_cannot_be_removed_and_is_not_needed_stops_no_start(
    store: CheckpointStore, train: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(store, 1, 12)
    flip(store.directory / "step-10" / "model.safetensors", 0)
    CheckpointStore(store.directory, 2).latest()

    def refuse(path: Path) -> None:
        raise OSError(errno.EUCLEAN, "Structure needs cleaning", str(path))

    monkeypatch.setattr("node.checkpoint.shutil.rmtree", refuse)
    again = CheckpointStore(store.directory, 2)
    again.tidy()
    recovery = again.latest()
    assert recovery.step == 5
    assert "what was damaged before cannot be removed: [Errno 117]" in recovery.problems[-1]


def test_the_same_step_may_be_damaged_twice(store: CheckpointStore, write: Any, train: Any, reached: Any) -> None:
    train(store, 1, 10)
    for _ in range(2):
        flip(store.directory / "step-10" / "model.safetensors", 0)
        again = CheckpointStore(store.directory, 2)
        assert again.latest().step == 5
        again.save(10, write(10), {"taken": 10})
    assert reached(store.directory) == (10, [], [])


def test_a_first_checkpoint_that_is_damaged_goes_back_to_the_initial_model(
    store: CheckpointStore, train: Any, reached: Any
) -> None:
    train(store, 1, 7)
    flip(store.directory / "step-5" / "state.json", 0)
    step, records, problems = reached(store.directory)
    assert (step, records, len(problems)) == (0, [1, 2, 3, 4, 5, 6, 7], 1)


def test_training_never_starts_over_by_itself(store: CheckpointStore, train: Any) -> None:
    train(store, 1, 17)
    flip(store.directory / "step-10" / "model.safetensors", 0)
    flip(store.directory / "step-15" / "model.safetensors", 0)
    for _ in range(2):  # nor at the next try
        with pytest.raises(CheckpointError, match=r"no checkpoint in .* is whole"):
            CheckpointStore(store.directory, 2).latest()


@pytest.mark.parametrize("cut", [1, 4, 7, 8, 9, 40])
def test_a_torn_tail_is_left_out_and_written_over(
    store: CheckpointStore, cut: int, record: Any, train: Any, reached: Any
) -> None:
    train(store, 1, 6)
    path = store.directory / "journal-5.bin"
    whole = path.stat().st_size
    store.append(record(7))
    os.truncate(path, whole + cut)
    step, records, problems = reached(store.directory)
    assert (step, records) == (5, [6])
    assert problems == [
        f"journal-5.bin: its last {cut} bytes are no whole record (a kill while writing, or damage) and are "
        "left out; going on after step 6"
    ]
    again = CheckpointStore(store.directory, 2)
    again.latest()
    train(again, 7, 8)
    assert reached(store.directory) == (5, [6, 7, 8], [])


def test_damage_amid_a_journal_that_is_needed_loses_what_comes_after_it_and_says_so(
    store: CheckpointStore, train: Any, reached: Any
) -> None:
    train(store, 1, 12)
    flip(store.directory / "step-10" / "model.safetensors", 0)
    size = (store.directory / "journal-5.bin").stat().st_size
    flip(store.directory / "journal-5.bin", size // 5 * 2 + 20)  # the third of five records
    step, records, problems = reached(store.directory)
    assert (step, records) == (5, [6, 7])
    assert [problem.split(":")[0].split(" begins")[0] for problem in problems[1:]] == [
        "journal-5.bin",
        "journal-10.bin",
    ]
    again = CheckpointStore(store.directory, 2)
    again.latest()
    assert again.base == 5
    train(again, 8, 8)
    assert reached(store.directory) == (5, [6, 7, 8], [])


@pytest.mark.parametrize("tail", [b"\xff" * 8, b"\0" * 4096, b"\0" * 7, os.urandom(64)])
def test_rubbish_at_the_end_of_a_journal_is_no_record(
    store: CheckpointStore, tail: bytes, record: Any, reached: Any
) -> None:
    store.append(record(1))
    with (store.directory / "journal-0.bin").open("ab") as file:
        file.write(tail)
    assert reached(store.directory)[:2] == (0, [1])
