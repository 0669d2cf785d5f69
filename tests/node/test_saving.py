"""When a checkpoint is written, and whose steps a start takes up."""

import errno
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from node.checkpoint import CheckpointError, CheckpointStore
from node.config import Config
from node.device import Device
from node.history import History
from node.interfaces import Batch
from node.journal import JournalRecord
from node.own_groups import OwnGroups
from node.progress import Progress
from node.saving import Saving
from node.selection import ForeignShare
from swarm.sampler import Sampler

STATE = {"epoch": 3, "taken": 8, "sampler": Sampler(0).state()}


class Trainer:
    step = 0

    def load(self, directory: Path) -> None:
        self.step = int(directory.name.removeprefix("step-"))

    def save(self, directory: Path) -> None:
        (directory / "model").write_text("w")


def some_model() -> Any:
    model = SimpleNamespace(named_parameters=lambda: [("w", torch.zeros(3))], dtype=torch.bfloat16)
    return SimpleNamespace(fingerprint=b"\1" * 32, name="other", model=model)


@pytest.fixture
def parts(tmp_path: Path) -> Iterator[Any]:
    device, history = Device(), History(tmp_path / "node.db", time.time)
    yield SimpleNamespace(
        config=Config(),
        bundle=some_model(),
        engine=None,
        scorer=None,
        device=device,
        trainer=Trainer(),
        averaging=None,
        sampler=Sampler(0),
        checkpoints=CheckpointStore(tmp_path / "checkpoints", 2),
        history=history,
        progress=Progress(time.time, 60.0),
        clock=time.time,
    )
    device.close()
    history.close()


@pytest.fixture
def saving(parts: Any) -> Saving:
    return Saving(parts, OwnGroups(parts), ForeignShare(4))


@pytest.fixture
def journalled(parts: Any) -> Callable[..., None]:
    """Has the process before journalled a step."""

    def append(step: int, **state: str) -> None:
        parts.checkpoints.append(JournalRecord(step, Batch(step, ()), {**STATE, **state}, {"foreign_groups": 0}))

    parts.checkpoints.latest()
    return append


async def test_a_checkpoint_is_due_by_steps_or_by_age(saving: Saving) -> None:
    now = 10_000.0
    saving.parts.clock = lambda: now
    saving.checkpointed_at = now - 599
    assert [step for step in range(1, 26) if due_at(saving, step)] == [25]
    saving.checkpointed_at = now - 600
    assert due_at(saving, 7)


def due_at(saving: Saving, step: int) -> bool:
    saving.parts.trainer.step = step
    return saving.is_due()


async def test_a_checkpoint_that_was_missed_at_its_step_is_made_up_for(
    saving: Saving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saving, "keep", lambda: None)  # as if the disk were full
    due = []
    for step in range(30, 90):  # the steps before were repeated at a start
        if due_at(saving, step):
            due.append(step)
            await saving.checkpoint()
    assert due == [30, 55, 80]


async def test_why_a_checkpoint_could_not_be_written_is_kept_until_one_is(
    saving: Saving, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(directory: Path) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    saving.parts.checkpoints.latest()
    saving.parts.trainer.step = 1
    with monkeypatch.context() as patched:
        patched.setattr(saving.parts.trainer, "save", refuse)
        await saving.checkpoint()
    directory = saving.parts.checkpoints.directory
    assert saving.unkept == (
        f"{directory / 'step-1'} could not be written ([Errno 13] Permission denied); "
        f"let this user write to {directory}: every step is journalled meanwhile"
    )
    await saving.checkpoint()
    assert saving.unkept == ""


async def test_what_could_not_be_written_is_tried_again_soon_and_then_less_and_less(
    saving: Saving, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object) -> None:
        raise CheckpointError("no")

    now = 10_000.0
    saving.parts.clock = lambda: now
    saving.checkpointed_at = now
    monkeypatch.setattr(saving.parts.checkpoints, "save", fail)
    await saving.checkpoint()
    tried = []
    for _ in range(2000):
        now += 1
        if saving.is_due():
            tried.append(now - 10_000.0)
            await saving.checkpoint()
    assert tried == [30, 90, 210, 450, 930, 1530]  # 600 s is the age at which one is due anyway


async def test_the_age_of_a_checkpoint_goes_on_over_a_restart(
    saving: Saving, parts: Any, journalled: Callable[..., None]
) -> None:
    os.utime(parts.checkpoints.save(3, Trainer().save, STATE), (time.time() - 500,) * 2)
    journalled(4)
    recovery = await saving.load()
    assert (parts.trainer.step, [record.step for record in recovery.records], saving.saved) == (3, [4], 4)
    assert 499 < time.time() - saving.checkpointed_at < 560
    parts.trainer.step = 4  # as if the journalled one were repeated
    await saving.checkpoint()
    assert time.time() - saving.checkpointed_at < 30


async def test_steps_of_another_model_are_not_repeated(
    saving: Saving, parts: Any, journalled: Callable[..., None]
) -> None:
    journalled(1, model=saving.state()["model"])
    assert [record.step for record in (await saving.load()).records] == [1]
    parts.bundle.fingerprint = b"\2" * 32
    with pytest.raises(CheckpointError, match="has the steps of another model than other"):
        await saving.load()


@pytest.mark.parametrize(("dtype", "told"), [("bfloat16", 0), ("float32", 1)])
async def test_steps_of_another_compute_type_are_repeated_and_told(
    saving: Saving, parts: Any, journalled: Callable[..., None], dtype: str, told: int
) -> None:
    journalled(1, model=saving.state()["model"], dtype=dtype)
    assert [record.step for record in (await saving.load()).records] == [1]
    said = [event["message"] for event in parts.history.events(None, 50)]
    assert sum("were computed in float32, and now it is bfloat16" in one for one in said) == told
