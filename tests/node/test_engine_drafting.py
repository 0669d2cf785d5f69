"""Guessing at next tokens: nothing that is sampled changes, and passes are saved where text repeats itself."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from node.device import Device
from node.engines import decoding, drafting
from node.engines.decoding import Limits
from node.engines.drafting import LONGEST, MARGIN, MOST_SAID, TRIED, UNEVEN, Drafter, SuffixTrie
from node.engines.transformers import KNEE, TransformersEngine
from node.interfaces import PromptRequest, Sample
from node.models import ModelBundle, load_model


@pytest.fixture(params=["llama", "qwen3"])
def bundle(request: pytest.FixtureRequest, tiny_model: Callable[[str], Path], tmp_path: Path) -> ModelBundle:
    torch.set_num_threads(1)
    return load_model(str(tiny_model(request.param)), device="cpu", dtype="float32", models=tmp_path)


def ask(key: str, prompt: tuple[int, ...], n: int, new: int, temperature: float) -> PromptRequest:
    return PromptRequest(key, prompt, n=n, max_new_tokens=new, temperature=temperature, seed=len(prompt))


async def run(bundle: ModelBundle, knee: float, *requests: PromptRequest) -> dict[str, tuple[Sample, ...]]:
    engine = TransformersEngine(bundle, Device(), Limits(knee=knee))
    return {group.key: group.samples async for group in engine.generate(requests)}


@pytest.mark.parametrize("temperature", [1.0, 0.15, 1e-4])
async def test_what_is_sampled_is_the_same_with_guesses_and_without(
    bundle: ModelBundle, temperature: float, forwarded: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of different lengths, starts, samples that stop amid their guesses and at their budget."""
    monkeypatch.setattr(drafting, "PAYS", -1.0)
    monkeypatch.setattr(drafting, "STILL_PAYS", -1.0)  # guesses are computed from the first one on
    start = Sample((9, 8, 7, 9, 8), (-1.0,) * 5, "aborted", 0)
    requests = [
        ask("a", (5, 6, 7) * 4, n=6, new=40, temperature=temperature),
        replace(ask("b", (40, 41, 40, 41, 40), n=3, new=25, temperature=temperature), starts=(start,)),
        ask("c", (3,), n=1, new=60, temperature=temperature),
    ]
    plain = await run(bundle, 0.0, *requests)
    without, tokens = len(forwarded), sum(forwarded)
    forwarded.clear()
    guessed = await run(bundle, 1e6, *requests)  # forwarded cost nothing more: guess whenever there is a guess
    assert sum(forwarded) > tokens - without or temperature == 1.0
    for request in requests:
        for ours, theirs in zip(guessed[request.key], plain[request.key], strict=True):
            assert (ours.token_ids, ours.finish) == (theirs.token_ids, theirs.finish)
            torch.testing.assert_close(torch.tensor(ours.logprobs), torch.tensor(theirs.logprobs), atol=1e-4, rtol=0)
    if temperature == 1e-4:  # greedy text of a small model runs in circles
        assert len(forwarded) < 0.6 * without


async def test_the_first_token_of_a_guess_has_the_frequency_that_the_model_gives_it(bundle: ModelBundle) -> None:
    """4000 pairs of tokens after a prompt that suggests them; the second is drawn after a guess at the first."""
    prompt = (5, 6, 7, 5, 6, 7, 5, 6)
    samples = (await run(bundle, 1e6, ask("x", prompt, n=4000, new=2, temperature=1.0)))["x"]
    with torch.no_grad():
        wanted = torch.softmax(bundle.model(torch.tensor([prompt])).logits[0, -1], -1)
    found = torch.bincount(torch.tensor([s.token_ids[0] for s in samples]), minlength=len(wanted)) / 4000
    assert (found - wanted).abs().max() < 5 * (wanted.max() / 4000) ** 0.5


def trie_of(*sequences: str) -> SuffixTrie:
    trie = SuffixTrie()
    for sequence in sequences:
        said = trie.start
        for letter in sequence:
            said = trie.add(said, ord(letter))
    return trie


