"""A store whose 'model' is one number, and what a node does with it. Fixtures, since tests cannot import each other."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from node.checkpoint import CheckpointStore
from node.interfaces import Batch, TrainGroup, TrainSequence
from node.journal import JournalRecord


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    opened = CheckpointStore(tmp_path, keep=2)
    opened.latest()
    return opened


def _record(step: int, foreign: int = 0) -> JournalRecord:
    sequence = TrainSequence((5, 6, step), (True, False, True), 0.5, (-1.0, -0.25, -0.125))
    batch = Batch(step, (TrainGroup((1, 2, 3), (sequence,), "own"),))
    return JournalRecord(step, batch, {"taken": step, "sampler": {"foreign": foreign}}, {"reward": 0.5})


def _write(step: int, size: int = 100) -> Callable[[Path], None]:
    def fill(directory: Path) -> None:
        (directory / "model.safetensors").write_bytes(bytes([step % 256]) * size)
        (directory / "trainer.json").write_text(json.dumps({"step": step}))

    return fill


def _train(store: CheckpointStore, first: int, last: int, every: int = 5) -> None:
    """What the loop does: journal each step; a full checkpoint at every fifth one."""
    for step in range(first, last + 1):
        store.append(_record(step))
        if step % every == 0:
            store.save(step, _write(step), {"taken": step})


def _reached(directory: Path, keep: int = 2) -> tuple[int, list[int], list[str]]:
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


def _names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


@pytest.fixture
def record() -> Callable[..., object]:
    return _record


@pytest.fixture
def write() -> Callable[..., object]:
    return _write


@pytest.fixture
def train() -> Callable[..., object]:
    return _train


@pytest.fixture
def reached() -> Callable[..., object]:
    return _reached


@pytest.fixture
def names() -> Callable[..., object]:
    return _names
