"""The sharded trainer against the local one: the same numbers, checkpoints that either goes on from, lost workers."""

import dataclasses
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch

from node.checkpoint import CheckpointError
from node.config_train import TrainConfig
from node.interfaces import Batch, Interrupted, StepSkipped, TrainerLost, UpdateStats
from node.models import load_model
from node.training.local import LocalTrainer
from node.training.sharded import ShardedTrainer
from tests.node.fsdp.conftest import SETTINGS, batch

pytestmark = [pytest.mark.slow, pytest.mark.network]

Local = Callable[..., LocalTrainer]


@pytest.fixture(scope="module")
def two(sharded: Callable[..., ShardedTrainer]) -> ShardedTrainer:
    """Two processes, for all tests of this file: each goes on from what the one before left."""
    return sharded()


@pytest.fixture
def fresh(two: ShardedTrainer, local: Local, tmp_path: Path) -> ShardedTrainer:
    """The two with the initial model, no moments and the settings that there were at first."""
    two.configure(TrainConfig(**SETTINGS, shards=2))
    start = saved(local(), tmp_path / "start")
    two.load(start)
    return two


def saved(trainer: LocalTrainer | ShardedTrainer, directory: Path) -> Path:
    directory.mkdir()
    trainer.save(directory)
    return directory


def same(ours: UpdateStats, theirs: UpdateStats) -> None:
    """But for how the work was divided."""
    divided = ("tokens_forwarded", "micro_batches")
    for field in dataclasses.fields(UpdateStats):
        if field.name not in divided:
            mine, other = getattr(ours, field.name), getattr(theirs, field.name)
            assert mine == (other if other is None else pytest.approx(other, rel=2e-5, abs=2e-6)), field.name


def same_weights(ours: ShardedTrainer, theirs: LocalTrainer) -> None:
    """The node's own model, which is what the workers have, against the local trainer's."""
    for mine, other in zip(ours.bundle.model.parameters(), theirs.model.parameters(), strict=True):
        torch.testing.assert_close(mine, other, atol=2e-6, rtol=0)


def test_updates_are_those_of_the_local_trainer(fresh: ShardedTrainer, local: Local) -> None:
    trainer = local()
    for step, groups in ((1, 3), (2, 3), (3, 1)):  # the last one is not enough work for two
        given = batch(step, groups)
        theirs = trainer.update(given)
        ours = fresh.update(given)
        same(ours, theirs)
        assert theirs.micro_batches == (1 if groups == 1 else 3)
        same_weights(fresh, trainer)
    assert fresh.step == 3
    for ours, theirs in zip(fresh.logprobs(given.groups), trainer.logprobs(given.groups), strict=True):
        assert [pytest.approx(row, abs=2e-5) for row in theirs] == ours
    held, alone = fresh.memory(), trainer.memory()
    assert held["weights"] == alone["weights"]
    assert held["gradients"] == 0


def test_a_critic_a_reference_and_several_optimizer_steps(fresh: ShardedTrainer, local: Local) -> None:
    settings = {
        "advantage": "gae",
        "passes": 2,
        "mini_batches": 2,
        "kl_coefficient": 0.1,
        "kl_in": "reward",
        "gradient_checkpointing": "on",
    }
    trainer = local(**settings)
    fresh.configure(TrainConfig(**SETTINGS, **settings, shards=2))
    for step in (1, 2):
        theirs = trainer.update(batch(step))
        ours = fresh.update(batch(step))
        assert ours.optimizer_steps == theirs.optimizer_steps == 4
        same(ours, theirs)
    same_weights(fresh, trainer)


def test_what_teaches_nothing_is_skipped_by_all(fresh: ShardedTrainer) -> None:
    groups = batch().groups
    even = [tuple(s.__class__(s.token_ids, s.mask, 0.5, None) for s in group.sequences) for group in groups]
    uniform = Batch(1, tuple(g.__class__(g.prompt_ids, s, g.origin) for g, s in zip(groups, even, strict=True)))
    with pytest.raises(StepSkipped, match="all groups are uniform"):
        fresh.update(uniform)
    poisoned = batch()
    bad = poisoned.groups[0].sequences[0]
    nan = bad.__class__(bad.token_ids, bad.mask, float("nan"), None)
    first = poisoned.groups[0]
    first = first.__class__(first.prompt_ids, (nan, *first.sequences[1:]), "own")
    with pytest.raises(StepSkipped, match="the loss is nan"):
        fresh.update(Batch(1, (first, *poisoned.groups[1:])))
    assert fresh.step == 0
    assert fresh.update(batch()).optimizer_steps == 1  # and all go on


