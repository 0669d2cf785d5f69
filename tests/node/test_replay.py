"""A start repeats journalled updates with the settings they were made with, and survives one that kills it."""

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from node import journal
from node.checkpoint import CheckpointError, CheckpointStore
from node.config import Config
from node.config_train import TrainConfig
from node.device import Device
from node.history import History
from node.interfaces import Batch, Interrupted, StepSkipped, TrainGroup, TrainSequence, UpdateStats
from node.journal import JournalRecord
from node.loop import Loop
from node.models import load_model
from node.progress import Progress, StageTimeout
from node.replay import Attempts, settings_of
from node.training.local import LocalTrainer
from swarm.sampler import Sampler

SUMMARY = {"foreign_groups": 0}


class FakeEngine:
    async def update_weights(self, version: int) -> None: ...


class Heavy:
    """A trainer that some updates are too much for: they raise `trouble`. Remembers what it was given."""

    def __init__(self, too_much: tuple[int, ...] = (), trouble: type[BaseException] = StageTimeout) -> None:
        self.step, self.too_much, self.trouble, self.given = 0, too_much, trouble, list[int]()
        self.config = TrainConfig()

    def configure(self, config: TrainConfig) -> None:
        self.config = config

    def update(self, batch: Batch, should_stop: Callable[[], bool]) -> UpdateStats:
        self.given.append(batch.step)
        if batch.step in self.too_much:
            raise self.trouble("it took too long")
        self.step += 1
        return UpdateStats(0.0, 0.0, 0.0, 1, 1, 0.0, 0.0, 0.0, 1.0, 0.0, None, 1, 0)

    def memory(self) -> dict[str, int]:
        return {}


@pytest.fixture
def life(tmp_path: Path) -> Iterator[Callable[..., Loop]]:
    """The loop of one process after another on the same directory."""
    device, history = Device(), History(tmp_path / "node.db", time.time)

    def begin(trainer: Any, **train: Any) -> Loop:
        checkpoints = CheckpointStore(tmp_path / "checkpoints", 2)
        parts: Any = SimpleNamespace(
            config=Config(train=TrainConfig(**train)),
            bundle=None,
            scorer=None,
            device=device,
            engine=FakeEngine(),
            trainer=trainer,
            averaging=None,
            rounds=None,
            sampler=Sampler(0),
            checkpoints=checkpoints,
            history=history,
            progress=Progress(time.time, 60.0),
            clock=time.time,
        )
        checkpoints.latest()
        return Loop(parts)

    yield begin
    device.close()
    history.close()


def record(step: int, taken: int = 0, train: TrainConfig | None = None) -> JournalRecord:
    sequences = tuple(TrainSequence((5 + step, 6, 7), (True,) * 3, sign, None) for sign in (1.0, -1.0))
    state = {"epoch": 3, "taken": taken, "sampler": Sampler(0).state()}
    batch = Batch(step, (TrainGroup((9, 8), sequences, "own"),))
    return JournalRecord(step, batch, state, SUMMARY, (train or TrainConfig()).model_dump(mode="json"))


def messages(loop: Loop) -> list[str]:
    return [event["message"] for event in loop.parts.history.events(None, 100)]


