"""The write-ahead journal of updates: what an update consumes is on disk before the update happens.

A file holds records, each [length, crc32] (little-endian uint32) and msgpack bytes: [format, record]. Only its tail can
be torn by a kill; a torn tail is cut off, since its update has not begun.
"""

import contextlib
import os
import struct
import zlib
from pathlib import Path
from typing import Any, Literal

import msgspec

from node.interfaces import Batch

HEADER = struct.Struct("<II")
MAX_RECORD_BYTES = 1 << 30
FORMAT = 2
"""2: sequences have rewards, and the update makes advantages of them. 1 had advantages, and no format number."""


class OtherFormat(Exception):
    """A journal of another version of Shoal: whole, and not to be repeated by this one."""


class RecordTooLarge(Exception):
    """A step's record is longer than a reader believes: it would take it, and all after it, for damage."""


class JournalRecord(msgspec.Struct, frozen=True, array_like=True):
    """One update and where the node stands after it."""

    step: int
    batch: Batch
    state: dict[str, Any]
    """Data position and sampler after the step's choices, as JSON values."""
    summary: dict[str, Any]
    """What the history keeps of the step besides the update's own numbers."""
    train: dict[str, Any] | None = None
    """The train.* settings of the update; None in a journal of Shoal 0.1 before it kept them."""


_decoder = msgspec.msgpack.Decoder(tuple[Literal[2], JournalRecord])


def append(path: Path, record: JournalRecord) -> int:
    """Add a record and fsync; returns its size. Raises OSError, and RecordTooLarge before anything is written.

    A failed write is taken back. Where that fails too, the caller must `cut` the file to its length of before.
    """
    content = msgspec.msgpack.encode((FORMAT, record))
    if len(content) > MAX_RECORD_BYTES:
        raise RecordTooLarge(
            f"the record of step {record.step} has {len(content) >> 20} MB, at most {MAX_RECORD_BYTES >> 20} ; lower "
            "swarm.own_groups or rollout.over_provision, or set train.routing_replay to off"
        )
    framed = HEADER.pack(len(content), zlib.crc32(content)) + content
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        before = os.fstat(descriptor).st_size
        try:
            written = 0
            while written < len(framed):
                written += os.write(descriptor, framed[written:])
            os.fsync(descriptor)
        except OSError:
            with contextlib.suppress(OSError):  # what is said is why the write failed
                os.ftruncate(descriptor, before)
            raise
    finally:
        os.close(descriptor)
    return len(framed)


def read(path: Path) -> tuple[list[JournalRecord], int]:
    """Good records of a journal and the length they take; what follows is torn or damaged.

    Raises OSError, and OtherFormat when a record is as it was written but is not of this version.
    """
    content = path.read_bytes()
    records: list[JournalRecord] = []
    at = 0
    while at + HEADER.size <= len(content):
        length, checksum = HEADER.unpack_from(content, at)
        body = content[at + HEADER.size : at + HEADER.size + length]
        if not 0 < length <= MAX_RECORD_BYTES or len(body) < length or zlib.crc32(body) != checksum:
            break
        try:
            records.append(_decoder.decode(body)[1])
        except msgspec.DecodeError as error:
            raise OtherFormat(f"{path}: its records are not of format {FORMAT} ({error})") from error
        at += HEADER.size + length
    return records, at


def cut(path: Path, length: int) -> None:
    """Cut off a torn tail, so that records appended next are readable. Raises OSError."""
    with path.open("r+b") as file:
        file.truncate(length)
        file.flush()
        os.fsync(file.fileno())
