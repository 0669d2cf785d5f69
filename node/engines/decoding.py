"""Sampling many groups in one batch: each prompt is computed once, each distinct beginning of its answers once.

A row stands for all samples of a group that have the same tokens so far: at first one row for all n, a new row
whenever two samples of a row draw different tokens. Keys and values of the prompt are kept once per group, those of
the answers in a preallocated buffer per group whose first rows are always the live ones. Nothing is concatenated or
expanded per token.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from node.attention import PackedAttention
from node.batching import TokenTrie, pack
from node.interfaces import FinishReason, PromptRequest, Sample, SampledGroup
from node.models import ModelBundle

PREFILL_TOKENS = 2048
"""Prompt tokens computed in one forward pass."""


@dataclass(slots=True)
class _Row:
    """Samples with the same tokens so far."""

    members: list[int]
    token: int = -1
    """The last token, whose keys and values are not computed yet."""


@dataclass(slots=True)
class _Group:
    request: PromptRequest
    generator: torch.Generator
    prefix: list[tuple[torch.Tensor, torch.Tensor]]
    """Keys and values of the prompt in each layer, [K, P, d]."""
    keys: torch.Tensor
    """[layers, n, K, L, d]: answers' keys; row j of the group is at j."""
    values: torch.Tensor
    rows: list[_Row]
    length: int = 0
    """Answer tokens whose keys and values are computed."""
    tokens: list[list[int]] = field(default_factory=list)
    logprobs: list[list[float]] = field(default_factory=list)
    finish: list[FinishReason] = field(default_factory=list)

    @property
    def open(self) -> int:
        return sum(len(row.members) for row in self.rows)


@dataclass(frozen=True, slots=True)
class Limits:
    """What one batch may hold; further groups wait until rows are free."""

    rows: int = 64
    """Samples decoded together. One group with more of them is still taken, alone."""
    cache_bytes: int = 1 << 30
    """Keys and values. A single group beyond it is still taken, alone."""


def decode_groups(
    bundle: ModelBundle,
    requests: Sequence[PromptRequest],
    version: int,
    emit: Callable[[SampledGroup], None],
    stopped: Callable[[], bool],
    limits: Limits,
) -> None:
    """Sample all requests, handing each group to `emit` when it is complete; returns early once `stopped()`.

    Each group draws from its own generator, one number per sample and token, so what else is in the batch changes
    nothing. Log-probabilities are those of the sampled tokens at temperature 1, whatever the sampling temperature.
    """
    waiting = deque(requests)
    groups: list[_Group] = []
    with torch.inference_mode():
        while (waiting or groups) and not stopped():
            states = [_step(bundle, groups)] if groups else []
            admitted = _admissible(bundle, waiting, groups, limits)
            if admitted:
                fresh, state = _prefill(bundle, admitted)
                groups += fresh
                states.append(state)
            _sample(bundle, groups, torch.cat(states))
            for group in groups:
                if not group.rows:
                    emit(_finished(group, version))
            groups = [group for group in groups if group.rows]


def _finished(group: _Group, version: int) -> SampledGroup:
    samples = zip(group.tokens, group.logprobs, group.finish, strict=True)
    return SampledGroup(
        group.request.key,
        tuple(Sample(tuple(tokens), tuple(logprobs), finish, version) for tokens, logprobs, finish in samples),
    )


# -- admission and prompts -----------------------------------------------------------------------------------


def _cache_bytes(bundle: ModelBundle, request: PromptRequest) -> int:
    layers, kv_heads, width = _shape(bundle)
    tokens = len(request.prompt_ids) + request.n * request.max_new_tokens
    return 2 * layers * kv_heads * width * tokens * bundle.model.dtype.itemsize


def _shape(bundle: ModelBundle) -> tuple[int, int, int]:
    config = bundle.model.config
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return config.num_hidden_layers, config.num_key_value_heads, width


