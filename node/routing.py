"""Routing replay for mixture-of-experts models: what the rollout's routers chose is chosen again in training.

Rollout Routing Replay, R3 (arXiv 2510.11370): a small numeric difference between rollout and training can flip which k
experts a token goes to, and then its log-probability jumps. So the engine notes the experts of every token in every
layer, and the training forward takes those; their weights still come from the training router's own logits, so
that router and experts get their gradients as usual. Prompt tokens are replayed too: their states are what the
completion attends to.

Choices travel as bytes, [tokens, layers, k] of uint8, or little-endian uint16 from 257 experts on; layers without a
router are left out. They may cover fewer tokens than there are: the rest, and foreign groups, are routed freely.
"""

import base64
import binascii
import io
import logging
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import torch

from node.batching import MicroBatch, Packed
from node.interfaces import PromptRequest, Sample, TrainGroup

log = logging.getLogger(__name__)

MAX_GROUP_BYTES = 64 << 20
"""Choices noted for one group; a request that could exceed it is sampled without."""
MAX_BATCH_BYTES = 512 << 20
"""Choices of one update, which are journalled with it: half of what a journal record may hold."""


class RoutingError(ValueError):
    """Noted choices do not fit the model or the tokens."""


@dataclass(slots=True)
class Routing:
    """The routers of one model, and what they do in the forward pass in progress."""

    layers: tuple[int, ...]
    """Which of the model's layers have a router."""
    experts: int
    chosen: int
    """k, experts of a token in a layer."""
    told: torch.Tensor | None = None
    """[T, layers, k] experts to take, -1 where the router chooses."""
    noted: list[torch.Tensor] | None = None
    """Experts taken, [T, k] of each layer."""

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype("u1" if self.experts <= 256 else "<u2")

    @property
    def token_bytes(self) -> int:
        return len(self.layers) * self.chosen * self.dtype.itemsize

    def unpack(self, choices: bytes, limit: int) -> np.ndarray[Any, Any]:
        """[tokens, layers, k] of at most `limit` tokens. Raises RoutingError."""
        count, rest = divmod(len(choices), self.token_bytes)
        if rest or count > limit:
            raise RoutingError(
                f"{len(choices)} bytes of experts for {limit} tokens at {self.token_bytes} a token: "
                "they are of another model or of other tokens; set train.routing_replay to off"
            )
        values = np.frombuffer(choices, self.dtype).reshape(count, len(self.layers), self.chosen)
        if count and int(values.max()) >= self.experts:
            raise RoutingError(f"expert {int(values.max())} was noted, but the model has {self.experts} a layer")
        return values


@dataclass(slots=True)
class Noted:
    """What was chosen for the tokens of a row."""

    values: np.ndarray[Any, Any] | None = None
    """[T, layers, k]; None for a dense model."""

    def of(self, places: Sequence[int]) -> bytes:
        """Choices of the tokens at `places`, in that order."""
        return b"" if self.values is None else self.values[list(places)].tobytes()


@contextmanager
def noted(routing: Routing | None) -> Iterator[Noted]:
    """The forward pass of a row inside this notes what is chosen; it can be asked afterwards."""
    result = Noted()
    if routing is None:
        yield result
        return
    routing.noted = []
    try:
        yield result
        result.values = torch.stack(routing.noted, 1).cpu().numpy().astype(routing.dtype)
    finally:
        routing.noted = None


# -- the model -----------------------------------------------------------------------------------------------


def find_routers(model: Any) -> Routing | None:
    """Give the routers of a loaded model a forward that can be told what to choose; None for a dense model.

    They are the modules of qwen2_moe, qwen3_moe, olmoe and mixtral that return (logits, weights, experts).
    """
    found = {
        index: layer.mlp.gate for index, layer in enumerate(model.base_model.layers) if hasattr(layer.mlp, "experts")
    }
    if not found:
        return None
    first = next(iter(found.values()))
    routing = Routing(tuple(found), first.num_experts, first.top_k)
    for slot, router in enumerate(found.values()):
        router.shoal_routing, router.shoal_slot = routing, slot
        router.forward = types.MethodType(_route, router)
    return routing


