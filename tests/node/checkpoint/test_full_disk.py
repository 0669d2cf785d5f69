"""A disk that is full, or fails: nothing half-written is left, and nothing written is lost."""

import errno
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from node import checkpoint
from node.checkpoint import CheckpointError, CheckpointStore, damage
from node.disk import advice


def full(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_too_little_room_is_noticed_before_anything_is_written(
    store: CheckpointStore,
    monkeypatch: pytest.MonkeyPatch,
    record: Any,
    write: Any,
    train: Any,
    reached: Any,
    names: Any,
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
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch, write: Any, train: Any, reached: Any, names: Any
) -> None:
    train(store, 1, 7)
    before = names(store.directory)

    def half(directory: Path) -> None:
        (directory / "model.safetensors").write_bytes(b"x" * 50)
        full()

    def plain(directory: Path) -> None:
        raise Exception("No space left on device (os error 28)")  # what tokenizers raises

    def worker(directory: Path) -> None:
        raise CheckpointError("one of the workers has No space left; free some disk")

    for fails, said in (
        (half, "could not be written .*"),
        (plain, "could not be written .*"),
        (worker, "workers has "),
    ):
        with pytest.raises(CheckpointError, match=rf"{said}No space left.*; free some disk"):
            store.save(7, fails, {"taken": 7})
        assert names(store.directory) == before
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(CheckpointError):
            store.save(7, write(7), {"taken": 7})
    assert names(store.directory) == before
    train(store, 8, 10)
    assert reached(store.directory) == (10, [], [])


def test_a_checkpoint_that_has_its_name_counts_though_the_disk_fails_then(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch, record: Any, write: Any, train: Any, reached: Any
) -> None:
    train(store, 1, 6)
    real, synced = checkpoint.sync, list[Path]()

    def failing(path: Path) -> None:
        if path == store.directory:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(path)

    def noted(path: Path) -> None:
        synced.append(path)
        real(path)

    with monkeypatch.context() as patched:
        patched.setattr(checkpoint, "sync", failing)
        with pytest.raises(CheckpointError, match=r"step-6 is there, but .*loss of power .*Input/output error"):
            store.save(6, write(6), {"taken": 6})
        assert store.base == 6
        with pytest.raises(CheckpointError, match="the step cannot be journalled"):
            store.append(record(7))
        patched.setattr(checkpoint, "sync", noted)
        store.append(record(7))
    assert synced == [store.directory]
    store.append(record(8))
    assert reached(store.directory) == (6, [7, 8], [])


def test_a_mistake_in_writing_is_not_called_a_full_disk(store: CheckpointStore, names: Any) -> None:
    def wrong(directory: Path) -> None:
        raise KeyError("lm_head")

    with pytest.raises(KeyError):
        store.save(5, wrong, {})
    assert names(store.directory) == []


def test_the_best_stays_when_a_better_one_cannot_be_written(store: CheckpointStore, write: Any) -> None:
    store.save_best(3, 0.2, write(3))
    with pytest.raises(CheckpointError, match="best could not be written"):
        store.save_best(6, 0.3, full)
    assert (store.find("best").step, damage(store.directory / "best")) == (3, None)


@pytest.mark.parametrize("call", ["write", "fsync"])
def test_a_step_that_cannot_be_journalled_is_taken_back(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch, call: str, record: Any, reached: Any
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


def test_a_disk_that_is_really_full(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch, record: Any, write: Any, reached: Any, names: Any
) -> None:
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


@pytest.mark.parametrize("before", [0, 2])
def test_what_a_failing_disk_leaves_of_a_step_is_cut_off_before_the_next_one(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch, before: int, record: Any, reached: Any
) -> None:
    for step in range(1, before + 1):
        store.append(record(step))
    real = os.write

    def torn(descriptor: int, data: bytes) -> int:
        if len(data) < 60:
            full()
        return real(descriptor, data[: len(data) // 2])

    def broken(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", torn)
        patched.setattr(os, "ftruncate", broken)
        for _ in range(2):
            with pytest.raises(CheckpointError, match=r"the step cannot be journalled .No space left"):
                store.append(record(before + 1))
    assert reached_aside(store.directory, reached) == (0, list(range(1, before + 1)))
    store.append(record(before + 1))
    store.append(record(before + 2))
    assert reached(store.directory) == (0, list(range(1, before + 3)), [])


def reached_aside(directory: Path, reached: Any) -> tuple[int, list[int]]:
    """What a start would find now, without its mending the files that the store is still writing to."""
    aside = directory.with_name(f"{directory.name}-aside")
    shutil.copytree(directory, aside)
    step, steps, problems = reached(aside)
    assert len(problems) == 1
    assert "are no whole record" in problems[0]
    return step, steps


def test_what_a_killed_save_left_goes_before_a_start_needs_room(store: CheckpointStore, train: Any, names: Any) -> None:
    train(store, 1, 6)
    before = names(store.directory)
    (store.directory / ".aside-step-10").mkdir()
    (store.directory / ".aside-step-10" / "model.safetensors").write_bytes(b"half")
    CheckpointStore(store.directory, 2).tidy()
    assert names(store.directory) == before


@pytest.mark.parametrize(
    ("error", "fix"),
    [
        (PermissionError(errno.EACCES, "Permission denied"), "let this user write to D"),
        (Exception("I/O error: Read-only file system (os error 30)"), "let this user write to D"),
        (OSError(errno.ENOSPC, "No space left on device"), "free some disk"),
        (OSError("something else"), "free some disk"),
        (OSError(errno.EIO, "Input/output error"), "see to that disk"),
    ],
)
def test_what_is_to_be_done_about_a_write_that_failed(error: Exception, fix: str) -> None:
    assert advice(error, Path("D")) == fix
