"""What travels beside rollout groups: announcements on gossip, requests and answers on streams.

Every message is msgpack, arrays in field order, decoded strictly; see docs/protocol.md for the bytes.
"""

from typing import Annotated

import msgspec

from protocol.rollout import TaskRef, UInt63

GROUPS_PROTOCOL = "/shoal/groups/1.0.0"
"""Pull a group's sealed bytes: GroupRequest -> the bytes from `offset`, or an empty answer: not held."""
BATCH_PROTOCOL = "/shoal/batch/1.0.0"
"""Pull several groups over one stream: BatchRequest -> their sealed bytes in that order, without anything between,
up to the first that is not held or would make the answer longer than MAX_BATCH_BYTES. Opening a stream costs far more
than a group's few kilobytes. A reader splits the answer by the announced sizes, and checks each digest."""
LIVE_PROTOCOL = "/shoal/live/1.1.0"
"""Heal lost announcements: LiveRequest -> LiveResponse."""
MANIFEST_PROTOCOL = "/shoal/manifest/1.0.0"
"""ManifestRequest -> the manifest's bytes, or an empty answer: not held."""
LISTING_PROTOCOL = "/shoal/listing/1.0.0"
"""An empty request -> a sealed listing of the swarm (protocol.listing), from nodes of public swarms."""
ROUNDS_PROTOCOL = "/shoal/rounds/1.0.0"
"""Follow the coordinator's log: RoundsRequest -> RoundsResponse."""
LISTS_PROTOCOL = "/shoal/lists/1.0.0"
"""A member list or a board by its digest: ListRequest -> its bytes, or an empty answer: not held."""
ENTER_PROTOCOL = "/shoal/enter/1.0.0"
"""Ask the coordinator to be a member: EnterRequest -> EnterResponse."""
REPORT_PROTOCOL = "/shoal/report/1.0.0"
"""Hand the coordinator the answers to a round's held-out tasks: ReportRequest -> ReportResponse."""

MAX_ANNOUNCEMENT_BYTES = 2048
MAX_REQUEST_BYTES = 64 * 1024
MAX_BATCH_BYTES = 1024 * 1024
MAX_HAVE = 1024
"""Digests that a LiveRequest names."""
MAX_LIVE = 64
"""Announcements in a LiveResponse."""
MAX_MANIFEST_BYTES = 64 * 1024
MAX_ROUNDS = 32
"""Records in a RoundsResponse."""
MAX_PROOFS = 8
MAX_LIST_BYTES = 1024 * 1024
"""Of a member list or a board."""
MAX_REPORT_BYTES = 1024 * 1024
MAX_ANSWERS = 65536
MAX_TRAINED = 1024
"""Producers that a report names."""

Digest = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]


def announce_topic(manifest_digest: bytes, shard: int) -> str:
    """GossipSub topic of one shard of a swarm's announcements."""
    return f"/shoal/{manifest_digest.hex()[:32]}/announce/{shard}"


def rounds_topic(manifest_digest: bytes) -> str:
    """GossipSub topic of the records of a swarm's coordinators."""
    return f"/shoal/{manifest_digest.hex()[:32]}/rounds"


class Announcement(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Says that a group exists and whether it is worth pulling. Travels sealed, at most 2 KiB."""

    swarm: Digest
    group: Digest
    """SHA-256 of the group's sealed bytes: its name, and what a pulled body is checked against."""
    size: UInt63
    """Length of the sealed bytes."""
    epoch: UInt63
    task: TaskRef
    model: Annotated[str, msgspec.Meta(max_length=64)]
    completions: UInt63
    reward_mean: float
    reward_std: float
    """Population standard deviation of the claimed rewards; 0 means nothing to learn."""
    tokens: UInt63
    """Sampled tokens of all completions."""


class GroupRequest(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    group: Digest
    offset: UInt63 = 0


class BatchRequest(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    groups: Annotated[tuple[Digest, ...], msgspec.Meta(min_length=1, max_length=64)]


class LiveRequest(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """`have`: digests of unexpired groups the asker knows of; the answer leaves those out."""

    swarm: Digest
    have: Annotated[tuple[Digest, ...], msgspec.Meta(max_length=MAX_HAVE)]
    settled: UInt63 = 0
    """Only what the server has known for so many seconds: the asker listens, and gossip may still bring the rest."""


class LiveResponse(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Sealed announcements the asker lacks, newest first."""

    announcements: Annotated[tuple[bytes, ...], msgspec.Meta(max_length=MAX_LIVE)]


class ManifestRequest(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    digest: Digest


PeerId = Annotated[str, msgspec.Meta(pattern=r"^12D3KooW[1-9A-HJ-NP-Za-km-z]{44}\Z")]
"""Of the form of an Ed25519 peer id: what transports can be asked to refuse."""
_Sealed = Annotated[bytes, msgspec.Meta(max_length=MAX_ANNOUNCEMENT_BYTES)]


class RoundsRequest(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    swarm: Digest
    after: Annotated[bytes, msgspec.Meta(max_length=32)] = b""
    """Digest of the newest record the asker has; empty: it has none."""


class RoundsResponse(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Sealed records, oldest first: those after the one asked about, or the last ones where that is not known."""

    records: Annotated[tuple[_Sealed, ...], msgspec.Meta(max_length=MAX_ROUNDS)]
    proofs: Annotated[tuple[_Sealed, ...], msgspec.Meta(max_length=2 * MAX_PROOFS)] = ()
    """Records that prove a coordinator's fault, one beside the other."""


class ListRequest(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    digest: Digest


class EnterRequest(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    swarm: Digest
    token: Annotated[bytes, msgspec.Meta(max_length=64)] = b""
    """Of the invite; empty where it has none."""


class EnterResponse(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    role: Annotated[str, msgspec.Meta(max_length=16)]
    """Empty: not let in."""
    detail: Annotated[str, msgspec.Meta(max_length=256)]
    """Why not, for people."""


class Trained(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """How many groups of a producer a member trained on in a round."""

    producer: PeerId
    groups: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]


class ReportRequest(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    swarm: Digest
    number: UInt63
    """Of the round."""
    answers: Annotated[tuple[str | None, ...], msgspec.Meta(max_length=MAX_ANSWERS)]
    """By environment in the manifest's order, then by task, then by sample; None: that environment is not here."""
    trained: Annotated[tuple[Trained, ...], msgspec.Meta(max_length=MAX_TRAINED)] = ()


class ReportResponse(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    taken: bool
    detail: Annotated[str, msgspec.Meta(max_length=256)] = ""
