"""Kills, full disks and damage at every point of a checkpoint's life; the state of a 'model' is one number."""

import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from node import checkpoint, journal
from node.checkpoint import CheckpointError, CheckpointStore, damage
from node.interfaces import Batch, TrainGroup, TrainSequence
from node.journal import JournalRecord


def record(step: int, foreign: int = 0) -> JournalRecord:
    sequence = TrainSequence((5, 6, step), (True, False, True), 0.5, (-1.0, -0.25, -0.125))
    batch = Batch(step, (TrainGroup((1, 2, 3), (sequence,), "own"),))
    return JournalRecord(step, batch, {"taken": step, "sampler": {"foreign": foreign}}, {"reward": 0.5})


def write(step: int, size: int = 100) -> Callable[[Path], None]:
    def fill(directory: Path) -> None:
        (directory / "model.safetensors").write_bytes(bytes([step % 256]) * size)
        (directory / "trainer.json").write_text(json.dumps({"step": step}))

    return fill


def train(store: CheckpointStore, first: int, last: int, every: int = 5) -> None:
    """What the loop does: journal each step; a full checkpoint at every fifth one."""
    for step in range(first, last + 1):
        store.append(record(step))
        if step % every == 0:
            store.save(step, write(step), {"taken": step})


def reached(directory: Path, keep: int = 2) -> tuple[int, list[int], list[str]]:
    """(checkpoint step, steps to repeat, problems) as a new process finds them; the checkpoint must be right."""
    recovery = CheckpointStore(directory, keep).latest()
    if recovery.directory is None:
        assert recovery.state is None
        assert recovery.step == 0
    else:
        assert recovery.state == {"taken": recovery.step}
        assert json.loads((recovery.directory / "trainer.json").read_text()) == {"step": recovery.step}
        assert (recovery.directory / "model.safetensors").read_bytes() == bytes([recovery.step % 256]) * 100
    return recovery.step, [found.step for found in recovery.records], list(recovery.problems)


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    opened = CheckpointStore(tmp_path, keep=2)
    opened.latest()
    return opened


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


# -- the straight way ------------------------------------------------------------------------------------------


def test_a_new_directory_starts_from_the_initial_model(tmp_path: Path) -> None:
    assert reached(tmp_path / "new") == (0, [], [])


def test_without_a_checkpoint_the_journal_starts_at_the_initial_model(store: CheckpointStore) -> None:
    train(store, 1, 3)
    assert reached(store.directory) == (0, [1, 2, 3], [])


def test_records_come_back_as_they_were(store: CheckpointStore) -> None:
    records = [record(1), record(2, foreign=4)]
    for one in records:
        store.append(one)
    assert CheckpointStore(store.directory, 2).latest().records == records


def test_a_checkpoint_and_the_steps_after_it(store: CheckpointStore) -> None:
    train(store, 1, 17)
    assert reached(store.directory) == (15, [16, 17], [])
    assert store.base == 15


def test_as_many_checkpoints_are_kept_as_asked_and_the_journals_that_lead_on_from_them(store: CheckpointStore) -> None:
    train(store, 1, 17)
    assert names(store.directory) == ["journal-10.bin", "journal-15.bin", "step-10", "step-15"]


def test_recovering_twice_changes_nothing(store: CheckpointStore) -> None:
    train(store, 1, 17)
    assert reached(store.directory) == reached(store.directory)


def test_a_recovered_store_goes_on_in_the_same_journal(store: CheckpointStore) -> None:
    train(store, 1, 7)
    again = CheckpointStore(store.directory, 2)
    again.latest()
    assert again.base == 5
    train(again, 8, 9)
    assert reached(store.directory) == (5, [6, 7, 8, 9], [])


def test_a_checkpoint_that_is_there_is_not_written_again(store: CheckpointStore) -> None:
    train(store, 1, 6)
    store.save(5, write(99), {"taken": 99})
    store.save(0, write(99), {"taken": 99})
    assert reached(store.directory) == (5, [6], [])
    assert not (store.directory / "step-0").exists()


def test_entries_and_find(store: CheckpointStore) -> None:
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


def test_best_is_replaced(store: CheckpointStore) -> None:
    store.save_best(3, 0.2, write(3))
    store.save_best(6, 0.3, write(6))
    assert store.find("best").step == 6
    assert names(store.directory) == ["best"]
    assert damage(store.directory / "best") is None


# -- damage ----------------------------------------------------------------------------------------------------


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("how", ["flipped", "missing", "short", "listing", "no listing"])
def test_a_damaged_newest_checkpoint_costs_no_step(store: CheckpointStore, how: str) -> None:
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


def test_the_same_step_may_be_damaged_twice(store: CheckpointStore) -> None:
    train(store, 1, 10)
    for _ in range(2):
        flip(store.directory / "step-10" / "model.safetensors", 0)
        again = CheckpointStore(store.directory, 2)
        assert again.latest().step == 5
        again.save(10, write(10), {"taken": 10})
    assert reached(store.directory) == (10, [], [])


