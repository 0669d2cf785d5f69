"""What a teacher is asked: log-probabilities of tokens that another node's policy sampled.

The specification is docs/protocol.md.

Token ids mean the same to both because both name the same fingerprint of their tokenizer.
"""

import math
from collections.abc import Sequence
from typing import Annotated

import msgspec

from protocol.messages import Digest
from protocol.rejection import Reason, Rejected
from protocol.rollout import UInt63, pack_logprobs, unpack_logprobs

TEACH_PROTOCOL = "/shoal/teach/1.0.0"
"""TeachRequest -> TeachAnswer; `wait` until it is computed: the same request is then sent again."""
MAX_TEACH_REQUEST = 512 * 1024
MAX_TEACH_TOKENS = 65536
"""Prompts and answers together."""
MAX_TEACH_ANSWER = 2 * MAX_TEACH_TOKENS + 4096
MAX_TEACH_GROUPS = 64
MAX_TEACH_ANSWERS = 64

Token = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
Tokens = Annotated[tuple[Token, ...], msgspec.Meta(max_length=MAX_TEACH_TOKENS)]


class AskedGroup(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Answers to one prompt."""

    prompt: Annotated[tuple[Token, ...], msgspec.Meta(min_length=1, max_length=MAX_TEACH_TOKENS)]
    answers: Annotated[tuple[Tokens, ...], msgspec.Meta(min_length=1, max_length=MAX_TEACH_ANSWERS)]


class TeachRequest(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    swarm: Digest
    fingerprint: Digest
    """SHA-256 of the asker's vocabulary and special tokens."""
    groups: Annotated[tuple[AskedGroup, ...], msgspec.Meta(min_length=1, max_length=MAX_TEACH_GROUPS)]

    @property
    def answered(self) -> int:
        """Tokens whose log-probabilities are asked for."""
        return sum(len(answer) for group in self.groups for answer in group.answers)

    @property
    def tokens(self) -> int:
        return self.answered + sum(len(group.prompt) for group in self.groups)


class TeachAnswer(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Either log-probabilities of all answers' tokens in order, or why there are none."""

    model: Annotated[str, msgspec.Meta(max_length=64)]
    version: UInt63
    """Updates that the teacher has done."""
    logprobs: bytes
    """float16 LE, one a token."""
    refusal: Annotated[str, msgspec.Meta(max_length=300)] = ""


def check_request(data: bytes, swarm: bytes) -> TeachRequest:
    """Raises Rejected: malformed, too_large, wrong_swarm."""
    try:
        request = msgspec.msgpack.decode(data, type=TeachRequest)
    except (msgspec.DecodeError, RecursionError) as error:
        raise Rejected(Reason.malformed, f"request to a teacher: {error}") from error
    if request.swarm != swarm:
        raise Rejected(Reason.wrong_swarm, "a request to a teacher of another swarm")
    if request.tokens > MAX_TEACH_TOKENS:
        raise Rejected(Reason.too_large, f"asks about {request.tokens} tokens; at most {MAX_TEACH_TOKENS}")
    return request


def answer_of(model: str, version: int, logprobs: Sequence[float]) -> TeachAnswer:
    return TeachAnswer(model[:64], version, pack_logprobs(logprobs))


def check_answer(data: bytes, request: TeachRequest) -> tuple[TeachAnswer, tuple[float, ...]]:
    """The answer, and the log-probability of each token; none where it refuses. Raises Rejected: malformed."""
    try:
        answer = msgspec.msgpack.decode(data, type=TeachAnswer)
        logprobs = unpack_logprobs(answer.logprobs)
    except (msgspec.DecodeError, RecursionError, ValueError) as error:
        raise Rejected(Reason.malformed, f"answer of a teacher: {error}") from error
    if answer.refusal:
        return answer, ()
    if len(logprobs) != request.answered:
        raise Rejected(Reason.malformed, f"a teacher gave {len(logprobs)} log-probs of {request.answered} tokens")
    if not all(math.isfinite(value) and value <= 0.0 for value in logprobs):
        raise Rejected(Reason.malformed, "a teacher gave log-probs that are none: above 0, or not finite")
    return answer, logprobs
