"""Which engine, why, and whether a model fits."""

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from node.config import Config
from node.device import Device
from node.engines.choose import make_engine, server_plan, share_device
from node.engines.transformers import TransformersEngine
from node.engines.vllm import VllmEngine
from node.engines.vllm_probe import EngineSetupError
from node.hardware import Gpu, Machine, choose_engine, memory_limit, sleeps
from node.memory_plan import GB, LIBRARIES, SCORER, ModelTooBig, check_fit, gpu_share, plan_memory
from node.model_shape import ModelShape, model_shape
from node.models import ModelError, load_model
from node.preflight import Setup, check_shards, prepare
from node.training.choose import place_of_model

CPU = Machine(8 * GB, (), "")
GPU = Machine(64 * GB, (Gpu("H200", 140 * GB),), "/usr/bin/vllm")
BARE_GPU = Machine(64 * GB, (Gpu("H200", 140 * GB),), "")
SEVEN_B = ModelShape("seven", 7_000_000_000, 131072)
HALF_B = ModelShape("half", 500_000_000, 24576)


def config(**sections: Any) -> Config:
    return Config.model_validate(sections)


@pytest.mark.parametrize(
    ("sections", "machine", "name", "why"),
    [
        ({}, CPU, "transformers", "there is no GPU"),
        ({}, GPU, "vllm", "there is a GPU (H200) and /usr/bin/vllm"),
        ({}, BARE_GPU, "transformers", "no program 'vllm'; pip install vllm"),
        ({"rollout": {"engine": "transformers"}}, GPU, "transformers", "(rollout.engine = "),
        ({"rollout": {"engine": "vllm"}}, CPU, "vllm", "(rollout.engine = "),
        ({"engine": {"url": "http://vllm:8000"}}, BARE_GPU, "vllm", "engine.url names one"),
    ],
)
def test_the_engine_follows_from_the_machine(sections: dict[str, Any], machine: Machine, name: str, why: str) -> None:
    choice = choose_engine(config(**sections), machine)
    assert choice.name == name
    assert why in choice.why


def test_it_sleeps_where_trainer_and_engine_share_a_gpu() -> None:
    apart = config(engine={"gpus": "1"})
    assert sleeps(config(), choose_engine(config(), GPU), GPU)
    assert not sleeps(apart, choose_engine(apart, GPU), GPU)
    awake = config(engine={"sleep": "off"})
    assert not sleeps(awake, choose_engine(awake, GPU), GPU)
    forced = config(rollout={"engine": "vllm"}, engine={"sleep": "on"})
    assert not sleeps(forced, choose_engine(forced, CPU), CPU)  # on a CPU it frees nothing and hangs requests


def test_a_model_that_does_not_fit_is_refused_with_the_sum() -> None:
    plan = plan_memory(config(), SEVEN_B, CPU, choose_engine(config(), CPU), torch.float32)
    assert plan.total == 7_000_000_000 * 16 + LIBRARIES + SCORER
    with pytest.raises(ModelTooBig) as refused:
        check_fit(plan, SEVEN_B)
    assert str(refused.value) == (
        "seven with 7.00 billion parameters does not fit: weights 26.1 + optimizer 52.2 + libraries 0.5 + "
        "scorer 0.1 + the larger of (gradients 26.1) and (keys and values 0.1) = 104.9 GB, of 8.0 GB of memory; train "
        "adapters only (train.lora_rank), compute layers twice (train.gradient_checkpointing on), use a smaller model "
        "(model.path), model.dtype bfloat16, train.optimizer adamw8bit on a GPU, several GPUs (train.shards), or a "
        "machine with more memory"
    )


