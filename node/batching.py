"""Packing: sequences that share a beginning are merged into a token trie and laid out as one row without padding.

A trie token stands for one (token, everything before it), so a prompt is computed once for all its completions, a
system prompt with worked examples once for all prompts that begin with it, and equal completions once. Causal
attention makes this exact: a token's state depends only on its path (ALGORITHMS.md, shared-prompt forward).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from node.attention import Block
from node.interfaces import TrainGroup

MAX_SEGMENT = 256
"""Longer runs of tokens are cut, so that the attention scores of one block stay small (causal chunks)."""
BLOCK_OVERHEAD = 4000
"""What one more block of attention costs, in query-key pairs of one layer (about 0.1 ms of dispatch on a CPU)."""


class TokenTrie:
    """Token sequences merged by common beginnings. Nodes are numbered in the order of insertion; -1 is the root.

    Without `merge`, every sequence gets nodes of its own.
    """

    def __init__(self, *, merge: bool = True) -> None:
        self.merge = merge
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self._children: dict[tuple[int, int], int] = {}

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def inner(self) -> int:
        """How many nodes something follows: what `pack` lays out without leaves."""
        return len(set(self.parents) - {-1})

    def missing(self, ids: Sequence[int]) -> int:
        """How many nodes inserting `ids` would add."""
        if not self.merge:
            return len(ids)
        node = -1
        for i, token in enumerate(ids):
            child = self._children.get((node, token))
            if child is None:
                return len(ids) - i
            node = child
        return 0

    def insert(self, ids: Sequence[int]) -> list[int]:
        """Add a sequence; returns its node of each token."""
        if not self.merge:
            path = list(range(len(self.tokens), len(self.tokens) + len(ids)))
            self.tokens += ids
            self.parents += [-1, *path[:-1]][: len(ids)]
            return path
        node, path = -1, []
        for token in ids:
            child = self._children.get((node, token))
            if child is None:
                child = len(self.tokens)
                self.tokens.append(token)
                self.parents.append(node)
                self._children[node, token] = child
            node = child
            path.append(node)
        return path


@dataclass(frozen=True, slots=True)
class Packed:
    """A trie as one row of T tokens in depth-first order."""

    token_ids: torch.Tensor
    """[T] int64."""
    positions: torch.Tensor
    """[T] int64: depth in the trie, which is the position in the token's own sequence."""
    place: tuple[int, ...]
    """Trie node -> index in the row, -1 where it was left out."""
    blocks: tuple[Block, ...]


def pack(trie: TokenTrie, device: torch.device, *, leaves: bool = True) -> Packed:
    """Lay a trie out as a row, with the attention blocks that give each token its own past.

    Without `leaves`, tokens that nothing follows are left out: training reads a token's probability off the token
    before it, and nothing off the last.
    """
    count = len(trie)
    children: list[list[int]] = [[] for _ in range(count + 1)]
    for node, parent in enumerate(trie.parents):
        children[parent].append(node)  # the root's children land in the last list: index -1
    if not leaves:
        children = [[node for node in those if children[node]] for those in children]
    place, depth = [-1] * count, [0] * count
    order: list[int] = []
    starts: list[int] = []  # segments: runs of tokens without branching
    above: list[int] = []  # segment -> the segment it continues, or -1
    segment_of = [0] * count
    stack = list(reversed(children[-1]))
    while stack:
        node = stack.pop()
        parent = trie.parents[node]
        place[node] = len(order)
        depth[node] = depth[parent] + 1 if parent >= 0 else 0
        opens = parent < 0 or len(children[parent]) > 1 or len(order) - starts[-1] >= MAX_SEGMENT
        if opens:
            starts.append(len(order))
            above.append(segment_of[parent] if parent >= 0 else -1)
        segment_of[node] = len(starts) - 1
        order.append(node)
        stack.extend(reversed(children[node]))
    positions = [depth[node] for node in order]
    return Packed(
        token_ids=torch.tensor([trie.tokens[node] for node in order], device=device),
        positions=torch.tensor(positions, device=device),
        place=tuple(place),
        blocks=_blocks(starts, above, positions, device),
    )