def test_checkpoints_go_on_with_one_two_and_three_processes(
    fresh: ShardedTrainer, local: Local, sharded: Callable[..., ShardedTrainer], tmp_path: Path
) -> None:
    straight = local()
    for step in (1, 2, 3):
        straight.update(batch(step))
    fresh.update(batch(1))
    by_two = saved(fresh, tmp_path / "two")
    assert {path.name for path in by_two.glob("exp_avg-*")} == {
        "exp_avg-00001-of-00002.safetensors",
        "exp_avg-00002-of-00002.safetensors",
    }
    exported = load_model(str(by_two), device="cpu", dtype="float32", models=tmp_path)  # it is a model directory, too
    for mine, other in zip(exported.model.parameters(), fresh.bundle.model.parameters(), strict=True):
        assert torch.equal(mine, other)

    three = sharded(shards=3)
    three.load(by_two)
    assert three.step == 1
    three.update(batch(2))
    by_three = saved(three, tmp_path / "three")
    three.close()
    alone = local()
    alone.load(by_three)
    alone.update(batch(3))
    same_weights(three, straight_at(local, 2))
    for mine, other in zip(alone.model.parameters(), straight.model.parameters(), strict=True):
        torch.testing.assert_close(mine, other, atol=3e-6, rtol=0)
    fresh.load(saved(alone, tmp_path / "alone"))
    assert fresh.step == 3
    same_weights(fresh, alone)

    (by_two / "exp_avg-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"exp_avg-00002-of-00002\.safetensors cannot be read"):
        fresh.load(by_two)


def straight_at(local: Local, steps: int) -> LocalTrainer:
    trainer = local()
    for step in range(1, steps + 1):
        trainer.update(batch(step))
    return trainer


def test_lost_workers_are_told_by_cause_and_started_again(fresh: ShardedTrainer, local: Local, tmp_path: Path) -> None:
    fresh.update(batch(1))
    kept = saved(fresh, tmp_path / "kept")
    victims = [psutil.Process(pid) for pid in fresh.workers.pids]
    threading.Timer(0.05, os.kill, (fresh.workers.pids[1], signal.SIGKILL)).start()

    def train_on() -> None:
        for step in range(2, 1000):
            fresh.update(batch(step))

    with pytest.raises(TrainerLost, match=r"worker 2 \(process \d+\) was ended by SIGKILL") as lost:
        train_on()
    assert not any(victim.is_running() for victim in victims)  # who is left alone is ended, too
    with pytest.raises(TrainerLost, match="workers have ended"):
        fresh.logprobs(batch().groups)

    lost.value.again()
    assert fresh.step == 0
    fresh.load(kept)
    fresh.update(batch(2))
    same_weights(fresh, straight_at(local, 2))

    with pytest.raises(Interrupted):
        fresh.update(batch(3), lambda: True)  # a node that is about to end does not wait for a step
    assert fresh.workers.pids == []


def test_the_compute_type_is_that_of_a_local_trainer(sharded: Callable[..., ShardedTrainer], local: Local) -> None:
    """One process is a group, too. Its masters are the files' float32, and the local trainer's are rounded at first."""
    ours, theirs = sharded(shards=1, dtype="bfloat16"), local(dtype="bfloat16")
    assert {weight.dtype for weight in ours.bundle.model.parameters()} == {torch.bfloat16}
    first, same_first = ours.update(batch()), theirs.update(batch())
    assert first.loss == pytest.approx(same_first.loss, rel=1e-4)
    assert first.grad_norm == pytest.approx(same_first.grad_norm, rel=1e-4)
    for mine, other in zip(ours.bundle.model.parameters(), theirs.model.parameters(), strict=True):
        # Adam's first step is the learning rate one way or the other; a weight below 1 is rounded to 2^-8 of it
        torch.testing.assert_close(mine, other, atol=2 * SETTINGS["learning_rate"], rtol=2**-7)
    [row, *_] = ours.logprobs(batch().groups)[0]
    assert row == pytest.approx(theirs.logprobs(batch().groups)[0][0], abs=0.1)