def test_a_first_checkpoint_that_is_damaged_goes_back_to_the_initial_model(store: CheckpointStore) -> None:
    train(store, 1, 7)
    flip(store.directory / "step-5" / "state.json", 0)
    step, records, problems = reached(store.directory)
    assert (step, records, len(problems)) == (0, [1, 2, 3, 4, 5, 6, 7], 1)


def test_training_never_starts_over_by_itself(store: CheckpointStore) -> None:
    train(store, 1, 17)
    flip(store.directory / "step-10" / "model.safetensors", 0)
    flip(store.directory / "step-15" / "model.safetensors", 0)
    for _ in range(2):  # nor at the next try
        with pytest.raises(CheckpointError, match=r"no checkpoint in .* is whole"):
            CheckpointStore(store.directory, 2).latest()


@pytest.mark.parametrize("cut", [1, 4, 7, 8, 9, 40])
def test_a_torn_tail_is_left_out_and_written_over(store: CheckpointStore, cut: int) -> None:
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


def test_damage_amid_a_journal_that_is_needed_loses_what_comes_after_it_and_says_so(store: CheckpointStore) -> None:
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
def test_rubbish_at_the_end_of_a_journal_is_no_record(store: CheckpointStore, tail: bytes) -> None:
    store.append(record(1))
    with (store.directory / "journal-0.bin").open("ab") as file:
        file.write(tail)
    assert reached(store.directory)[:2] == (0, [1])


# -- a full disk -----------------------------------------------------------------------------------------------


def full(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_too_little_room_is_noticed_before_anything_is_written(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(store, 1, 7)
    before = names(store.directory)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=10 << 20))
    with pytest.raises(CheckpointError, match=r"step-7 needs 64 MB, 10 MB are free; free some"):
        store.save(7, write(7), {"taken": 7})
    assert names(store.directory) == before
    store.append(record(8))
    assert reached(store.directory) == (5, [6, 7, 8], [])


