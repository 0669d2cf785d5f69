"""Scores a peer's completions here: the claim of whoever sent them is never used."""

from collections.abc import Sequence

from node.models import ModelBundle, encode_completion
from node.scorer import Scorer, ScorerError
from protocol.rollout import Completion, RolloutGroup
from protocol.rules import Reason, Rejected, check_budget
from swarm.exchange import ScoringUnavailable
from swarm.records import Scored

BUDGET_SLACK = 2
"""Tokenizers differ: the same text may take twice the tokens here that it took its producer."""


class Rescorer:
    """The exchange's `rescore`: regenerates the task in the scorer process and scores every completion."""

    def __init__(self, bundle: ModelBundle, scorer: Scorer) -> None:
        self._bundle, self._scorer = bundle, scorer

    async def __call__(self, group: RolloutGroup) -> Sequence[Scored]:
        """One score per completion. Raises Rejected(over_budget), ScoringUnavailable when the scorer failed."""
        try:
            return await self._score(group)
        except ScorerError as error:
            raise ScoringUnavailable(str(error)) from error

    async def _score(self, group: RolloutGroup) -> Sequence[Scored]:
        (task,) = await self._scorer.tasks([group.task], foreign=True)
        check_budget(group, task.max_tokens)  # before a tokenizer sees the text: megabytes take it seconds
        limit = task.max_tokens * BUDGET_SLACK
        for i, completion in enumerate(group.completions):
            if (length := self._length(completion, limit)) > limit:
                raise Rejected(
                    Reason.over_budget,
                    f"completion {i}: {completion.token_count} tokens claimed, {length} here; "
                    f"the task allows {task.max_tokens}",
                )
        texts = [(group.task, completion.text) for completion in group.completions]
        scores = await self._scorer.score(texts, foreign=True)
        return [Scored(score.reward, score.all_parts) for score in scores]

    def _length(self, completion: Completion, limit: int) -> int:
        """Tokens of a completion here, or what they cannot exceed where that is within the limit already.

        A token spells a byte at least, some tokenizers put one token before the text, and one ends the turn.
        """
        most = len(completion.text.encode()) + 2
        return most if most <= limit else len(encode_completion(self._bundle, completion.text, completion.finish))
