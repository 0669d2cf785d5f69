"""What only a GPU can show: `make test-gpu`. Written where there is none, so a failure may be the test's own."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from node.bench.train import small_model
from node.config import Config
from node.config_train import TrainConfig
from node.device import Device
from node.engines.agreement import check_agreement
from node.engines.choose import make_engine, share_device
from node.engines.vllm import VllmEngine
from node.home import models_dir
from node.interfaces import Batch, TrainGroup, TrainSequence
from node.models import ModelBundle, load_model
from node.preflight import prepare
from node.training.local import LocalTrainer
from node.training.sharded import ShardedTrainer
from node.training.workers import Kind, WorkerPlan, Workers

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")]

PROMPTS = [tuple(range(100, 160)), tuple(range(500, 530))]


@pytest.fixture
def small() -> ModelBundle:
    """Six layers of SmolLM2's, random, in bfloat16."""
    bundle = small_model()
    bundle.model.to("cuda", torch.bfloat16)
    return bundle


def batch(step: int, vocabulary: int, *, prompt: int = 64, answer: int = 32, groups: int = 4) -> Batch:
    rng = random.Random(step)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(rng.randrange(vocabulary) for _ in range(count))

    def group() -> TrainGroup:
        answers = [tokens(answer) for _ in range(8)]
        rewarded = [TrainSequence(ids, (True,) * answer, float(i % 2), None) for i, ids in enumerate(answers)]
        return TrainGroup(tokens(prompt), tuple(rewarded), "own")

    return Batch(step, tuple(group() for _ in range(groups)))


def masters(trainer: LocalTrainer) -> list[torch.Tensor]:
    return [weight.detach().clone() for weight in trainer.weights.masters.values()]


@pytest.mark.parametrize("rank", [0, 16])
def test_moments_in_8_bits_take_a_quarter_and_resume_exactly(rank: int, small: ModelBundle, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes", reason="needs shoal[gpu]")
    settings: dict[str, Any] = {"lora_rank": rank, "learning_rate": 1e-4, "tokens_per_micro_batch": 4096}
    first = LocalTrainer(small, TrainConfig(optimizer="adamw8bit", **settings), dumps=tmp_path)
    for step in (1, 2):
        first.update(batch(step, small.vocabulary_size))
    trained = sum(weight.numel() for weight in first.weights.masters.values())
    assert first.memory()["optimizer"] < (2.2 if rank == 0 else 2.6) * trained  # small tensors keep 32 bits
    saved = tmp_path / "saved"
    saved.mkdir()
    first.save(saved)
    other = small_model()
    other.model.to("cuda", torch.bfloat16)
    second = LocalTrainer(other, TrainConfig(optimizer="adamw8bit", **settings), dumps=tmp_path)
    second.load(saved)
    state = [first.optimizer.state[weight] for weight in first.weights.masters.values()]
    again = [second.optimizer.state[weight] for weight in second.weights.masters.values()]
    for ours, theirs in zip(state, again, strict=True):
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(torch.as_tensor(ours[key]).cpu(), torch.as_tensor(theirs[key]).cpu()) for key in ours)
    assert all(map(torch.equal, masters(first), masters(second)))


