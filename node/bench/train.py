"""`shoal bench train`: the update's forward and backward pass with prefix merging against plain packing.

Both sides are the same trainer with the default settings; plain packing lays every sequence out whole. A group of G
completions of L tokens after a prompt of P is G(P + L) tokens plain and P + GL merged: that is the token ratio, and
`share` is how much of it becomes time. The output head works on completions only, which merging does not lessen;
`work_ratio` counts it (node/bench/floor.py) and says what can become time at most.

The grid runs on a model with the embedded one's layers, but a fifth of them and of its vocabulary, and random weights:
work per token and layer, and the head's part in it, are the same. One case runs on the embedded model itself. Times are
CPU seconds, merged before and after plain, so that what else runs on the machine counts less.
"""

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from node.attention import ATTENTION
from node.batching import TokenTrie
from node.bench.floor import matrix_weights, work_of
from node.bench.side import Say, Stopwatch, run_side, serve
from node.bench.workload import spec_of
from node.config_train import TrainConfig
from node.home import models_dir
from node.interfaces import TrainGroup, TrainSequence
from node.lean import make_lean
from node.models import ModelBundle, load_model
from node.training.local import LocalTrainer
from node.training.objective import StepObjective

GRID = (
    *((64, 8, 16), (64, 32, 8)),
    *((256, 8, 4), (256, 8, 16), (256, 32, 8), (256, 128, 4)),
    *((1024, 8, 8), (1024, 32, 4), (1024, 128, 4)),
)
"""(P, L, G): of {64, 256, 1024} x {8, 32, 128} x {4, 8, 16} what takes some minutes on one slow thread."""
REAL = (256, 8, 8)
"""The case that also runs on the embedded model."""
MUCH_LONGER = 32
"""P >> L: the prompt is at least this many times a completion."""
GROUPS = 8
"""Of a case at most; fewer where that is more than a micro-batch holds: an update is more than one short group."""
LAPS = 2
"""Merged, before and after the plain one, which takes longer."""
DEADLINE = 7200.0


@dataclass(frozen=True, slots=True)
class Case:
    """Groups that one batch is made of, and their name in the result."""

    name: str
    shape: Mapping[str, int]
    groups: tuple[TrainGroup, ...]

    @property
    def token_ratio(self) -> float:
        """Tokens of all sequences whole over those of every distinct beginning once."""
        whole = sum(len(group.prompt_ids) + len(one.token_ids) for group in self.groups for one in group.sequences)
        trie = TokenTrie()
        for group in self.groups:
            for one in group.sequences:
                trie.insert(group.prompt_ids + one.token_ids)
        return whole / len(trie)

    def work_ratio(self, layers: int, head: int) -> float:
        """The same of multiplications by weights, of which `layers` are in the layers and `head` in the output head."""
        merged = work_of(self.groups)
        sequences = [(len(group.prompt_ids), len(one.token_ids)) for group in self.groups for one in group.sequences]
        plain = sum(layers * (prompt + own - 1) + head * own for prompt, own in sequences)
        return plain / (layers * merged.trained_tokens + head * merged.trained_states)


async def compare(threads: int, machine: dict[str, Any]) -> dict[str, Any]:
    """Measure every case; `share` is the time ratio over the token ratio, `share_long` the lowest where P >> L."""
    result = await run_side("node.bench.train", spec_of(threads), DEADLINE)
    long = [case["share"] for case in result["grid"] if case["prompt"] >= MUCH_LONGER * case["completion"]]
    return {**result, "share_long": min(long)}


def work(spec: Mapping[str, Any], say: Say, directory: Path) -> None:
    torch.set_num_threads(spec["threads"])
    say(measure(spec, directory))


def measure(spec: Mapping[str, Any], directory: Path, grid: Sequence[tuple[int, int, int]] = GRID) -> dict[str, Any]:
    """The grid and the branching case, and one case on `spec["model"]`."""
    small = small_model()
    real = load_model(spec["model"], device="cpu", dtype="float32", models=models_dir())
    return {
        "tokens_per_micro_batch": TrainConfig().tokens_per_micro_batch,
        "grid": [measured(small, grouped(*shape, vocabulary=small.vocabulary_size), directory) for shape in grid],
        "branching": measured(small, branching(vocabulary=small.vocabulary_size), directory),
        "model": {"name": real.name, **measured(real, grouped(*REAL, vocabulary=real.vocabulary_size), directory)},
    }