def test_the_sum_of_a_shared_gpu() -> None:
    """Asleep while the trainer works, vLLM and the gradients take turns; awake, they add up."""
    own = SEVEN_B.parameters
    cache = SEVEN_B.kv_bytes * 1024
    choice = choose_engine(config(), GPU)
    turns = plan_memory(config(), SEVEN_B, GPU, choice, torch.bfloat16)
    assert turns.total == own * (2 + 4 + 8) + own * 4
    awake = config(engine={"sleep": "off"})
    assert plan_memory(awake, SEVEN_B, GPU, choice, torch.bfloat16).total == own * (2 + 4 + 8 + 4 + 2) + cache
    apart = config(engine={"gpus": "1"})
    alone = plan_memory(apart, SEVEN_B, GPU, choose_engine(apart, GPU), torch.bfloat16)
    assert alone.total == own * (2 + 4 + 8 + 4)
    with_reference = config(train={"kl_coefficient": 0.1})
    assert plan_memory(with_reference, SEVEN_B, GPU, choice, torch.bfloat16).total == turns.total + own * 2
    taught = plan_memory(config(), SEVEN_B, GPU, choice, torch.bfloat16, HALF_B)
    assert taught.total == turns.total + HALF_B.parameters * 2
    assert "teacher 0.9 + " in str(taught)


def test_averaging_is_in_main_memory() -> None:
    given = config(averaging={"method": "diloco"})
    plan = plan_memory(given, SEVEN_B, CPU, choose_engine(given, CPU), torch.float32)
    # anchor and momentum besides weights and optimizer; a round takes more than an update's gradients
    assert plan.total == 7_000_000_000 * (4 + 8 + 8 + 8) + (400 << 20) + LIBRARIES + SCORER
    assert "outer optimizer 52.2 + averager 0.4 + the larger of (a round of averaging 52.2)" in str(plan)
    on_gpu = plan_memory(given, SEVEN_B, GPU, choose_engine(given, GPU), torch.bfloat16)
    assert on_gpu.total == plan_memory(config(), SEVEN_B, GPU, choose_engine(config(), GPU), torch.bfloat16).total


EIGHT_B = ModelShape("eight", 8_000_000_000, 131072, 32, 4096, {"q_proj": 32 * 8192, "down_proj": 32 * 18432})


@pytest.mark.parametrize(
    ("train", "trained"),
    [
        ({"lora_rank": 16}, 16 * 32 * (8192 + 18432)),
        ({"lora_rank": 8, "lora_targets": "q_proj,k_proj"}, 8 * 32 * 8192),
    ],
)
def test_adapters_take_little_and_the_weights_once(train: dict[str, Any], trained: int) -> None:
    apart = {"engine": {"gpus": "1"}}
    given = config(train={**train, "kl_coefficient": 0.1}, **apart)  # the reference is the model without adapters
    plan = plan_memory(given, EIGHT_B, GPU, choose_engine(given, GPU), torch.bfloat16)
    kept = 640 * (32 * 4096 + 8192 + 18432) * 2
    assert plan.total == EIGHT_B.parameters * 2 + trained * (2 + 4 + 8 + 4) + kept
    assert "weights 14.9 + adapters 0.0 + 32-bit adapters" in str(plan)


FOUR_GPUS = Machine(512 * GB, (Gpu("H200", 140 * GB),) * 4, "/usr/bin/vllm")


def test_shards_hold_their_rows_and_gather_layers() -> None:
    shape = dataclasses.replace(EIGHT_B, embedding=1_000_000_000)
    layer = 7_000_000_000 // 32
    gathered = (1_000_000_000 + 2 * layer) * (2 + 4)
    kept = 640 * (32 * 4096 + 8192 + 18432) * 2
    given = config(train={"shards": 4, "kl_coefficient": 0.1}, engine={"gpus": "4"})
    plan = plan_memory(given, shape, FOUR_GPUS, choose_engine(given, FOUR_GPUS), torch.bfloat16)
    assert plan.total == 2_000_000_000 * (4 + 8 + 4 + 4) + gathered + kept  # vLLM elsewhere: no copy on a GPU
    assert str(plan).startswith("1/4 of 32-bit weights 7.5 + 1/4 of optimizer 14.9 + 1/4 of reference 7.5 + ")
    one = config(engine={"gpus": "4"}, train={"kl_coefficient": 0.1})
    assert plan.total < plan_memory(one, shape, FOUR_GPUS, choose_engine(one, FOUR_GPUS), torch.bfloat16).total / 2

    on_cpu = config(train={"shards": 2})  # all of them share the memory of the machine, with the node's own copy
    plan = plan_memory(on_cpu, shape, CPU, choose_engine(on_cpu, CPU), torch.float32)
    update = 8_000_000_000 * 4 + 2 * (1_000_000_000 + 2 * layer) * 8 + 2 * 640 * 32 * (8192 + 18432) * 4
    assert plan.total == 8_000_000_000 * (4 + 8 + 4) + update + 3 * LIBRARIES + SCORER


