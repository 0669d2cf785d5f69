"""Exact changes between weights, and bytes that are none."""

import io
import struct
import zlib
from typing import Any

import numpy as np
import pytest

from node.federation import changes
from node.federation.changes import BLOCK_WORDS, BadChanges, Changes, changes_between


def packed(old: Any, new: Any) -> bytes:
    return b"".join(changes_between(old, new))


def applied(raw: bytes, words: Any) -> Any:
    found = words.copy()
    reader = Changes(io.BytesIO(raw))
    reader.apply(found)
    reader.finish()
    return found


@pytest.mark.parametrize("kind", [np.uint16, np.uint32])
@pytest.mark.parametrize("share", [0.0, 1e-5, 0.1, 1.0])
def test_changes_lead_there_and_back(kind: Any, share: float) -> None:
    chance = np.random.default_rng(0)
    old = chance.integers(0, np.iinfo(kind).max, BLOCK_WORDS + 1000, kind)
    new = old.copy()
    new[chance.random(len(new)) < share] ^= 1
    raw = packed(old, new)
    assert (applied(raw, old) == new).all()
    assert (applied(raw, new) == old).all()


def test_last_bits_of_a_tenth_of_the_words_take_less_than_a_bit_a_word() -> None:
    chance = np.random.default_rng(0)
    old = chance.integers(0, 2**16, 200_000, np.uint16)
    new = old.copy()
    new[chance.random(len(new)) < 0.1] ^= 1
    assert len(packed(old, new)) * 8 < 0.65 * len(old)
    assert packed(old, old) == bytes(12)


def test_bits_without_any_order_are_within_the_bound() -> None:
    chance = np.random.default_rng(0)
    old, new = (chance.integers(0, 2**16, BLOCK_WORDS, np.uint16) for _ in range(2))
    assert (applied(packed(old, new), old) == new).all()


def test_gaps_of_any_length() -> None:
    where = np.array([0, 1, 255, 256, 511, 766, 1022, 100_000])
    raw = np.frombuffer(changes._gaps(where), np.uint8)
    assert changes._where(raw, len(where), 100_001).tolist() == where.tolist()
    with pytest.raises(BadChanges, match="at word 100000 of 100000"):
        changes._where(raw, len(where), 100_000)


def block(count: int, gaps: bytes, planes: bytes) -> bytes:
    gaps, planes = changes._deflated(gaps), changes._deflated(planes)
    return struct.pack("<III", count, len(gaps), len(planes)) + gaps + planes


@pytest.mark.parametrize(
    ("raw", "problem"),
    [
        (b"", "ends 12 bytes early"),
        (struct.pack("<III", 0, 1, 0) + b"x", "without changes"),
        (struct.pack("<III", 17, 9, 9), "17 changes"),
        (struct.pack("<III", 1, 2**32 - 1, 9), "4294967295"),
        (struct.pack("<III", 1, 9, 2**32 - 1), "4294967295"),
        (struct.pack("<III", 1, 3, 3) + b"garbag", "deflate"),
        (block(2, b"\0", b"\1\0"), "1 positions for 2"),
        (block(1, b"\0\xff", b"\1\0"), "deflate stream of at most|positions"),
        (block(1, b"\x10", b"\1\0"), "at word 16 of 16"),
        (block(1, b"\0", b"\1"), "1 bytes for 1 words"),
        (block(1, b"\0", bytes(1000)), "at most 2 bytes"),
        (block(1, b"\0", b"\1\0")[:-1], "ends 1 bytes early"),
        (block(1, b"\0", b"\1\0") + b"x", "after the last"),
    ],
)
def test_hostile_bytes(raw: bytes, problem: str) -> None:
    with pytest.raises(BadChanges, match=problem):
        applied(raw, np.zeros(16, np.uint16))


def test_a_bomb_is_not_inflated() -> None:
    bomb = zlib.compress(bytes(50_000_000), 9)[2:-4]
    raw = struct.pack("<III", 16, 20, len(bomb)) + bytes(20) + bomb
    with pytest.raises(BadChanges):
        applied(raw, np.zeros(16, np.uint16))