def peak(trainer: LocalTrainer, given: Batch) -> int:
    """Bytes that an update takes on top of what is held before it."""
    trainer.update(given)  # the optimizer's state is there from now on
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    trainer.update(given)
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("rank", [0, 16])
def test_gradient_checkpointing_lowers_the_peak(rank: int, tmp_path: Path) -> None:
    """By adapters more than with whole weights, whose gradients it does not lessen; the loss stays what it was."""
    peaks, losses = {}, {}
    for kind in ("off", "on"):
        bundle = small_model()
        bundle.model.to("cuda", torch.bfloat16)
        given = batch(1, bundle.vocabulary_size, prompt=256, answer=256, groups=4)
        config = TrainConfig(lora_rank=rank, gradient_checkpointing=kind, tokens_per_micro_batch=16384)  # type: ignore[arg-type]
        trainer = LocalTrainer(bundle, config, dumps=tmp_path)
        losses[kind] = trainer.update(given).loss
        peaks[kind] = peak(trainer, given)
        del trainer, bundle
        torch.cuda.empty_cache()
    assert losses["on"] == pytest.approx(losses["off"], abs=1e-3)
    assert peaks["on"] < (0.8 if rank == 0 else 0.6) * peaks["off"], peaks


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_two_gpus_train_as_one_does(dtype: Kind, tmp_path: Path) -> None:
    """By NCCL: losses and gradient norms of several updates, and the weights in the node's own model."""
    path, models = "embedded", models_dir()
    settings: dict[str, Any] = {"learning_rate": 1e-5, "tokens_per_micro_batch": 256}
    one = load_model(path, device="cuda:0", dtype=dtype, models=models)
    local = LocalTrainer(one, TrainConfig(**settings), dumps=tmp_path)
    node = load_model(path, device="cpu", dtype=dtype, models=models)
    workers = Workers(WorkerPlan(2, "cuda", dtype, path, models, 2, 0.0, tmp_path, tmp_path / "trainer.log"))
    config = TrainConfig(**settings, shards=2)
    trainer = ShardedTrainer(node, config, workers, handover=tmp_path / "handover", seconds=lambda: 300.0)
    trainer.start()
    near = 1e-5 if dtype == "float32" else 2e-2
    try:
        for step in (1, 2, 3):
            given = batch(step, one.vocabulary_size)
            theirs, ours = local.update(given), trainer.update(given)
            assert ours.loss == pytest.approx(theirs.loss, rel=near, abs=near)
            assert ours.grad_norm == pytest.approx(theirs.grad_norm, rel=near)
        for mine, other in zip(node.model.parameters(), one.model.parameters(), strict=True):
            torch.testing.assert_close(mine.float(), other.float().cpu(), atol=10 * near, rtol=0)
    finally:
        trainer.close()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize(
    ("kind", "division"),
    [
        ("qwen3", {"tensor_parallel": 2}),
        ("qwen3", {"pipeline_parallel": 2}),
        ("qwen3", {}),
        ("mixtral", {"expert_parallel": 2}),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_megatron_on_two_gpus_trains_as_one_does(
    kind: str, division: dict[str, Any], dtype: Kind, tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    """By NCCL, with Megatron's real streams: what tests/node/megatron shows on a CPU."""
    pytest.importorskip("megatron.core", reason="needs shoal[megatron]")
    path = str(tiny_model(kind, num_hidden_layers=4, tie_word_embeddings=False, sliding_window=None))
    settings: dict[str, Any] = {"learning_rate": 1e-5, "tokens_per_micro_batch": 256}
    one = load_model(path, device="cuda:0", dtype=dtype, models=tmp_path)
    local = LocalTrainer(one, TrainConfig(**settings), dumps=tmp_path)
    node = load_model(path, device="cpu", dtype=dtype, models=tmp_path)
    workers = Workers(WorkerPlan(2, "cuda", dtype, path, tmp_path, 2, 0.0, tmp_path, tmp_path / "trainer.log"))
    config = TrainConfig(**settings, **division, shards=2, backend="megatron")
    trainer = ShardedTrainer(node, config, workers, handover=tmp_path / "handover", seconds=lambda: 300.0)
    trainer.start()
    near = 1e-4 if dtype == "float32" else 5e-2
    try:
        for step in (1, 2, 3):
            given = batch(step, 250)
            theirs, ours = local.update(given), trainer.update(given)
            assert ours.loss == pytest.approx(theirs.loss, rel=near, abs=near)
            assert ours.grad_norm == pytest.approx(theirs.grad_norm, rel=near)
    finally:
        trainer.close()


@pytest.fixture
def device() -> Iterator[Device]:
    made = Device()
    yield made
    made.close()


@pytest.mark.parametrize("rank", [0, 16])
@pytest.mark.parametrize("quantization", ["none", "fp8"])
async def test_rollouts_of_a_real_server_against_the_trainer(
    rank: int, quantization: str, device: Device, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """log-probabilities before and after an update; with fp8 they differ by what train.correction corrects."""
    config = Config.model_validate(
        {
            "rollout": {"engine": "vllm"},
            "model": {"dtype": "bfloat16"},
            "engine": {"quantization": quantization, "gpu_share": 0.3, "start_seconds": 900},
            "train": {"lora_rank": rank, "learning_rate": 1e-3 if rank else 1e-5, "warmup_steps": 0},
        }
    )
    setup = prepare(config, models_dir())
    if not setup.machine.vllm:
        pytest.skip("no vllm program: .venv/bin/pip install -e '.[vllm]'")
    bundle = load_model("embedded", device="cuda", dtype="bfloat16", models=models_dir())
    trainer = LocalTrainer(bundle, config.train, dumps=tmp_path)
    engine = make_engine(setup, config, bundle, device, home=tmp_path, peer_id="p" * 20, say=print)
    assert isinstance(engine, VllmEngine)
    share_device(device, [engine])
    kinds = ["bfloat16", *([quantization] if quantization != "none" else [])]
    try:
        await engine.start()
        before = await check_agreement(engine, trainer, device, PROMPTS, dtypes=kinds, tokens=64)
        stats = await device.run(trainer.update, batch(1, bundle.vocabulary_size))
        assert stats.grad_norm > 0
        await engine.update_weights(trainer.step)
        after = await check_agreement(engine, trainer, device, PROMPTS, dtypes=kinds, tokens=64)
    finally:
        await engine.close()
    record_property("largest differences in nats, before and after an update", (before, after))
    if quantization == "fp8":
        assert before > 1e-3, "it was not rounded at all"
