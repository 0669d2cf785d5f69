"""What Megatron's trainer refuses, in words that name the setting, the limit and what to do."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from transformers import AutoConfig

from node.config_train import TrainConfig
from node.models import ModelError
from node.training import megatron_checks
from node.training.megatron_checks import check_architecture, check_division, check_megatron


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"tensor_parallel": 2, "shards": 2}, "train.tensor_parallel = 2 is Megatron's, and train.backend is fsdp"),
        ({"backend": "megatron"}, r"over train.shards = 1 devices.* set train.shards to a multiple of 1, and to 2"),
        (
            {"backend": "megatron", "shards": 6, "tensor_parallel": 2, "pipeline_parallel": 2},
            r"train.shards = 6 devices, and tensor_parallel = 2 x pipeline_parallel = 2 x expert_parallel = 1 is 4",
        ),
        ({"backend": "megatron", "shards": 2, "lora_rank": 4}, "set train.shards to 1, or train.lora_rank to 0"),
        ({"backend": "megatron", "shards": 2, "optimizer": "adamw8bit"}, "set train.optimizer to adamw"),
    ],
)
def test_settings_that_do_not_go_together(settings: dict[str, Any], why: str) -> None:
    with pytest.raises(ValidationError, match=why):
        TrainConfig(**settings)


def test_settings_that_do() -> None:
    TrainConfig(backend="megatron", shards=8, tensor_parallel=2, pipeline_parallel=2)
    TrainConfig(backend="megatron", shards=4, expert_parallel=4)


def config(kind: str, **settings: Any) -> Any:
    return AutoConfig.for_model(kind, **settings)


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (config("olmoe"), "does not know the architecture 'olmoe'; use one of llama, mistral, mixtral, qwen2, qwen3"),
        (config("qwen2_moe"), "does not know the architecture 'qwen2_moe'"),
        (config("llama", attention_bias=True), "a llama with attention_bias"),
        (config("llama", hidden_act="gelu"), "the activation 'gelu'"),
        (config("llama", rope_parameters={"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}), "positions 'yarn'"),
        (config("qwen3_moe", mlp_only_layers=[1]), "wants experts in all layers or in none"),
    ],
)
def test_models_that_are_not_rebuilt(model: Any, why: str) -> None:
    with pytest.raises(ModelError, match=why):
        check_architecture(model)


@pytest.mark.parametrize("kind", megatron_checks.KNOWN)
def test_models_that_are(kind: str) -> None:
    check_architecture(config(kind))


@pytest.mark.parametrize(
    ("model", "settings", "why"),
    [
        (
            config("llama", hidden_size=48, num_attention_heads=6),
            {"tensor_parallel": 4},
            "does not divide the 6 attention heads",
        ),
        (
            config("qwen3", num_attention_heads=16, num_key_value_heads=2),
            {"tensor_parallel": 4},
            "train.tensor_parallel = 4 does not divide the 2 key heads of this model evenly; set it to a divisor",
        ),
        (config("qwen3", num_hidden_layers=3), {"pipeline_parallel": 2}, "does not divide the 3 layers"),
        (config("mixtral", num_local_experts=6), {"expert_parallel": 4}, "does not divide the 6 experts"),
        (config("llama"), {"expert_parallel": 2}, "does not divide the 1 experts"),
        (config("mixtral"), {"tensor_parallel": 2}, "set it to 1 and share the experts out with train.expert_parallel"),
        (config("llama", tie_word_embeddings=True), {"pipeline_parallel": 2}, "tied embedding in its first and in its"),
        (config("llama", vocab_size=10), {"tensor_parallel": 4}, "a vocabulary of 10 is too small"),
    ],
)
def test_models_that_cannot_be_divided_so(model: Any, settings: dict[str, int], why: str) -> None:
    train = TrainConfig(backend="megatron", shards=4, **settings)  # type: ignore[arg-type]
    with pytest.raises(ModelError, match=why):
        check_division(model, train)


def test_a_machine_that_cannot(tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    train, directory = TrainConfig(backend="megatron", shards=2), tiny_model("llama")
    with pytest.raises(ModelError, match=r"computes on GPUs only, and torch sees none; set train\.backend to fsdp"):
        check_megatron(train, directory, gpus=0)
    monkeypatch.setattr(megatron_checks, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match=r"pip install -e '.\[megatron\]'"):
        check_megatron(train, directory, gpus=2)
    monkeypatch.setattr(megatron_checks, "find_spec", lambda name: name)
    with pytest.raises(ModelError, match="does not know the architecture 'olmoe'"):
        check_megatron(train, tiny_model("olmoe"), gpus=2)
    check_megatron(train, directory, gpus=2)
    check_megatron(TrainConfig(shards=2), tiny_model("olmoe"), gpus=0)