def test_megatron_holds_a_part_and_its_copies_and_gathers_nothing() -> None:
    eight = Machine(512 * GB, (Gpu("H200", 140 * GB),) * 8, "/usr/bin/vllm")
    division = {"shards": 8, "backend": "megatron", "pipeline_parallel": 2}
    kept = 640 * (32 * 4096 + 8192 + 18432) * 2
    given = config(train={**division, "tensor_parallel": 2, "kl_coefficient": 0.1}, rollout={"engine": "transformers"})
    plan = plan_memory(given, EIGHT_B, eight, choose_engine(given, eight), torch.bfloat16)
    part = 2_000_000_000  # two replicas of four: they hold the same
    rollouts = 8_000_000_000 * 2 + EIGHT_B.kv_bytes * 1024
    assert plan.total == part * (4 + 8 + 2 + 2) + 8_000_000_000 * 2 + max(part * 4 + kept, rollouts - 16_000_000_000)
    assert str(plan).startswith("a part of 32-bit weights 7.5 + a part of optimizer 14.9 + a part of weights 3.7 + ")
    mixture = dataclasses.replace(EIGHT_B, experts=6_000_000_000)
    assert mixture.divided(config(train={**division, "expert_parallel": 4}).train) == 10**9 + 6 * 10**9 // 8


def test_shards_and_vllm_are_apart_only_where_they_share_no_gpu() -> None:
    four = {"shards": 4}
    shared = config(train=four, engine={"gpus": "3,4"})
    assert choose_engine(shared, FOUR_GPUS).shared_gpu
    apart = config(train=four, engine={"gpus": "4,5"})
    assert not choose_engine(apart, FOUR_GPUS).shared_gpu


def test_more_shards_than_gpus_are_refused() -> None:
    with pytest.raises(ModelError, match=r"shards = 8 needs a GPU for each, and there are 4; set train\.shards to 4"):
        check_shards(config(train={"shards": 8}), FOUR_GPUS)
    check_shards(config(train={"shards": 4}), FOUR_GPUS)
    check_shards(config(train={"shards": 8}), CPU)


def test_the_copy_of_a_node_with_shards_is_where_it_is_used() -> None:
    def place(machine: Machine, **sections: Any) -> tuple[str, str]:
        given = config(**sections, model={"device": "cpu", "dtype": "float32"})
        choice = choose_engine(given, machine)
        setup = Setup(machine, choice, plan_memory(given, HALF_B, machine, choice, torch.float32))
        given = given.model_copy(update={"model": given.model.model_copy(update={"device": "cuda"})})
        monkeypatch.setattr("node.training.choose.device_of", lambda name: torch.device("cpu"))
        return place_of_model(given, setup)

    with pytest.MonkeyPatch.context() as monkeypatch:
        assert place(FOUR_GPUS, train={"shards": 4}) == ("cpu", "float32")
        assert place(FOUR_GPUS, train={"shards": 4}, engine={"transfer": "nccl"}) == ("cuda", "float32")
        assert place(FOUR_GPUS, train={"shards": 4}, rollout={"engine": "transformers"}) == ("cuda", "float32")
        assert place(FOUR_GPUS) == ("cuda", "float32")


