"""What a foreign completion may be long, and that its text is measured by this node's own tokenizer."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from node.interfaces import Message, Score, Task
from node.models import ModelBundle, load_model
from node.rescore import BUDGET_SLACK, Rescorer
from node.scorer import ScorerError
from protocol.rollout import Completion, RolloutGroup, TaskRef, Turn
from protocol.rules import Reason, Rejected
from swarm.exchange import ScoringUnavailable

MAX_TOKENS = 8


class Scores:
    """A scorer whose rewards are the lengths of the answers."""

    broken = False

    async def tasks(self, refs: Sequence[TaskRef], *, foreign: bool) -> list[Task]:
        if self.broken:
            raise ScorerError("it is gone")
        return [Task((Message("user", "?"),), MAX_TOKENS) for _ in refs]

    async def score(self, items: Sequence[tuple[TaskRef, str]], *, foreign: bool) -> list[Score]:
        return [Score(float(len(text)), True) for _, text in items]


@pytest.fixture(scope="module")
def bundle(tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> ModelBundle:
    return load_model(str(tiny_model("llama")), device="cpu", dtype="float32", models=tmp_path_factory.mktemp("m"))


def group(*texts: str, tokens: int = 2) -> RolloutGroup:
    completions = tuple(Completion((Turn("assistant", text),), "stop", tokens, 0.0) for text in texts)
    return RolloutGroup(0, TaskRef("any", "1", 0, 0), "tiny", b"", 0, completions)


async def test_rewards_are_those_of_the_own_scorer(bundle: ModelBundle) -> None:
    scorer: Any = Scores()
    # the tokenizer makes one token of each byte, and one ends the turn
    longest = "x" * (MAX_TOKENS * BUDGET_SLACK - 1)
    scores = await Rescorer(bundle, scorer)(group("ab", "", longest))
    assert [score.reward for score in scores] == [2.0, 0.0, float(len(longest))]
    assert [score.parts for score in scores] == [{"parsed": 1.0}] * 3


@pytest.mark.parametrize(
    ("texts", "tokens", "why"),
    [
        (("ab", "x" * MAX_TOKENS * BUDGET_SLACK), 2, "completion 1: 2 tokens claimed, 17 here"),
        (("a",), 9, "9 tokens"),
        (("ab", "\u00e9" * 513), 2, "completion 1 has 1026 bytes of text for a budget of 8 tokens"),
    ],
)
async def test_what_is_too_long_is_over_budget(
    bundle: ModelBundle, texts: tuple[str, ...], tokens: int, why: str
) -> None:
    scorer: Any = Scores()
    with pytest.raises(Rejected, match=why) as refused:
        await Rescorer(bundle, scorer)(group(*texts, tokens=tokens))
    assert refused.value.reason == Reason.over_budget


async def test_a_scorer_that_is_gone_blames_nobody(bundle: ModelBundle) -> None:
    scorer: Any = Scores()
    scorer.broken = True
    with pytest.raises(ScoringUnavailable, match="it is gone"):
        await Rescorer(bundle, scorer)(group("ab"))


async def test_no_tokenizer_sees_what_cannot_be_within_the_budget(bundle: ModelBundle, monkeypatch: Any) -> None:
    """8 MB of one letter are some KB on the wire, and took a tokenizer ten seconds of the event loop."""
    scorer: Any = Scores()
    monkeypatch.setattr("node.rescore.encode_completion", lambda *arguments: pytest.fail("it was tokenized"))
    with pytest.raises(Rejected, match="bytes of text"):
        await Rescorer(bundle, scorer)(group("a" * (8 << 20)))
