"""What a coordinator signs: numbered rounds that pace, mix and evaluate a swarm. A pure state machine, and its checks.

    waiting -> open -> closing -> evaluated -> waiting or open of the next number

Rounds decide nothing that admission depends on: that goes by the clock's epochs (protocol.assignment), so a member
that lacks the newest record, or has no coordinator at all, agrees with all others about every group. A record names
the one before it by digest. The seed of the held-out tasks is committed to when a round opens and told when it closes.
"""

import hashlib
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Annotated

import msgspec

from protocol.envelope import MAX_CLOCK_SKEW, Domain, Opened, seal, unseal
from protocol.identity import Identity
from protocol.manifest import MAX_COORDINATORS, Manifest
from protocol.messages import MAX_ANNOUNCEMENT_BYTES, MAX_ANSWERS, Digest
from protocol.rejection import Reason, Rejected
from protocol.rollout import UInt63

LIFETIME = 2**31 - 1
"""Seconds: a log is to be read years later."""
FARTHEST = 30 * 86400
"""Seconds that a round is open at most, and that a record's times are ahead of when it was signed: what a coordinator's
settings allow, and what is left of a clock that was ahead and was set, whose round must still be ended."""
LEAST_MIX = 0.1
"""Share of its weight that an environment keeps however easy or hard it is: else it would never be measured again."""

_DigestOrNone = Annotated[bytes, msgspec.Meta(max_length=32)]


class State(IntEnum):
    waiting = 0
    """For members."""
    open = 1
    closing = 2
    """The seed is told; members answer the held-out tasks."""
    evaluated = 3


