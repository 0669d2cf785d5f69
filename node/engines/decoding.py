"""Sampling many groups in one batch: each prompt is computed once, each distinct beginning of its answers once.

A row stands for all samples of a group that have the same tokens so far: at first one row for all n, a new row
whenever two samples of a row draw different tokens. Keys and values of the prompt are kept once per group, those of
the answers in a preallocated buffer per group whose first rows are always the live ones. Nothing is concatenated or
expanded per token.

Unfinished samples of an earlier pass (`PromptRequest.starts`) are prefilled with the prompt, so the rows of a group
may be of different lengths; rows of one length take the fast path.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from node.attention import PackedAttention
from node.batching import TokenTrie, pack
from node.engines.partial import continued
from node.interfaces import FinishReason, PromptRequest, SampledGroup
from node.models import ModelBundle
from node.routing import fits, noted

PREFILL_TOKENS = 2048
"""Prompt tokens, and those of starts, computed in one forward pass."""
DRAWS = 64
"""Positions whose random numbers are drawn at once."""


@dataclass(slots=True)
class _Row:
    """Samples with the same tokens so far."""

    members: list[int]
    token: int = -1
    """The last token, whose keys and values are not computed yet."""
    length: int = 0
    """Answer tokens whose keys and values are computed."""


@dataclass(slots=True)
class _Group:
    request: PromptRequest
    generator: torch.Generator
    prefix: list[tuple[torch.Tensor, torch.Tensor]]
    """Keys and values of the prompt in each layer, [K, P, d]."""
    keys: torch.Tensor
    """[layers, n, K, L, d]: answers' keys; row j of the group is at j. Finite up to `reach` in all live rows."""
    values: torch.Tensor
    rows: list[_Row]
    tokens: list[list[int]]
    """Of every sample, those of its start included; log-probabilities only of the new ones."""
    logprobs: list[list[float]]
    finish: list[FinishReason]
    experts: list[bytearray]
    """Of every sample, which experts the prompt's tokens and its own went to; empty where that is not noted."""
    draws: torch.Tensor = field(default_factory=lambda: torch.empty(0, 0))
    """[positions, n] in [0, 1): the number that token t of sample i is drawn with."""

    @property
    def open(self) -> int:
        return sum(len(row.members) for row in self.rows)

    @property
    def reach(self) -> int:
        return max(row.length for row in self.rows)

    def draw(self, row: _Row) -> torch.Tensor:
        """The numbers that the row's samples draw their next tokens with, [members].

        They follow from seed, sample and position alone, so a sample that is stopped and goes on later (in the same
        place of a request with the same seed) draws what it would have drawn.
        """
        position = len(self.tokens[row.members[0]])
        while position >= len(self.draws):
            more = torch.rand(DRAWS, self.request.n, generator=self.generator, dtype=torch.float64)
            self.draws = torch.cat([self.draws.view(-1, self.request.n), more])
        return self.draws[position, row.members]


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
    closed: Callable[[], bool],
    stopped: Callable[[], bool],
    limits: Limits,
) -> None:
    """Sample all requests, handing each group to `emit` when it is complete.

    Once `stopped()`, what is left is emitted as it is, unfinished samples as 'aborted'; once `closed()`, nothing more
    is. Each group draws from its own generator, one number per sample and token, so what else is in the batch changes
    nothing. Log-probabilities are those of the sampled tokens at temperature 1, whatever the sampling temperature.
    """
    waiting = deque(requests)
    groups: list[_Group] = []
    with torch.inference_mode():
        while (waiting or groups) and not closed():
            if stopped():
                for group in groups:
                    emit(_finished(group, version))
                for request in waiting:
                    emit(unstarted(request, version))
                return
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
    """The group's samples: those with a start first, in the order of the starts."""
    for row in group.rows:
        for member in row.members:
            group.finish[member] = "aborted"
    starts = group.request.starts
    samples = []
    for i, (tokens, logprobs, finish) in enumerate(zip(group.tokens, group.logprobs, group.finish, strict=True)):
        start = starts[i] if i < len(starts) else None
        fresh = tokens[len(start.token_ids) :] if start else tokens
        experts = bytes(group.experts[i]) if group.experts else b""
        samples.append(continued(start, fresh, logprobs, finish, version, experts=experts))
    return SampledGroup(group.request.key, tuple(samples))


