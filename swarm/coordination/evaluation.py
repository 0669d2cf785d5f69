"""Evaluates a round: scores the held-out answers that members handed in, and makes the board of it."""

import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import msgspec

from protocol.assignment import round_task
from protocol.board import Report, fitted, list_bytes, next_board
from protocol.manifest import EnvironmentSpec, Manifest
from protocol.messages import MAX_REPORT_BYTES, ReportRequest
from protocol.rollout import TaskRef
from protocol.rounds import Round, is_over
from swarm.coordination.chain import Chain
from swarm.coordination.membership import Membership
from swarm.coordination.reports import Reports

LATE_SECONDS = 2.0
"""An answer may be on its way when the time is over."""
SCORING_SECONDS = 600.0
"""After the time for answers: whose answers are not scored by then counts as absent."""
MEMBER_SECONDS = 60.0
"""That one member's answers may take in a round."""
SLICE = 8
"""Answers of one member scored at a time, after the first one of an environment: by that, slow ones are known."""
BYTES_PER_TOKEN = 128
MAX_TEXT_BYTES = 64 * 1024

Score = Callable[[Sequence[tuple[TaskRef, str]]], Awaitable[Sequence[float]]]
"""Rewards of answers, in order, from the coordinator's own scorer. May raise ScoringUnavailable."""


def most_bytes(spec: EnvironmentSpec) -> int:
    """The longest answer to a task of this environment that is scored at all."""
    return min(MAX_TEXT_BYTES, BYTES_PER_TOKEN * (spec.max_tokens or MAX_TEXT_BYTES))


def within_bounds(manifest: Manifest, report: ReportRequest) -> tuple[ReportRequest, int]:
    """A whole report as a coordinator takes it, and how many of its answers were left out for that.

    Those that are too long to be scored go first, then the longest until the rest fits a request: an empty answer
    scores 0, and a request that is too large loses all of them.
    """
    each = len(report.answers) // len(manifest.environments)
    most = [most_bytes(spec) for spec in manifest.environments for _ in range(each)]
    sizes = [len((text or "").encode()) for text in report.answers]
    out = {n for n, size in enumerate(sizes) if size > most[n]}
    over = len(msgspec.msgpack.encode(report)) - sum(sizes[n] for n in out) - MAX_REPORT_BYTES
    for n in sorted(set(range(len(sizes))) - out, key=sizes.__getitem__, reverse=True):
        if over <= 0:
            break
        out.add(n)
        over -= sizes[n]
    answers = tuple("" if n in out else text for n, text in enumerate(report.answers))
    return msgspec.structs.replace(report, answers=answers), len(out)


class ScoringUnavailable(Exception):
    """The scorer does not answer now."""


@dataclass(slots=True)
class _Begun:
    """How far one member's answers are scored. In memory: after a restart they are scored anew."""

    sums: list[float]
    """Of rewards, by environment."""
    at: int = 0
    """Answers that are done."""
    seconds: float = 0.0
    failed: float = 0.0
    """Times that the scorer was not to be had for them, each like a second."""

    @property
    def turn(self) -> float:
        return self.seconds + self.failed


class Evaluation:
    """Of the leader's closing rounds."""

    def __init__(
        self,
        manifest: Manifest,
        chain: Chain,
        membership: Membership,
        reports: Reports,
        score: Score,
        clock: Callable[[], float],
        tell: Callable[[str, str], None],
        answer_seconds: int,
    ) -> None:
        self._manifest, self._chain, self._membership = manifest, chain, membership
        self._reports, self._score, self._clock, self._tell = reports, score, clock, tell
        self._answer_seconds = answer_seconds
        self._number = 0
        """Of the round that `_begun` is of."""
        self._begun: dict[str, _Begun] = {}

    async def score_next(self, record: Round) -> bool:
        """Score some answers of the member whose scoring took least so far. False: all are scored. Raises
        ScoringUnavailable, StoreError.

        So slow answers hold up whose they are, and nobody else; beyond MEMBER_SECONDS the rest of them score 0.
        """
        if record.number != self._number:
            self._number, self._begun = record.number, {}
        waiting = self._reports.unscored(record.number)
        if not waiting:
            return False
        peer = min(waiting, key=lambda peer: self._begun[peer].turn if peer in self._begun else 0.0)
        begun = self._begun.setdefault(peer, _Begun([0.0] * len(self._manifest.environments)))
        report = self._reports.report(record.number, peer)
        started = self._clock()
        try:
            await self._score_some(record, report, begun)
        except ScoringUnavailable:
            begun.failed += 1.0  # it may be for these answers
            raise
        begun.seconds += max(0.0, self._clock() - started)
        over = begun.seconds > MEMBER_SECONDS and begun.at < len(report.answers)
        if over:
            self._tell("evaluate", f"{peer}: scoring took {begun.seconds:.0f} s; what is left of its answers scores 0")
        if over or begun.at >= len(report.answers):
            self._reports.keep_scores(record.number, peer, Report(_means(record, report, begun.sums), report.trained))
            del self._begun[peer]
        return True

    async def _score_some(self, record: Round, report: ReportRequest, begun: "_Begun") -> None:
        """The next answers of one environment; those that it is not answered in as a whole are passed over."""
        each = record.tasks * record.samples
        number, first = divmod(begun.at, each)
        spec, end = self._manifest.environments[number], (number + 1) * each
        if None in report.answers[number * each : end]:
            begun.at = end
            return
        some = report.answers[begun.at : min(end, begun.at + (SLICE if first else 1))]
        most = most_bytes(spec)
        items = [
            (round_task(self._manifest, record.seed, spec.name, n // record.samples), text)
            for n, text in enumerate(some, first)
            if text and len(text.encode()) <= most  # a longer one scores 0, and so does what was left out
        ]
        # what an environment calls nan or infinite is worth nothing: it must not reach a board
        rewards = filter(math.isfinite, await self._score(items)) if items else ()
        begun.sums[number] += math.fsum(rewards)
        begun.at += len(some)

    def board(self, record: Round, awaited: set[str]) -> bytes:
        """Digest of the closing round's board, once all who are waited for have answered or the time is over, and all
        is scored; empty until then. Raises StoreError."""
        number = record.number
        everybody = bool(awaited) and awaited <= self._reports.reporters(number)
        if not (everybody or self._is_over(record, LATE_SECONDS)):
            return b""
        if self._reports.unscored(number) and not self._is_over(record, SCORING_SECONDS):
            return b""
        before = self._chain.board
        board = next_board(
            self._manifest.digest,
            number,
            [one.peer for one in self._membership.members() if one.role == "member"],
            before.standings if before else (),
            self._reports.scored(number),
            self._reports.heard(number - 1, number),
        )
        digest, body = list_bytes(fitted(board))
        self._chain.keep_list(digest, body)
        return digest

    def _is_over(self, record: Round, later: float) -> bool:
        """Whether the time for answers is over by so many seconds."""
        return is_over(record.answers_by + later, self._clock(), self._answer_seconds + later)


def _means(record: Round, report: ReportRequest, sums: Sequence[float]) -> tuple[float | None, ...]:
    """Mean reward by environment; None where it was not answered."""
    each = record.tasks * record.samples
    return tuple(
        None if None in report.answers[i * each : (i + 1) * each] else rewards / each for i, rewards in enumerate(sums)
    )
