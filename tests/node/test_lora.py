"""Adapters: what is trained, what every part computes with them, and what is on disk."""

import asyncio
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from node.checkpoint import CheckpointError
from node.config_train import TrainConfig
from node.device import Device
from node.engines.agreement import check_agreement
from node.engines.transformers import TransformersEngine
from node.interfaces import Batch, TrainGroup, TrainSequence
from node.models import ModelError, load_model
from node.training import lora
from node.training.local import LocalTrainer
from node.training.objective import StepObjective

pytest.importorskip("peft", reason="needs shoal[lora]")

Make = Callable[..., LocalTrainer]
PROMPTS = [tuple(range(9, 30)), tuple(range(40, 50))]


@pytest.fixture
def make(tiny_model: Callable[[str], Path], tmp_path: Path) -> Iterator[Make]:
    """A trainer of adapters on a fresh tiny model."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)

    def trainer(dtype: str = "float32", kind: str = "llama", **settings: Any) -> LocalTrainer:
        bundle = load_model(str(tiny_model(kind)), device="cpu", dtype=dtype, models=tmp_path)
        chosen = {"lora_rank": 4, "learning_rate": 1e-2, "warmup_steps": 0, **settings}
        return LocalTrainer(bundle, TrainConfig(**chosen), dumps=tmp_path / "dumps")

    yield trainer
    torch.set_num_threads(threads)


def batch(step: int = 1) -> Batch:
    rng = random.Random(step)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(rng.randrange(2, 250) for _ in range(count))

    groups = []
    for _ in range(2):
        answers = [tokens(6) for _ in range(4)]
        sequences = [TrainSequence(ids, (True,) * 6, float(i % 2), (-5.0,) * 6) for i, ids in enumerate(answers)]
        groups.append(TrainGroup(tokens(12), tuple(sequences), "own"))
    return Batch(step, tuple(groups))


def masters(trainer: LocalTrainer) -> list[torch.Tensor]:
    return [weight.detach().clone() for weight in trainer.weights.masters.values()]


def base(trainer: LocalTrainer) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters() if lora.MARK not in name}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_adapters_are_trained_and_nothing_else(make: Make, dtype: str) -> None:
    trainer, whole = make(dtype), make(dtype, lora_rank=0)
    assert trainer.logprobs(batch().groups) == whole.logprobs(batch().groups), "B is 0 at first"
    before, adapters = base(trainer), masters(trainer)
    trainer.update(batch(1))
    trainer.update(batch(2))
    assert all(torch.equal(weight, before[name]) for name, weight in base(trainer).items())
    assert all(not torch.equal(a, b) for a, b in zip(adapters, masters(trainer), strict=True))
    assert {master.dtype for master in trainer.weights.masters.values()} == {torch.float32}
    assert {p.dtype for p in trainer.model.parameters()} == {getattr(torch, dtype)}
    # 3 layers, 7 linear layers each: rank * (in + out)
    trained = 3 * 4 * ((48 + 48) * 2 + (48 + 16) * 2 + (48 + 64) * 3)
    assert sum(master.numel() for master in trainer.weights.masters.values()) == trained
    held = trainer.memory()
    assert held["optimizer"] == pytest.approx(8 * trained, rel=0.01)
    width = trainer.model.dtype.itemsize
    copies = trained * width if width < 4 else 0
    assert held["weights"] == sum(p.numel() * width for p in before.values()) + 4 * trained + copies
    assert held["gradients"] == 0


def merged(trainer: LocalTrainer, directory: Path) -> Any:
    """The model as another program sees it: adapters added to the weights."""
    aside, target = directory / "adapters", directory / "merged"
    aside.mkdir()
    target.mkdir()
    trainer.export(aside)
    lora.merge(trainer.bundle.directory, aside, target)
    return AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32, local_files_only=True).eval()


@pytest.mark.parametrize("targets", [("all-linear",), ("q_proj", "v_proj"), ("down_proj",)])
def test_trainer_engine_and_merged_weights_agree(make: Make, tmp_path: Path, targets: tuple[str, ...]) -> None:
    """Feed-forward layers with adapters must not take the path that reads their weights alone (node/lean.py)."""
    trainer = make(lora_targets=targets)
    group = batch().groups[0]
    untrained = trainer.logprobs([group])
    for step in (1, 2, 3):
        trainer.update(batch(step))
    trained = trainer.logprobs([group])
    assert max(abs(a - b) for a, b in zip(trained[0][0], untrained[0][0], strict=True)) > 0.05
    device = Device()
    engine = TransformersEngine(trainer.bundle, device)
    largest = asyncio.run(check_agreement(engine, trainer, device, PROMPTS, dtypes=["float32"]))
    device.close()
    assert largest < 1e-4
    model = merged(trainer, tmp_path)
    for sequence, values in zip(group.sequences, trained[0], strict=True):
        ids = torch.tensor([group.prompt_ids + sequence.token_ids])
        scores = model(ids, use_cache=False).logits[0, :-1].log_softmax(-1)
        plain = scores.gather(1, ids[0, 1:, None])[len(group.prompt_ids) - 1 :, 0]
        torch.testing.assert_close(torch.tensor(values), plain, atol=1e-4, rtol=0)


def gradients(trainer: LocalTrainer) -> dict[str, torch.Tensor]:
    """Of one batch, with nothing applied."""
    objective = StepObjective(trainer.config, batch().groups, trainer.model.device)
    trainer.accumulate(objective, objective.judge())
    found = {name: w.grad.clone() for name, w in trainer.weights.masters.items()}  # type: ignore[union-attr]
    trainer.weights.drop_gradients()
    return found


def test_gradients_are_those_of_whole_weights_projected(make: Make) -> None:
    """dB = s dW A^T and dA = s B^T dW for y = (W + s B A) x, whether layers are computed once or twice."""
    trainer, twice, whole = (
        make(kl_coefficient=0.5, **settings) for settings in ({}, {"gradient_checkpointing": "on"}, {"lora_rank": 0})
    )
    weights = trainer.weights.masters
    with torch.no_grad():
        for name, a in weights.items():
            if "lora_A" in name:
                b = weights[name.replace("lora_A", "lora_B")]
                b.copy_(torch.randn(b.shape, generator=torch.Generator().manual_seed(b.numel())) * 0.1)
                whole.weights.masters[name.replace("lora_A.default.", "")].add_(8.0 * b @ a)
        for name, weight in twice.weights.masters.items():
            weight.copy_(weights[name])
    ours, again, theirs = gradients(trainer), gradients(twice), gradients(whole)
    assert all(torch.equal(gradient, again[name]) for name, gradient in ours.items())
    for name in [name for name in ours if "lora_A" in name]:
        partner, dw = name.replace("lora_A", "lora_B"), theirs[name.replace("lora_A.default.", "")]
        a, b = weights[name].detach(), weights[partner].detach()
        torch.testing.assert_close(ours[partner], 8.0 * dw @ a.t(), atol=1e-5, rtol=1e-3)
        torch.testing.assert_close(ours[name], 8.0 * b.t() @ dw, atol=1e-5, rtol=1e-3)


def test_the_reference_is_the_model_without_adapters_and_no_copy(make: Make) -> None:
    trainer, plain = make(kl_coefficient=0.1), make(lora_rank=0)
    expected = plain.logprobs(batch().groups)
    assert trainer.reference is trainer.model
    assert trainer.update(batch(1)).kl_reference == pytest.approx(0, abs=1e-6)
    stats = trainer.update(batch(2))
    assert stats.kl_reference is not None
    assert stats.kl_reference > 1e-4
    with lora.switched_off(trainer.model):
        assert trainer.logprobs(batch().groups) == expected
    assert trainer.logprobs(batch().groups) != expected
    assert all(weight.requires_grad for weight in trainer.weights.masters.values())
    without = make()
    without.update(batch(1))
    without.configure(trainer.config)  # a reference is at hand whenever it is asked for
    assert without.update(batch(2)).kl_reference == pytest.approx(stats.kl_reference, rel=1e-3)


# -- checkpoints ---------------------------------------------------------------------------------------------


def saved(trainer: LocalTrainer, directory: Path) -> Path:
    directory.mkdir()
    trainer.save(directory)
    return directory


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_resume_is_exact(make: Make, dtype: str, tmp_path: Path) -> None:
    straight, first, second = make(dtype), make(dtype), make(dtype)
    for step in (1, 2, 3, 4):
        straight.update(batch(step))
    for step in (1, 2):
        first.update(batch(step))
    second.load(saved(first, tmp_path / "saved"))
    for step in (3, 4):
        second.update(batch(step))
    assert second.step == 4
    assert all(map(torch.equal, masters(straight), masters(second)))
    assert all(map(torch.equal, straight.model.parameters(), second.model.parameters()))
    size = sum(file.stat().st_size for file in (tmp_path / "saved").iterdir())
    assert size < 20 * sum(master.numel() for master in masters(first)), "no weights of the base model"


def test_updates_from_the_initial_model_repeat_exactly(make: Make) -> None:
    """A journal that begins there is repeated onto adapters made anew."""
    first, again = make(), make()
    torch.manual_seed(99)
    for trainer in (first, again):
        trainer.update(batch(1))
    assert all(map(torch.equal, masters(first), masters(again)))
    state = torch.random.get_rng_state()
    make()
    assert torch.equal(state, torch.random.get_rng_state()), "nobody else's random numbers are touched"


def test_peft_loads_a_checkpoint(make: Make, tmp_path: Path) -> None:
    from peft import PeftModel

    trainer = make()
    trainer.update(batch())
    directory = saved(trainer, tmp_path / "saved")
    plain = AutoModelForCausalLM.from_pretrained(trainer.bundle.directory, dtype=torch.float32, local_files_only=True)
    model = PeftModel.from_pretrained(plain, str(directory)).eval()
    group = batch().groups[0]
    ids = torch.tensor([group.prompt_ids + group.sequences[0].token_ids])
    scores = model(input_ids=ids, use_cache=False).logits[0, :-1].log_softmax(-1)
    theirs = scores.gather(1, ids[0, 1:, None])[len(group.prompt_ids) - 1 :, 0]
    torch.testing.assert_close(torch.tensor(trainer.logprobs([group])[0][0]), theirs, atol=1e-4, rtol=0)


def test_a_checkpoint_of_another_run_is_refused(make: Make, tmp_path: Path) -> None:
    adapters = saved(make(), tmp_path / "adapters")
    whole = saved(make(lora_rank=0), tmp_path / "whole")
    before = masters(make(lora_rank=0))
    for settings, directory, words in (
        ({"lora_rank": 0}, adapters, r"train\.lora_rank = 4, and it is 0 now ; set it back, or give another --home"),
        ({}, whole, r"train\.lora_rank = 0, and it is 4 now"),
        ({"lora_rank": 8}, adapters, r"adapters of rank 4, .*the settings say rank 8, .*set train\.lora_rank, "),
        ({"lora_alpha": 8}, adapters, r"alpha 32 .*say rank 4, alpha 8 "),
        ({"lora_targets": ("q_proj",)}, adapters, r"say rank 4, alpha 32 on q_proj ;"),
    ):
        trainer = make(**settings)
        with pytest.raises(CheckpointError, match=words):
            trainer.load(directory)
        if not trainer.config.lora_rank:
            assert all(map(torch.equal, before, masters(trainer)))


def test_journalled_steps_of_another_run_are_refused(make: Make) -> None:
    trainer = make()
    trainer.configure(TrainConfig(lora_rank=4, gradient_checkpointing="on", learning_rate=1e-3))
    assert trainer.recompute
    for other in ({}, {"lora_rank": 8}, {"lora_rank": 4, "optimizer": "adamw8bit"}):
        with pytest.raises(ModelError, match=r"steps were journalled that trained with .*set them back"):
            trainer.configure(TrainConfig(**other))  # type: ignore[arg-type]
    make(lora_rank=0).configure(TrainConfig(lora_alpha=8))  # of no effect without adapters


def test_merging_needs_the_model_that_was_trained(
    make: Make, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    trainer = make()
    aside, target = saved(trainer, tmp_path / "saved"), tmp_path / "target"
    target.mkdir()
    tensors = load_file(aside / lora.WEIGHTS)
    save_file({name.replace("layers.2", "layers.9"): tensor for name, tensor in tensors.items()}, aside / lora.WEIGHTS)
    with pytest.raises(CheckpointError, match=r"no weight for 14 tensors, .*layers\.9.*set model\.path"):
        lora.merge(trainer.bundle.directory, aside, target)


# -- what cannot be ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("targets", [("lm_head",), ("q_proj", "embed_tokens"), ("none",)])
def test_layers_that_cannot_have_adapters(make: Make, targets: tuple[str, ...]) -> None:
    """The output layer among them: its weight is used without the module."""
    with pytest.raises(ModelError, match=r"no such linear layers; use all-linear, or some of down_proj, gate_proj, "):
        make(lora_targets=targets)


def test_peft_is_asked_for(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lora, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match=r"train\.lora_rank needs .*pip install -e '.\[lora\]'.*set train"):
        make()


def test_a_model_with_experts_gets_adapters_in_its_attention(make: Make) -> None:
    trainer = make(kind="qwen3_moe", gradient_checkpointing="on")
    assert {name.split(".")[-4] for name in trainer.weights.masters} == {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert trainer.update(batch(1)).grad_norm > 0
    with pytest.raises(ModelError, match="no such linear layers"):
        make(kind="qwen3_moe", lora_targets=("gate_proj",))
