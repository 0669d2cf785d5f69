"""Heads, records and the way between versions: what is believed of them, and of bytes that are none."""

import hashlib
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from protocol.envelope import Domain, seal
from protocol.identity import Identity
from protocol.policy import (
    MAX_HEAD_BYTES,
    MAX_ITEMS,
    MAX_PIECES,
    MOST_PIECE_BYTES,
    PIECE_BYTES,
    PolicyHead,
    PolicyItem,
    PolicyRecord,
    check_head,
    check_record,
    claim_of,
    claimed_version,
    claiming,
    kept_items,
    piece_bytes_for,
    way_to,
)
from protocol.rejection import Reason, Rejected

LEADER, OTHER = (Identity.from_seed(bytes([i]) * 32) for i in (1, 2))
SWARM, NOW = b"s" * 32, 1_800_000_000.0


def item(version: int, base: int | None = None, size: int = 100, name: bytes = b"") -> PolicyItem:
    digest = hashlib.sha256(name or f"{version}/{base}".encode()).digest()
    return PolicyItem(version, base, digest, 1, size)


def sealed(items: Any, by: Identity = LEADER, domain: Domain = Domain.policy, **changes: Any) -> bytes:
    head = msgspec.structs.replace(PolicyHead(SWARM, "mark-7", tuple(items)), **changes)
    return seal(by, domain, msgspec.msgpack.encode(head), issued=NOW, expires=NOW + 60)


def refused(raw: bytes, now: float = NOW) -> Reason:
    with pytest.raises(Rejected) as found:
        check_head(raw, leader=LEADER.peer_id, swarm=SWARM, now=now)
    return found.value.reason


def test_a_head_with_as_many_versions_as_may_be_is_small_enough() -> None:
    items = [item(0, None, 2**40), *(item(2**33 + i, 2**33 + i - 1, 2**40) for i in range(1, MAX_ITEMS))]
    raw = sealed(items)
    assert len(raw) <= MAX_HEAD_BYTES
    known = check_head(raw, leader=LEADER.peer_id, swarm=SWARM, now=NOW)
    assert (known.head.items, known.head.version) == (tuple(items), 2**33 + MAX_ITEMS - 1)
    assert (known.issued, known.expires) == (NOW, NOW + 60)


def test_heads_that_are_not_believed() -> None:
    good = [item(1), item(2, 1)]
    assert refused(sealed(good, by=OTHER)) is Reason.wrong_producer
    assert refused(sealed(good, swarm=b"t" * 32)) is Reason.wrong_swarm
    assert refused(sealed(good), now=NOW + 61) is Reason.stale
    assert refused(sealed(good), now=NOW - 31) is Reason.from_future
    assert refused(sealed(good, domain=Domain.announcement)) is Reason.malformed
    assert refused(sealed(good)[:-1]) is Reason.malformed
    assert refused(bytes(MAX_HEAD_BYTES + 1)) is Reason.too_large
    assert refused(sealed(good, model="a\u202eb")) is Reason.malformed
    assert refused(sealed(good, model="")) is Reason.malformed
    assert refused(sealed([])) is Reason.malformed
    assert refused(sealed([item(2, 1), item(1)])) is Reason.malformed
    assert refused(sealed([item(2, 2)])) is Reason.malformed
    assert refused(sealed([item(2, size=0)])) is Reason.malformed
    many = [item(0, name=b"same") for _ in range(MAX_ITEMS + 1)]  # the same one compresses well
    assert refused(sealed(many)) is Reason.malformed


@given(
    st.binary(max_size=300)
    | st.lists(st.integers() | st.text() | st.binary(max_size=40) | st.none()).map(lambda v: repr(v).encode())
)
@example(b"\x93\xc4\x20")
def test_whatever_the_payload_the_answer_is_rejected(payload: bytes) -> None:
    raw = seal(LEADER, Domain.policy, payload, issued=NOW, expires=NOW + 60)
    assert refused(raw) is Reason.malformed
    named = PolicyItem(1, None, hashlib.sha256(payload).digest(), 1, 1)
    with pytest.raises(Rejected):
        check_record(payload, named)


def record(**changes: Any) -> tuple[bytes, PolicyItem]:
    made = PolicyRecord(5, 4, b"b" * 32, "bfloat16", b"n" * 32, PIECE_BYTES + 1, PIECE_BYTES, (b"1" * 32, b"2" * 32))
    made = msgspec.structs.replace(made, **changes)
    raw = msgspec.msgpack.encode(made)
    return raw, PolicyItem(5, 4, hashlib.sha256(raw).digest(), len(raw), PIECE_BYTES + 1)


def test_a_record_and_the_sizes_of_its_pieces() -> None:
    found = check_record(*record())
    assert [found.piece_size(i) for i in range(2)] == [PIECE_BYTES, 1]


