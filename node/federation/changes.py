"""What changed between two versions of the weights: which words, and their bits, exactly.

A step changes few of the weights' bits as they are computed with: in bfloat16 some 10% of the words, and mostly the
last bit. Old and new are read as integers; what is sent is where old XOR new is not 0, and what it is there. XOR is its
own inverse, so the same changes lead back as well.

Per block of BLOCK_WORDS of a tensor (docs/protocol.md, section 12):

    u32 count, u32 length of the gaps, u32 length of the bits, gaps, bits           all little-endian

Gaps and bits are each one DEFLATE stream. Gaps: for each changed word how many are unchanged since the one before, a
byte 255 for each 255 of them and a byte for the rest. Bits: the lowest bytes of all XORs, then the next ones.
"""

import struct
import zlib
from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

BLOCK_WORDS = 1 << 20
_HEAD = struct.Struct("<III")
_ESCAPE = 255
_RAW_DEFLATE = -zlib.MAX_WBITS

Words = NDArray[np.unsignedinteger[Any]]


class BadChanges(Exception):
    """Bytes that are no changes of these weights."""


class Readable(Protocol):
    def read(self, size: int) -> bytes: ...


def changes_between(old: Words, new: Words) -> Iterator[bytes]:
    """The blocks of one tensor; `old` and `new` are flat, of one length and type."""
    for start in range(0, len(old), BLOCK_WORDS):
        bits = old[start : start + BLOCK_WORDS] ^ new[start : start + BLOCK_WORDS]
        where = np.flatnonzero(bits)
        if not len(where):
            yield _HEAD.pack(0, 0, 0)
            continue
        gaps, planes = _deflated(_gaps(where)), _deflated(_planes(bits[where]))
        yield _HEAD.pack(len(where), len(gaps), len(planes)) + gaps + planes


class Changes:
    """Changes as they are read, tensor after tensor."""

    def __init__(self, stream: Readable) -> None:
        self._stream = stream

    def apply(self, words: Words) -> None:
        """Change one tensor, in place. Raises BadChanges, and then some of it is changed."""
        for start in range(0, len(words), BLOCK_WORDS):
            block = words[start : start + BLOCK_WORDS]
            count, gap_bytes, plane_bytes = _HEAD.unpack(self._exactly(_HEAD.size))
            if not count:
                if gap_bytes or plane_bytes:
                    raise BadChanges("bytes for a block without changes")
                continue
            width = words.itemsize
            most = count + len(block) // _ESCAPE
            # what is longer than deflate makes of the longest that can be is not read
            if count > len(block) or gap_bytes > _most_deflated(most) or plane_bytes > _most_deflated(count * width):
                raise BadChanges(f"{count} changes in {gap_bytes} and {plane_bytes} bytes for {len(block)} words")
            where = _where(_inflated(self._exactly(gap_bytes), most), count, len(block))
            planes = _inflated(self._exactly(plane_bytes), count * width)
            if len(planes) != count * width:
                raise BadChanges(f"{len(planes)} bytes for {count} words of {width}")
            bits = np.ascontiguousarray(planes.reshape(width, count).T).view(words.dtype)
            block[where] ^= bits[:, 0]

    def finish(self) -> None:
        """Raises BadChanges when there is more."""
        if self._stream.read(1):
            raise BadChanges("bytes after the last tensor")

    def _exactly(self, size: int) -> bytes:
        found = self._stream.read(size)
        if len(found) != size:
            raise BadChanges(f"ends {size - len(found)} bytes early")
        return found


def _gaps(where: NDArray[np.intp]) -> bytes:
    """Increasing positions as bytes: see above."""
    escapes, rest = np.divmod(np.diff(where, prepend=-1) - 1, _ESCAPE)
    ends = np.cumsum(escapes + 1) - 1
    found = np.full(int(ends[-1]) + 1, _ESCAPE, np.uint8)
    found[ends] = rest
    return found.tobytes()


def _where(gaps: NDArray[np.uint8], count: int, size: int) -> NDArray[np.intp]:
    """Inverse of `_gaps`. Raises BadChanges when they are not `count` positions below `size`."""
    ends = np.flatnonzero(gaps != _ESCAPE)
    if len(ends) != count or ends[-1] != len(gaps) - 1:
        raise BadChanges(f"{len(ends)} positions for {count} changes")
    escapes = np.diff(ends, prepend=-1) - 1
    where: NDArray[np.intp] = np.cumsum(escapes * _ESCAPE + gaps[ends].astype(np.intp) + 1) - 1
    if where[-1] >= size:
        raise BadChanges(f"a change at word {where[-1]} of {size}")
    return where


def _planes(bits: Words) -> bytes:
    return bits.view(np.uint8).reshape(len(bits), bits.itemsize).T.tobytes()


def _deflated(raw: bytes) -> bytes:
    # run lengths and Huffman only: what gaps and last bits are made of, at 50 MB/s
    deflater = zlib.compressobj(6, zlib.DEFLATED, _RAW_DEFLATE, 9, zlib.Z_RLE)
    return deflater.compress(raw) + deflater.flush()


def _most_deflated(size: int) -> int:
    # what zlib makes of bytes without any order is longer by a part in 820; other deflaters may need more
    return size + (size >> 5) + 64


def _inflated(packed: bytes, most: int) -> NDArray[np.uint8]:
    inflater = zlib.decompressobj(_RAW_DEFLATE)
    try:
        found = inflater.decompress(packed, most + 1)
    except zlib.error as error:
        raise BadChanges(f"no deflate stream: {error}") from error
    if len(found) > most or not inflater.eof or inflater.unused_data:
        raise BadChanges(f"not one deflate stream of at most {most} bytes")
    return np.frombuffer(found, np.uint8)
