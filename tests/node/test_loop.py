"""The loop's life around a step: recovering from the journal, pausing, and trouble that costs one step only."""

import asyncio
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from node.checkpoint import CheckpointError, CheckpointStore
from node.config import Config
from node.config_train import TrainConfig
from node.device import Device
from node.held_out import RETRIES
from node.history import History
from node.interfaces import Batch, Interrupted, StepSkipped, UpdateStats
from node.journal import JournalRecord
from node.limits import Hold
from node.loop import Loop
from node.progress import Progress
from node.scorer import ScorerError
from protocol.manifest import embedded_manifest
from swarm.experience import StoreFull
from swarm.sampler import Sampler

STATS = UpdateStats(0.0, 0.0, 0.0, 1, 1, 0.0, 0.0, 0.0, 1.0, 0.0, None, 1, 0)
STATE = {"epoch": 3, "taken": 8, "sampler": Sampler(0).state()}


class FakeTrainer:
    """Does a step unless its number is one to be skipped; remembers what it was given."""

    def __init__(self, skip: Sequence[int] = ()) -> None:
        self.step, self.skip, self.given = 0, skip, list[int]()

    def update(self, batch: Batch, should_stop: Callable[[], bool]) -> UpdateStats:
        self.given.append(batch.step)
        if batch.step in self.skip:
            raise StepSkipped("no memory")
        self.step += 1
        return STATS

    def configure(self, config: TrainConfig) -> None: ...

    def memory(self) -> dict[str, int]:
        return {"weights": 4 * self.step}


class FakeEngine:
    async def update_weights(self, version: int) -> None: ...


@pytest.fixture
def make_loop(tmp_path: Path) -> Iterator[Callable[..., Loop]]:
    device, history = Device(), History(tmp_path / "node.db", time.time)

    def make(trainer: FakeTrainer, journalled: Sequence[int] = ()) -> Loop:
        checkpoints = CheckpointStore(tmp_path / "checkpoints", 2)
        checkpoints.latest()
        for step in journalled:
            checkpoints.append(JournalRecord(step, Batch(step, ()), STATE, {"foreign_groups": 0}))
        parts: Any = SimpleNamespace(
            config=Config(),
            manifest=embedded_manifest("one", time.time() - 60),
            peer_id="12D3",
            bundle=None,
            scorer=None,
            device=device,
            engine=FakeEngine(),
            trainer=trainer,
            teacher=None,
            rounds=None,
            averaging=None,
            sampler=Sampler(0),
            checkpoints=CheckpointStore(tmp_path / "checkpoints", 2),
            history=history,
            progress=Progress(time.time, 60.0),
            clock=time.time,
            unreached=str,
        )
        return Loop(parts)

    yield make
    device.close()
    history.close()


async def test_recovery_repeats_the_steps_that_were_done_and_not_those_tried_again(
    make_loop: Callable[..., Loop],
) -> None:
    trainer = FakeTrainer()
    loop = make_loop(trainer, [1, 2, 2, 2, 3])
    await loop.recover()
    assert trainer.given == [1, 2, 3]
    assert loop.saving.saved == trainer.step == 3
    assert (loop.own.position.epoch, loop.own.position.taken) == (3, 8)
    assert [step["step"] for step in loop.parts.history.steps(0, 10)] == [1, 2, 3]


async def test_a_last_step_that_is_skipped_is_not_counted_as_saved(make_loop: Callable[..., Loop]) -> None:
    loop = make_loop(FakeTrainer(skip=[3]), [1, 2, 3])
    await loop.recover()
    assert loop.saving.saved == loop.parts.trainer.step == 2


async def test_a_step_that_can_no_longer_be_repeated_is_not_passed_over(make_loop: Callable[..., Loop]) -> None:
    loop = make_loop(FakeTrainer(skip=[2]), [1, 2, 3])
    with pytest.raises(CheckpointError, match="journalled step 2 cannot be repeated: no memory"):
        await loop.recover()
    assert loop.saving.saved == 3  # it is all on disk still


