"""What train.backend = megatron can be had for: said before anything is loaded."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from node.config_train import TrainConfig
from node.models import ModelError, checked_config

KNOWN = ("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe")
"""Model types that are rebuilt in Megatron, and tested against transformers."""
ROPE = ("default", "linear", "llama3")
"""Kinds of rotary positions whose angles depend on nothing but the position."""


def check_megatron(config: TrainConfig, directory: Path, *, gpus: int) -> None:
    """Raises ModelError where the model in `directory` cannot be trained so on this machine."""
    if config.backend != "megatron":
        return
    if not gpus:
        raise ModelError(
            "train.backend = megatron computes on GPUs only, and torch sees none; set train.backend to fsdp"
        )
    if find_spec("megatron") is None:
        raise ModelError(
            "train.backend = megatron needs the package megatron-core, which is not installed; run "
            "`.venv/bin/pip install -e '.[megatron]'`, or set train.backend to fsdp"
        )
    model = checked_config(directory)
    check_architecture(model)
    check_division(model, config)


def check_architecture(config: Any) -> None:
    """Raises ModelError for a model (its transformers config) that is not rebuilt here."""
    instead = f"use one of {', '.join(KNOWN)}, or set train.backend to fsdp"
    if config.model_type not in KNOWN:
        raise ModelError(f"train.backend = megatron does not know the architecture '{config.model_type}'; {instead}")
    biased = getattr(config, "attention_bias", False) or getattr(config, "mlp_bias", False)
    if biased or config.hidden_act != "silu":
        raise ModelError(
            f"train.backend = megatron does not know a {config.model_type} with attention_bias, mlp_bias or the "
            f"activation '{config.hidden_act}'; {instead}"
        )
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope not in ROPE:
        raise ModelError(
            f"train.backend = megatron does not know the rotary positions '{rope}', only {', '.join(ROPE)}; {instead}"
        )
    if getattr(config, "mlp_only_layers", None) or getattr(config, "decoder_sparse_step", 1) != 1:
        raise ModelError(f"train.backend = megatron wants experts in all layers or in none; {instead}")


def check_division(config: Any, train: TrainConfig) -> None:
    """Raises ModelError where a model (its transformers config) cannot be divided so."""
    tensor, pipeline, expert = train.tensor_parallel, train.pipeline_parallel, train.expert_parallel
    experts = experts_of(config)
    wanted = (
        ("tensor_parallel", tensor, config.num_attention_heads, "attention heads"),
        ("tensor_parallel", tensor, config.num_key_value_heads, "key heads"),
        ("tensor_parallel", tensor, config.intermediate_size, "numbers between gate and down projection"),
        ("pipeline_parallel", pipeline, config.num_hidden_layers, "layers"),
        ("expert_parallel", expert, experts or 1, "experts"),
    )
    for name, parts, whole, what in wanted:
        if whole % parts:
            raise ModelError(
                f"train.{name} = {parts} does not divide the {whole} {what} of this model evenly; set it to a divisor"
            )
    if config.vocab_size <= tensor * (tensor - 1):
        raise ModelError(f"a vocabulary of {config.vocab_size} is too small for train.tensor_parallel = {tensor}")
    if experts and tensor > 1:
        raise ModelError(
            f"train.tensor_parallel = {tensor} is for models without experts; set it to 1 and share the experts out "
            "with train.expert_parallel"
        )
    if pipeline > 1 and config.tie_word_embeddings:
        raise ModelError(
            f"train.pipeline_parallel = {pipeline} would need this model's tied embedding in its first and in its last "
            "stage; set it to 1 and train.tensor_parallel higher"
        )


def experts_of(config: Any) -> int:
    """Experts of a layer; 0: the model is dense."""
    return int(getattr(config, "num_local_experts", 0) or getattr(config, "num_experts", 0) or 0)
