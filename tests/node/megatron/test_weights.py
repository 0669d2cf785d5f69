"""Between Hugging Face's tensors and Megatron's: nothing lost, nothing moved to another place, nothing rounded."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from node.models import load_model
from node.training.files import rows_of
from node.training.megatron_weights import Heads, divided, pieces, stage_of

Shapes = dict[str, tuple[int, ...]]


def megatron_shapes(config: Any, head_dim: int, parts: int, experts: int) -> Shapes:
    """Parameters of a GPTModel of one stage, as one of `parts` processes has them; `experts`: of a layer here."""
    width, layers = config.hidden_size, config.num_hidden_layers
    heads, keys = config.num_attention_heads // parts, config.num_key_value_heads // parts
    rows = rows_of(config.vocab_size, 0, parts).stop
    inner = getattr(config, "moe_intermediate_size", config.intermediate_size) if experts else config.intermediate_size
    found: Shapes = {"embedding.word_embeddings.weight": (rows, width), "decoder.final_layernorm.weight": (width,)}
    if not config.tie_word_embeddings:
        found["output_layer.weight"] = (rows, width)
    for number in range(layers):
        layer: Shapes = {
            "input_layernorm.weight": (width,),
            "pre_mlp_layernorm.weight": (width,),
            "self_attention.linear_qkv.weight": ((heads + 2 * keys) * head_dim, width),
            "self_attention.linear_proj.weight": (width, heads * head_dim),
        }
        if config.model_type == "qwen2":
            layer["self_attention.linear_qkv.bias"] = ((heads + 2 * keys) * head_dim,)
        if config.model_type.startswith("qwen3"):
            layer["self_attention.q_layernorm.weight"] = layer["self_attention.k_layernorm.weight"] = (head_dim,)
        if experts:
            layer["mlp.router.weight"] = (config.num_local_experts, width)
        for prefix in [f"mlp.experts.local_experts.{at}." for at in range(experts)] or ["mlp."]:
            layer[f"{prefix}linear_fc1.weight"] = (2 * inner // parts, width)
            layer[f"{prefix}linear_fc2.weight"] = (width, inner // parts)
        found |= {f"decoder.layers.{number}.{name}": shape for name, shape in layer.items()}
    return found


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe"])
@pytest.mark.parametrize("parts", [1, 2])
def test_a_round_trip_is_exact(tiny_model: Callable[..., Path], tmp_path: Path, kind: str, parts: int) -> None:
    settings = {"mistral": {"sliding_window": None}, "mixtral": {"sliding_window": None}}.get(kind, {})
    path = tiny_model(kind, **{**settings, **({"mlp_only_layers": []} if kind == "qwen3_moe" else {})})
    model = load_model(str(path), device="cpu", dtype="float32", models=tmp_path).model
    config, weights = model.config, dict(model.named_parameters())
    heads = Heads(config.num_attention_heads, config.num_key_value_heads, 8)
    with_experts = kind in ("mixtral", "qwen3_moe")
    experts = config.num_local_experts // parts if with_experts else 0
    back = {name: torch.full_like(weight, torch.nan) for name, weight in weights.items()}
    for part in range(parts):
        here: dict[str, tuple[slice, ...]] = {}
        for name, weight in weights.items():
            where = divided(name)
            place = [slice(None)] * weight.ndim
            # two processes divide the layers of a dense model, or the experts
            if where is not None and where[0] == ("expert" if with_experts else "tensor"):
                place[where[1]] = rows_of(weight.shape[where[1]], part, parts)
            here[name] = tuple(place)
        tokens = weights["model.embed_tokens.weight"][here["model.embed_tokens.weight"]].shape[0]
        shapes = megatron_shapes(config, 8, 1 if with_experts else parts, experts)
        megatron = {name: torch.full(shape, torch.nan) for name, shape in shapes.items()}
        seen = set()
        for name, tensor in megatron.items():
            for piece in pieces(name, tensor, heads, 0, tokens):
                piece.values.copy_(piece.of(weights[piece.name].detach()[here[piece.name]].contiguous()))
                seen.add(piece.name)
            padding = shapes[name][0] - tokens if name.startswith(("embedding", "output")) else 0
            assert torch.isnan(tensor).sum() == padding * config.hidden_size, name  # each number has been set
        assert seen == set(weights)
        for name, tensor in megatron.items():
            for piece in pieces(name, tensor, heads, 0, tokens):
                own = torch.empty_like(weights[piece.name].detach()[here[piece.name]].contiguous())
                piece.of(own).copy_(piece.values)
                target = back[piece.name][here[piece.name]]
                piece.of(target).copy_(piece.of(own)) if piece.expert is not None else target.copy_(own)
    for name, weight in weights.items():
        assert torch.equal(back[name], weight), name


def test_heads_that_share_a_key_lie_together() -> None:
    """Megatron's order: the queries of a group, its key, its value; for one group after the other."""
    heads = Heads(queries=4, keys=2, width=1)
    fused = torch.arange(8.0).reshape(8, 1)
    found = {
        piece.name[-13:-7]: piece.values.flatten().tolist()
        for piece in pieces("decoder.layers.1.self_attention.linear_qkv.weight", fused, heads, 2, 0)
    }
    assert found == {"q_proj": [0.0, 1.0, 4.0, 5.0], "k_proj": [2.0, 6.0], "v_proj": [3.0, 7.0]}
    gate, up = pieces("decoder.layers.1.mlp.linear_fc1.weight", fused, heads, 2, 0)
    assert (gate.name, gate.values.flatten().tolist()) == ("model.layers.3.mlp.gate_proj.weight", [0.0, 1.0, 2.0, 3.0])
    assert (up.name, up.values.flatten().tolist()) == ("model.layers.3.mlp.up_proj.weight", [4.0, 5.0, 6.0, 7.0])


def test_where_tensors_lie() -> None:
    assert divided("model.layers.0.self_attn.k_proj.bias") == ("tensor", 0)
    assert divided("model.layers.0.mlp.down_proj.weight") == ("tensor", 1)
    assert divided("model.layers.0.mlp.experts.down_proj") == ("expert", 0)
    assert divided("model.layers.0.mlp.gate.weight") is None
    assert divided("model.layers.0.self_attn.q_norm.weight") is None
    stages = [stage_of(f"model.layers.{layer}.mlp.gate.weight", 6, 3) for layer in range(6)]
    assert stages == [0, 0, 1, 1, 2, 2]
    assert [stage_of(name, 6, 3) for name in ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")] == [
        0,
        2,
        2,
    ]