async def test_many_skipped_steps_are_told_with_what_to_do_until_one_is_not(
    make_loop: Callable[..., Loop], monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = make_loop(FakeTrainer())
    rests: list[float] = []
    told: list[tuple[str, str, str]] = []

    async def rest(seconds: float) -> None:
        rests.append(seconds)

    async def step() -> None:
        loop._say_state()
        told.append(loop.parts.progress.told())
        if len(told) <= 7:
            raise StepSkipped("nothing to be had", "look elsewhere")
        loop.parts.trainer.step += 1

    monkeypatch.setattr("node.loop.asyncio", SimpleNamespace(sleep=rest))
    monkeypatch.setattr(loop, "step", step)
    loop.parts.exchange = SimpleNamespace(transport=SimpleNamespace(peers=list))
    loop.parts.history.record_evaluation(0, {"x": 0.0})
    await loop.run(2)
    assert rests == [1.0, 2.0, 4.0]
    alone = "TRAINING", "alone: no peer connected", "invite somebody: shoal swarm invite"
    assert told[:5] == [alone] * 5
    assert [one[0] for one in told[5:8]] == ["WAITING"] * 3
    assert told[7][1:] == ("7 steps in a row skipped: nothing to be had", "look elsewhere")
    assert told[8] == alone


async def test_who_reaches_nobody_is_told_so(make_loop: Callable[..., Loop]) -> None:
    loop = make_loop(FakeTrainer())
    loop.parts.exchange = SimpleNamespace(transport=SimpleNamespace(peers=list))
    loop.parts.unreached = lambda: "3 tried: connection refused"
    loop._say_state()
    told = loop.parts.progress
    assert (told.state, told.reason) == ("TRAINING", "alone: no peer reachable (3 tried: connection refused)")
    assert told.next == "shoal doctor"


async def test_a_peer_that_goes_amid_a_step_is_not_told_of_until_its_end(make_loop: Callable[..., Loop]) -> None:
    loop, peers = make_loop(FakeTrainer()), ["a peer"]
    loop.parts.exchange = SimpleNamespace(transport=SimpleNamespace(peers=lambda: peers))
    loop._say_state()
    assert loop.parts.progress.told() == ("TRAINING", "with 1 peer", "")
    peers.clear()
    assert loop.parts.progress.told()[1] == "alone: no peer connected"


async def test_a_checkpoint_that_was_not_written_is_told_with_the_company(make_loop: Callable[..., Loop]) -> None:
    loop = make_loop(FakeTrainer())
    loop.parts.exchange = SimpleNamespace(transport=SimpleNamespace(peers=lambda: ["a peer"]))
    loop._say_state()
    loop.saving.unkept = "step-1 could not be written (denied); let this user write to it"
    told = loop.parts.progress.told()
    assert told == ("TRAINING", "with 1 peer; step-1 could not be written (denied)", "let this user write to it")


async def test_a_step_that_waited_for_the_journal_trains_again_before_its_update(
    make_loop: Callable[..., Loop], monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, told = make_loop(FakeTrainer()), list[tuple[str, str, str]]()
    loop.parts.exchange = SimpleNamespace(transport=SimpleNamespace(peers=lambda: ["a peer"]))
    full = [CheckpointError("the step cannot be journalled (No space left); free some disk: training waits for it")]

    class Updated(Exception):
        """The step is as far as this test goes."""

    async def no_groups(*arguments: object) -> list[Any]:
        return []

    def append(record: JournalRecord) -> None:
        if full:
            raise full.pop()

    async def rest(seconds: float) -> None:
        told.append(loop.parts.progress.told())

    async def update(record: JournalRecord) -> None:
        told.append(loop.parts.progress.told())
        raise Updated

    monkeypatch.setattr(loop.foreign, "missing", lambda: 0)
    monkeypatch.setattr(loop.foreign, "choose", no_groups)
    monkeypatch.setattr(loop.own, "roll_out", no_groups)
    monkeypatch.setattr(loop, "_share", lambda own: None)
    monkeypatch.setattr(loop.saving, "state", lambda: STATE)
    monkeypatch.setattr(loop.parts.checkpoints, "append", append)
    monkeypatch.setattr("node.saving.asyncio.sleep", rest)
    monkeypatch.setattr(loop, "_apply", update)
    with pytest.raises(Updated):
        await loop.step()
    words = "the step cannot be journalled (No space left)", "free some disk: training waits for it"
    assert told == [("WAITING", *words), ("TRAINING", "with 1 peer", "")]


async def test_a_stop_amid_an_update_counts_what_is_in_the_journal(make_loop: Callable[..., Loop]) -> None:
    class Interrupts(FakeTrainer):
        def update(self, batch: Batch, should_stop: Callable[[], bool]) -> UpdateStats:
            if self.step == 2:
                raise Interrupted("a stop was asked for")
            return super().update(batch, should_stop)

    loop = make_loop(Interrupts())
    for step in (1, 2):
        await loop._apply(JournalRecord(step, Batch(step, ()), STATE, {"foreign_groups": 0}))
    with pytest.raises(asyncio.CancelledError):
        await loop._apply(JournalRecord(3, Batch(3, ()), STATE, {"foreign_groups": 0}))
    assert (loop.parts.trainer.step, loop.saving.saved) == (2, 3)


async def test_a_stop_amid_replay_knows_what_is_saved(make_loop: Callable[..., Loop]) -> None:
    class Slow(FakeTrainer):
        def update(self, batch: Batch, should_stop: Callable[[], bool]) -> UpdateStats:
            time.sleep(0.05)
            return super().update(batch, should_stop)

    loop = make_loop(Slow(), range(1, 9))
    recovering = asyncio.create_task(loop.recover())
    await asyncio.sleep(0.12)
    recovering.cancel()
    with pytest.raises(asyncio.CancelledError):
        await recovering
    assert loop.parts.trainer.step < 8 == loop.saving.saved


async def test_a_pause_covers_what_it_holds_up_until_it_is_over(make_loop: Callable[..., Loop]) -> None:
    loop = make_loop(FakeTrainer())
    progress = loop.parts.progress
    loop.parts.history.record_evaluation(0, {"a": 0.5})
    progress.hold = playing = Hold("person", "playing", "run shoal resume to go on")
    loop.unpaused.clear()
    progress.say("RESUMING", "replaying")  # said after the pause, as while starting
    assert progress.told() == ("PAUSED", "playing (once it has started)", "run shoal resume to go on")
    running = asyncio.create_task(loop.run(1))
    await asyncio.sleep(0.05)
    assert progress.told() == ("PAUSED", "playing", "run shoal resume to go on")
    running.cancel()
    progress.hold = None
    assert progress.told()[0] == "RESUMING"
    progress.say("TRAINING", "alone")
    progress.enter("step")
    progress.hold = playing
    assert progress.told()[1] == "playing (after the step in progress)"
    progress.say("IDLE", "done")
    assert progress.told()[0] == "IDLE"


def steps_of_nothing(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    async def step() -> None:
        loop.parts.trainer.step += 1

    monkeypatch.setattr(loop, "step", step)


def scores_in_turn(monkeypatch: pytest.MonkeyPatch, *outcomes: float | Exception) -> list[float | Exception]:
    """What each evaluation comes to; the list that is returned holds those to come."""
    left = list(outcomes)

    async def evaluate(*arguments: object) -> dict[str, float]:
        outcome = left.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return {"a": outcome}

    monkeypatch.setattr("node.held_out.held_out", evaluate)
    return left


@pytest.mark.parametrize("trouble", [ScorerError("out of breath"), StoreFull("no room")])
async def test_a_failed_evaluation_costs_a_score_and_not_the_node(
    make_loop: Callable[..., Loop], monkeypatch: pytest.MonkeyPatch, trouble: Exception
) -> None:
    async def fail(*arguments: object) -> None:
        raise trouble

    monkeypatch.setattr("node.held_out.held_out", fail)
    loop = make_loop(FakeTrainer())
    await loop.run(0)
    assert loop.parts.history.held_out_start() is None
    assert loop.parts.history.events(None, 1)[0]["message"] == f"step 0 has no held-out score: {trouble}"


async def test_a_failed_first_evaluation_is_made_up_for_before_the_first_step(
    make_loop: Callable[..., Loop], monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = make_loop(FakeTrainer())
    steps_of_nothing(loop, monkeypatch)
    left = scores_in_turn(monkeypatch, ScorerError("out of breath"), 0.25, 0.5)
    await loop.run(3)
    assert [(found["step"], found["mean"]) for found in loop.parts.history.evaluations(-1, 99)] == [(0, 0.25)]
    assert left == [0.5]


async def test_an_evaluation_counts_its_tasks(make_loop: Callable[..., Loop], monkeypatch: pytest.MonkeyPatch) -> None:
    loop = make_loop(FakeTrainer())
    progress, seen = loop.parts.progress, list[object]()

    async def held_out(*arguments: Any) -> Mapping[str, float]:
        seen.append(progress.count)
        for sampled in (1, 2):
            arguments[-1](8, sampled)
            seen.append(progress.count)
        return {"sums": 0.5}

    monkeypatch.setattr("node.held_out.held_out", held_out)
    await loop.evaluations.take()
    assert [*seen, progress.count] == [None, (1, 8), (2, 8), None]


async def test_an_evaluation_that_keeps_failing_is_not_tried_at_every_step(
    make_loop: Callable[..., Loop], monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = make_loop(FakeTrainer())
    steps_of_nothing(loop, monkeypatch)
    left = scores_in_turn(monkeypatch, *[ScorerError("gone")] * 10)
    await loop.run(8)
    assert 10 - len(left) == 1 + RETRIES


async def test_the_best_weights_are_those_that_could_be_written(
    make_loop: Callable[..., Loop], monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = make_loop(FakeTrainer())
    loop.parts.checkpoints.latest()
    scores_in_turn(monkeypatch, 0.3, 0.2, 0.9, 0.5, 0.4)
    full, writes = CheckpointError("no room"), list[int]()

    def export(directory: Path) -> None:
        writes.append(loop.parts.trainer.step)
        if loop.parts.trainer.step == 2:
            raise full
        (directory / "model.safetensors").write_text("w")

    loop.parts.trainer.export = export  # type: ignore[method-assign]
    for step in range(5):
        loop.parts.trainer.step = step
        await loop.evaluations.take()
    assert writes == [2, 3]  # worse than the initial model: no; failed; better than what there is; worse than that
    assert (loop.parts.checkpoints.find("best").step, loop.parts.checkpoints.best_score()) == (3, 0.5)
    assert [found["mean"] for found in loop.parts.history.evaluations(-1, 99)] == [0.3, 0.2, 0.9, 0.5, 0.4]
    assert [event["message"] for event in loop.parts.history.events(None, 9)] == ["no room"]


@pytest.mark.parametrize("wanted", [True, False])
async def test_a_policy_that_has_declined_goes_back_to_its_best_weights(
    make_loop: Callable[..., Loop], monkeypatch: pytest.MonkeyPatch, wanted: bool
) -> None:
    class Trainer(FakeTrainer):
        weights = "initial"

        def export(self, directory: Path) -> None:
            (directory / "model.safetensors").write_text(self.weights)

        def load(self, directory: Path) -> None:
            self.weights = (directory / "model.safetensors").read_text()
            self.step = json.loads((directory / "trainer.json").read_text())["step"]
            assert {found.name for found in directory.iterdir()} == {
                "model.safetensors", "trainer.json", "state.json", "files.json"
            }  # fmt: skip

    trainer = Trainer()
    loop = make_loop(trainer)
    parts = loop.parts
    parts.config = Config.model_validate({"eval": {"every": 1, "tasks": 128, "roll_back": wanted}})
    parts.checkpoints.latest()

    async def offer() -> None:
        offered.append(trainer.step)

    offered = list[int]()
    monkeypatch.setattr(loop, "_offer", offer)
    monkeypatch.setattr(loop.saving, "state", lambda: STATE)
    scores = {1: 0.5, 2: 0.3, 3: 0.5, 4: 0.3, 5: 0.3}  # one that is low is chance; two in a row are not
    scores_in_turn(monkeypatch, *scores.values(), *([0.45] if wanted else []))
    for step in scores:
        trainer.step, trainer.weights = step, f"of step {step}"
        await loop.evaluations.take()
        if loop.evaluations.declined:
            await loop._roll_back()
    told = [event["message"] for event in parts.history.events(None, 9) if event["level"] == "warning"]
    assert told[0].startswith("the held-out score of step 2, 0.300, is far below the best, 0.500; ")
    if wanted:
        again = CheckpointStore(parts.checkpoints.directory, 2).latest()  # what a start finds after a kill
        assert (trainer.weights, trainer.step, offered) == ("of step 1", 6, [6])
        assert told[-1].startswith("step 6 is the best weights again")
        assert (again.step, again.records) == (6, [])
        assert parts.history.held_out_latest() == 0.45
    else:
        assert (trainer.weights, trainer.step, offered) == ("of step 5", 5, [])
        assert "shoal checkpoint rollback best" in told[-1]
    assert not loop.evaluations.declined


async def test_time_in_a_pause_is_no_age_of_a_step(
    make_loop: Callable[..., Loop], monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = make_loop(FakeTrainer())
    loop.parts.history.record_evaluation(0, {"a": 0.5})
    steps_of_nothing(loop, monkeypatch)
    now = 1000.0
    loop.parts.clock = loop.parts.progress.clock = lambda: now
    loop.parts.progress.last_step_at = now
    loop.unpaused.clear()
    running = asyncio.create_task(loop.run(1))
    await asyncio.sleep(0.05)
    now = 9000.0
    assert loop.parts.progress.step_age(now) == 8000.0
    loop.unpaused.set()
    await running
    assert loop.parts.progress.step_age(9004.0) == 4.0
    assert Progress(time.time, 60.0).step_age(5.0) is None


async def test_settings_change_between_two_steps_and_not_in_one(
    make_loop: Callable[..., Loop], monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = make_loop(FakeTrainer())
    parts, seen = loop.parts, list[tuple[Any, ...]]()
    parts.history.record_evaluation(0, {"a": 0.5})
    configured = list[TrainConfig]()
    monkeypatch.setattr(parts.trainer, "configure", configured.append)
    wanted = Config.model_validate(
        {
            "swarm": {"own_groups": 2, "foreign_groups": 1},
            "train": {"learning_rate": 0.5, "curriculum_low": 0.25},
            "rollout": {"temperature": 0.5},
            "checkpoint": {"keep": 7},
        }
    )

    def now() -> tuple[Any, ...]:
        swarm = parts.config.swarm
        own = loop.own
        return (
            swarm.own_groups,
            loop.foreign.share.most,
            own.rollouts.config.rollout.temperature,
            own.curriculum.low,
            parts.checkpoints.keep,
            [train.learning_rate for train in configured],
        )

    async def step() -> None:
        seen.append(now())
        loop.change(wanted)
        await asyncio.sleep(0)
        seen.append(now())
        parts.trainer.step += 1

    monkeypatch.setattr(loop, "step", step)
    await loop.run(2)
    before, after = (4, 4, 1.0, 0.0, 2, []), (2, 1, 0.5, 0.25, 7, [0.5])
    assert seen == [before, before, after, after]
    assert parts.config is wanted


async def test_a_start_that_is_held_repeats_no_step_until_it_may(make_loop: Callable[..., Loop]) -> None:
    trainer = FakeTrainer()
    loop = make_loop(trainer, [1, 2])
    loop.unpaused.clear()
    recovering = asyncio.create_task(loop.recover())
    await asyncio.sleep(0.2)
    assert (loop.parts.progress.stage, loop.saving.saved, trainer.given) == ("paused", 2, [])
    loop.unpaused.set()
    await recovering
    assert (loop.parts.progress.stage, trainer.given) == ("start", [1, 2])


async def test_a_scorer_that_fails_skips_the_step(
    make_loop: Callable[..., Loop], monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = make_loop(FakeTrainer())

    async def fail(*arguments: object, long: bool) -> None:
        raise ScorerError("out of breath")

    monkeypatch.setattr(loop.own.rollouts, "take", fail)
    with pytest.raises(StepSkipped, match="the scorer failed: out of breath"):
        await loop.own.roll_out(1, 4)