def test_a_disk_that_fills_while_writing_leaves_no_half_checkpoint(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(store, 1, 7)
    before = names(store.directory)

    def half(directory: Path) -> None:
        (directory / "model.safetensors").write_bytes(b"x" * 50)
        full()

    def plain(directory: Path) -> None:
        raise Exception("No space left on device (os error 28)")  # what tokenizers raises

    for fails in (half, plain):
        with pytest.raises(CheckpointError, match=r"step-7 could not be written .*No space left.*; free some disk"):
            store.save(7, fails, {"taken": 7})
        assert names(store.directory) == before
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(CheckpointError):
            store.save(7, write(7), {"taken": 7})
    assert names(store.directory) == before
    train(store, 8, 10)
    assert reached(store.directory) == (10, [], [])


def test_a_mistake_in_writing_is_not_called_a_full_disk(store: CheckpointStore) -> None:
    def wrong(directory: Path) -> None:
        raise KeyError("lm_head")

    with pytest.raises(KeyError):
        store.save(5, wrong, {})
    assert names(store.directory) == []


def test_the_best_stays_when_a_better_one_cannot_be_written(store: CheckpointStore) -> None:
    store.save_best(3, 0.2, write(3))
    with pytest.raises(CheckpointError, match="best could not be written"):
        store.save_best(6, 0.3, full)
    assert (store.find("best").step, damage(store.directory / "best")) == (3, None)


@pytest.mark.parametrize("call", ["write", "fsync"])
def test_a_step_that_cannot_be_journalled_is_taken_back(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    store.append(record(1))
    real = os.write

    def short(descriptor: int, data: bytes) -> int:
        if len(data) < 40:
            full()
        return real(descriptor, data[: len(data) // 2])

    with monkeypatch.context() as patched:
        patched.setattr(os, call, short if call == "write" else full)
        with pytest.raises(CheckpointError, match=r"the step cannot be journalled .No space left"):
            store.append(record(2))
    assert reached(store.directory) == (0, [1], [])
    store.append(record(2))
    assert reached(store.directory) == (0, [1, 2], [])


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(place)], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting a small file system needs root")
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


def test_a_disk_that_is_really_full(small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "FREE_MARGIN", 0)
    store = CheckpointStore(small_disk, 2)
    store.latest()
    store.append(record(1))
    with pytest.raises(CheckpointError, match=r"No space left on device"):
        store.save(1, write(1, size=1 << 20), {"taken": 1})
    assert names(small_disk) == ["journal-0.bin"]
    (small_disk / "other").write_bytes(b"\0" * shutil.disk_usage(small_disk).free)
    records = iter(range(2, 100))  # what is left of the journal's last page
    with pytest.raises(CheckpointError, match=r"No space left on device"):
        all(store.append(record(step)) is None for step in records)
    (small_disk / "other").unlink()
    last = reached(small_disk)[1][-1]
    store.append(record(last + 1))
    assert reached(small_disk) == (0, list(range(1, last + 2)), [])


# -- kills -----------------------------------------------------------------------------------------------------


class Killed(BaseException):
    """Stands for SIGKILL: nothing in the code may catch it."""


CALLS = [(os, "fsync"), (os, "open"), (os, "replace"), (os, "rename"), (os, "mkdir"), (os, "rmdir"), (os, "unlink")]


def killed_at(monkeypatch: pytest.MonkeyPatch, moment: int, work: Callable[[], None]) -> bool:
    """Run `work`, killed before the `moment`-th call that touches the disk. False when it ended before that."""
    left = moment

    def count(real: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object, **kwargs: object) -> object:
            nonlocal left
            left -= 1
            if left < 0:
                raise Killed
            return real(*args, **kwargs)

        return call

    with monkeypatch.context() as patched:
        for module, name in CALLS:
            patched.setattr(module, name, count(getattr(module, name)))
        try:
            work()
        except Killed:
            return True
    return False


@pytest.mark.parametrize("keep", [1, 2])
def test_a_kill_at_any_call_of_a_save_costs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep: int) -> None:
    prepared = CheckpointStore(tmp_path / "prepared", keep)
    prepared.latest()
    train(prepared, 1, 14)
    prepared.append(record(15))
    seen = set()
    for moment in range(200):
        directory = tmp_path / f"kill-{moment}"
        shutil.copytree(prepared.directory, directory)
        store = CheckpointStore(directory, keep)
        store.latest()
        if not killed_at(monkeypatch, moment, lambda store=store: store.save(15, write(15), {"taken": 15})):
            break
        step, records, problems = reached(directory, keep)
        assert (step, records, problems) in [(10, [11, 12, 13, 14, 15], []), (15, [], [])]
        seen.add(step)
        again = CheckpointStore(directory, keep)
        again.latest()
        again.save(15, write(15), {"taken": 15})
        train(again, 16, 21)
        assert reached(directory, keep) == (20, [21], [])
        assert not [name for name in names(directory) if name.startswith(".")]
    assert seen == {10, 15}
    assert moment > 10


def test_a_kill_at_any_call_of_a_journalled_step_costs_that_step_at_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for moment in range(100):
        store = CheckpointStore(tmp_path / f"kill-{moment}", 2)
        store.latest()
        store.append(record(1))
        if not killed_at(monkeypatch, moment, lambda store=store: store.append(record(2))):
            break
        assert reached(store.directory)[1] in ([1], [1, 2])
    assert moment > 1


def test_a_kill_while_the_best_is_replaced_leaves_one_of_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = set()
    for moment in range(200):
        store = CheckpointStore(tmp_path / f"kill-{moment}", 2)
        store.latest()
        store.append(record(1))
        store.save_best(1, 0.1, write(1))
        if not killed_at(monkeypatch, moment, lambda store=store: store.save_best(2, 0.2, write(2))):
            break
        again = CheckpointStore(store.directory, 2)
        again.latest()
        assert damage(store.directory / "best") is None
        steps.add(again.find("best").step)
        assert names(store.directory) == ["best", "journal-0.bin"]
    assert steps == {1, 2}


TRAINING = textwrap.dedent(
    """
    import json, sys
    from pathlib import Path
    from node.checkpoint import CheckpointStore
    from node.interfaces import Batch
    from node.journal import JournalRecord

    store = CheckpointStore(Path(sys.argv[1]), 2)
    recovery = store.latest()
    assert not [problem for problem in recovery.problems if "damaged" in problem], recovery.problems
    value = json.loads((recovery.directory / "model").read_text()[:20]) if recovery.directory else 0
    for record in recovery.records:
        assert record.step == value + 1, (record.step, value)
        value = record.step
    print("at", value, flush=True)
    while True:
        store.append(JournalRecord(value + 1, Batch(value + 1, ()), {}, {}))
        value += 1
        print("done", value, flush=True)
        if value % 3 == 0:
            text = str(value).ljust(20) * 20000
            store.save(value, lambda aside: (aside / "model").write_text(text), {"value": value})
    """
)


def test_sigkill_at_random_moments_never_loses_a_journalled_step(tmp_path: Path) -> None:
    """A real process, killed eight times; what it printed as done is there at its next start."""
    moments, done = random.Random(3), 0
    for _ in range(8):
        process = subprocess.Popen(
            [sys.executable, "-c", TRAINING, str(tmp_path / "checkpoints")], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        started = process.stdout.readline().split()
        assert started[0] == "at"
        assert int(started[1]) in (done, done + 1)
        time.sleep(moments.uniform(0.02, 0.25))
        process.send_signal(signal.SIGKILL)
        lines = process.stdout.read().splitlines()
        process.wait(timeout=10)
        done = int(lines[-1].split()[1]) if lines and len(lines[-1].split()) == 2 else int(started[1])
    assert done > 8


def test_a_directory_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file")
    with pytest.raises(CheckpointError, match=f"{tmp_path / 'checkpoints'} cannot be read"):
        CheckpointStore(tmp_path / "checkpoints", 2).latest()


def test_journal_records_are_framed_and_small(tmp_path: Path) -> None:
    size = journal.append(tmp_path / "journal-0.bin", record(1))
    assert (tmp_path / "journal-0.bin").stat().st_size == size < 200
    assert (tmp_path / "journal-0.bin").stat().st_mode & 0o777 == 0o600
