"""What an own answer is worth besides what its scorer says."""

import pytest

from node.interfaces import Score
from node.rollouts import readable, scored
from protocol.rollout import TaskRef


@pytest.mark.parametrize("text", ["42\x0b", "\x00", "a\u202eb"])
def test_an_answer_that_no_peer_takes_is_worth_nothing(text: str) -> None:
    score = Score(0.75, parsed=True, parts={"raw": 0.75})
    assert readable("42", score) is score
    assert readable(text, score) == Score(0.0, parsed=False, parts={"raw": 0.0})


async def test_rollouts_are_scored_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class Generous:
        async def score(self, answers: list[tuple[TaskRef, str]]) -> list[Score]:
            return [Score(1.0, parsed=True) for _ in answers]

    class Said(str):
        token_ids = property(lambda self: self)

    monkeypatch.setattr("node.rollouts.decode", lambda bundle, ids: str(ids))
    (rollout,) = await scored(
        None,  # type: ignore[arg-type]
        Generous(),  # type: ignore[arg-type]
        [TaskRef("chain_sum", "1", 1, 0)],
        [[Said("7"), Said("7\x0c")]],  # type: ignore[list-item]
        [(1,)],
        [8],
        [0],
    )
    assert rollout.rewards == (1.0, 0.0)
