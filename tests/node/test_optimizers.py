"""The optimizer of `train.optimizer`: what is refused, and 8-bit moments where bitsandbytes is installed."""

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from node.checkpoint import CheckpointError
from node.config_train import TrainConfig
from node.interfaces import Batch, TrainGroup, TrainSequence
from node.models import ModelError, load_model
from node.training import optimizers
from node.training.local import LocalTrainer
from node.training.optimizers import check_optimizer

Make = Callable[..., LocalTrainer]
EIGHT_BIT = TrainConfig(optimizer="adamw8bit")


@pytest.fixture
def make(tiny_model: Callable[[str], Path], tmp_path: Path) -> Iterator[Make]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)

    def trainer(**settings: Any) -> LocalTrainer:
        bundle = load_model(str(tiny_model("llama")), device="cpu", dtype="float32", models=tmp_path)
        return LocalTrainer(bundle, TrainConfig(learning_rate=1e-3, **settings), dumps=tmp_path / "dumps")

    yield trainer
    torch.set_num_threads(threads)


def batch(step: int) -> Batch:
    rng = random.Random(step)
    answers = [tuple(rng.randrange(2, 250) for _ in range(6)) for _ in range(4)]
    sequences = [TrainSequence(ids, (True,) * 6, float(i % 2), None) for i, ids in enumerate(answers)]
    return Batch(step, (TrainGroup((9, 8, 7), tuple(sequences), "own"),))


def masters(trainer: LocalTrainer) -> list[torch.Tensor]:
    return [weight.detach().clone() for weight in trainer.weights.masters.values()]


def test_8_bits_need_a_gpu_and_a_package(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelError, match=r"adamw8bit works on a GPU only, and the model is on the cpu; set train\.opt"):
        make(optimizer="adamw8bit")
    monkeypatch.setattr(optimizers, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match=r"bitsandbytes, which is not installed; run .*pip install -e '.\[gpu\]'`"):
        check_optimizer(EIGHT_BIT, torch.device("cuda"))
    monkeypatch.setattr(optimizers, "find_spec", lambda name: object())
    check_optimizer(EIGHT_BIT, torch.device("cuda"))
    check_optimizer(TrainConfig(), torch.device("cpu"))


def test_moments_of_another_optimizer_are_refused(make: Make, tmp_path: Path) -> None:
    trainer = make()
    trainer.save(tmp_path)
    said = json.loads((tmp_path / "trainer.json").read_text())
    assert said["optimizer"] == "adamw"
    (tmp_path / "trainer.json").write_text(json.dumps({**said, "optimizer": "adamw8bit"}))
    with pytest.raises(
        CheckpointError, match=r"state of adamw8bit, and train\.optimizer is adamw ; set train\.optimizer"
    ):
        trainer.load(tmp_path)
    del said["optimizer"]  # a checkpoint of Shoal 0.1
    (tmp_path / "trainer.json").write_text(json.dumps(said))
    trainer.load(tmp_path)


def test_8_bit_moments_resume_exactly(make: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """bitsandbytes computes on a CPU too, if slowly: what is on disk can be tested without a GPU."""
    pytest.importorskip("bitsandbytes", reason="needs shoal[gpu]")
    monkeypatch.setattr(optimizers, "check_optimizer", lambda config, device: None)
    straight, first, second = (make(optimizer="adamw8bit") for _ in range(3))
    plain = make()
    for step in (1, 2, 3, 4):
        straight.update(batch(step))
        plain.update(batch(step))
    for step in (1, 2):
        first.update(batch(step))
    saved = tmp_path / "saved"
    saved.mkdir()
    first.save(saved)
    second.load(saved)
    for step in (3, 4):
        second.update(batch(step))
    assert all(map(torch.equal, masters(straight), masters(second)))
    moved = torch.cat([(a - b).flatten() for a, b in zip(masters(plain), masters(first), strict=True)]).abs().max()
    assert moved < 5e-3, "about where 32 bits lead"
    embedding = straight.weights.masters["model.embed_tokens.weight"]
    assert straight.optimizer.state[embedding]["state1"].dtype == torch.uint8
    (saved / "moments8.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"moments8\.safetensors is of another model, or cannot be read"):
        second.load(saved)