class Round(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One record of the log. Times in unix seconds; fields that a state does not have yet are 0 or empty."""

    swarm: Digest
    number: Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)]
    state: State
    term: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
    """Who leads: number term mod len of the manifest's coordinators."""
    revision: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
    """Counts records of one state, number and term: each has another member list."""
    previous: _DigestOrNone
    """Digest of the sealed record before; empty: this is the first one."""
    opened: UInt63
    closes: UInt63
    answers_by: UInt63
    mix: Annotated[tuple[Annotated[int, msgspec.Meta(ge=0, le=10_000)], ...], msgspec.Meta(max_length=256)]
    """Weights of the environments, in the manifest's order."""
    tasks: Annotated[int, msgspec.Meta(ge=1, le=256)]
    """Held-out tasks of each environment."""
    samples: Annotated[int, msgspec.Meta(ge=1, le=16)]
    """Completions of each task."""
    commitment: _DigestOrNone
    """SHA-256 of the seed."""
    seed: _DigestOrNone
    members: Digest
    """SHA-256 of the member list (protocol.board)."""
    board: _DigestOrNone = b""
    """SHA-256 of the board."""

    @property
    def position(self) -> tuple[int, int, int, int]:
        """Where it is in the log: a later record has a greater one, and a higher term is later than all of a lower."""
        return self.term, self.number, self.state, self.revision


@dataclass(frozen=True, slots=True)
class Pace:
    """How a coordinator runs its rounds."""

    round_seconds: int
    answer_seconds: int
    """For the answers to the held-out tasks."""
    least_members: int
    """Present ones, for a round to open."""
    quorum: float
    """Share of the members that are waited for that must be through for a round to close before its time."""
    groups: int
    """Groups that a member publishes to be through with a round; 0: rounds close at their time only."""
    tasks: int
    samples: int


@dataclass(frozen=True, slots=True)
class Facts:
    """What the coordinator sees, for the next record."""

    members: bytes
    """Digest of the member list."""
    present: int
    """Members that were heard of lately."""
    awaited: int
    """Members that an early end of a round waits for: after a coordinator's start those that may yet come back, too."""
    through: int
    """Of them, those that are through with the open round."""
    board: bytes
    """Digest of the closing round's board, once there is one."""
    mix: tuple[int, ...]
    """For the next round."""


def first(manifest: Manifest, facts: Facts, pace: Pace) -> Round:
    """The first record of a log."""
    return Round(
        manifest.digest, 1, State.waiting, 0, 0, b"", 0, 0, 0, facts.mix, pace.tasks, pace.samples, b"", b"",
        facts.members,
    )  # fmt: skip


def advance(
    head: Round, previous: bytes, now: float, facts: Facts, pace: Pace, seed_of: Callable[[int], bytes]
) -> Round | None:
    """The record after `head`, whose sealed digest is `previous`; None: nothing is to be said now.

    `seed_of` gives the 32-byte held-out seed of a round by its number, the same each time it is asked.
    """
    after: dict[str, object] = {}
    match head.state:
        case State.waiting if facts.present >= pace.least_members:
            after = _opening(head.number, now, facts, pace, seed_of)
        case State.open if is_over(head.closes, now, pace.round_seconds) or _quorum(facts, pace):
            after = {
                "state": State.closing,
                "seed": seed_of(head.number),
                "answers_by": int(now) + pace.answer_seconds,
            }
        case State.closing if facts.board:
            after = {"state": State.evaluated, "board": facts.board}
        case State.evaluated:
            cleared = {"opened": 0, "closes": 0, "answers_by": 0, "commitment": b"", "seed": b"", "board": b""}
            after = {"number": head.number + 1, "state": State.waiting, **cleared}
            if facts.present >= pace.least_members:
                after |= _opening(head.number + 1, now, facts, pace, seed_of)
    if after:
        return msgspec.structs.replace(head, revision=0, previous=previous, members=facts.members, **after)
    if facts.members != head.members:
        return msgspec.structs.replace(head, revision=head.revision + 1, previous=previous, members=facts.members)
    return None


def is_over(until: float, now: float, seconds: float) -> bool:
    """Whether a time that was at most `seconds` away when it was set is over.

    One that is still further away was set by a clock that was wrong, or by who wants a round never to end.
    """
    return not now < until <= now + seconds + MAX_CLOCK_SKEW


def _opening(number: int, now: float, facts: Facts, pace: Pace, seed_of: Callable[[int], bytes]) -> dict[str, object]:
    return {
        "state": State.open,
        "opened": int(now),
        "closes": int(now) + pace.round_seconds,
        "mix": facts.mix,
        "tasks": pace.tasks,
        "samples": pace.samples,
        "commitment": commitment_of(seed_of(number)),
    }


def _quorum(facts: Facts, pace: Pace) -> bool:
    return pace.groups > 0 and facts.awaited > 0 and facts.through >= pace.quorum * facts.awaited


def take_over(
    head: Round, previous: bytes, term: int, now: float, pace: Pace, seed_of: Callable[[int], bytes]
) -> Round:
    """A standby's first record: the same round goes on, under a higher term.

    It does not know the seed that an open round is committed to, so it commits to one of its own; members that answer
    a closing round's tasks get the time for it anew.
    """
    after: dict[str, object] = {}
    if head.state is State.open:
        after = {"commitment": commitment_of(seed_of(head.number))}
    elif head.state is State.closing:
        after = {"answers_by": int(now) + pace.answer_seconds}
    return msgspec.structs.replace(head, term=term, revision=0, previous=previous, **after)


def next_term(manifest: Manifest, coordinator: str, term: int) -> int:
    """The first term after `term` that this coordinator leads. Raises ValueError when it is none."""
    number, count = manifest.coordinators.index(coordinator), len(manifest.coordinators)
    return term + 1 + (number - term - 1) % count


def leader_of(manifest: Manifest, term: int) -> str:
    """Peer id of the coordinator that leads a term."""
    return manifest.coordinators[term % len(manifest.coordinators)]


def commitment_of(seed: bytes) -> bytes:
    return hashlib.sha256(seed).digest()


def seed_for(identity: Identity, swarm: bytes, number: int, term: int) -> bytes:
    """A round's held-out seed: only the coordinator's key gives it, and it gives it again after a restart."""
    return hashlib.sha256(identity.sign(b"shoal/1/round-seed\n" + swarm + struct.pack(">QI", number, term))).digest()


def seal_round(identity: Identity, record: Round, now: float) -> bytes:
    """Sign a record."""
    raw = msgspec.msgpack.encode(record)
    return seal(identity, Domain.round, raw, issued=now, expires=now + LIFETIME)


def open_round(sealed: bytes, manifest: Manifest, now: float) -> tuple[Opened, Round]:
    """Verify a sealed record by itself: form, signer, what its state must have.

    Raises Rejected: of the envelope, wrong_swarm, wrong_producer (not the leader of its term), broken_commitment.
    """
    opened = unseal(sealed, Domain.round, max_bytes=MAX_ANNOUNCEMENT_BYTES, now=now)
    try:
        record = msgspec.msgpack.decode(opened.payload, type=Round)
    except (msgspec.DecodeError, RecursionError) as error:
        raise Rejected(Reason.malformed, f"round: {error}") from error
    if record.swarm != manifest.digest:
        raise Rejected(Reason.wrong_swarm, f"a round of swarm {record.swarm.hex()[:12]}")
    if not manifest.coordinators or opened.producer != leader_of(manifest, record.term):
        raise Rejected(Reason.wrong_producer, f"{opened.producer} does not lead term {record.term}")
    problem = _problem(record, manifest, opened.issued)
    if problem:
        raise Rejected(Reason.malformed, f"round {record.number}, {record.state.name}: {problem}")
    if record.seed and commitment_of(record.seed) != record.commitment:
        raise Rejected(
            Reason.broken_commitment,
            f"round {record.number}: the seed that was told is not the one that was committed to",
        )
    return opened, record


def _problem(record: Round, manifest: Manifest, issued: int) -> str:
    """What is wrong with a record's form; empty: nothing."""
    has = {name: len(getattr(record, name)) for name in ("previous", "commitment", "seed", "board")}
    if any(length not in (0, 32) for length in has.values()):
        return "a digest has 32 bytes"
    if len(record.mix) != len(manifest.environments) or not any(record.mix):
        return "the mix has a weight for each environment, not all of them 0"
    if len(record.mix) * record.tasks * record.samples > MAX_ANSWERS:
        return f"more than the {MAX_ANSWERS} answers that a report holds are asked for"
    for name, since in (("commitment", State.open), ("seed", State.closing), ("board", State.evaluated)):
        if bool(has[name]) != (record.state >= since):
            return f"{name} is there from {since.name} on"
    if not 0 <= record.closes - record.opened <= FARTHEST:
        return f"it closes before it opens, or more than {FARTHEST} s after"
    if max(record.opened, record.answers_by) > issued + FARTHEST:
        return f"it names a time that is more than {FARTHEST} s ahead"
    if max(record.term, record.number) > issued:  # after the greatest one nobody could sign any more
        return "terms and rounds take a second at least, so there are no more of them than seconds since 1970"
    return ""


def check_successor(before: Round, after: Round) -> None:
    """Whether `after`, which names `before` as the record before it, may follow it. Raises Rejected(broken_chain).

    What a round promised when it opened holds until it is evaluated; only who leads may take over with a new promise.
    """
    same = (before.number, before.state) == (after.number, after.state)
    if after.term > before.term:
        changes = {State.open: {"commitment"}, State.closing: {"answers_by"}}.get(before.state, set())
        near = after.term - before.term <= MAX_COORDINATORS  # who is next in line takes the next term that is its own
        legal = near and same and after.revision == 0 and _differ(before, after) <= changes | {"term"}
    elif after.term < before.term:
        legal = False
    elif same:
        legal = after.revision == before.revision + 1 and _differ(before, after) == {"members"}
    elif before.state is State.evaluated:
        legal = after.number == before.number + 1 and after.state in (State.waiting, State.open)
    else:
        promised = {
            State.waiting: {"opened", "closes", "mix", "tasks", "samples", "commitment"},
            State.open: {"seed", "answers_by"},
            State.closing: {"board"},
        }[before.state]
        legal = (
            after.number == before.number
            and after.state == before.state + 1
            and _differ(before, after) <= promised | {"state", "members"}
        )
    if not legal or (not same and after.revision):
        raise Rejected(
            Reason.broken_chain,
            f"{after.state.name} of round {after.number} (term {after.term}, revision {after.revision}) cannot follow "
            f"{before.state.name} of round {before.number} (term {before.term}, revision {before.revision})",
        )


def _differ(before: Round, after: Round) -> set[str]:
    """Names of the fields that are not the same, but for the two that every record has anew."""
    return {
        name
        for name in Round.__struct_fields__
        if name not in ("previous", "revision") and getattr(before, name) != getattr(after, name)
    }


def measured_mix(manifest: Manifest, rates: Mapping[str, float | None]) -> tuple[int, ...]:
    """Weights for the next round by measured pass rates p: the manifest's, times 4 p (1 - p), at least LEAST_MIX.

    4 p (1 - p) is the chance that two answers to one task differ, which is what there is to learn from, as a share of
    its greatest. An environment that was not measured keeps its weight.
    """
    weights = []
    for spec in manifest.environments:
        rate = rates.get(spec.name)
        worth = 1.0 if rate is None else max(LEAST_MIX, 4 * rate * (1 - rate))
        weights.append(worth * spec.weight)
    return scaled(weights)


def scaled(weights: Sequence[float]) -> tuple[int, ...]:
    """The same proportions as whole numbers, the largest of which is 1000, and none that was above 0 is lost."""
    top = max(weights)
    return tuple(max(1, round(1000 * weight / top)) if weight > 0 else 0 for weight in weights)
