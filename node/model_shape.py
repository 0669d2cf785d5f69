"""How large a model is, read from its files without loading them."""

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from node.config_train import TrainConfig
from node.logprobs import CHUNK_BYTES, KEEP_BYTES
from node.models import ModelError, check_directory


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What the memory of a model follows from."""

    name: str
    parameters: int
    kv_bytes: int
    """Keys and values of one token, in 16-bit numbers."""
    layers: int = 0
    width: int = 0
    """Numbers of one token's state between layers."""
    linear: Mapping[str, int] = field(default_factory=dict)
    """Linear layers by name (q_proj), those of experts left out: numbers in and out of one token, in all layers."""
    embedding: int = 0
    """Numbers of the embedding and the output layer."""
    experts: int = 0
    """Numbers of all experts."""
    vocabulary: int = 0

    def adapters(self, config: TrainConfig) -> int:
        """Numbers in the adapters of `train.lora_rank`: A is [rank, in], B is [out, rank]."""
        everywhere = config.lora_targets == ("all-linear",)
        return config.lora_rank * sum(n for name, n in self.linear.items() if everywhere or name in config.lora_targets)

    def activations(self, config: TrainConfig, *, recomputed: bool) -> int:
        """About the most numbers that a micro-batch keeps for the way back, experts and output layer left out."""
        kept = sum(self.linear.values())
        if recomputed and self.layers:
            kept = self.layers * self.width + kept // self.layers  # what goes into each layer, and all of one layer
        return config.tokens_per_micro_batch * kept

    def output_layer(self, config: TrainConfig) -> int:
        """The most bytes that a micro-batch takes there (node/logprobs.py), if every token is trained on: float32
        probabilities that are kept, and two chunks at work, scores and what is made of them.
        """
        scores = 4 * config.tokens_per_micro_batch * self.vocabulary
        return min(KEEP_BYTES, scores) + 2 * min(CHUNK_BYTES, scores)

    def gathered(self) -> int:
        """About the most numbers of other processes' that one has at a time: embedding, output and two layers."""
        layer = (self.parameters - self.embedding) // max(1, self.layers)
        return min(self.parameters, self.embedding + 2 * layer)

    def divided(self, config: TrainConfig) -> int:
        """About the numbers that one of the processes of Megatron's trainer holds."""
        parts = config.tensor_parallel * config.pipeline_parallel
        return -(-(self.parameters - self.experts) // parts) + -(-self.experts // (parts * config.expert_parallel))


def model_shape(directory: Path) -> ModelShape:
    """Read the headers of a model's files. Raises ModelError."""
    check_directory(directory)
    try:
        config = json.loads((directory / "config.json").read_text())
        tensors = [tensor for file in directory.glob("*.safetensors") for tensor in _tensors(file)]
        linear: dict[str, int] = {}
        for name, sizes in tensors:
            if len(sizes) == 2 and ".layers." in name and ".experts." not in name:
                layer = name.split(".")[-2]
                linear[layer] = linear.get(layer, 0) + sum(sizes)
        heads, vocabulary = config["num_attention_heads"], config["vocab_size"]
        width = config.get("head_dim") or config["hidden_size"] // heads
        kv = 2 * 2 * config["num_hidden_layers"] * (config.get("num_key_value_heads") or heads) * width
    except (OSError, ValueError, KeyError, TypeError, struct.error) as error:
        raise ModelError(f"{directory}: its files cannot be read ({error!r}); copy the model again, whole") from error
    return ModelShape(
        name=directory.name,
        parameters=sum(math.prod(sizes) for _, sizes in tensors),
        kv_bytes=kv,
        layers=config["num_hidden_layers"],
        width=config["hidden_size"],
        linear=MappingProxyType(linear),
        embedding=sum(math.prod(sizes) for name, sizes in tensors if "embed_tokens" in name or "lm_head" in name),
        vocabulary=vocabulary,
        experts=sum(math.prod(sizes) for name, sizes in tensors if ".experts." in name),
    )


def _tensors(file: Path) -> list[tuple[str, list[int]]]:
    """Names and shapes."""
    with file.open("rb") as opened:
        (length,) = struct.unpack("<Q", opened.read(8))
        header = json.loads(opened.read(min(length, 100 << 20)))
    return [(name, tensor["shape"]) for name, tensor in header.items() if name != "__metadata__"]
