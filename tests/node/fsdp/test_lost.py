"""A trainer that is lost in the loop: the step is repeated from the journal, after a pause, and people are told."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from node.checkpoint import CheckpointStore
from node.config import Config
from node.config_train import TrainConfig
from node.device import Device
from node.history import History
from node.interfaces import Batch, TrainerLost, UpdateStats
from node.journal import JournalRecord
from node.loop import Loop
from node.making import start_engines
from node.progress import Progress
from protocol.manifest import embedded_manifest
from swarm.sampler import Sampler

STATS = UpdateStats(0.0, 0.0, 0.0, 1, 1, 0.0, 0.0, 0.0, 1.0, 0.0, None, 1, 0)
STATE = {"epoch": 3, "taken": 8, "sampler": Sampler(0).state()}


class Fragile:
    """Is lost in the updates whose turn is in `losses`; started again, it is at step 0."""

    def __init__(self, losses: set[int]) -> None:
        self.step, self.turn, self.losses = 0, 0, losses
        self.given = list[int]()
        self.starts = 0

    def again(self) -> None:
        self.step = 0
        self.starts += 1
        if self.starts == 2:
            raise TrainerLost("worker 1 did not come up", self.again)

    def update(self, batch: Batch, should_stop: Callable[[], bool]) -> UpdateStats:
        self.given.append(batch.step)
        self.turn += 1
        if self.turn in self.losses:
            raise TrainerLost("worker 2 (process 7) was ended by SIGKILL\nand its log", self.again)
        self.step += 1
        return STATS

    def configure(self, config: TrainConfig) -> None: ...

    def memory(self) -> dict[str, int]:
        return {}


class FakeEngine:
    async def update_weights(self, version: int) -> None: ...


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    made: list[float] = []

    async def sleep(seconds: float) -> None:
        made.append(seconds)

    monkeypatch.setattr("node.loop.asyncio.sleep", sleep)
    return made


Make = Callable[[Fragile], Loop]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """A loop whose steps are updates of nothing, journalled like others."""
    device, history = Device(), History(tmp_path / "node.db", time.time)

    def made(trainer: Fragile) -> Loop:
        parts: Any = SimpleNamespace(
            config=Config(),
            manifest=embedded_manifest("one", time.time() - 60),
            peer_id="12D3",
            bundle=None,
            scorer=SimpleNamespace(knows=lambda ref: True),
            device=device,
            engine=FakeEngine(),
            trainer=trainer,
            teacher=None,
            averaging=None,
            rounds=None,
            sampler=Sampler(0),
            checkpoints=CheckpointStore(tmp_path / "checkpoints", 2),
            history=history,
            progress=Progress(time.time, 60.0),
            clock=time.time,
        )
        loop = Loop(parts)
        history.record_evaluation(0, {"x": 0.0})

        async def step() -> None:
            number = trainer.step + 1
            record = JournalRecord(number, Batch(number, ()), STATE, {"foreign_groups": 0})
            await loop.saving.journal(record)
            await loop._apply(record)

        monkeypatch.setattr(loop, "step", step)
        return loop

    yield made
    device.close()
    history.close()


LOST = "the trainer is lost: worker 2 (process 7) was ended by SIGKILL"


async def test_a_lost_step_is_repeated_from_the_journal(
    make: Make, pauses: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Fragile({2, 4})  # step 2 at its first turn, and as it is repeated
    loop, told = make(trainer), list[tuple[str, str, str]]()
    say = Progress.say

    def listen(progress: Progress, state: Any, reason: str = "", next: str = "") -> None:
        told.append((state, reason, next))
        say(progress, state, reason, next)

    monkeypatch.setattr(Progress, "say", listen)
    await loop.recover()
    await loop.run(3)
    assert trainer.step == 3
    # 1, then 2 lost; repeated: 1, 2 lost again; started twice, since it did not come up; 1, 2; and on to 3
    assert trainer.given == [1, 2, 1, 2, 1, 2, 3]
    assert trainer.starts == 3
    assert pauses == [1.0, 2.0, 4.0]
    assert loop._losses == 0
    assert [one["step"] for one in loop.parts.history.steps(0, 10)] == [1, 2, 3]
    assert trainer_events(loop) == [
        f"{LOST}; it is started again in 1 s",
        f"{LOST}; it is started again in 2 s",
        "the trainer is lost: worker 1 did not come up; it is started again in 4 s",
    ]
    assert ("WAITING", f"{LOST}; it is started again", "if that goes on, read the log: shoal logs") in told


async def test_an_update_that_kills_every_time_is_left_out(make: Make, pauses: list[float]) -> None:
    trainer = Fragile({2, 4, 6})
    loop = make(trainer)
    await loop.recover()
    await loop.run(2)
    assert trainer.given == [1, 2, 1, 2, 1, 2, 1, 2]  # the last one is another try of step 2, with other groups
    said = [event["message"] for event in loop.parts.history.events(None, 50) if event["kind"] == "resume"]
    assert any("the update of step 2 is left out and the step tried again with other groups" in one for one in said)
    assert len(trainer_events(loop)) == 4


async def test_a_trainer_that_is_lost_as_the_best_weights_are_exported_costs_them_only(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Fragile(set())
    loop = make(trainer)
    trainer.step = 1
    loop.parts.checkpoints.directory.mkdir()

    async def scores(*_: Any) -> dict[str, float]:
        return {"x": 0.5}

    def lost(directory: Path) -> None:
        raise TrainerLost("worker 1 was ended by SIGKILL", trainer.again)

    monkeypatch.setattr("node.held_out.held_out", scores)
    monkeypatch.setattr(trainer, "export", lost, raising=False)
    await loop.evaluations.take()
    assert not loop.evaluations.owed
    assert [event["message"] for event in loop.parts.history.events(None, 9) if event["kind"] == "checkpoint"] == [
        "worker 1 was ended by SIGKILL"
    ]


async def test_settings_that_a_lost_trainer_did_not_get_are_had_by_the_next_one(
    make: Make, pauses: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Fragile(set())
    loop, had = make(trainer), list[float]()
    await loop.recover()

    def configure(config: TrainConfig) -> None:
        had.append(config.learning_rate)
        if len(had) == 1:
            raise TrainerLost("worker 1 was ended by SIGKILL", trainer.again)

    monkeypatch.setattr(trainer, "configure", configure)
    loop.change(Config.model_validate({"train": {"learning_rate": 0.5}}))
    await loop.run(1)
    assert (trainer.step, trainer.starts, set(had)) == (1, 1, {0.5})


async def test_a_trainer_that_was_lost_while_engines_started_is_had_again_before_the_check(
    make: Make, pauses: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Fragile(set())
    loop, checked = make(trainer), list[str]()
    await loop.recover()

    async def check(engine: Any, trainer: Fragile, *_: Any, **__: Any) -> None:
        checked.append(engine)
        if len(checked) == 2:
            raise TrainerLost("worker 2 was ended by SIGKILL", trainer.again)

    async def prompts(parts: Any) -> list[tuple[int, ...]]:
        return [(1, 2)]

    monkeypatch.setattr("node.making.check_agreement", check)
    monkeypatch.setattr("node.making._check_prompts", prompts)
    parts: Any = loop.parts
    parts.bundle = SimpleNamespace(model=SimpleNamespace(dtype="torch.float32"), routing=None)
    node: Any = SimpleNamespace(progress=parts.progress, device=parts.device)
    engines: Any = ["first", "second"]
    await start_engines(node, engines, parts, loop)
    assert checked == ["first", "second", "second"]
    assert trainer.starts == 1
    assert trainer_events(loop) == ["the trainer is lost: worker 2 was ended by SIGKILL; it is started again in 1 s"]


def trainer_events(loop: Loop) -> list[str]:
    events = loop.parts.history.events(None, 50)
    return [event["message"] for event in events if event["kind"] == "trainer"]
