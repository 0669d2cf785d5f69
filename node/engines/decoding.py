"""Sampling many groups in one batch: each prompt is computed once, each distinct beginning of its answers once.

A row stands for all samples of a group that have the same tokens so far: at first one row for all n, a new row
whenever two samples of a row draw different tokens. Keys and values of the prompt are kept once per group, those of
the answers in a preallocated buffer per group whose first rows are always the live ones. Nothing is concatenated or
expanded per token.

Unfinished samples of an earlier pass (`PromptRequest.starts`) are prefilled with the prompt, so the rows of a group
may be of different lengths; rows of one length take the fast path. Where it pays, a row computes guesses at its next
tokens too (node/engines/drafting.py); what is sampled stays the same.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from node.attention import PackedAttention
from node.batching import TokenTrie, pack
from node.engines.decode_attention import DecodeAttention
from node.engines.decode_state import Group, Row
from node.engines.drafting import Drafter, SuffixTrie
from node.engines.partial import continued
from node.interfaces import PromptRequest, SampledGroup
from node.logprobs import logits_of
from node.models import ModelBundle
from node.routing import fits, noted

PREFILL_TOKENS = 2048
"""Tokens of prompts and starts, merged where they begin alike, that one forward pass computes."""
PROMPT_SAID = 1024
"""Last prompt tokens that guesses are made from."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What one batch may hold; further groups wait until rows are free."""

    rows: int = 64
    """Samples decoded together. One group with more of them is still taken, alone."""
    cache_bytes: int = 1 << 29
    """Keys and values. A single group beyond it is still taken, alone. Held-out tasks, each with a prompt of its own,
    fill it; with twice as much an evaluation of the embedded model took more memory than an update."""
    knee: float = 0.0
    """Tokens below which a pass takes about as long whatever their number; 0: no guesses."""


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
    groups: list[Group] = []
    # which experts a guess that is not drawn went to must not be noted
    drafter = Drafter(limits.knee) if limits.knee and bundle.routing is None else None
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
                fresh, state = _prefill(bundle, admitted, drafter)
                groups += fresh
                states.append(state)
            _sample(bundle, groups, torch.cat(states), drafter)
            for group in groups:
                if not group.rows:
                    emit(_finished(group, version))
            groups = [group for group in groups if group.rows]
            if drafter is not None:
                _guess(groups, drafter, bundle.stop_ids)


def _finished(group: Group, version: int) -> SampledGroup:
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
    bundle: ModelBundle, waiting: deque[PromptRequest], groups: list[Group], limits: Limits
) -> list[PromptRequest]:
    rows = sum(group.open for group in groups)
    held = sum(_cache_bytes(bundle, group.request) for group in groups)
    trie = TokenTrie()
    admitted: list[PromptRequest] = []
    while waiting:
        request = waiting[0]
        rows += request.n
        held += _cache_bytes(bundle, request)
        over = rows > limits.rows or held > limits.cache_bytes
        if not over:
            for begun in _beginnings(request):
                trie.insert(request.prompt_ids + begun)
            over = len(trie) > PREFILL_TOKENS
        if over and (groups or admitted):
            break
        admitted.append(waiting.popleft())
    return admitted


def _prefill(
    bundle: ModelBundle, requests: Sequence[PromptRequest], drafter: Drafter | None
) -> tuple[list[Group], torch.Tensor]:
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
        rows = [Row(members, length=len(begun)) for begun, members in _beginnings(request).items()]
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
            Group(
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
                trie=_trie(request, rows) if drafter is not None else None,
            )
        )
    return groups, hidden[torch.tensor(last, device=device)]


def _trie(request: PromptRequest, rows: list[Row]) -> SuffixTrie:
    """What is said so far, and where in it the rows are."""
    trie = SuffixTrie()
    prompt = trie.start
    for token in request.prompt_ids[-PROMPT_SAID:]:
        prompt = trie.add(prompt, token)
    for row, begun in zip(rows, _beginnings(request), strict=True):
        row.endings = prompt
        for token in begun:
            row.endings = trie.add(row.endings, token, len(row.members))
    return trie


def _beginnings(request: PromptRequest) -> dict[tuple[int, ...], list[int]]:
    """Distinct beginnings of the request's answers -> samples that begin so."""
    members: dict[tuple[int, ...], list[int]] = {}
    for i in range(request.n):
        begun = request.starts[i].token_ids if i < len(request.starts) else ()
        members.setdefault(begun, []).append(i)
    return members


# -- one pass ------------------------------------------------------------------------------------------------


def _guess(groups: list[Group], drafter: Drafter, stop_ids: frozenset[int]) -> None:
    """Give rows the guesses that pay, to be computed or to be compared with what comes."""
    answers = sum(len(group.rows) for group in groups)
    least, compute = drafter.least(answers), answers > 0 and drafter.decide(answers)
    for group in groups:
        if group.trie is None:
            continue
        for row in group.rows:
            if row.compared and not compute:
                continue
            most = group.request.max_new_tokens - len(group.tokens[row.members[0]]) - 1
            guess = group.trie.guess(row.endings, most, least, stop_ids)
            row.compared, row.hits = [], 0
            if not guess:
                drafter.learn(0, 0)
            elif compute:
                row.draft = guess
            else:
                row.compared = guess


