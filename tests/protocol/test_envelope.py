import zlib
from typing import Any

import msgspec
import pytest

from protocol.envelope import MAX_CLOCK_SKEW, Domain, digest_of, seal, unseal
from protocol.identity import Identity
from protocol.rejection import Reason, Rejected

ME = Identity.from_seed(bytes(range(32)))
NOW = 1_800_000_000.25


def sealed(payload: bytes = b"hello", *, issued: float = NOW, expires: float = NOW + 60) -> bytes:
    return seal(ME, Domain.group, payload, issued=issued, expires=expires)


def reason_of(raw: bytes, *, domain: Domain = Domain.group, max_bytes: int = 4096, now: float = NOW) -> Reason:
    with pytest.raises(Rejected) as caught:
        unseal(raw, domain, max_bytes=max_bytes, now=now)
    assert caught.value.detail
    return caught.value.reason


def forged(position: int, value: Any) -> bytes:
    """A sealed message with one field replaced and the old signature kept."""
    fields = msgspec.msgpack.decode(sealed())
    fields[position] = value
    return msgspec.msgpack.encode(fields)


def resigned(packed: bytes, lifetime: int = 60) -> bytes:
    """A validly signed envelope around what `seal` would never have made."""
    issued = int(NOW)
    head = b"shoal/2/group\n" + ME.public_key
    signed = head + issued.to_bytes(8, "big") + lifetime.to_bytes(4, "big") + packed
    return msgspec.msgpack.encode([2, 1, ME.public_key, issued, lifetime, packed, ME.sign(signed)])


def deflated(payload: bytes) -> bytes:
    deflater = zlib.compressobj(wbits=-15)
    return deflater.compress(payload) + deflater.flush()


def test_what_was_sealed_comes_back() -> None:
    raw = sealed(b"payload" * 50)
    opened = unseal(raw, Domain.group, max_bytes=4096, now=NOW)
    assert (opened.producer, opened.payload) == (ME.peer_id, b"payload" * 50)
    assert (opened.issued, opened.expires) == (1_800_000_000, 1_800_000_060), "to the second"
    assert opened.digest == digest_of(raw)
    assert len(digest_of(raw)) == 32
    assert raw == sealed(b"payload" * 50)


def test_the_size_is_capped_before_anything_is_parsed() -> None:
    assert reason_of(b"\xff" * 101, max_bytes=100) is Reason.too_large


@pytest.mark.parametrize(
    "raw", [b"", b"\x97", b"\xff" * 50, b"\x80\x02", b"\x97\x02", b"\x97\xcc\x02", b"\xdc\x00\x07\x02"]
)
def test_garbage_is_malformed(raw: bytes) -> None:
    assert reason_of(raw) is Reason.malformed


@pytest.mark.parametrize("version", [0, 1, 3, 127])
def test_another_version_is_told_apart(version: int) -> None:
    assert reason_of(forged(0, version)) is Reason.unsupported_version
    assert reason_of(msgspec.msgpack.encode([version, "a layout", {"yet": "unknown"}])) is Reason.unsupported_version


def test_trailing_bytes_extra_fields_and_truncation_are_malformed() -> None:
    raw = sealed()
    assert reason_of(raw + b"\x00") is Reason.malformed
    assert reason_of(msgspec.msgpack.encode([*msgspec.msgpack.decode(raw), 1])) is Reason.malformed
    for length in range(len(raw)):
        assert reason_of(raw[:length]) is Reason.malformed


def test_a_second_encoding_of_the_same_message_is_no_second_message() -> None:
    raw = sealed()
    assert raw[2] == 0x01  # a positive fixint, which uint8 can say too
    longer = raw[:2] + b"\xcc\x01" + raw[3:]
    assert msgspec.msgpack.decode(longer) == msgspec.msgpack.decode(raw)
    assert reason_of(longer) is Reason.malformed


def test_every_changed_field_breaks_the_signature() -> None:
    other = Identity.from_seed(bytes(32)).public_key
    for position, value in [(2, other), (3, 5), (4, 2**31 - 1), (5, deflated(b"x")), (6, bytes(64))]:
        assert reason_of(forged(position, value)) is Reason.bad_signature
    for position, value in [(1, 3), (1, "group"), (2, ME.peer_id), (2, bytes(31)), (3, -1), (4, 0), (4, 2**31)]:
        assert reason_of(forged(position, value)) is Reason.malformed


def test_a_message_of_one_domain_is_none_of_another() -> None:
    assert reason_of(sealed(), domain=Domain.announcement) is Reason.malformed
    assert reason_of(forged(1, 2), domain=Domain.announcement) is Reason.bad_signature


def test_time_window() -> None:
    raw = sealed()
    issued = int(NOW)
    assert unseal(raw, Domain.group, max_bytes=4096, now=issued - MAX_CLOCK_SKEW).payload == b"hello"
    assert reason_of(raw, now=issued - MAX_CLOCK_SKEW - 0.001) is Reason.from_future
    assert unseal(raw, Domain.group, max_bytes=4096, now=issued + 59.999).payload == b"hello"
    assert reason_of(raw, now=issued + 60) is Reason.stale


def test_what_expires_as_it_is_issued_is_neither_sealed_nor_read() -> None:
    with pytest.raises(ValueError, match="expires 0 s after it was issued ; a sealed message lives 1 s at least"):
        sealed(expires=NOW)
    assert reason_of(resigned(deflated(b"x"), lifetime=0)) is Reason.malformed


def test_a_bomb_stops_at_the_cap() -> None:
    raw = sealed(bytes(10_000_000))
    assert len(raw) < 20_000
    assert reason_of(raw, max_bytes=20_000) is Reason.too_large
    assert unseal(sealed(bytes(4096)), Domain.group, max_bytes=4096, now=NOW).payload == bytes(4096)
    assert reason_of(sealed(bytes(4097))) is Reason.too_large


def test_the_payload_is_one_whole_deflate_stream() -> None:
    packed = deflated(b"payload")
    assert unseal(resigned(packed), Domain.group, max_bytes=4096, now=NOW).payload == b"payload"
    for broken in (packed[:-1], packed + b"x", packed + packed, b"", b"not deflated", zlib.compress(b"payload")):
        assert reason_of(resigned(broken)) is Reason.malformed
