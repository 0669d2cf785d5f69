"""Random token tries, multi-turn ones that branch after an environment's answer included, against plain forwards."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from node import batching
from node.batching import micro_batches
from node.config_train import TrainConfig
from node.interfaces import TrainGroup, TrainSequence
from node.models import load_model
from node.training.forward import states
from node.training.local import LocalTrainer

Turn = tuple[tuple[int, ...], bool]
"""Tokens, and whether the policy said them."""

few = st.integers(2, 4)
"""So few different tokens that branches begin alike by chance too."""
said = st.lists(few, min_size=1, max_size=5).map(lambda ids: (tuple(ids), True))
heard = st.lists(st.integers(2, 257), min_size=1, max_size=7).map(lambda ids: (tuple(ids), False))
branches = st.recursive(
    st.lists(said, min_size=1, max_size=3).map(lambda turns: [[turn] for turn in turns]),
    # something said, then the environment's answer, then whatever branches from there
    lambda more: st.lists(st.tuples(said, heard, more), min_size=1, max_size=2).map(
        lambda nodes: [[first, answer, *rest] for first, answer, rests in nodes for rest in rests]
    ),
    max_leaves=8,
)
prompts = st.tuples(st.integers(0, 12), st.lists(st.integers(2, 257), min_size=1, max_size=9))


def sequence(turns: list[Turn]) -> TrainSequence:
    ids = tuple(token for tokens, _ in turns for token in tokens)
    mask = tuple(own for tokens, own in turns for _ in tokens)
    return TrainSequence(ids, mask, 1.0, None)


@st.composite
def tries(draw: Any) -> list[TrainGroup]:
    """Groups with ragged prompts that share a stem; each a tree of turns."""
    groups = []
    for stem, tail in draw(st.lists(prompts, min_size=1, max_size=3)):
        paths = draw(branches)
        groups.append(TrainGroup((*range(100, 100 + stem), *tail), tuple(map(sequence, paths)), "own"))
    return groups


@pytest.fixture(params=["llama", "qwen3", "mixtral"])
def models(
    request: pytest.FixtureRequest, tiny_model: Callable[[str], Path], tmp_path: Path
) -> Iterator[tuple[LocalTrainer, Any]]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    directory = tiny_model(request.param)
    bundle = load_model(str(directory), device="cpu", dtype="float32", models=tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager", local_files_only=True
    ).eval()
    yield LocalTrainer(bundle, TrainConfig(), dumps=tmp_path), plain
    torch.set_num_threads(threads)


@settings(
    max_examples=6,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    groups=tries(),
    budget=st.sampled_from([1, 20, 48, 10**6]),
    layout=st.sampled_from([(256, 4000), (3, 0), (256, 0), (4, 4000)]),
)
def test_logprobs_and_gradients_are_those_of_plain_forwards(
    models: tuple[LocalTrainer, Any], groups: list[TrainGroup], budget: int, layout: tuple[int, int]
) -> None:
    trainer, plain = models
    weights = torch.randn(400, generator=torch.Generator().manual_seed(1))  # one a token, none where not trained on
    expected: dict[tuple[int, int], torch.Tensor] = {}
    for g, group in enumerate(groups):
        for s, one in enumerate(group.sequences):
            ids = torch.tensor([group.prompt_ids + one.token_ids])
            scores = plain(ids, use_cache=False).logits[0, :-1].log_softmax(-1)
            expected[g, s] = scores.gather(1, ids[0, 1:, None])[len(group.prompt_ids) - 1 :, 0]
    trained = {member: torch.tensor(groups[member[0]].sequences[member[1]].mask) for member in expected}
    plain.zero_grad()
    count = sum(int(mask.sum()) for mask in trained.values())
    sum((weights[: len(v)] * v)[trained[m]].sum() / count for m, v in expected.items()).backward()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batching, "MAX_SEGMENT", layout[0])
        patch.setattr(batching, "BLOCK_OVERHEAD", layout[1])
        trainer.budget = budget
        got = trainer.logprobs(groups)
        for (g, s), values in expected.items():
            assert got[g][s] == pytest.approx(values.tolist(), abs=1e-5)
        trainer.model.zero_grad()
        seen = 0
        for micro in micro_batches(groups, list(expected), budget):
            values = states(trainer.model, micro, trainer.bundle.routing).logprobs
            parts = values.split([len(path) for path in micro.paths])
            losses = [(weights[: len(v)] * v)[trained[m]].sum() for m, v in zip(micro.members, parts, strict=True)]
            (sum(losses) / count).backward()
            seen += len(losses)
    assert seen == len(expected)
    for (name, theirs), ours in zip(plain.named_parameters(), trainer.model.parameters(), strict=True):
        wanted = torch.zeros_like(theirs) if theirs.grad is None else theirs.grad
        torch.testing.assert_close(ours.grad, wanted, atol=1e-5, rtol=1e-5, msg=lambda m, name=name: f"{name}: {m}")