def guess(trie: SuffixTrie, after: str, most: int = 99, least: float = 0.0) -> str:
    said = trie.start
    for letter in after:
        said = (trie.root, *(node.children[ord(letter)] for node in said[:6] if ord(letter) in node.children))
    return "".join(map(chr, trie.guess(said, most, least)))


def test_a_guess_goes_on_as_siblings_did_after_the_longest_common_ending() -> None:
    trie = trie_of("x sat", "y sang", "z sang")
    assert guess(trie, "x sa") == "t"
    assert guess(trie, "w sa") == "ng"  # two of three
    assert guess(trie, "w sa", most=1) == "n"
    assert guess(trie, "x q") == ""
    assert guess(trie_of("abcabcabcabcabcabcabc"), "ab") == ("cab" * LONGEST)[:LONGEST]


def test_a_guess_stops_where_it_gets_unlikely() -> None:
    trie = trie_of(*["ab"] * 6, *["ac"] * 2)
    assert guess(trie, "a", least=0.55) == "b"  # 6 of 8 and 2 for what was never said
    assert guess(trie, "a", least=0.61) == ""
    ending = trie.guess((trie.root, trie.root.children[ord("a")]), 9, 0.0, frozenset({ord("b")}))
    assert ending == [ord("b")]


def test_a_full_trie_remembers_no_more_and_still_finds() -> None:
    trie = SuffixTrie()
    said = trie.start
    for i in range(MOST_SAID):
        said = trie.add(said, i % 7)
    nodes = len(trie.root.children)
    said = trie.add(said, 99)
    assert (len(trie.root.children), said) == (nodes, (trie.root,))
    assert len(trie.add(trie.add(said, 3), 4)) == 3


def test_guesses_are_computed_once_they_are_known_to_pay_and_no_longer_than_that() -> None:
    drafter = Drafter(12.0)
    assert drafter.least(1) == pytest.approx(MARGIN / 13)
    assert drafter.least(12) == pytest.approx(MARGIN / 2)
    assert drafter.least(64) == 1.0  # no guess can be that sure
    for _ in range(int(TRIED) * 2):
        assert not drafter.decide(2) or drafter.seen >= TRIED
        drafter.learn(3, 2.0)
    assert drafter.gain(2) == pytest.approx(3 * 14 / ((12 + 2 * 4) * UNEVEN))
    assert drafter.decide(2)
    assert not drafter.decide(24)  # the same guesses do not pay with so many answers
    assert drafter.decide(2)
    for _ in range(200):
        drafter.learn(3, 0.0)
    assert not drafter.decide(2)


async def test_comparing_finds_out_what_computing_would_gain(
    bundle: ModelBundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One answer that runs in circles: first only compared, then computed, and both see the same hits."""
    drafters: list[Drafter] = []

    class Watched(Drafter):
        def __init__(self, knee: float) -> None:
            super().__init__(knee)
            drafters.append(self)
            self.decided: list[bool] = []

        def decide(self, answers: int) -> bool:
            self.decided.append(super().decide(answers))
            return self.decided[-1]

    monkeypatch.setattr(decoding, "Drafter", Watched)
    request = ask("c", (5, 6, 7) * 4, n=1, new=400, temperature=1e-4)
    endless = replace(bundle, stop_ids=frozenset())
    plain = await run(endless, 0.0, request)
    assert [s.token_ids for s in (await run(endless, 12.0, request))["c"]] == [s.token_ids for s in plain["c"]]
    (drafter,) = drafters
    assert isinstance(drafter, Watched)
    first = drafter.decided.index(True)
    assert first >= TRIED
    assert all(drafter.decided[first:])
    assert len(drafter.decided) < 0.6 * len(plain["c"][0].token_ids)


async def test_drafting_can_be_left_out(bundle: ModelBundle) -> None:
    assert TransformersEngine(bundle, Device()).limits.knee == KNEE["cpu"]
    assert TransformersEngine(bundle, Device(), drafting=False).limits.knee == 0.0