def test_moments_in_8_bits_and_layers_computed_twice_take_less() -> None:
    def total(**train: Any) -> int:
        given = config(train=train, engine={"gpus": "1"})
        return plan_memory(given, EIGHT_B, GPU, choose_engine(given, GPU), torch.bfloat16).total

    assert total() - total(optimizer="adamw8bit") == 6 * EIGHT_B.parameters
    whole, once = 32 * (8192 + 18432), 32 * 4096 + 8192 + 18432
    assert total(gradient_checkpointing="off") - total(gradient_checkpointing="on") == 640 * 2 * (whole - once)
    assert total(gradient_checkpointing="on") == total(), "auto turns it on before memory runs out for good"


SMOL = ModelShape(
    "smol", 134_515_008, 23040, 30, 576, {"all of a layer": 30 * 10176}, embedding=28_311_552, vocabulary=49152
)


def test_a_node_without_a_gpu_is_planned_about_as_large_as_it_was_measured() -> None:
    """3,580 to 3,668 MiB of resident memory, and two processes of the scorer (docs/results.md)."""

    def planned(shape: ModelShape = SMOL, **train: Any) -> float:
        given = config(train=train)
        return plan_memory(given, shape, CPU, choose_engine(given, CPU), torch.float32).total / 2**20

    assert 3668 + 100 < planned() < 1.08 * (3580 + 100)
    whole, once = 640 * 30 * 10176 * 4, 640 * (30 * 576 + 10176) * 4
    assert planned() - planned(gradient_checkpointing="on") == (whole - once) / 2**20, "auto is not told in time"
    # probabilities of 640 tokens, two chunks of 64 MiB at work, two gradients before they are added up
    without = dataclasses.replace(SMOL, vocabulary=0)
    assert planned() - planned(without) == 120 + 2 * 64 + 2 * 108


def test_fp8_rollouts_take_half_the_memory() -> None:
    choice = choose_engine(config(), GPU)
    awake = {"sleep": "off"}
    plain = plan_memory(config(engine=awake), EIGHT_B, GPU, choice, torch.bfloat16)
    rounded = plan_memory(config(engine={**awake, "quantization": "fp8"}), EIGHT_B, GPU, choice, torch.bfloat16)
    assert plain.total - rounded.total == EIGHT_B.parameters


