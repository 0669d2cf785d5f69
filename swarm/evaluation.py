"""Evaluates a round: scores the held-out answers that members handed in, and makes the board of it."""

import math
from collections.abc import Awaitable, Callable, Sequence

from protocol.assignment import round_task
from protocol.board import Report, fitted, list_bytes, next_board
from protocol.manifest import EnvironmentSpec, Manifest
from protocol.messages import ReportRequest
from protocol.rollout import TaskRef
from protocol.rounds import Round
from swarm.membership import Membership
from swarm.reports import Reports
from swarm.rounds import Following

LATE_SECONDS = 2.0
"""An answer may be on its way when the time is over."""
SCORING_SECONDS = 600.0
"""After the time for answers: whose answers are not scored by then counts as absent."""
BYTES_PER_TOKEN = 128
MAX_TEXT_BYTES = 64 * 1024

Score = Callable[[Sequence[tuple[TaskRef, str]]], Awaitable[Sequence[float]]]
"""Rewards of answers, in order, from the coordinator's own scorer. May raise ScoringUnavailable."""


def most_bytes(spec: EnvironmentSpec) -> int:
    """The longest answer to a task of this environment that is scored at all."""
    return min(MAX_TEXT_BYTES, BYTES_PER_TOKEN * (spec.max_tokens or MAX_TEXT_BYTES))


class ScoringUnavailable(Exception):
    """The scorer does not answer now."""


class Evaluation:
    """Of the leader's closing rounds."""

    def __init__(
        self,
        manifest: Manifest,
        following: Following,
        membership: Membership,
        reports: Reports,
        score: Score,
        clock: Callable[[], float],
    ) -> None:
        self._manifest, self._following, self._membership = manifest, following, membership
        self._reports, self._score, self._clock = reports, score, clock

    async def score_next(self, record: Round) -> bool:
        """Score one more report of the round. False: there is none. Raises ScoringUnavailable, StoreError."""
        waiting = self._reports.next_unscored(record.number)
        if waiting is None:
            return False
        peer, report = waiting
        self._reports.keep_scores(record.number, peer, Report(await self._scores(record, report), report.trained))
        return True

    async def _scores(self, record: Round, report: ReportRequest) -> tuple[float | None, ...]:
        """Mean reward by environment; None where it was not answered."""
        each = record.tasks * record.samples
        means: list[float | None] = []
        for i, spec in enumerate(self._manifest.environments):
            answers = report.answers[i * each : (i + 1) * each]
            if None in answers:
                means.append(None)
                continue
            most = most_bytes(spec)
            items = [
                (round_task(self._manifest, record.seed, spec.name, n // record.samples), text)
                for n, text in enumerate(answers)
                if text is not None and len(text.encode()) <= most  # a longer one scores 0
            ]
            # what an environment calls nan or infinite is worth nothing: it must not reach a board
            rewards = filter(math.isfinite, await self._score(items)) if items else ()
            means.append(math.fsum(rewards) / each)
        return tuple(means)

    def board(self, record: Round, present: set[str]) -> bytes:
        """Digest of the closing round's board, once everybody has answered or the time is over, and all is scored;
        empty until then. Raises StoreError."""
        number, now = record.number, self._clock()
        everybody = bool(present) and present <= self._reports.reporters(number)
        if now < record.answers_by + LATE_SECONDS and not everybody:
            return b""
        if now < record.answers_by + SCORING_SECONDS and self._reports.next_unscored(number) is not None:
            return b""
        before = self._following.board
        board = next_board(
            self._manifest.digest,
            number,
            [one.peer for one in self._membership.members() if one.role == "member"],
            before.standings if before else (),
            self._reports.scored(number),
            self._reports.heard(number - 1, number),
        )
        digest, body = list_bytes(fitted(board))
        self._following.keep_list(digest, body)
        return digest
