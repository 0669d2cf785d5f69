"""Updates repeated with other settings than the present ones, and what is kept of a batch that gave no update."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from node.config_train import TrainConfig
from node.interfaces import Batch, StepSkipped, TrainGroup, TrainSequence
from node.models import load_model
from node.training import dumps
from node.training.local import LocalTrainer

Make = Callable[..., LocalTrainer]


@pytest.fixture
def make(tiny_model: Callable[[str], Path], tmp_path: Path) -> Make:
    def trainer(**settings: Any) -> LocalTrainer:
        bundle = load_model(str(tiny_model("llama")), device="cpu", dtype="float32", models=tmp_path)
        return LocalTrainer(bundle, TrainConfig(**settings), dumps=tmp_path / "dumps")

    return trainer


def batch(step: int, advantage: float = 1.0) -> Batch:
    sequences = tuple(TrainSequence((5 + i, 6, 7), (True,) * 3, sign, None) for i, sign in enumerate((advantage, -1.0)))
    return Batch(step, (TrainGroup((9, 8), sequences, "own"),))


def weights(trainer: LocalTrainer) -> list[torch.Tensor]:
    return [weight.detach().clone() for weight in trainer.weights.masters.values()]


THEN = {"learning_rate": 1e-2, "weight_decay": 0.1, "betas": (0.5, 0.6), "warmup_steps": 0, "max_grad_norm": 0.5}


def test_updates_take_the_settings_they_are_given(make: Make) -> None:
    straight, changed = make(**THEN), make(learning_rate=1e-5)
    changed.configure(straight.config)
    for step in (1, 2):
        assert straight.update(batch(step)) == changed.update(batch(step))
    assert all(map(torch.equal, weights(straight), weights(changed)))


def test_a_reference_that_is_asked_for_later_is_the_initial_model(make: Make) -> None:
    straight, changed = make(kl_coefficient=0.5, learning_rate=1e-2), make(learning_rate=1e-2)
    straight.configure(changed.config)
    assert straight.reference is None
    for trainer in (straight, changed):
        trainer.update(batch(1))
    initial = make(kl_coefficient=0.5, learning_rate=1e-2)
    changed.configure(initial.config)
    found = changed.reference.state_dict()
    assert all(torch.equal(found[name], value) for name, value in initial.reference.state_dict().items())
    assert changed.update(batch(2)).kl_reference != 0


def test_a_critic_that_is_switched_on_again_starts_anew_wherever_the_process_started(
    make: Make, tmp_path: Path
) -> None:
    gae, grpo = TrainConfig(advantage="gae"), TrainConfig()
    begun = make(advantage="gae")
    begun.update(batch(1))
    (tmp_path / "step-1").mkdir()
    begun.save(tmp_path / "step-1")

    def go_on(trainer: LocalTrainer, steps: tuple[TrainConfig, ...]) -> list[torch.Tensor]:
        for config in steps:
            trainer.configure(config)
            trainer.update(batch(trainer.step + 1))
        return weights(trainer)

    resumed = make(advantage="gae")
    resumed.load(tmp_path / "step-1")
    live, replayed = go_on(begun, (gae, grpo, gae)), go_on(resumed, (gae, grpo, gae))
    assert all(torch.equal(a, b) for a, b in zip(live, replayed, strict=True))


def test_a_bad_batch_on_a_full_disk_is_a_skipped_step(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    trainer = make()
    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(
        StepSkipped, match=r"the loss is nan; no update was made, and the batch could not be .*No space"
    ):
        trainer.update(batch(1, advantage=float("nan")))
    assert trainer.step == 0


def test_only_the_last_few_bad_batches_are_kept(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dumps, "KEPT", 3)
    trainer = make()
    for step in range(1, 6):
        with pytest.raises(StepSkipped, match=f"the batch is in .*step-{step}.msgpack"):
            trainer.update(batch(step, advantage=float("nan")))
        os.utime(tmp_path / "dumps" / f"step-{step}.msgpack", (step, step))
    assert sorted(path.name for path in (tmp_path / "dumps").iterdir()) == [f"step-{n}.msgpack" for n in (3, 4, 5)]
