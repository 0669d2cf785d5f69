"""The packed forward gives the log-probabilities and the gradients of the plain one, sequence by sequence."""

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from node import batching, logprobs
from node.attention import PackedAttention
from node.batching import TokenTrie, micro_batches, pack
from node.interfaces import TrainGroup, TrainSequence
from node.logprobs import chosen_logprobs
from node.models import load_model


def groups(seed: int, count: int = 3, n: int = 4, longest: int = 9) -> list[TrainGroup]:
    """Ragged prompts with a common stem, completions that partly begin alike, and two equal ones."""
    rng = random.Random(seed)
    stem = [rng.randrange(2, 258) for _ in range(11)]
    made = []
    for g in range(count):
        prompt = (*stem, *(rng.randrange(2, 258) for _ in range(1 + 5 * g)))
        answers = [tuple(rng.randrange(2, 5) for _ in range(rng.randint(1, longest))) for _ in range(n - 1)]
        answers.append(answers[0])
        made.append(
            TrainGroup(
                tuple(prompt),
                tuple(TrainSequence(ids, (True,) * len(ids), rng.uniform(-1, 1), None) for ids in answers),
                "own",
            )
        )
    return made


def plain(model: torch.nn.Module, made: Sequence[TrainGroup]) -> list[torch.Tensor]:
    """log-probabilities of every completion token, one unpadded forward pass per completion."""
    result = []
    for group in made:
        for sequence in group.sequences:
            ids = torch.tensor([group.prompt_ids + sequence.token_ids])
            scores = model(ids, use_cache=False).logits[0, :-1].log_softmax(-1)
            result.append(scores.gather(1, ids[0, 1:, None])[len(group.prompt_ids) - 1 :, 0])
    return result