def _blocks(starts: list[int], above: list[int], positions: list[int], device: torch.device) -> tuple[Block, ...]:
    """Cut the row into blocks of queries: whole subtrees where they are small, single segments where that is cheaper.

    A block over a subtree computes scores between branches and masks them out; a block per segment computes none in
    vain, but there are more of them. The cheaper of both is chosen bottom-up.
    """
    count, total = len(starts), len(positions)
    stops = [*starts[1:], total]
    ends = list(stops)  # where the subtree of each segment ends
    below: list[list[int]] = [[] for _ in range(count)]
    for segment in reversed(range(count)):
        if above[segment] >= 0:
            ends[above[segment]] = max(ends[above[segment]], ends[segment])
            below[above[segment]].append(segment)
    cost, merged = [0] * count, [False] * count
    for segment in reversed(range(count)):
        past = positions[starts[segment]]
        own, subtree = stops[segment] - starts[segment], ends[segment] - starts[segment]
        split = own * (past + own) + BLOCK_OVERHEAD + sum(cost[child] for child in below[segment])
        whole = subtree * (past + subtree) + BLOCK_OVERHEAD
        # a merged block is capped as a segment is, or one with many branches would need a huge score matrix
        merged[segment] = whole <= split and subtree <= 2 * MAX_SEGMENT
        cost[segment] = whole if merged[segment] else split
    reach = torch.empty(total, dtype=torch.int64)
    for segment in range(count):
        reach[starts[segment] : stops[segment]] = ends[segment]
    index = torch.arange(total)
    blocks: list[Block] = []
    todo = [segment for segment in reversed(range(count)) if above[segment] < 0]
    while todo:
        segment = todo.pop()
        start, stop = starts[segment], ends[segment] if merged[segment] else stops[segment]
        here = index[start:stop]
        # a token is seen by itself and by what lies in its subtree
        hidden = (here[None, :] > here[:, None]) | (here[:, None] >= reach[start:stop][None, :])
        blocks.append(Block(start, stop, _past(segment, starts, stops, above), hidden.to(device)))
        if not merged[segment]:
            todo.extend(below[segment])
    return tuple(blocks)


def _past(segment: int, starts: list[int], stops: list[int], above: list[int]) -> tuple[tuple[int, int], ...]:
    """Spans of the row that hold everything before a segment, joined where they touch."""
    spans: list[tuple[int, int]] = []
    segment = above[segment]
    while segment >= 0:
        start, stop = starts[segment], stops[segment]
        if spans and spans[-1][0] == stop:
            spans[-1] = (start, spans[-1][1])
        else:
            spans.append((start, stop))
        segment = above[segment]
    return tuple(reversed(spans))


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Some sequences of a batch, merged."""

    members: tuple[tuple[int, int], ...]
    """(group, sequence) of each."""
    paths: tuple[tuple[int, ...], ...]
    """Trie nodes of each sequence's own tokens, the prompt's left out."""
    trie: TokenTrie
    groups: Sequence[TrainGroup]
    """All groups of the batch."""


def micro_batches(
    groups: Sequence[TrainGroup], members: Sequence[tuple[int, int]], budget: int, merge: bool = True
) -> list[MicroBatch]:
    """Split sequences into micro-batches of at most `budget` merged tokens.

    A sequence of more than half of that may bring `budget // 2` tokens of other branches along: its beginning would
    be computed again for each of them otherwise. Sequences are sorted, so that what shares a beginning is merged
    wherever the budget allows.
    """

    def ids(member: tuple[int, int]) -> tuple[int, ...]:
        group = groups[member[0]]
        return group.prompt_ids + group.sequences[member[1]].token_ids

    batches: list[MicroBatch] = []
    trie = TokenTrie(merge=merge)
    chosen: list[tuple[int, int]] = []
    paths: list[tuple[int, ...]] = []
    longest = 0
    for member in sorted(members, key=lambda member: (ids(member), member)):
        sequence = ids(member)
        longest = max(longest, len(sequence))
        room = max(budget, longest + budget // 2) if merge else budget
        if chosen and len(trie) + trie.missing(sequence) > room:
            batches.append(MicroBatch(tuple(chosen), tuple(paths), trie, groups))
            trie, chosen, paths, longest = TokenTrie(merge=merge), [], [], len(sequence)
        chosen.append(member)
        paths.append(tuple(trie.insert(sequence)[len(groups[member[0]].prompt_ids) :]))
    if chosen:
        batches.append(MicroBatch(tuple(chosen), tuple(paths), trie, groups))
    return batches
