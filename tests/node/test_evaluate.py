"""`shoal checkpoint eval` and `export` of a checkpoint that a trainer wrote, from the command line to the model."""

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file

from node.checkpoint import CheckpointError, CheckpointStore
from node.cli.app import shoal
from node.config_train import TrainConfig
from node.evaluate import evaluate_checkpoint
from node.home import Home, NoSwarm
from node.interfaces import Batch, TrainGroup, TrainSequence
from node.journal import JournalRecord
from node.models import load_model
from node.settings import load, set_value
from node.training import lora
from node.training.local import LocalTrainer
from protocol.manifest import EnvironmentSpec, make_manifest


@pytest.fixture
def trained(home: Home, tiny_model: Callable[..., Path], evenness: EnvironmentSpec, tmp_path: Path) -> LocalTrainer:
    """A home with the checkpoint of step 2 of a tiny model."""
    for key, value in (("eval.tasks", "6"), ("eval.samples", "4"), ("model.dtype", "float32"), ("node.threads", "1")):
        set_value(home, key, value)
    home.found(make_manifest("tests", time.time() - 60, (evenness,), epoch_seconds=86400))
    bundle = load_model(str(tiny_model("llama", ascii_only=True)), device="cpu", dtype="float32", models=tmp_path)
    trainer = LocalTrainer(bundle, TrainConfig(learning_rate=1e-2, warmup_steps=0), dumps=tmp_path / "dumps")
    for step in (1, 2):
        # more likely to answer with two letters
        good, bad = (
            TrainSequence(ids, (True,) * len(ids), reward, None) for ids, reward in (((40, 40, 1), 1.0), ((50, 1), 0.0))
        )
        trainer.update(Batch(step, (TrainGroup((9, 8), (good, bad), "own"),)))
    store = CheckpointStore(home.checkpoints, 2)
    store.latest()
    store.save(2, trainer.save, {"taken": 1})
    return trainer


def call(home: Home, *arguments: str) -> str:
    result = CliRunner().invoke(shoal, ["--home", str(home.path), "checkpoint", *arguments])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_a_checkpoint_is_scored_on_the_held_out_tasks(home: Home, trained: LocalTrainer) -> None:
    found = json.loads(call(home, "eval", "--json"))
    assert (found["checkpoint"], found["step"]) == ("step-2", 2)
    assert found["scores"] == {"evenness": found["mean"]}
    assert found["mean"] * 24 == round(found["mean"] * 24)  # 6 tasks x 4 samples, each 0 or 1
    assert 0 < found["mean"] < 1
    told = list[tuple[int, int]]()
    assert evaluate_checkpoint(home, load(home), "2", lambda *count: told.append(count)).scores == found["scores"]
    assert told == [(6, sampled) for sampled in range(1, 7)]
    rows = dict(line.split() for line in call(home, "eval", "2").splitlines())
    assert rows["checkpoint"] == "step-2"
    assert float(rows["mean"]) == pytest.approx(found["mean"], abs=1e-3)  # the same tasks and draws again


def test_an_exported_checkpoint_is_the_model(home: Home, trained: LocalTrainer, tmp_path: Path) -> None:
    target = tmp_path / "exported"
    assert f"Step 2 is in {target}" in call(home, "export", "latest", str(target))
    masters = trained.weights.masters
    written = load_file(target / "model.safetensors")
    assert written.keys() == masters.keys()
    assert all(torch.equal(written[name], weight) for name, weight in masters.items())
    set_value(home, "model.path", str(target))  # as the command says
    config = load(home).config.model
    bundle = load_model(config.path, device="cpu", dtype="float32", models=tmp_path)
    assert bundle.fingerprint == trained.bundle.fingerprint
    again = LocalTrainer(bundle, TrainConfig(), dumps=tmp_path)
    groups = [TrainGroup((9, 8), (TrainSequence((40, 41, 1), (True,) * 3, 0.0, None),), "own")]
    assert again.logprobs(groups) == trained.logprobs(groups)


def test_a_node_goes_on_from_an_earlier_checkpoint(home: Home, trained: LocalTrainer) -> None:
    store = CheckpointStore(home.checkpoints, 2)
    store.latest()
    store.save_best(2, 0.5, trained.export)
    there = {name: weight.clone() for name, weight in trained.weights.masters.items()}
    third = Batch(3, (TrainGroup((9, 8), (TrainSequence((50, 1), (True,) * 2, 1.0, None),) * 2, "own"),))
    store.append(JournalRecord(3, third, {"taken": 7}, {}))  # a step that is in the journal alone
    for name, updates in (("best", 0), ("2", 2)):
        step = 4 if name == "best" else 5
        said = call(home, "rollback", name)
        assert said == f"Step {step} of this node has the weights of step 2 now. Next: shoal --home {home.path} up\n"
        recovery = CheckpointStore(home.checkpoints, 2).latest()
        assert (recovery.step, recovery.state, recovery.records) == (step, {"taken": 7}, [])
        again = LocalTrainer(trained.bundle, TrainConfig(), dumps=home.path)
        assert recovery.directory is not None
        again.load(recovery.directory)
        assert all(torch.equal(there[name], weight) for name, weight in again.weights.masters.items())
        assert [int(state["step"]) for state in again.optimizer.state.values()] == [2] * len(there) * bool(updates)
        assert again.step == step
    damaged = home.checkpoints / "best" / "model.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    result = CliRunner().invoke(shoal, ["--home", str(home.path), "checkpoint", "rollback", "best"])
    assert result.exit_code == 1
    assert "best is damaged: model.safetensors" in result.stderr
    assert CheckpointStore(home.checkpoints, 2).latest().step == 5


def test_adapters_are_scored_as_the_weights_that_they_make(
    home: Home, trained: LocalTrainer, tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    pytest.importorskip("peft", reason="needs shoal[lora]")
    path = tiny_model("llama", ascii_only=True)
    set_value(home, "model.path", str(path))
    bundle = load_model(str(path), device="cpu", dtype="float32", models=tmp_path)
    adapted = LocalTrainer(bundle, TrainConfig(lora_rank=4, learning_rate=3e-2, warmup_steps=0), dumps=tmp_path)
    for step in range(1, 5):
        good, bad = (
            TrainSequence(ids, (True,) * len(ids), reward, None) for ids, reward in (((40, 40, 1), 1.0), ((50, 1), 0.0))
        )
        adapted.update(Batch(step, (TrainGroup((9, 8), (good, bad), "own"),)))
    store = CheckpointStore(home.checkpoints, 3)
    store.latest()
    store.save(4, adapted.save, {})
    store.save(5, lambda directory: lora.merge(path, home.checkpoints / "step-4", directory), {})
    scores = [json.loads(call(home, "eval", step, "--json"))["mean"] for step in ("4", "5")]
    assert scores[0] == scores[1]
    assert 0 < scores[0] < 1


def test_what_cannot_be_scored_is_named(home: Home, trained: LocalTrainer) -> None:
    with pytest.raises(CheckpointError, match="there is: step-2"):
        evaluate_checkpoint(home, load(home), "7")
    weights = home.checkpoints / "step-2" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"step-2 is damaged: model\.safetensors has changed ; score"):
        evaluate_checkpoint(home, load(home), "latest")
    home.manifest_path.unlink()
    with pytest.raises(NoSwarm, match="run `shoal up` until it has come"):
        evaluate_checkpoint(home, load(home), "latest")
