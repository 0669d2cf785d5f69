"""The unit of exchange: a rollout group is one task and G completions by one policy.

Wire form: msgpack arrays (field order is the schema, see docs/protocol.md), so a field may only ever be
appended. Token ids travel as little-endian uint32, behaviour log-probabilities as little-endian float16:
both are advisory (a reader without the same tokenizer re-encodes the text) and cost 6 bytes a token.
"""

import struct
from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec

UInt63 = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9][A-Za-z0-9._/+-]*\Z")]

FinishReason = Literal["stop", "length", "aborted"]


class TaskRef(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Names one task. Everybody regenerates question, answer and scorer from it; none of them travels."""

    environment: Name
    version: Name
    """Version of the environment's generator and scorer; a reader must have exactly this one."""
    seed: UInt63
    """Derived from (manifest, epoch, producer or 'shared'): see `protocol.assignment`."""
    index: UInt63
    """Slot within the seed's stream of tasks."""


class Turn(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One message of a completion. The prompt is regenerated from the task, never sent."""

    role: Literal["assistant", "user", "tool"]
    text: str


class Completion(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What one policy answered once, with what its producer claims about it."""

    turns: tuple[Turn, ...]
    finish: FinishReason
    token_count: UInt63
    """Sampled tokens, end-of-turn included."""
    reward: float
    """The producer's claim. Compared with the local score, never used."""
    token_ids: bytes = b""
    """uint32 LE, one per sampled token, or empty."""
    logprobs: bytes = b""
    """float16 LE, natural log-probability under the behaviour policy, one per sampled token, or empty."""

    @property
    def text(self) -> str:
        """What the policy said: its assistant turns, joined."""
        return "".join(turn.text for turn in self.turns if turn.role == "assistant")


class RolloutGroup(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One task, G completions, one policy. Signed as a whole by its producer (see `protocol.envelope`).

    Neither producer nor swarm is in it: the envelope names the one, and the announcement, which is signed too and
    names the group by its hash, the other. The task's seed is derived from both.
    """

    epoch: UInt63
    task: TaskRef
    model: Annotated[str, msgspec.Meta(max_length=64)]
    """Model family and size in words, for people and for family-aware sampling."""
    tokenizer: Annotated[bytes, msgspec.Meta(max_length=32)]
    """Fingerprint of the tokenizer that `token_ids` belong to, or empty."""
    policy_version: UInt63
    """The producer's step count when it sampled."""
    completions: tuple[Completion, ...]

    @property
    def rewards(self) -> tuple[float, ...]:
        return tuple(completion.reward for completion in self.completions)


def pack_token_ids(token_ids: Sequence[int]) -> bytes:
    """Token ids as little-endian uint32."""
    return struct.pack(f"<{len(token_ids)}I", *token_ids)


def unpack_token_ids(packed: bytes) -> tuple[int, ...]:
    """Inverse of `pack_token_ids`. Raises ValueError when the length is no multiple of 4."""
    if len(packed) % 4:
        raise ValueError(f"token ids take 4 bytes each, got {len(packed)} bytes")
    return struct.unpack(f"<{len(packed) // 4}I", packed)


def pack_logprobs(logprobs: Sequence[float]) -> bytes:
    """Log-probabilities as little-endian float16, clamped to its range."""
    return struct.pack(f"<{len(logprobs)}e", *(max(-65504.0, min(0.0, value)) for value in logprobs))


def unpack_logprobs(packed: bytes) -> tuple[float, ...]:
    """Inverse of `pack_logprobs`. Raises ValueError when the length is no multiple of 2."""
    if len(packed) % 2:
        raise ValueError(f"log-probabilities take 2 bytes each, got {len(packed)} bytes")
    return struct.unpack(f"<{len(packed) // 2}e", packed)