def _admissible(
    bundle: ModelBundle, waiting: deque[PromptRequest], groups: list[_Group], limits: Limits
) -> list[PromptRequest]:
    rows = sum(group.open for group in groups)
    held = sum(_cache_bytes(bundle, group.request) for group in groups)
    prompt_tokens = 0
    admitted: list[PromptRequest] = []
    while waiting:
        request = waiting[0]
        rows += request.n
        held += _cache_bytes(bundle, request)
        prompt_tokens += len(request.prompt_ids)
        over = rows > limits.rows or held > limits.cache_bytes or prompt_tokens > PREFILL_TOKENS
        if over and (groups or admitted):
            break
        admitted.append(waiting.popleft())
    return admitted


def _prefill(bundle: ModelBundle, requests: Sequence[PromptRequest]) -> tuple[list[_Group], torch.Tensor]:
    """Compute the prompts, merged where they begin alike; returns the groups and their last states [groups, D]."""
    device = bundle.model.device
    trie = TokenTrie()
    paths = [trie.insert(request.prompt_ids) for request in requests]
    packed = pack(trie, device)
    attention = PackedAttention(packed.blocks, keep=True)
    hidden = _forward(bundle, packed.token_ids, packed.positions, attention)
    kept = attention.kept or []
    layers, kv_heads, width = _shape(bundle)
    groups, last = [], []
    for request, path in zip(requests, paths, strict=True):
        where = torch.tensor([packed.place[node] for node in path], device=device)
        last.append(int(where[-1]))
        shape = (layers, request.n, kv_heads, max(1, request.max_new_tokens - 1), width)
        groups.append(
            _Group(
                request=request,
                generator=torch.Generator().manual_seed(request.seed),
                prefix=[(key.index_select(1, where), value.index_select(1, where)) for key, value in kept],
                # untouched pages of an empty tensor take no memory: short answers cost only what they use
                keys=torch.empty(shape, dtype=hidden.dtype, device=device),
                values=torch.empty(shape, dtype=hidden.dtype, device=device),
                rows=[_Row(list(range(request.n)))],
                tokens=[[] for _ in range(request.n)],
                logprobs=[[] for _ in range(request.n)],
                finish=["length"] * request.n,
            )
        )
    return groups, hidden[torch.tensor(last, device=device)]


# -- one token -----------------------------------------------------------------------------------------------


def _step(bundle: ModelBundle, groups: list[_Group]) -> torch.Tensor:
    """Compute the last token of every row; returns their states [rows, D]."""
    device = bundle.model.device
    tokens = [row.token for group in groups for row in group.rows]
    positions = [len(group.request.prompt_ids) + group.length for group in groups for _ in group.rows]
    hidden = _forward(
        bundle,
        torch.tensor(tokens, device=device),
        torch.tensor(positions, device=device),
        _DecodeAttention(groups),
    )
    for group in groups:
        group.length += 1
    return hidden


def _sample(bundle: ModelBundle, groups: list[_Group], states: torch.Tensor) -> None:
    """Draw the next token of every open sample from the rows' states, and branch or close rows accordingly."""
    logits = torch.mm(states, bundle.model.get_output_embeddings().weight.t()).float()
    lse = torch.logsumexp(logits, -1, keepdim=True)
    rows = [(group, row) for group in groups for row in group.rows]
    temperatures = [group.request.temperature for group, _ in rows]
    if any(temperature != 1.0 for temperature in temperatures):
        scale = torch.tensor(temperatures, device=logits.device).unsqueeze(1)
        probabilities = torch.softmax(logits / scale, -1)
    else:
        probabilities = torch.exp(logits - lse)
    # in float64, or the running sum would round away rare tokens
    running = torch.cumsum(probabilities, -1, dtype=torch.float64)
    draws = {id(group): torch.rand(group.request.n, generator=group.generator, dtype=torch.float64) for group in groups}
    where = torch.zeros(len(rows), max(len(row.members) for _, row in rows), dtype=torch.float64)
    for i, (group, row) in enumerate(rows):
        where[i, : len(row.members)] = draws[id(group)][row.members]
    drawn = torch.searchsorted(running, where.to(running.device) * running[:, -1:], right=True)
    drawn.clamp_(max=logits.shape[-1] - 1)
    chosen = (logits.gather(1, drawn) - lse).tolist()
    tokens = drawn.tolist()
    at = 0
    for group in groups:
        count = len(group.rows)
        _advance(group, bundle.stop_ids, tokens[at : at + count], chosen[at : at + count])
        at += count