# -- what is trained on --------------------------------------------------------------------------------------


def grouped(prompt: int, completion: int, size: int, *, vocabulary: int) -> Case:
    """Groups of one prompt each, with random tokens."""
    tokens = _tokens(vocabulary, prompt, completion, size)
    fitting = TrainConfig().tokens_per_micro_batch // (prompt + size * completion)
    count = max(1, min(GROUPS, fitting))
    groups = tuple(
        TrainGroup(
            tuple(itertools.islice(tokens, prompt)),
            tuple(_sequence(tuple(itertools.islice(tokens, completion)), (), i) for i in range(size)),
            "own",
        )
        for _ in range(count)
    )
    shape = {"prompt": prompt, "completion": completion, "group": size, "groups": count}
    return Case(f"P={prompt} L={completion} G={size}", shape, groups)


def branching(
    prompt: int = 256, turn: int = 16, answer: int = 48, branches: tuple[int, int] = (4, 4), *, vocabulary: int
) -> Case:
    """Two turns: each first turn gets an environment's answer, after which several second turns branch."""
    tokens = _tokens(vocabulary, prompt, turn, answer)
    start = tuple(itertools.islice(tokens, prompt))
    sequences = []
    for first in range(branches[0]):
        said = tuple(itertools.islice(tokens, turn))
        heard = tuple(itertools.islice(tokens, answer))
        for second in range(branches[1]):
            more = tuple(itertools.islice(tokens, turn))
            sequences.append(_sequence(said + heard + more, range(turn, turn + answer), first + second))
    shape = {"prompt": prompt, "turn": turn, "answer": answer, "first_turns": branches[0], "second_turns": branches[1]}
    return Case("two turns", shape, (TrainGroup(start, tuple(sequences), "own"),))


def _sequence(token_ids: tuple[int, ...], unmasked: Sequence[int], number: int) -> TrainSequence:
    mask = tuple(i not in unmasked for i in range(len(token_ids)))
    return TrainSequence(token_ids, mask, 1.0 if number % 2 else -1.0, None)


def _tokens(vocabulary: int, *seeds: int) -> Iterator[int]:
    rng = random.Random(repr(seeds))
    while True:
        yield rng.randrange(vocabulary)


# -- one case ------------------------------------------------------------------------------------------------


def small_model() -> ModelBundle:
    """A fifth of SmolLM2-135M: its layers, six of thirty, and a fifth of its vocabulary; without a tokenizer."""
    config = LlamaConfig(
        vocab_size=9830,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=6,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        attn_implementation=ATTENTION,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    make_lean(model.eval())
    return ModelBundle(model, None, frozenset(), -1, b"", "a fifth of SmolLM2-135M", Path())


def measured(bundle: ModelBundle, case: Case, directory: Path) -> dict[str, Any]:
    """Tokens and mean CPU seconds of both ways to pack, after a small batch that warms up."""
    merged, plain = (LocalTrainer(bundle, TrainConfig(), dumps=directory, merge=merge) for merge in (True, False))
    _lap(merged, grouped(8, 4, 2, vocabulary=bundle.vocabulary_size))
    before = [_lap(merged, case) for _ in range(LAPS)]
    tokens_plain, seconds_plain = _lap(plain, case)
    after = [_lap(merged, case) for _ in range(LAPS)]
    tokens = before[0][0]
    seconds = sum(spent for _, spent in before + after) / (2 * LAPS)
    return {
        "case": case.name,
        **case.shape,
        "tokens": tokens,
        "tokens_plain": tokens_plain,
        "token_ratio": case.token_ratio,
        "work_ratio": case.work_ratio(*matrix_weights(bundle.model)),
        "cpu_seconds": seconds,
        "cpu_seconds_plain": seconds_plain,
        "time_ratio": seconds_plain / seconds,
        "share": seconds_plain / seconds / case.token_ratio,
    }


def _lap(trainer: LocalTrainer, case: Case) -> tuple[int, float]:
    """Tokens and CPU seconds of one forward and backward pass over a case."""
    members = [(g, s) for g, group in enumerate(case.groups) for s in range(len(group.sequences))]
    watch = Stopwatch()
    objective = StepObjective(trainer.config, case.groups, trainer.model.device)
    objective.judge()
    counts = trainer.accumulate(objective, members)
    spent = watch.lap()["cpu_seconds"]
    trainer.weights.drop_gradients()
    return counts.tokens, spent


if __name__ == "__main__":
    serve(work)