def unstarted(request: PromptRequest, version: int) -> SampledGroup:
    """What a request comes to that was stopped before it began."""
    begun = [continued(start, (), (), "aborted", version) for start in request.starts]
    rest = [continued(None, (), (), "aborted", version)] * (request.n - len(begun))
    return SampledGroup(request.key, (*begun, *rest))


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
        prompt_tokens += len(request.prompt_ids) + sum(len(start.token_ids) for start in request.starts)
        over = rows > limits.rows or held > limits.cache_bytes or prompt_tokens > PREFILL_TOKENS
        if over and (groups or admitted):
            break
        admitted.append(waiting.popleft())
    return admitted


def _prefill(bundle: ModelBundle, requests: Sequence[PromptRequest]) -> tuple[list[_Group], torch.Tensor]:
    """Compute prompts and starts, merged where they begin alike; returns groups and their rows' states [rows, D]."""
    device = bundle.model.device
    trie = TokenTrie()
    paths = [[trie.insert(request.prompt_ids + begun) for begun in _beginnings(request)] for request in requests]
    packed = pack(trie, device)
    attention = PackedAttention(packed.blocks, keep=True)
    with noted(bundle.routing) as routes:
        hidden = _forward(bundle, packed.token_ids, packed.positions, attention)
    kept = attention.kept or []
    layers, kv_heads, width = _shape(bundle)
    groups, last = [], []
    for request, of_rows in zip(requests, paths, strict=True):
        prompt = len(request.prompt_ids)
        where = [torch.tensor([packed.place[node] for node in path], device=device) for path in of_rows]
        last += [int(places[-1]) for places in where]
        shape = (layers, request.n, kv_heads, max(1, request.max_new_tokens - 1), width)
        # untouched pages of an empty tensor take no memory: short answers cost only what they use
        keys, values = (torch.empty(shape, dtype=hidden.dtype, device=device) for _ in range(2))
        rows = [_Row(members, length=len(begun)) for begun, members in _beginnings(request).items()]
        reach = max(row.length for row in rows)
        experts = [bytearray() for _ in range(request.n)] if fits(bundle.routing, request) else []
        for row, places in zip(rows, where, strict=True) if experts else ():
            chosen = routes.of(places.tolist())
            for member in row.members:
                experts[member] += chosen
        for cache, side in ((keys, 0), (values, 1)):
            cache[:, : len(rows), :, :reach] = 0.0
            for slot, (row, places) in enumerate(zip(rows, where, strict=True)):
                for layer, pair in enumerate(kept if row.length else ()):
                    cache[layer, slot, :, : row.length] = pair[side].index_select(1, places[prompt:])
        groups.append(
            _Group(
                request=request,
                generator=torch.Generator().manual_seed(request.seed),
                prefix=[
                    (key.index_select(1, where[0][:prompt]), value.index_select(1, where[0][:prompt]))
                    for key, value in kept
                ],
                keys=keys,
                values=values,
                rows=rows,
                tokens=[list(start.token_ids) for start in request.starts]
                + [[] for _ in range(request.n - len(request.starts))],
                logprobs=[[] for _ in range(request.n)],
                finish=["length"] * request.n,
                experts=experts,
            )
        )
    return groups, hidden[torch.tensor(last, device=device)]


def _beginnings(request: PromptRequest) -> dict[tuple[int, ...], list[int]]:
    """Distinct beginnings of the request's answers -> samples that begin so."""
    members: dict[tuple[int, ...], list[int]] = {}
    for i in range(request.n):
        begun = request.starts[i].token_ids if i < len(request.starts) else ()
        members.setdefault(begun, []).append(i)
    return members


# -- one token -----------------------------------------------------------------------------------------------