async def test_steps_are_repeated_with_the_settings_they_were_made_with(
    life: Callable[..., Loop], tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    def trainer(config: TrainConfig) -> LocalTrainer:
        bundle = load_model(str(tiny_model("llama")), device="cpu", dtype="float32", models=tmp_path)
        return LocalTrainer(bundle, config, dumps=tmp_path / "dumps")

    def weights(loop: Loop) -> list[torch.Tensor]:
        assert isinstance(loop.parts.trainer, LocalTrainer)
        return [weight.detach().clone() for weight in loop.parts.trainer.weights.masters.values()]

    async def train(loop: Loop, step: int) -> None:
        made = record(step, train=loop.parts.config.train)
        await loop.saving.journal(made)
        await loop._apply(made)

    then = TrainConfig(learning_rate=1e-2, warmup_steps=0, loss="reinforce", weight_decay=0.1)
    first = life(trainer(then), **then.model_dump())
    for step in (1, 2):
        await train(first, step)

    now = TrainConfig(learning_rate=1e-4, warmup_steps=0)
    second = life(trainer(now), **now.model_dump())  # the first one was killed, then the settings were changed
    await second.recover()
    assert all(map(torch.equal, weights(first), weights(second)))
    assert second.parts.trainer.config == now  # type: ignore[attr-defined]
    await train(second, 3)

    third = life(trainer(then), **then.model_dump())
    await third.recover()
    assert all(map(torch.equal, weights(second), weights(third)))
    assert third.parts.trainer.step == 3


def test_a_smaller_token_budget_holds_for_old_steps_too() -> None:
    made = record(1, train=TrainConfig(tokens_per_micro_batch=1024, learning_rate=0.5))
    found = settings_of(made, TrainConfig(tokens_per_micro_batch=256))
    assert found == TrainConfig(tokens_per_micro_batch=256, learning_rate=0.5)
    assert settings_of(made, TrainConfig(tokens_per_micro_batch=4096)) == TrainConfig(
        tokens_per_micro_batch=1024, learning_rate=0.5
    )


async def test_records_without_settings_are_repeated_with_the_present_ones_and_it_is_said(
    life: Callable[..., Loop], tmp_path: Path
) -> None:
    class Old(msgspec.Struct, array_like=True):
        """A record as Shoal wrote it before it kept the settings."""

        step: int
        batch: Batch
        state: dict[str, Any]
        summary: dict[str, Any]

    trainer = Heavy()
    loop = life(trainer, learning_rate=0.25)
    made = record(1)
    old: Any = Old(made.step, made.batch, made.state, made.summary)
    journal.append(tmp_path / "checkpoints" / "journal-0.bin", old)
    strange = msgspec.structs.replace(record(2), train={"learning_rate": -1})
    journal.append(tmp_path / "checkpoints" / "journal-0.bin", strange)
    await loop.recover()
    assert trainer.given == [1, 2]
    assert trainer.config.learning_rate == 0.25
    assert messages(loop)[0].startswith("2 updates (steps 1 to 2) were journalled without settings that this version")


async def die(loop: Loop, trouble: type[BaseException] = StageTimeout) -> None:
    with pytest.raises(trouble):
        await loop.recover()


async def test_a_last_step_that_ended_two_starts_is_left_out(life: Callable[..., Loop]) -> None:
    first = life(Heavy((2,)))
    for step in (1, 2):
        first.parts.checkpoints.append(record(step, taken=4 * step))
    for _ in range(2):
        await die(life(Heavy((2,))))
    for _ in range(2):  # and stays left out until there is another one
        trainer = Heavy((2,))
        loop = life(trainer)
        await loop.recover()
        assert trainer.given == [1]
        assert loop.saving.saved == trainer.step == 1
        assert loop.own.position.taken == 8  # not the same tasks again
    assert messages(loop)[-3:-1] == [
        "2 starts ended while they repeated step 2",
        "the update of step 2 is left out and the step tried again with other groups; if that happens again, lower "
        "train.tokens_per_micro_batch or raise limits.stage_seconds",
    ]

    loop.parts.checkpoints.append(record(2, taken=12))  # tried again with other groups: two attempts of its own
    for _ in range(2):
        await die(life(Heavy((2,))))
    trainer = Heavy()
    loop = life(trainer)
    await loop.recover()
    assert trainer.given == [1]
    assert loop.own.position.taken == 12


async def test_a_step_that_was_done_outlives_starts_that_are_killed_amid_repeating_it(
    life: Callable[..., Loop],
) -> None:
    first = life(Heavy())
    for step in (1, 2):
        first.parts.checkpoints.append(record(step))
    await first.recover()  # both are done, and in the history
    for _ in range(3):
        await die(life(Heavy((2,))))
    trainer = Heavy()
    again = life(trainer)
    await again.recover()
    assert trainer.given == [1, 2]
    assert again.parts.history.last_step()["step"] == 2
    assert set(again.parts.progress.stages) == {"update", "weights"}, "of the last step only, and of no start"
    for _ in range(8):
        await die(life(Heavy((2,))))
    await (last := life(Heavy((2,)))).recover()
    assert last.saving.saved == 1, "memory may be short now: no start is kept from training for ever"


async def test_a_step_that_others_follow_is_tried_at_every_start(life: Callable[..., Loop]) -> None:
    first = life(Heavy())
    for step in (1, 2, 3):
        first.parts.checkpoints.append(record(step))
    for _ in range(4):
        await die(life(Heavy((2,))))
    trainer = Heavy()
    loop = life(trainer)
    await loop.recover()
    assert trainer.given == [1, 2, 3]
    assert "4 starts ended while they repeated step 2" in messages(loop)
    assert not (loop.parts.checkpoints.directory / "replay.json").exists()


async def test_a_stop_or_a_skip_is_no_failed_attempt(life: Callable[..., Loop], tmp_path: Path) -> None:
    first = life(Heavy())
    for step in (1, 2):
        first.parts.checkpoints.append(record(step))
    await die(life(Heavy((2,))))
    for _ in range(3):
        await die(life(Heavy((2,), Interrupted)), asyncio.CancelledError)
    assert list(json.loads((tmp_path / "checkpoints" / "replay.json").read_text()).values()) == [1]
    for _ in range(3):
        loop = life(Heavy((2,), StepSkipped))
        await loop.recover()
        assert loop.saving.saved == 1
    assert not (tmp_path / "checkpoints" / "replay.json").exists()
    with pytest.raises(CheckpointError, match="journalled step 1 cannot be repeated: it took too long"):
        await life(Heavy((1,), StepSkipped)).recover()


def test_attempts_without_a_disk_are_not_counted_and_stop_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    attempts = Attempts(tmp_path)
    monkeypatch.setattr("node.replay.write_atomic", full)
    attempts.begin(record(1))
    assert attempts.failed(record(1)) == 0
    assert "the attempt to repeat step 1 is not counted: [Errno 28]" in caplog.text
    (tmp_path / "replay.json").write_text("[]")
    assert attempts.failed(record(1)) == 0
