"""Attention over a packed row (node/batching.py), put into any transformers model through its attention interface.

Linear layers run over all tokens of the row at once, without padding; attention runs block by block, each block of
queries against its own past only. Written as one autograd function: slicing keys per block under autograd would
allocate and add a full-size gradient for every slice.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

ATTENTION = "shoal_packed"
"""Name under which the attention is registered: `attn_implementation` of every model that node/models.py loads."""


@dataclass(frozen=True, slots=True)
class Block:
    """A run of queries, and which keys they see."""

    start: int
    stop: int
    """Queries are tokens [start, stop) of the row; they are also the last keys."""
    past: tuple[tuple[int, int], ...]
    """Spans of tokens before them, seen by all of them."""
    hidden: torch.Tensor
    """[stop - start, stop - start] bool: True where a query does not see a key of the block itself."""


class Attending(Protocol):
    """What a forward pass is given as `shoal=`: it computes the attention of one layer."""

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        """query [1, H, T, d], key and value [1, K, T, d] -> [1, T, H, d]."""


def _attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    shoal: Attending | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """The registered attention; without `shoal`, the library's own, so that a model also runs as usual."""
    if shoal is None:
        output, _ = sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **others)
        return output, None
    return shoal.attend(module.layer_idx, query, key, value, scaling or query.shape[-1] ** -0.5), None


AttentionInterface.register(ATTENTION, _attention)


class PackedAttention:
    """Attention of a packed row, with gradients. With `keep`, keys and values of every layer are kept for decoding."""

    def __init__(self, blocks: tuple[Block, ...], *, keep: bool = False) -> None:
        self.blocks = blocks
        self.kept: list[tuple[torch.Tensor, torch.Tensor]] | None = [] if keep else None
        """Keys and values of each layer, [K, T, d]."""

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        if self.kept is not None:
            self.kept.append((key[0].contiguous(), value[0].contiguous()))
        output: torch.Tensor = _Blockwise.apply(query, key, value, scaling, self.blocks)
        return output


class _Blockwise(torch.autograd.Function):
    """Softmax attention of every block; keeps only queries, keys and values for the way back."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float,
        blocks: tuple[Block, ...],
    ) -> torch.Tensor:
        ctx.save_for_backward(query, key, value)
        ctx.scaling, ctx.blocks = scaling, blocks
        _, heads, tokens, width = query.shape
        output = query.new_empty(tokens, heads, width)
        for block, _, _, values, weights in _weights(query, key, value, scaling, blocks):
            output[block.start : block.stop] = _from_kv_heads(torch.bmm(weights, values), block).transpose(0, 1)
        return output.unsqueeze(0)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value = ctx.saved_tensors
        d_query, d_key, d_value = torch.empty_like(query), torch.zeros_like(key), torch.zeros_like(value)
        d_output = gradient[0].transpose(0, 1)
        for block, queries, keys, values, weights in _weights(query, key, value, ctx.scaling, ctx.blocks):
            d_out = _to_kv_heads(d_output[:, block.start : block.stop], keys.shape[0])
            d_values = torch.bmm(weights.transpose(1, 2), d_out)
            d_weights = torch.bmm(d_out, values.transpose(1, 2))
            inner = (d_weights * weights).sum(-1, keepdim=True)
            d_scores = d_weights.sub_(inner).mul_(weights).mul_(ctx.scaling)
            d_query[0, :, block.start : block.stop] = _from_kv_heads(torch.bmm(d_scores, keys), block)
            d_keys = torch.bmm(d_scores.transpose(1, 2), queries)
            at = 0
            for start, stop in (*block.past, (block.start, block.stop)):
                d_key[0, :, start:stop] += d_keys[:, at : at + stop - start]
                d_value[0, :, start:stop] += d_values[:, at : at + stop - start]
                at += stop - start
        return d_query, d_key, d_value, None, None


def _weights(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float, blocks: tuple[Block, ...]
) -> Iterator[tuple[Block, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]]:
    """For each block its queries [K, r*Q, d], keys and values [K, S, d], and weights [K, r*Q, S].

    r query heads share one of the K key heads.
    """
    kv_heads = key.shape[1]
    for block in blocks:
        spans = (*block.past, (block.start, block.stop))
        queries = _to_kv_heads(query[0, :, block.start : block.stop], kv_heads)
        keys, values = _gather(key[0], spans), _gather(value[0], spans)
        scores = torch.bmm(queries, keys.transpose(1, 2)).float().mul_(scaling)
        own = block.stop - block.start
        scores.view(kv_heads, -1, own, scores.shape[-1])[..., -own:].masked_fill_(block.hidden, -torch.inf)
        yield block, queries, keys, values, torch.softmax(scores, -1).to(query.dtype)


def _gather(tensor: torch.Tensor, spans: tuple[tuple[int, int], ...]) -> torch.Tensor:
    if len(spans) == 1:
        return tensor[:, spans[0][0] : spans[0][1]]
    return torch.cat([tensor[:, start:stop] for start, stop in spans], dim=1)


def _to_kv_heads(tensor: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """[H, Q, d] -> [K, r*Q, d]: the query heads that share a key head, one after the other."""
    heads, tokens, width = tensor.shape
    return tensor.reshape(kv_heads, heads // kv_heads * tokens, width)


def _from_kv_heads(tensor: torch.Tensor, block: Block) -> torch.Tensor:
    """[K, r*Q, d] -> [H, Q, d]."""
    return tensor.reshape(-1, block.stop - block.start, tensor.shape[-1])