@pytest.mark.parametrize(
    "changes",
    [
        {"version": 6},
        {"base": 3},
        {"base": None},
        {"base": None, "base_state": b""},
        {"base_state": b""},
        {"base_state": b"short"},
        {"dtype": "float64"},
        {"state": b""},
        {"size": 1},
        {"size": 2**63 - 1},
        {"piece_bytes": 1},
        {"piece_bytes": MOST_PIECE_BYTES * 2},
        {"pieces": ()},
        {"pieces": (b"1" * 32,)},
        {"pieces": (b"1" * 32,) * 3},
        {"pieces": (b"1" * 32, b"2")},
        {"pieces": (b"1" * 32,) * (MAX_PIECES + 1)},
    ],
)
def test_records_that_are_not_believed(changes: dict[str, Any]) -> None:
    with pytest.raises(Rejected) as found:
        check_record(*record(**changes))
    assert found.value.reason is Reason.malformed


def test_a_record_of_another_hash_or_encoding() -> None:
    raw, named = record()
    with pytest.raises(Rejected) as found:
        check_record(raw + b"x", named)
    assert found.value.reason is Reason.hash_mismatch
    longer = raw[:1] + b"\xcc" + raw[1:]  # version 5 as an 8-bit integer
    with pytest.raises(Rejected, match="canonical"):
        check_record(longer, msgspec.structs.replace(named, record=hashlib.sha256(longer).digest()))


def test_the_way_is_the_one_of_fewest_bytes() -> None:
    items = [item(4, 3, 10), item(5, 4, 10), item(5, None, 100), item(6, 5, 10), item(7, 6, 200), item(7, 5, 15)]
    items.sort(key=lambda one: one.version)

    def way(have: int | None) -> list[tuple[int, int | None]] | None:
        found = way_to(items, have)
        return None if found is None else [(one.version, one.base) for one in found]

    assert way(3) == [(4, 3), (5, 4), (7, 5)]
    assert way(6) == [(5, None), (7, 5)]  # 117 bytes, and not 201
    assert way(None) == [(5, None), (7, 5)]
    assert way(7) == []
    assert way(99) == way(None)
    assert way_to([item(4, 3)], 2) is None
    assert way_to([item(4, 3)], None) is None


def test_what_a_leader_keeps() -> None:
    items = [item(0, None, 1000), *(item(i, i - 1, 10) for i in range(1, 40))]
    kept = kept_items(items, 5)
    assert len(kept) == MAX_ITEMS
    assert [one.version for one in kept] == [0, *range(17, 40)]
    # a new whole replaces the old one, and stands after the changes of its version
    kept = kept_items([*items, item(40, 39, 10), item(40, None, 1000)], 5)
    assert [(one.version, one.base is None) for one in kept][-2:] == [(40, False), (40, True)]
    assert sum(one.base is None for one in kept) == 1
    # large changes go once nobody needs them who is not late
    large = [item(0, None, 100), *(item(i, i - 1, 90) for i in range(1, 20))]
    assert [one.version for one in kept_items(large, 2)] == [0, 16, 17, 18, 19]
    assert [one.version for one in kept_items(large, 10)] == [0, *range(10, 20)]
    # as many where only every tenth update is published
    rare = [item(0, None, 100), *(item(10 * i, 10 * (i - 1), 90) for i in range(1, 20))]
    assert [one.version for one in kept_items(rare, 6)] == [0, *range(140, 200, 10)]


def test_pieces_grow_with_what_is_cut() -> None:
    assert piece_bytes_for(1) == PIECE_BYTES
    assert piece_bytes_for(MAX_PIECES * PIECE_BYTES + 1) == 2 * PIECE_BYTES
    assert piece_bytes_for(MAX_PIECES * MOST_PIECE_BYTES) == MOST_PIECE_BYTES
    with pytest.raises(ValueError, match="do not fit"):
        piece_bytes_for(MAX_PIECES * MOST_PIECE_BYTES + 1)


def test_claims() -> None:
    state = bytes(range(32))
    said = claiming("SmolLM2-135M-Instruct", LEADER.peer_id, state)
    assert said == f"SmolLM2-135M-Instruct@{LEADER.peer_id[-8:]}.0001020304050607"
    assert len(claiming("x" * 80, LEADER.peer_id, state)) == 64
    found = claim_of(said)
    assert found is not None
    assert (found.leader, found.state) == (LEADER.peer_id[-8:], "0001020304050607")
    versions = {"0001020304050607": 7}
    assert claimed_version(said, LEADER.peer_id, versions) == 7
    assert claimed_version(said, LEADER.peer_id, {}) == -1
    assert claimed_version(said, OTHER.peer_id, versions) is None
    for none in ("SmolLM2", "@", said + "\n", said[:-1], said.replace("@", "#")):
        assert claim_of(none) is None
