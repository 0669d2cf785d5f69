"""The frame of a stream request, the same in both directions.

Over a stream, once the protocol name is negotiated by multistream-select:

    requester -> server   u32 big-endian length, then that many bytes
    server -> requester   u32 big-endian length, then that many bytes

The requester may then send its next request on the same stream, or close it; the server closes a stream on which
no request comes for 10 seconds. Each side refuses a length over its own cap before it reads a byte of the body. A
server that refuses, whose handler fails or that is too busy resets the stream: there is no error message on the
wire.
"""

import struct
from collections.abc import Callable
from typing import Protocol

CHUNK_BYTES = 64 * 1024
"""Most bytes read or written in one go; progress (and a caller's sink) advances in these steps."""

_LENGTH = struct.Struct(">I")


class FrameError(Exception):
    """The other side closed in the middle of a frame."""


class FrameClosed(FrameError):
    """The other side closed where a frame could have begun."""


class FrameTooLarge(FrameError):
    """The other side announced a frame over the cap."""


class Readable(Protocol):
    async def read(self, n: int) -> bytes: ...


class Writable(Protocol):
    async def write(self, data: bytes) -> None: ...


async def write_frame(stream: Writable, payload: bytes) -> None:
    """Write one frame. The caller holds the deadline."""
    # The header rides with the first bytes: one packet for a small request, not two.
    await stream.write(_LENGTH.pack(len(payload)) + payload[:CHUNK_BYTES])
    for offset in range(CHUNK_BYTES, len(payload), CHUNK_BYTES):
        await stream.write(payload[offset : offset + CHUNK_BYTES])


async def read_frame(stream: Readable, max_bytes: int, arrived: Callable[[bytes], None]) -> None:
    """Read one frame, handing each piece to `arrived`. The caller holds the deadline. Raises FrameError."""
    header = b""
    while len(header) < _LENGTH.size:
        piece = await stream.read(_LENGTH.size - len(header))
        if not piece:
            raise FrameError("stream closed in the length of a frame") if header else FrameClosed("stream closed")
        header += piece
    (length,) = _LENGTH.unpack(header)
    if length > max_bytes:
        raise FrameTooLarge(f"frame of {length} bytes is over the cap of {max_bytes}")
    remaining = length
    while remaining:
        piece = await stream.read(min(remaining, CHUNK_BYTES))
        if not piece:
            raise FrameError(f"stream closed after {length - remaining} of {length} bytes")
        remaining -= len(piece)
        arrived(piece)