def _route(module: Any, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The router's own forward, with the experts it is told in place of its own choice."""
    routing: Routing = module.shoal_routing
    logits, weights, experts = type(module).forward(module, hidden_states)
    if routing.told is not None:
        told = routing.told[:, module.shoal_slot]
        experts = torch.where(told >= 0, told, experts)
        probabilities = torch.softmax(logits, -1, dtype=torch.float32).gather(-1, experts)
        if getattr(module, "norm_topk_prob", True):  # mixtral has no such setting and always does
            probabilities = probabilities / probabilities.sum(-1, keepdim=True)
        weights = probabilities.to(weights.dtype)
    if routing.noted is not None:
        routing.noted.append(experts)
    return logits, weights, experts


def fits(routing: Routing | None, request: PromptRequest) -> bool:
    """Whether the choices of a request's samples are noted: their number is known before, and bounded."""
    tokens = request.n * (len(request.prompt_ids) + request.max_new_tokens)
    return routing is not None and tokens * routing.token_bytes <= MAX_GROUP_BYTES


def divide(routing: Routing | None, prompt: int, samples: Sequence[Sample]) -> tuple[bytes, list[bytes]]:
    """Choices for the prompt's tokens, once, and for those of each sample."""
    if routing is None:
        return b"", [b""] * len(samples)
    cut = prompt * routing.token_bytes
    own = [sample.experts[cut:] for sample in samples]
    return max((sample.experts[:cut] for sample in samples), key=len, default=b""), own


# -- a micro-batch -------------------------------------------------------------------------------------------


def told(routing: Routing, micro: MicroBatch, packed: Packed) -> torch.Tensor | None:
    """[T, layers, k] experts of a packed row, -1 where nothing was noted; None when nothing was at all.

    Where sequences are merged, the first of them that has a choice for a token decides. Raises RoutingError.
    """
    place = np.array(packed.place)
    values = np.full((len(packed.token_ids), len(routing.layers), routing.chosen), -1, np.int64)
    for (g, s), path in reversed(list(zip(micro.members, micro.paths, strict=True))):
        group = micro.groups[g]
        before = _before(micro.trie.parents, path[0]) if path else []
        for nodes, choices in ((path, group.sequences[s].experts), (before, group.prompt_experts)):
            noted = routing.unpack(choices, len(nodes))
            at = place[list(nodes[: len(noted)])]
            values[at[at >= 0]] = noted[at >= 0]
    return None if (values < 0).all() else torch.from_numpy(values).to(packed.token_ids.device)


def _before(parents: Sequence[int], node: int) -> list[int]:
    """The nodes that lead to a node, from the first token on."""
    nodes: list[int] = []
    while (node := parents[node]) >= 0:
        nodes.append(node)
    return nodes[::-1]


def bounded(groups: Sequence[TrainGroup], limit: int = MAX_BATCH_BYTES) -> tuple[TrainGroup, ...]:
    """Groups with choices of at most `limit` bytes together: the ones beyond go without, and are routed freely."""
    kept: list[TrainGroup] = []
    left_out = 0
    for group in groups:
        size = len(group.prompt_experts) + sum(len(one.experts) for one in group.sequences)
        if size > limit:
            bare = tuple(msgspec.structs.replace(one, experts=b"") for one in group.sequences)
            group = msgspec.structs.replace(group, prompt_experts=b"", sequences=bare)
            left_out += 1
        else:
            limit -= size
        kept.append(group)
    if left_out:
        log.warning("%d of %d groups train without routing replay: too many choices to keep", left_out, len(kept))
    return tuple(kept)


@contextmanager
def replayed(routing: Routing | None, micro: MicroBatch, packed: Packed) -> Iterator[None]:
    """The forward pass of a packed row inside this takes the experts that were noted. Raises RoutingError."""
    if routing is None:
        yield
        return
    routing.told = told(routing, micro, packed)
    try:
        yield
    finally:
        routing.told = None


# -- vLLM ----------------------------------------------------------------------------------------------------


def longest_field(routing: Routing, tokens: int) -> int:
    """Bytes that `routed_experts` takes at most: the group's bound, times the layers that have no router, in base64."""
    layers = routing.layers[-1] + 1
    return 2 * min(MAX_GROUP_BYTES, tokens * routing.token_bytes) * layers // len(routing.layers)


def from_vllm(text: str, routing: Routing, tokens: int) -> bytes:
    """Choices of at most `tokens` tokens of prompt and sample, from `routed_experts` of a vLLM choice.

    vLLM (server flag `--enable-return-routed-experts`) sends base64 of a .npy array [tokens - 1, layers, k]: prompt and
    sampled tokens but the last, and all layers, those without a router as zeros. Raises RoutingError.
    """
    try:
        values = np.load(io.BytesIO(base64.b64decode(text, validate=True)), allow_pickle=False)
    except (binascii.Error, ValueError, OSError, EOFError) as error:
        raise RoutingError(f"routed_experts of the vLLM server cannot be read: {error}") from error
    wanted = (routing.layers[-1] + 1, routing.chosen)
    if values.ndim != 3 or values.shape[1] < wanted[0] or values.shape[2] != wanted[1]:
        raise RoutingError(
            f"routed_experts of the vLLM server has shape {values.shape}, but the model has {wanted[0]} layers or more "
            f"and {wanted[1]} experts a token and layer; serve the same model"
        )
    chosen = values[:, list(routing.layers)]
    if len(chosen) > tokens or (len(chosen) and not 0 <= int(chosen.min()) <= int(chosen.max()) < routing.experts):
        raise RoutingError(
            f"routed_experts of the vLLM server covers {len(chosen)} tokens of {tokens} with experts up to "
            f"{int(chosen.max(initial=0))} of {routing.experts}; serve the same model"
        )
    return chosen.astype(routing.dtype).tobytes()
