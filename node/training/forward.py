"""The forward pass of a micro-batch: each distinct token once, and log-probabilities of the completions' tokens."""

import itertools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch

from node.attention import PackedAttention
from node.batching import MicroBatch, Packed, TokenTrie, micro_batches, pack
from node.interfaces import TrainGroup
from node.logprobs import Vocabulary, chosen_logprobs
from node.memory import give_back
from node.routing import Routing, replayed
from node.training.recompute import recomputed


class States(NamedTuple):
    """What a pass gives, for n completion tokens in the order of the micro-batch's members."""

    logprobs: torch.Tensor
    """[n] float32, differentiable."""
    entropy: torch.Tensor
    """[n], of the distribution each token was drawn from, in nats."""
    states: torch.Tensor
    """[M, D], the distinct last states that tokens are drawn from."""
    drawn: torch.Tensor
    """[n], which of those states each token is drawn from."""


def states(model: Any, micro: MicroBatch, routing: Routing | None = None, *, recompute: bool = False) -> States:
    """Run `model` over a micro-batch. With `routing`, the experts noted in the rollout are chosen again.

    With `recompute`, layers keep only their inputs for the way back (node/training/recompute.py).
    """
    packed = pack(micro.trie, model.device, leaves=False)
    layers = model.base_model.layers
    if not micro.groups:  # an idle pass: nothing was noted for it
        routing = None
    with replayed(routing, micro, packed), recomputed(layers, routing) if recompute else nullcontext():
        hidden = model.base_model(
            input_ids=packed.token_ids[None],
            position_ids=packed.positions[None],
            use_cache=False,
            shoal=PackedAttention(packed.blocks),
        ).last_hidden_state[0]
    return drawn_from(hidden, model.get_output_embeddings().weight, micro, packed)


def drawn_from(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    micro: MicroBatch,
    packed: Packed,
    vocabulary: Vocabulary | None = None,
) -> States:
    """What the last states [T, D] of a packed row say of the completions' tokens, by the output embedding [V, D].

    With `vocabulary`, each of several processes has a part of the embedding's rows.
    """
    device, trie = hidden.device, micro.trie
    # completions that begin alike share their tokens: each distinct one is computed once
    nodes: dict[int, int] = {}
    index = torch.tensor(
        [nodes.setdefault(node, len(nodes)) for path in micro.paths for node in path], dtype=torch.int64, device=device
    )
    # a token's probability is read off the token before it, and branches share that one
    parents = torch.tensor([packed.place[trie.parents[node]] for node in nodes], dtype=torch.int64, device=device)
    before, rows = torch.unique(parents, return_inverse=True)
    tokens = torch.tensor([trie.tokens[node] for node in nodes], dtype=torch.int64, device=device)
    last, drawn = hidden[before], rows[index]
    logprobs, entropy = chosen_logprobs(last, weight, rows, tokens, vocabulary)
    return States(logprobs[index], entropy[drawn], last, drawn)


def idle() -> MicroBatch:
    """The smallest row that a model can be run over: one token after another."""
    trie = TokenTrie()
    _, last = trie.insert((0, 0))
    return MicroBatch(((0, 0),), ((last,),), trie, ())


Take = Callable[[MicroBatch, States], torch.Tensor | None]
"""Is given what a pass over a micro-batch found; with gradients, it returns the loss to go back from."""


def run(
    model: Any,
    micros: Sequence[MicroBatch],
    take: Take,
    *,
    routing: Routing | None = None,
    recompute: bool = False,
) -> None:
    """Passes over micro-batches, one after another; `states` says what `routing` and `recompute` do."""
    for micro in micros:
        go_back(take(micro, states(model, micro, routing, recompute=recompute)))


def go_back(loss: torch.Tensor | None) -> None:
    """Add the gradients of a pass's loss to the weights'; None: there is none."""
    if loss is not None:
        loss.backward()
        give_back()


def sequence_logprobs(
    groups: Sequence[TrainGroup],
    budget: int,
    passes: Callable[[Sequence[MicroBatch], Take], None],
    *,
    merge: bool = True,
    add_up: Callable[[torch.Tensor], None] | None = None,
) -> list[list[tuple[float, ...]]]:
    """log-probability of every sequence token, [group][sequence][token], by `passes` in parts of `budget` tokens.

    Of several processes each computes a part, and `add_up` sums over them, in place.
    """
    members = [(g, s) for g, group in enumerate(groups) for s in range(len(group.sequences))]
    ends = list(itertools.accumulate(len(groups[g].sequences[s].token_ids) for g, s in members))
    starts = dict(zip(members, [0, *ends], strict=False))
    found = torch.zeros(ends[-1] if ends else 0)

    def keep(micro: MicroBatch, computed: States) -> None:
        pairs = zip(micro.members, micro.paths, strict=True)
        found[[starts[member] + i for member, path in pairs for i in range(len(path))]] = computed.logprobs.cpu()

    with torch.no_grad():
        passes(micro_batches(groups, members, budget, merge), keep)
    if add_up is not None:
        add_up(found)
    flat = found.tolist()
    results: list[list[tuple[float, ...]]] = [[] for _ in groups]
    for (g, s), start in starts.items():
        results[g].append(tuple(flat[start : start + len(groups[g].sequences[s].token_ids)]))
    return results
