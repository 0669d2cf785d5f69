"""The coordinator's two lists, each named in its signed records by SHA-256: who are members, and how they stand.

Nothing here is self-reported: scores are of answers that the coordinator scored itself, and what somebody is credited
with comes from the gains of others.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Annotated, Literal

import msgspec

from protocol.messages import MAX_LIST_BYTES, Digest, PeerId, Trained
from protocol.rejection import Reason, Rejected
from protocol.rollout import UInt63

MAX_MEMBERS = 4096
MAX_GAIN = 0.25
"""Of a member's held-out score in one round, as far as it counts for those it learned from."""
MAX_SHARE = 0.5
"""Of a member's gain that one producer is credited with."""

Role = Literal["member", "observer"]
"""An observer may connect and read along; its groups are not taken, and it is not evaluated."""


class Member(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    peer: PeerId
    role: Role


class MemberList(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Both sorted by peer id."""

    swarm: Digest
    members: Annotated[tuple[Member, ...], msgspec.Meta(max_length=MAX_MEMBERS)]
    kicked: Annotated[tuple[PeerId, ...], msgspec.Meta(max_length=MAX_MEMBERS)] = ()


class Standing(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """How one member stands after a round."""

    peer: PeerId
    scores: Annotated[tuple[float | None, ...], msgspec.Meta(max_length=256)]
    """Mean held-out reward by environment, in the manifest's order; None: not answered. Empty: absent, or left out for
    want of room."""
    mean: float | None
    """Over all environments, one not answered counting 0; None: absent."""
    best: float | None
    """The best mean of all rounds so far."""
    credit: float
    """Sum over all rounds."""


class Board(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    swarm: Digest
    number: UInt63
    """Of the round."""
    standings: Annotated[tuple[Standing, ...], msgspec.Meta(max_length=MAX_MEMBERS)]
    """Best mean first, absent ones last."""


@dataclass(frozen=True, slots=True)
class Report:
    """What the coordinator found in one member's report."""

    scores: tuple[float | None, ...]
    """By environment; see Standing."""
    trained: tuple[Trained, ...]


def most_members(environments: int) -> int:
    """How many a swarm of so many environments may have: a board of all of them must fit its bound."""
    standing = 96 + 9 * environments  # at most: 54 of the peer id, 9 a number, and heads
    return min(MAX_MEMBERS, MAX_LIST_BYTES // standing)


def list_bytes(content: MemberList | Board) -> tuple[bytes, bytes]:
    """(digest, bytes) of a list."""
    raw = msgspec.msgpack.encode(content)
    return hashlib.sha256(raw).digest(), raw


def read_list(raw: bytes, kind: type[MemberList] | type[Board], swarm: bytes) -> MemberList | Board:
    """Decode a list whose digest a signed record names. Raises Rejected: too_large, malformed, wrong_swarm.

    A standby takes up what it says, so a list that names a peer twice, or a board of no numbers, is refused here.
    """
    if len(raw) > MAX_LIST_BYTES:
        raise Rejected(Reason.too_large, f"{len(raw)} bytes, at most {MAX_LIST_BYTES}")
    try:
        content = msgspec.msgpack.decode(raw, type=kind)
    except (msgspec.DecodeError, RecursionError) as error:
        raise Rejected(Reason.malformed, f"{kind.__name__}: {error}") from error
    if content.swarm != swarm:
        raise Rejected(Reason.wrong_swarm, f"{kind.__name__} of swarm {content.swarm.hex()[:12]}")
    if isinstance(content, Board):
        lists = [sorted(one.peer for one in content.standings)]
        numbers = (number for one in content.standings for number in (*one.scores, one.mean, one.best, one.credit))
        if not all(number is None or math.isfinite(number) for number in numbers):
            raise Rejected(Reason.malformed, "Board: a score or credit that is not finite")
    else:
        lists = [[one.peer for one in content.members], list(content.kicked)]
    if any(one >= following for peers in lists for one, following in pairwise(peers)):
        raise Rejected(Reason.malformed, f"{kind.__name__}: peers out of order, or one of them twice")
    return content


def next_board(
    swarm: bytes,
    number: int,
    members: Sequence[str],
    before: Sequence[Standing],
    reports: Mapping[str, Report],
    heard: Mapping[str, int],
) -> Board:
    """The board after a round.

    `members`: peer ids that may stand on it. `before`: the standings of the round before. `heard`: how many groups of
    each producer the coordinator itself heard announced lately.

    A member's gain is what its mean is above its own best so far, so that it can give away no more than 1 minus its
    first score in its life, however often it sinks and rises; in one round at most MAX_GAIN. Its gain goes to the
    producers that it says it trained on, in proportion, at most MAX_SHARE to one of them, and none to itself nor to
    who is no member or announced fewer groups than were counted: those counts are cut down to what was heard.
    """
    old = {standing.peer: standing for standing in before}
    credit = {peer: old[peer].credit if peer in old else 0.0 for peer in members}
    standings = []
    for peer in members:
        known = old.get(peer)
        best, mean = known.best if known else None, None
        scores: tuple[float | None, ...] = ()
        report = reports.get(peer)
        if report is not None:
            scores = report.scores
            mean = sum(score or 0.0 for score in scores) / len(scores)
            if best is not None:
                for producer, share in _shares(peer, report.trained, credit, heard).items():
                    credit[producer] += share * min(MAX_GAIN, max(0.0, mean - best))
            best = mean if best is None else max(best, mean)
        standings.append((peer, scores, mean, best))
    ordered = sorted(standings, key=lambda one: (one[2] is None, -(one[2] or 0.0), one[0]))
    return Board(swarm, number, tuple(Standing(*one, credit[one[0]]) for one in ordered))


def _shares(
    learner: str, trained: Sequence[Trained], members: Mapping[str, float], heard: Mapping[str, int]
) -> dict[str, float]:
    """What part of a learner's gain each producer is credited with; together at most 1."""
    counts: dict[str, int] = {}
    for one in trained:
        if one.producer != learner and one.producer in members:
            counts[one.producer] = min(counts.get(one.producer, 0) + one.groups, heard.get(one.producer, 0))
    total = sum(counts.values())
    return {producer: min(MAX_SHARE, count / total) for producer, count in counts.items() if count} if total else {}


def fitted(board: Board) -> Board:
    """The board within MAX_LIST_BYTES: where many members and many environments make it longer, the scores by
    environment of the last ones are left out."""
    kept, standings = len(board.standings), board.standings
    while len(list_bytes(board)[1]) > MAX_LIST_BYTES:
        kept //= 2
        rest = (msgspec.structs.replace(one, scores=()) for one in standings[kept:])
        board = msgspec.structs.replace(board, standings=(*standings[:kept], *rest))
    return board


def pass_rates(board: Board, environments: Sequence[str]) -> dict[str, float | None]:
    """Held-out score of each environment in the median of the members that answered it; None where nobody did.

    The median: what one member hands in need not come from a model, and must not steer the mix.
    """
    rates: dict[str, float | None] = {}
    for i, name in enumerate(environments):
        scores = [one.scores[i] for one in board.standings if i < len(one.scores)]
        answered = [score for score in scores if score is not None]
        rates[name] = median(answered) if answered else None
    return rates