def _step(bundle: ModelBundle, groups: list[_Group]) -> torch.Tensor:
    """Compute the last token of every row; returns their states [rows, D]."""
    device = bundle.model.device
    tokens = [row.token for group in groups for row in group.rows]
    positions = [len(group.request.prompt_ids) + row.length for group in groups for row in group.rows]
    with noted(bundle.routing) as routes:
        hidden = _forward(
            bundle,
            torch.tensor(tokens, device=device),
            torch.tensor(positions, device=device),
            _DecodeAttention(groups),
        )
    rows = [(group, row) for group in groups for row in group.rows]
    for i, (group, row) in enumerate(rows):
        row.length += 1
        if group.experts:
            chosen = routes.of([i])
            for member in row.members:
                group.experts[member] += chosen
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
    where = torch.zeros(len(rows), max(len(row.members) for _, row in rows), dtype=torch.float64)
    for i, (group, row) in enumerate(rows):
        where[i, : len(row.members)] = group.draw(row)
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
                onward.setdefault(token, _Row([], token, row.length)).members.append(member)
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
    reach = group.reach
    # a free slot has no branch, so nothing that is still to be copied is overwritten
    for (source, row), slot in zip(homeless, free, strict=True):
        rows[slot] = row
        for cache in (group.keys, group.values):
            cache[:, slot, :, :reach] = cache[:, source, :, :reach]
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
        self.reaches = [group.reach for group in groups]
        self.ragged = [_lengths(group) for group in groups]

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        _, heads, tokens, width = query.shape
        kv_heads = key.shape[1]
        output = query.new_empty(tokens, heads, width)
        stop = 0
        for group, reach, lengths in zip(self.groups, self.reaches, self.ragged, strict=True):
            start, stop = stop, stop + len(group.rows)
            rows, seen = stop - start, reach + 1
            for cache, new in ((group.keys, key), (group.values, value)):
                if lengths is None:
                    cache[layer, :rows, :, reach] = new[0, :, start:stop].transpose(0, 1)
                else:
                    cache[layer, :rows, :, reach] = 0.0  # or weights of 0 would meet what was in memory
                    slots = torch.arange(rows, device=new.device)
                    cache[layer, slots, :, lengths] = new[0, :, start:stop].transpose(0, 1)
            past_keys, past_values = group.prefix[layer]
            own_keys = group.keys[layer, :rows, :, :seen].flatten(0, 1)  # [rows*K, seen, d], a view
            own_values = group.values[layer, :rows, :, :seen].flatten(0, 1)
            by_row = query[0, :, start:stop].transpose(0, 1).reshape(rows, kv_heads, -1, width)  # [rows, K, r, d]
            by_head = by_row.transpose(0, 1).reshape(kv_heads, -1, width)  # [K, rows*r, d]
            shared = torch.bmm(by_head, past_keys.transpose(1, 2)).view(kv_heads, rows, heads // kv_heads, -1)
            own = torch.bmm(by_row.flatten(0, 1), own_keys.transpose(1, 2)).view(rows, kv_heads, -1, seen)
            if lengths is not None:
                unwritten = torch.arange(seen, device=own.device) > lengths[:, None]
                own = own.masked_fill(unwritten[:, None, None], -torch.inf)
            scores = torch.cat([shared.transpose(0, 1), own], -1).float().mul_(scaling)
            weights = torch.softmax(scores, -1).to(query.dtype)  # [rows, K, r, P + seen]
            prompt = past_keys.shape[1]
            of_prompt = weights[..., :prompt].transpose(0, 1).reshape(kv_heads, -1, prompt)
            result = torch.bmm(of_prompt, past_values).view(kv_heads, rows, -1, width).transpose(0, 1)
            result = result + torch.bmm(weights[..., prompt:].flatten(0, 1), own_values).view(rows, kv_heads, -1, width)
            output[start:stop] = result.reshape(rows, heads, width)
        return output.unsqueeze(0)


def _lengths(group: _Group) -> torch.Tensor | None:
    """Rows' lengths where they differ, [rows]."""
    lengths = [row.length for row in group.rows]
    return torch.tensor(lengths, device=group.keys.device) if min(lengths) < max(lengths) else None
