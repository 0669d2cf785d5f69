"""Attention of a decode step: a few new tokens per row, against the group's prompt and the row's own tokens."""

from dataclasses import dataclass

import torch

from node.engines.decode_state import Group


@dataclass(frozen=True, slots=True)
class _Ragged:
    """Rows of different lengths, or with guesses, of one group; q is the most new tokens of a row."""

    tokens: torch.Tensor
    """[rows, q]: where the new tokens of each row are in the group's part of the batch; short rows repeat the last."""
    real: torch.Tensor
    """[rows, q] bool: which of them are no such repetition."""
    slots: torch.Tensor
    """[T]: row of each new token."""
    columns: torch.Tensor
    """[T]: where its keys and values go."""
    hidden: torch.Tensor
    """[rows, q, seen] bool: which columns a token must not see."""


class DecodeAttention:
    """Computes the prompt's part for all rows of a group in one product, and the rows' own part in another."""

    def __init__(self, groups: list[Group]) -> None:
        self.groups = groups
        self.counts = [sum(1 + len(row.draft) for row in group.rows) for group in groups]
        self.reaches = [group.reach for group in groups]
        self.ragged = [_ragged(group) for group in groups]

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        """query [1, H, T, d], key and value [1, K, T, d] -> [1, T, H, d]."""
        _, heads, tokens, width = query.shape
        kv_heads = key.shape[1]
        output = query.new_empty(tokens, heads, width)
        stop = 0
        for group, count, reach, ragged in zip(self.groups, self.counts, self.reaches, self.ragged, strict=True):
            start, stop = stop, stop + count
            rows = len(group.rows)
            own = query[0, :, start:stop].transpose(0, 1)  # [T, H, d]
            for cache, new in ((group.keys[layer], key), (group.values[layer], value)):
                fresh = new[0, :, start:stop].transpose(0, 1)
                if ragged is None:
                    cache[:rows, :, reach] = fresh
                else:
                    # what a row does not write would be whatever was in memory, and a weight of 0 does not undo a NaN
                    cache[:rows, :, reach : ragged.hidden.shape[2]] = 0.0
                    cache[ragged.slots, :, ragged.columns] = fresh
            if ragged is None:
                seen = reach + 1
                queries = own.reshape(rows, 1, kv_heads, -1, width)
            else:
                seen = ragged.hidden.shape[2]
                queries = own[ragged.tokens].reshape(rows, ragged.tokens.shape[1], kv_heads, -1, width)
            result = _attend(group, layer, queries, seen, scaling, None if ragged is None else ragged.hidden)
            result = result.reshape(rows, -1, heads, width)
            output[start:stop] = result[:, 0] if ragged is None else result[ragged.real]
        return output.unsqueeze(0)


def _attend(
    group: Group, layer: int, queries: torch.Tensor, seen: int, scaling: float, hidden: torch.Tensor | None
) -> torch.Tensor:
    """queries [rows, q, K, r, d] -> the same shape."""
    rows, new, kv_heads, _, width = queries.shape
    past_keys, past_values = group.prefix[layer]
    own_keys = group.keys[layer, :rows, :, :seen].flatten(0, 1)  # [rows*K, seen, d], a view
    own_values = group.values[layer, :rows, :, :seen].flatten(0, 1)
    by_row = queries.transpose(1, 2).reshape(rows, kv_heads, -1, width)  # [rows, K, q*r, d]
    by_head = by_row.transpose(0, 1).reshape(kv_heads, -1, width)  # [K, rows*q*r, d]
    shared = torch.bmm(by_head, past_keys.transpose(1, 2)).view(kv_heads, rows, by_row.shape[2], -1)
    own = torch.bmm(by_row.flatten(0, 1), own_keys.transpose(1, 2)).view(rows, kv_heads, -1, seen)
    if hidden is not None:
        unseen = hidden[:, None, :, None, :]  # for every K and r
        own = own.view(rows, kv_heads, new, -1, seen).masked_fill(unseen, -torch.inf).flatten(2, 3)
    scores = torch.cat([shared.transpose(0, 1), own], -1).float().mul_(scaling)
    weights = torch.softmax(scores, -1).to(queries.dtype)  # [rows, K, q*r, P + seen]
    prompt = past_keys.shape[1]
    of_prompt = weights[..., :prompt].transpose(0, 1).reshape(kv_heads, -1, prompt)
    result = torch.bmm(of_prompt, past_values).view(kv_heads, rows, -1, width).transpose(0, 1)
    result = result + torch.bmm(weights[..., prompt:].flatten(0, 1), own_values).view(rows, kv_heads, -1, width)
    return result.view(rows, kv_heads, new, -1, width).transpose(1, 2)


def _ragged(group: Group) -> _Ragged | None:
    """None where all rows are of one length and have one new token."""
    lengths = [row.length for row in group.rows]
    counts = [1 + len(row.draft) for row in group.rows]
    if min(lengths) == max(lengths) and max(counts) == 1:
        return None
    device, most = group.keys.device, max(counts)
    seen = max(length + count for length, count in zip(lengths, counts, strict=True))
    count, length = torch.tensor(counts, device=device), torch.tensor(lengths, device=device)
    ahead = torch.arange(most, device=device)
    first = count.cumsum(0) - count
    real = ahead < count[:, None]
    columns = length[:, None] + ahead
    return _Ragged(
        tokens=first[:, None] + torch.minimum(ahead, count[:, None] - 1),
        real=real,
        slots=torch.arange(len(counts), device=device).repeat_interleave(count),
        columns=columns[real],
        hidden=torch.arange(seen, device=device) > columns[..., None],
    )