def _step(bundle: ModelBundle, groups: list[Group]) -> torch.Tensor:
    """Compute the last token of every row, and its guesses; returns their states [T, D]."""
    device = bundle.model.device
    tokens: list[int] = []
    positions: list[int] = []
    for group in groups:
        for row in group.rows:
            first = len(group.request.prompt_ids) + row.length
            tokens += [row.token, *row.draft]
            positions += range(first, first + 1 + len(row.draft))
    with noted(bundle.routing) as routes:
        hidden = _forward(
            bundle,
            torch.tensor(tokens, device=device),
            torch.tensor(positions, device=device),
            DecodeAttention(groups),
        )
    rows = [(group, row) for group in groups for row in group.rows]
    for i, (group, row) in enumerate(rows):
        row.length += 1
        if group.experts:
            chosen = routes.of([i])
            for member in row.members:
                group.experts[member] += chosen
    return hidden


def _sample(bundle: ModelBundle, groups: list[Group], states: torch.Tensor, drafter: Drafter | None) -> None:
    """Draw the next tokens of every open sample from the rows' states, and branch or close rows accordingly."""
    logits = logits_of(states, bundle.model.get_output_embeddings().weight)
    lse = torch.logsumexp(logits, -1, keepdim=True)
    places = [(group, row, ahead) for group in groups for row in group.rows for ahead in range(1 + len(row.draft))]
    temperatures = [group.request.temperature for group, _, _ in places]
    if any(temperature != 1.0 for temperature in temperatures):
        scale = torch.tensor(temperatures, device=logits.device).unsqueeze(1)
        probabilities = torch.softmax(logits / scale, -1)
    else:
        probabilities = torch.exp(logits - lse)
    # in float64, or the running sum would round away rare tokens
    running = torch.cumsum(probabilities, -1, dtype=torch.float64)
    where = torch.zeros(len(places), max(len(row.members) for _, row, _ in places), dtype=torch.float64)
    for i, (group, row, ahead) in enumerate(places):
        where[i, : len(row.members)] = group.draw(row, ahead)
    drawn = torch.searchsorted(running, where.to(running.device) * running[:, -1:], right=True)
    drawn.clamp_(max=logits.shape[-1] - 1)
    chosen = (logits.gather(1, drawn) - lse).tolist()
    tokens = drawn.tolist()
    at = 0
    for group in groups:
        branches: list[tuple[int, Row]] = []
        for slot, row in enumerate(group.rows):
            end = at + 1 + len(row.draft)
            branches += [
                (slot, on) for on in _advance(group, row, bundle.stop_ids, tokens[at:end], chosen[at:end], drafter)
            ]
            at = end
        _place(group, branches)


def _advance(
    group: Group,
    row: Row,
    stop_ids: frozenset[int],
    drawn: list[list[int]],
    logprobs: list[list[float]],
    drafter: Drafter | None,
) -> list[Row]:
    """Write down what each sample of a row drew, as far as its guesses were drawn and one token more.

    The row goes on once per distinct token that does not end its samples: returns those rows.
    """
    paths: dict[tuple[int, int, bool], list[int]] = {}
    for i, member in enumerate(row.members):
        for ahead, (token, logprob) in enumerate(zip((of[i] for of in drawn), (of[i] for of in logprobs), strict=True)):
            group.tokens[member].append(token)
            group.logprobs[member].append(logprob)
            if token in stop_ids:
                group.finish[member] = "stop"
            over = token in stop_ids or len(group.tokens[member]) >= group.request.max_new_tokens
            if over or ahead == len(row.draft) or token != row.draft[ahead]:
                paths.setdefault((ahead, token, over), []).append(member)
                break
    if drafter is not None and row.draft:
        drafter.learn(len(row.draft), sum(path[0] * len(members) for path, members in paths.items()) / len(row.members))
    onward = []
    for (ahead, token, over), members in paths.items():
        on = Row(members, token, row.length + ahead, endings=row.endings)
        if group.trie is not None:
            for said in (*row.draft[:ahead], token):
                on.endings = group.trie.add(on.endings, said, len(members))
        if drafter is not None and row.compared:
            hit = token == row.compared[row.hits]
            if hit and not over and row.hits + 1 < len(row.compared):
                on.compared, on.hits = row.compared, row.hits + 1
            else:
                drafter.learn(len(row.compared), row.hits + hit)
        if not over:
            onward.append(on)
    return onward


def _place(group: Group, branches: list[tuple[int, Row]]) -> None:
    """Give every branch a slot among the first ones, copying keys and values only where a row moves or splits."""
    rows: list[Row | None] = [None] * len(branches)
    homeless: list[tuple[int, Row]] = []
    for slot, row in branches:
        if slot < len(rows) and rows[slot] is None:
            rows[slot] = row
        else:
            homeless.append((slot, row))
    free = [slot for slot, row in enumerate(rows) if row is None]
    reach = max((row.length for _, row in branches), default=0)
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
    attention: PackedAttention | DecodeAttention,
) -> torch.Tensor:
    """Last states [T, D] of a row of T tokens."""
    output = bundle.model.base_model(
        input_ids=token_ids.unsqueeze(0), position_ids=positions.unsqueeze(0), use_cache=False, shoal=attention
    )
    return output.last_hidden_state[0]
