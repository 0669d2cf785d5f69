"""The frame of a stream request, the same in both directions.

Over a stream, once the protocol name is negotiated by multistream-select:

    requester -> server   u32 big-endian length, then that many bytes
    server -> requester   u32 big-endian length, then that many bytes

The requester may then send its next request on the same stream, or close it; the server closes a stream on which
no request comes for 10 seconds. Each side refuses a length over its own cap before it reads a byte of the body.

A server that gave the requester its share for now answers with the length 2^32-1 and a u32 of milliseconds after
which to ask again. One that refuses otherwise, or whose handler fails, resets the stream: there is no other error
message on the wire.
"""

import math
import struct
from collections.abc import Callable, Iterator
from typing import Protocol

CHUNK_BYTES = 64 * 1024
"""Most bytes read or written in one go; progress (and a caller's sink) advances in these steps."""

MAX_WAIT_SECONDS = 60.0
"""A server that asks to wait longer is taken to mean this."""

_LENGTH = struct.Struct(">I")
_WAIT = 2**32 - 1


class FrameError(Exception):
    """The other side closed in the middle of a frame."""


class FrameClosed(FrameError):
    """The other side closed where a frame could have begun."""


class FrameTooLarge(FrameError):
    """The other side announced a frame over the cap."""


class FrameRefused(FrameError):
    """The server asks to wait `seconds`; the stream is good for another request."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"asks to wait {seconds:.1f} s")
        self.seconds = seconds


class Readable(Protocol):
    async def read(self, n: int) -> bytes: ...


class Writable(Protocol):
    async def write(self, data: bytes) -> None: ...


class Pace(Protocol):
    """How fast bytes may be read: `swarm.throttle.Lane`."""

    @property
    def piece(self) -> int: ...

    async def passed(self, size: int) -> None: ...


async def write_frame(stream: Writable, payload: bytes) -> None:
    """Write one frame. The caller holds the deadline."""
    for piece in frame_pieces(payload, CHUNK_BYTES):
        await stream.write(piece)


def frame_pieces(payload: bytes, size: int) -> Iterator[bytes]:
    """One frame in pieces of at most `size` bytes of the payload."""
    # The header rides with the first bytes: one packet for a small request, not two.
    yield _LENGTH.pack(len(payload)) + payload[:size]
    for offset in range(size, len(payload), size):
        yield payload[offset : offset + size]


async def write_wait(stream: Writable, seconds: float) -> None:
    """Instead of an answer: ask again after `seconds`. The caller holds the deadline."""
    milliseconds = math.ceil(1000 * min(seconds, MAX_WAIT_SECONDS))
    await stream.write(_LENGTH.pack(_WAIT) + _LENGTH.pack(milliseconds))


async def read_frame(stream: Readable, max_bytes: int, arrived: Callable[[bytes], None]) -> None:
    """Read one frame, handing each piece to `arrived`. The caller holds the deadline. Raises FrameError."""
    await _read_body(stream, await _read_number(stream), max_bytes, arrived)


async def read_answer(
    stream: Readable, max_bytes: int, arrived: Callable[[bytes], None], pace: Pace | None = None
) -> None:
    """`read_frame` for the requester, at its pace; it may be asked to wait instead: FrameRefused."""
    length = await _read_number(stream)
    if length == _WAIT:
        raise FrameRefused(min(MAX_WAIT_SECONDS, await _read_number(stream) / 1000))
    await _read_body(stream, length, max_bytes, arrived, pace)


async def _read_number(stream: Readable) -> int:
    header = b""
    while len(header) < _LENGTH.size:
        piece = await stream.read(_LENGTH.size - len(header))
        if not piece:
            raise FrameError("stream closed in the length of a frame") if header else FrameClosed("stream closed")
        header += piece
    (number,) = _LENGTH.unpack(header)
    return int(number)


async def _read_body(
    stream: Readable, length: int, max_bytes: int, arrived: Callable[[bytes], None], pace: Pace | None = None
) -> None:
    if length > max_bytes:
        raise FrameTooLarge(f"frame of {length} bytes is over the cap of {max_bytes}")
    remaining = length
    while remaining:
        piece = await stream.read(min(remaining, pace.piece if pace else CHUNK_BYTES))
        if not piece:
            raise FrameError(f"stream closed after {length - remaining} of {length} bytes")
        remaining -= len(piece)
        arrived(piece)
        if pace:
            await pace.passed(len(piece))