def test_an_optimizer_that_cannot_be_is_refused_before_anything_is_loaded(
    tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    model = {"path": str(tiny_model("llama")), "dtype": "float32", "device": "cpu"}
    with pytest.raises(
        ModelError, match=r"train\.optimizer = adamw8bit works on a GPU only, .*set train\.optimizer to"
    ):
        prepare(config(model=model, train={"optimizer": "adamw8bit"}), tmp_path)


def test_vllm_gets_what_the_trainer_leaves() -> None:
    choice = choose_engine(config(), GPU)
    plan = plan_memory(config(), HALF_B, GPU, choice, torch.bfloat16)
    held = HALF_B.parameters * 14 / (140 * GB)
    assert gpu_share(config(), plan, choice) == pytest.approx(0.9 - held, abs=1e-3)
    assert gpu_share(config(engine={"gpu_share": 0.3}), plan, choice) == 0.3
    apart = config(engine={"gpus": "1"})
    assert gpu_share(apart, plan, choose_engine(apart, GPU)) == 0.9


def test_shape_of_a_model_is_read_from_its_headers(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    directory = tiny_model("llama")
    bundle = load_model(str(directory), device="cpu", dtype="float32", models=tmp_path)
    shape = model_shape(directory)
    assert shape.parameters == sum(parameter.numel() for parameter in bundle.model.parameters())
    assert shape.kv_bytes == 2 * 2 * 3 * 2 * 8
    assert (shape.layers, shape.width, shape.linear["q_proj"], len(shape.linear)) == (3, 48, 3 * 96, 7)
    config = json.loads((directory / "config.json").read_text())
    del config["vocab_size"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    shutil.copy(directory / "model.safetensors", tmp_path)
    with pytest.raises(ModelError, match="its files cannot be read"):
        model_shape(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 9)
    with pytest.raises(ModelError, match="its files cannot be read"):
        model_shape(tmp_path)


def test_prepare_refuses_before_anything_is_loaded(
    tiny_model: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = config(model={"path": str(tiny_model("llama")), "dtype": "float32"})
    setup = prepare(settings, tmp_path)
    assert setup.choice.name == "transformers"
    assert setup.plan.limit == memory_limit()
    divided = config(
        model={"path": str(tiny_model("llama")), "device": "cpu"}, train={"shards": 2, "backend": "megatron"}
    )
    with pytest.raises(ModelError, match=r"megatron computes on GPUs only.*; set train\.backend to fsdp"):
        prepare(divided, tmp_path)
    monkeypatch.setattr("node.hardware.memory_limit", lambda: 1 << 20)
    with pytest.raises(ModelTooBig, match=r"of 0\.0 GB of memory"):
        prepare(settings, tmp_path)


def test_a_container_limits_memory(tmp_path: Path) -> None:
    whole = memory_limit(tmp_path)
    (tmp_path / "memory.max").write_text("1073741824\n")
    assert memory_limit(tmp_path) == GB
    (tmp_path / "memory.max").write_text("max\n")
    assert memory_limit(tmp_path) == whole


def test_the_engine_that_is_made(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    bundle = load_model(str(tiny_model("llama")), device="cpu", dtype="float32", models=tmp_path)
    device = Device()

    def make(settings: Config, machine: Machine) -> TransformersEngine | VllmEngine:
        choice = choose_engine(settings, machine)
        plan = plan_memory(settings, HALF_B, machine, choice, torch.float32)
        setup = Setup(machine, choice, plan)
        return make_engine(setup, settings, bundle, device, home=tmp_path, peer_id="x" * 30, say=print)

    own = make(config(), CPU)
    assert isinstance(own, TransformersEngine)
    engine = make(config(engine={"url": "http://gpu-server:8000"}), CPU)
    assert isinstance(engine, VllmEngine)
    assert engine.server is None
    assert str(engine.client.address) == "http://gpu-server:8000"
    assert engine.overlaps
    share_device(device, [own])
    assert device.make_room is None
    share_device(device, [engine])
    assert device.make_room is not None
    with pytest.raises(EngineSetupError, match=r"no program 'vllm'; pip install vllm"):
        make(config(rollout={"engine": "vllm"}), CPU)
    with pytest.raises(EngineSetupError, match=r"set engine\.gpus to GPUs that the trainer does not use"):
        make(config(engine={"transfer": "nccl"}), GPU)


def test_arguments_of_a_server_on_a_gpu_and_on_a_cpu(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    bundle = load_model(str(tiny_model("llama")), device="cpu", dtype="float32", models=tmp_path)
    settings = config(engine={"args": "--max-num-seqs=32"}, node={"threads": 3})
    plan = server_plan(settings, bundle, GPU, share=0.25, sleep=True, home=tmp_path)
    assert "--gpu-memory-utilization=0.250" in plan.arguments
    assert "--enable-sleep-mode" in plan.arguments
    assert "--enforce-eager" not in plan.arguments
    assert plan.arguments[-1] == "--max-num-seqs=32"
    assert plan.environment == (("CUDA_VISIBLE_DEVICES", "0"),)
    pair = config(engine={"gpus": "2,3", "transfer": "nccl"})
    plan = server_plan(pair, bundle, GPU, share=0.9, sleep=False, home=tmp_path)
    assert "--tensor-parallel-size=2" in plan.arguments
    assert '--weight-transfer-config={"backend":"nccl"}' in plan.arguments
    assert plan.environment == (("CUDA_VISIBLE_DEVICES", "2,3"),)
    machine = Machine(GB, (), "/opt/vllm")
    plan = server_plan(settings, bundle, machine, share=0.9, sleep=False, home=tmp_path)
    assert plan.command == "/opt/vllm"
    assert "--enforce-eager" in plan.arguments
    assert '--hf-overrides={"tie_word_embeddings": false}' in plan.arguments
    assert dict(plan.environment) == {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "3",
    }
