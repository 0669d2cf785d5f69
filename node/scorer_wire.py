"""What the daemon and the scorer process say to each other: msgpack structs, each behind a 4-byte big-endian length.

Daemon: Setup once, then Chunk after Chunk. Scorer: Ready or Refused, then for every chunk one Done per job in order, or
Died in place of the first that killed the child that was working on it. A child says the same to the scorer process.
"""

import struct

import msgspec

from node.interfaces import Score, Task
from protocol.rollout import TaskRef

LENGTH = struct.Struct(">I")
MAX_REPLY_BYTES = 4 * 1024 * 1024
MAX_ANSWER_BYTES = 64 * 1024


class Wanted(msgspec.Struct, frozen=True, array_like=True):
    """One environment to have ready."""

    name: str
    version: str
    settings: dict[str, int | float | str | bool]


class Setup(msgspec.Struct, frozen=True, array_like=True):
    environments: tuple[Wanted, ...]
    deadline: float
    """Seconds for one job."""
    memory_mb: int


class Job(msgspec.Struct, frozen=True, array_like=True):
    """Score `answer`; when there is none, regenerate the task or, with `gold`, say an answer that scores 1."""

    ref: TaskRef
    answer: str | None
    gold: bool = False


class Chunk(msgspec.Struct, frozen=True, array_like=True):
    jobs: tuple[Job, ...]
    prepare: bool = True
    """Make the tasks that environments keep before the fork."""


class Ready(msgspec.Struct, frozen=True, array_like=True, tag=True):
    isolation: tuple[str, ...]
    """Mechanisms in force in the process that is about to see answers."""


class Refused(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """An environment cannot be had; the process ends."""

    why: str


class Done(msgspec.Struct, frozen=True, array_like=True, tag=True, forbid_unknown_fields=True):
    index: int
    """Position of the job in its chunk."""
    score: Score | None = None
    task: Task | None = None
    failure: str | None = None
    gold: str | None = None
    """None with no failure either: the environment knows no answer to this task."""


class Died(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The child that worked on the chunk is gone; the rest of the chunk is forgotten."""

    why: str


Reply = Ready | Refused | Done | Died


class Overlong(ValueError):
    """A frame longer than any reply."""


def end_of_frame(unread: bytes | bytearray) -> int | None:
    """Where the first frame ends; None while it is not whole. Raises Overlong."""
    if len(unread) < LENGTH.size:
        return None
    (length,) = LENGTH.unpack_from(unread)
    if length > MAX_REPLY_BYTES:
        raise Overlong(f"reply of {length} bytes")
    end: int = LENGTH.size + length
    return end if len(unread) >= end else None


def frame(message: msgspec.Struct) -> bytes:
    """The bytes of one message on the pipe."""
    body = msgspec.msgpack.encode(message)
    return LENGTH.pack(len(body)) + body


def score_of(result: Done) -> Score:
    """The score that came, where it is one: an answer that is evaluated may have written it."""
    if result.score is None:
        return Score(0.0, parsed=False, failure=f"scorer_failed: {result.failure}")
    if not 0 <= result.score.reward <= 1:  # NaN too
        return Score(0.0, parsed=False, failure=f"scorer_failed: a reward of {result.score.reward:g}, not in [0, 1]")
    return result.score


def can_travel(answer: str) -> bool:
    """Neither oversize nor unencodable (lone surrogates); such an answer is wrong without looking at it."""
    if len(answer) > MAX_ANSWER_BYTES:
        return False
    try:
        return len(answer.encode()) <= MAX_ANSWER_BYTES
    except UnicodeEncodeError:
        return False