def _advance(group: _Group, stop_ids: frozenset[int], drawn: list[list[int]], logprobs: list[list[float]]) -> None:
    """Write down what each sample drew; a row goes on once per distinct token that does not end its samples."""
    branches: list[tuple[int, _Row]] = []
    for slot, row in enumerate(group.rows):
        onward: dict[int, _Row] = {}
        for member, token, logprob in zip(row.members, drawn[slot], logprobs[slot], strict=False):
            group.tokens[member].append(token)
            group.logprobs[member].append(logprob)
            if token in stop_ids:
                group.finish[member] = "stop"
            elif len(group.tokens[member]) < group.request.max_new_tokens:
                onward.setdefault(token, _Row([], token)).members.append(member)
        branches += [(slot, row) for row in onward.values()]
    _place(group, branches)


def _place(group: _Group, branches: list[tuple[int, _Row]]) -> None:
    """Give every branch a slot among the first ones, copying keys and values only where a row moves or splits."""
    rows: list[_Row | None] = [None] * len(branches)
    homeless: list[tuple[int, _Row]] = []
    for slot, row in branches:
        if slot < len(rows) and rows[slot] is None:
            rows[slot] = row
        else:
            homeless.append((slot, row))
    free = [slot for slot, row in enumerate(rows) if row is None]
    # a free slot has no branch, so nothing that is still to be copied is overwritten
    for (source, row), slot in zip(homeless, free, strict=True):
        rows[slot] = row
        for cache in (group.keys, group.values):
            cache[:, slot, :, : group.length] = cache[:, source, :, : group.length]
    group.rows = [row for row in rows if row is not None]


def _forward(
    bundle: ModelBundle,
    token_ids: torch.Tensor,
    positions: torch.Tensor,
    attention: "PackedAttention | _DecodeAttention",
) -> torch.Tensor:
    """Last states [T, D] of a row of T tokens."""
    output = bundle.model.base_model(
        input_ids=token_ids.unsqueeze(0), position_ids=positions.unsqueeze(0), use_cache=False, shoal=attention
    )
    return output.last_hidden_state[0]


class _DecodeAttention:
    """One new token per row: against the group's prompt in one product, against the row's own tokens in another."""

    def __init__(self, groups: list[_Group]) -> None:
        self.groups = groups

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        _, heads, tokens, width = query.shape
        kv_heads = key.shape[1]
        output = query.new_empty(tokens, heads, width)
        stop = 0
        for group in self.groups:
            start, stop = stop, stop + len(group.rows)
            rows, seen = stop - start, group.length + 1
            group.keys[layer, :rows, :, group.length] = key[0, :, start:stop].transpose(0, 1)
            group.values[layer, :rows, :, group.length] = value[0, :, start:stop].transpose(0, 1)
            past_keys, past_values = group.prefix[layer]
            own_keys = group.keys[layer, :rows, :, :seen].flatten(0, 1)  # [rows*K, seen, d], a view
            own_values = group.values[layer, :rows, :, :seen].flatten(0, 1)
            by_row = query[0, :, start:stop].transpose(0, 1).reshape(rows, kv_heads, -1, width)  # [rows, K, r, d]
            by_head = by_row.transpose(0, 1).reshape(kv_heads, -1, width)  # [K, rows*r, d]
            shared = torch.bmm(by_head, past_keys.transpose(1, 2)).view(kv_heads, rows, heads // kv_heads, -1)
            own = torch.bmm(by_row.flatten(0, 1), own_keys.transpose(1, 2)).view(rows, kv_heads, -1, seen)
            scores = torch.cat([shared.transpose(0, 1), own], -1).float().mul_(scaling)
            weights = torch.softmax(scores, -1).to(query.dtype)  # [rows, K, r, P + seen]
            prompt = past_keys.shape[1]
            of_prompt = weights[..., :prompt].transpose(0, 1).reshape(kv_heads, -1, prompt)
            result = torch.bmm(of_prompt, past_values).view(kv_heads, rows, -1, width).transpose(0, 1)
            result = result + torch.bmm(weights[..., prompt:].flatten(0, 1), own_values).view(rows, kv_heads, -1, width)
            output[start:stop] = result.reshape(rows, heads, width)
        return output.unsqueeze(0)
