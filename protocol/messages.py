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

MAX_ANNOUNCEMENT_BYTES = 2048
MAX_REQUEST_BYTES = 64 * 1024
MAX_BATCH_BYTES = 1024 * 1024
MAX_HAVE = 1024
"""Digests that a LiveRequest names."""
MAX_LIVE = 64
"""Announcements in a LiveResponse."""
MAX_MANIFEST_BYTES = 64 * 1024

Digest = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]


def announce_topic(manifest_digest: bytes, shard: int) -> str:
    """GossipSub topic of one shard of a swarm's announcements."""
    return f"/shoal/{manifest_digest.hex()[:32]}/announce/{shard}"


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
