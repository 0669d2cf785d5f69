"""Which numbers of a Megatron GPTModel are which of a Hugging Face model's, and where they lie among the processes.

Megatron keeps queries, keys and values of a layer in one tensor (for each group of heads that share a key: its queries,
its key, its value), gate and up projection in another, and every expert's in tensors of its own. All of it is said as
views of Megatron's tensors: copying out of a view and into it is exact, and gradients go the same way as weights.
"""

import re
from dataclasses import dataclass
from typing import Literal

import torch

OUTSIDE = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    "output_layer.weight": "lm_head.weight",
}
LAYER = {
    "input_layernorm.weight": "input_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "mlp.linear_fc2.weight": "mlp.down_proj.weight",
    "mlp.router.weight": "mlp.gate.weight",
}
"""Tensors that are the same in both, Megatron's name -> Hugging Face's, within a layer."""
ROWS = re.compile(r"(embed_tokens|lm_head|[qkv]_proj|gate_proj|up_proj)\.(weight|bias)$")
COLUMNS = re.compile(r"(o_proj|down_proj)\.weight$")


@dataclass(frozen=True, slots=True)
class Heads:
    """Of the whole model."""

    queries: int
    keys: int
    width: int


@dataclass(frozen=True, slots=True)
class Piece:
    """Some numbers of a Megatron tensor, and what they are."""

    name: str
    """Of the tensor in the Hugging Face layout."""
    values: torch.Tensor
    """A view, whose numbers are, in order, this process's part of that tensor; or one expert of it."""
    expert: int | None = None
    """Which of this process's experts."""

    def of(self, part: torch.Tensor) -> torch.Tensor:
        """The same numbers of this process's part of the Hugging Face tensor, as a view in the shape of `values`."""
        part = part if self.expert is None else part[self.expert]
        return part.view(self.values.shape)


def pieces(name: str, tensor: torch.Tensor, heads: Heads, first_layer: int, vocabulary: int) -> list[Piece]:
    """What a parameter of GPTModel (or its gradient) is made of.

    `first_layer`: the model's number of this stage's layer 0. `vocabulary`: tokens that this process has rows of; the
    rows beyond are padding, and belong to no piece.
    """
    if name in OUTSIDE:
        return [Piece(OUTSIDE[name], tensor if tensor.ndim == 1 else tensor[:vocabulary])]
    _, _, number, inside = name.split(".", 3)
    layer = f"model.layers.{first_layer + int(number)}"
    if inside in LAYER:
        return [Piece(f"{layer}.{LAYER[inside]}", tensor)]
    match inside.split("."):
        case ["self_attention", "linear_qkv", kind]:
            group = heads.queries // heads.keys
            by_group = tensor.view(-1, group + 2, heads.width, *tensor.shape[1:])
            parts = {"q": by_group[:, :group], "k": by_group[:, group], "v": by_group[:, group + 1]}
            return [Piece(f"{layer}.self_attn.{letter}_proj.{kind}", part) for letter, part in parts.items()]
        case ["mlp", "linear_fc1", "weight"]:
            gate, up = tensor.chunk(2)
            return [Piece(f"{layer}.mlp.gate_proj.weight", gate), Piece(f"{layer}.mlp.up_proj.weight", up)]
        case ["mlp", "experts", "local_experts", expert, "linear_fc1", "weight"]:
            return [Piece(f"{layer}.mlp.experts.gate_up_proj", tensor, int(expert))]
        case ["mlp", "experts", "local_experts", expert, "linear_fc2", "weight"]:
            return [Piece(f"{layer}.mlp.experts.down_proj", tensor, int(expert))]
    raise AssertionError(f"no such tensor is built: {name}")


def divided(name: str) -> tuple[Literal["tensor", "expert"], int] | None:
    """By which processes a Hugging Face tensor is shared out, and along which dimension; None: all have it whole."""
    if ".mlp.experts." in name:
        return "expert", 0
    if ROWS.search(name):
        return "tensor", 0
    return ("tensor", 1) if COLUMNS.search(name) else None


def stage_of(name: str, layers: int, stages: int) -> int:
    """The pipeline stage that a Hugging Face tensor lies in, of a model with that many layers."""
    if name.startswith("model.layers."):
        return int(name.split(".")[2]) // (layers // stages)
    return 0 if "embed_tokens" in name else stages - 1
