"""What a node and its averager process say to each other: msgpack structs, each behind its length, over a socket pair.

The node: Setup once, then Round, one at a time. The averager: Beat again and again, Ready once, then Gathered or
NoRound for each Round. Weights cross as files of float32 numbers in a directory of the node's home.
"""

import struct
from pathlib import Path

import msgspec

LENGTH = struct.Struct(">I")
MAX_FRAME = 1 << 16
MAX_GROUP = 8
"""Nodes of one round. Everybody fetches from everybody, so traffic grows with its square."""
BEAT_SECONDS = 1.0


class Setup(msgspec.Struct, frozen=True, array_like=True, tag=True):
    prefix: str
    """Names the rounds of one model in one swarm; whoever does not know it cannot take part."""
    listen: str
    peers: tuple[str, ...]
    """Multiaddrs of other averagers to begin with."""
    directory: str
    size: int
    """Bytes of everybody's weights."""
    min_peers: int
    """Nodes that make a round, this one counted."""


class Round(msgspec.Struct, frozen=True, array_like=True, tag=True):
    number: int
    path: str
    """The own weights."""
    digest: bytes
    """SHA-256 of them."""
    find_seconds: float
    """Deadline for others to come together with."""
    fetch_seconds: float
    """Deadline for their weights, from then on."""


class Meet(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Dial these averagers besides those of the setup, in place of those of the last one."""

    peers: tuple[str, ...]


Command = Setup | Round | Meet


class Beat(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The process is there."""


class Ready(msgspec.Struct, frozen=True, array_like=True, tag=True):
    addresses: tuple[str, ...]
    """Multiaddrs that other averagers reach this one at."""


class Gathered(msgspec.Struct, frozen=True, array_like=True, tag=True):
    number: int
    peers: tuple[str, ...]
    """Whose weights there are, in an order that is the same on all nodes; this node is among them."""
    own: int
    """Which of `peers` is this node."""
    lost: tuple[str, ...]
    """Who was in the round and whose weights did not come, with why."""


class NoRound(msgspec.Struct, frozen=True, array_like=True, tag=True):
    number: int
    why: str


Reply = Beat | Ready | Gathered | NoRound


def frame(message: msgspec.Struct) -> bytes:
    """The bytes of one message."""
    body = msgspec.msgpack.encode(message)
    return LENGTH.pack(len(body)) + body


def file_of(directory: Path, index: int) -> Path:
    """Where the weights of the round's `index`th node are put."""
    return directory / f"peer-{index}.bin"