def packed(model: torch.nn.Module, made: Sequence[TrainGroup]) -> list[torch.Tensor]:
    members = [(g, s) for g, group in enumerate(made) for s in range(len(group.sequences))]
    (micro,) = micro_batches(made, members, 10**6)
    row = pack(micro.trie, torch.device("cpu"))
    hidden = model.base_model(
        input_ids=row.token_ids[None],
        position_ids=row.positions[None],
        use_cache=False,
        shoal=PackedAttention(row.blocks),
    ).last_hidden_state[0]
    result: dict[tuple[int, int], torch.Tensor] = {}
    for member, path in zip(micro.members, micro.paths, strict=True):
        parents = torch.tensor([row.place[micro.trie.parents[node]] for node in path])
        tokens = torch.tensor([micro.trie.tokens[node] for node in path])
        weight = model.get_output_embeddings().weight
        result[member], _ = chosen_logprobs(hidden[parents], weight, torch.arange(len(path)), tokens)
    return [result[member] for member in members]


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize(("segment", "overhead"), [(256, 4000), (4, 0), (256, 0), (3, 4000)])
def test_equals_the_plain_forward(
    kind: str,
    segment: int,
    overhead: int,
    tiny_model: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever blocks the row is cut into: whole subtrees, single branches, or chunks of a long run."""
    monkeypatch.setattr(batching, "MAX_SEGMENT", segment)
    monkeypatch.setattr(batching, "BLOCK_OVERHEAD", overhead)
    ours = load_model(str(tiny_model(kind)), device="cpu", dtype="float32", models=tmp_path).model
    theirs = AutoModelForCausalLM.from_pretrained(
        tiny_model(kind), dtype=torch.float32, attn_implementation="eager", local_files_only=True
    ).eval()
    made = groups(seed=3)
    expected, got = plain(theirs, made), packed(ours, made)
    for a, b in zip(expected, got, strict=True):
        torch.testing.assert_close(b, a, atol=1e-5, rtol=0)
    generator = torch.Generator().manual_seed(1)
    count = sum(map(len, expected))
    weights = [torch.randn(len(values), generator=generator) / count for values in expected]
    sum((w * values).sum() for w, values in zip(weights, expected, strict=True)).backward()
    sum((w * values).sum() for w, values in zip(weights, got, strict=True)).backward()
    for (name, a), b in zip(theirs.named_parameters(), ours.parameters(), strict=True):
        assert a.grad is not None, name
        torch.testing.assert_close(b.grad, a.grad, atol=1e-5, rtol=1e-5)


def test_without_a_layout_the_model_runs_as_usual(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    bundle = load_model(str(tiny_model("llama")), device="cpu", dtype="float32", models=tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(
        tiny_model("llama"), dtype=torch.float32, local_files_only=True
    ).eval()
    ids = torch.randint(2, 258, (2, 17), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(bundle.model(ids).logits, theirs(ids).logits)


def test_what_begins_alike_is_laid_out_once() -> None:
    trie = TokenTrie()
    paths = [trie.insert(ids) for ids in ([5, 6, 7, 8], [5, 6, 9], [5, 6, 7, 8], [4])]
    assert trie.missing([5, 6, 9, 1, 1]) == 2
    row = pack(trie, torch.device("cpu"))
    assert row.token_ids.tolist() == [5, 6, 7, 8, 9, 4]
    assert row.positions.tolist() == [0, 1, 2, 3, 2, 0]
    assert paths[0] == paths[2]
    assert [row.place[node] for node in paths[1]] == [0, 1, 4]
    seen = [(block.start, block.stop, block.past, (~block.hidden).int().tolist()) for block in row.blocks]
    of_the_tree = [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1, 1, 0, 0, 1]]
    assert seen == [(0, 5, (), of_the_tree), (5, 6, (), [[1]])]


def test_long_branches_do_not_compute_scores_between_each_other() -> None:
    trie = TokenTrie()
    for branch in range(4):
        trie.insert([*range(10), 100 + branch, *range(200)])
    blocks = pack(trie, torch.device("cpu")).blocks
    assert [block.stop - block.start for block in blocks] == [10, 201, 201, 201, 201]
    assert {block.past for block in blocks[1:]} == {((0, 10),)}


def test_without_leaves_only_what_something_follows_is_laid_out() -> None:
    trie = TokenTrie()
    for ids in ([5, 6, 7, 8], [5, 6, 9], [5, 6], [4], [3, 2]):
        trie.insert(ids)
    row = pack(trie, torch.device("cpu"), leaves=False)
    assert row.token_ids.tolist() == [5, 6, 7, 3]
    assert row.positions.tolist() == [0, 1, 2, 0]
    assert row.place == (0, 1, 2, -1, -1, -1, 3, -1)
    assert trie.inner == 4


def test_without_merging_every_sequence_is_whole() -> None:
    trie = TokenTrie(merge=False)
    assert [trie.insert([5, 6, 7]), trie.insert([5, 6])] == [[0, 1, 2], [3, 4]]
    assert trie.missing([5, 6]) == 2
    assert pack(trie, torch.device("cpu")).positions.tolist() == [0, 1, 2, 0, 1]


def test_micro_batches_keep_the_budget_and_every_sequence() -> None:
    made = groups(seed=5, count=4, n=6)
    members = [(g, s) for g, group in enumerate(made) for s in range(len(group.sequences))]
    longest = max(len(group.prompt_ids) + len(one.token_ids) for group in made for one in group.sequences)
    for merge in (True, False):
        split = micro_batches(made, members, 72, merge)
        assert len(split) > 2
        assert sorted(member for micro in split for member in micro.members) == members
        assert longest <= 36
        assert all(len(micro.trie) <= 72 for micro in split)
        for micro in split:
            for (g, s), path in zip(micro.members, micro.paths, strict=True):
                assert tuple(micro.trie.tokens[node] for node in path) == made[g].sequences[s].token_ids


def test_a_sequence_over_the_budget_goes_alone() -> None:
    made = groups(seed=5, count=1, n=3)
    assert [len(micro.members) for micro in micro_batches(made, [(0, 0), (0, 1)], 1)] == [1, 1]


def test_a_prompt_over_the_budget_is_not_computed_again_for_every_answer() -> None:
    answers = tuple(TrainSequence((7, i, i, i), (True,) * 4, 1.0, None) for i in range(16))
    made = [TrainGroup(tuple(range(100)), answers, "own")]
    split = micro_batches(made, [(0, i) for i in range(16)], 40)
    # 104 tokens of the first answer, and 20 of others that share all but their last three
    assert [len(micro.members) for micro in split] == [7, 7, 2]
    assert max(len(micro.trie) for micro in split) == 100 + 1 + 7 * 3


@pytest.mark.parametrize("keep", [0, 1 << 28])
def test_chosen_logprobs_in_chunks(keep: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values, entropy and gradients are those of a plain log_softmax, kept or computed again on the way back."""
    monkeypatch.setattr(logprobs, "CHUNK_BYTES", 4 * 30 * 3)  # 3 rows of 30 at once
    monkeypatch.setattr(logprobs, "KEEP_BYTES", keep)
    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(7, 5, generator=generator, requires_grad=True)
    weight = torch.randn(30, 5, generator=generator, requires_grad=True)
    rows, tokens = torch.tensor([6, 0, 0, 3, 0, 5]), torch.tensor([1, 2, 29, 4, 2, 0])
    factors = torch.randn(6, generator=generator)
    scores = (hidden @ weight.t()).log_softmax(-1)
    values, entropy = chosen_logprobs(hidden, weight, rows, tokens)
    torch.testing.assert_close(values, scores[rows, tokens])
    torch.testing.assert_close(entropy, -(scores.exp() * scores).sum(-1).detach())
    expected = torch.autograd.grad((scores[rows, tokens] * factors).sum(), (hidden, weight))
    got = torch.autograd.grad((values * factors).sum(), (hidden, weight))
    torch.testing.assert_close(got, expected)
