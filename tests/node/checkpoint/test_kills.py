"""Kills at every point of a checkpoint's life, staged and real."""

import os
import random
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from node.checkpoint import CheckpointStore, damage


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
def test_a_kill_at_any_call_of_a_save_costs_nothing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    keep: int,
    record: Any,
    write: Any,
    train: Any,
    reached: Any,
    names: Any,
) -> None:
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
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record: Any, reached: Any
) -> None:
    for moment in range(100):
        store = CheckpointStore(tmp_path / f"kill-{moment}", 2)
        store.latest()
        store.append(record(1))
        if not killed_at(monkeypatch, moment, lambda store=store: store.append(record(2))):
            break
        assert reached(store.directory)[1] in ([1], [1, 2])
    assert moment > 1


def test_a_kill_while_the_best_is_replaced_leaves_one_of_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record: Any, write: Any, names: Any
) -> None:
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
        lines = process.stdout.read().rpartition("\n")[0].splitlines()  # the kill may have cut the last one
        process.wait(timeout=10)
        done = int(lines[-1].split()[1]) if lines else int(started[1])
    assert done > 8
