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


def resigned(packed: bytes) -> bytes:
    """A validly signed envelope around bytes that `seal` would never have compressed like this."""
    issued, expires = round(NOW * 1000), round((NOW + 60) * 1000)
    head = b"shoal/1/group\n" + ME.peer_id.encode() + b"\n"
    signed = head + issued.to_bytes(8, "big") + expires.to_bytes(8, "big") + packed
    return msgspec.msgpack.encode([1, "group", ME.peer_id, issued, expires, packed, ME.sign(signed)])


def test_what_was_sealed_comes_back() -> None:
    raw = sealed(b"payload" * 50)
    opened = unseal(raw, Domain.group, max_bytes=4096, now=NOW)
    assert (opened.producer, opened.payload) == (ME.peer_id, b"payload" * 50)
    assert (opened.issued, opened.expires) == (NOW, NOW + 60)
    assert opened.digest == digest_of(raw)
    assert len(digest_of(raw)) == 32
    assert raw == sealed(b"payload" * 50)


def test_the_size_is_capped_before_anything_is_parsed() -> None:
    assert reason_of(b"\xff" * 101, max_bytes=100) is Reason.too_large


@pytest.mark.parametrize(
    "raw", [b"", b"\x97", b"\xff" * 50, b"\x80\x01", b"\x97\x01", b"\x97\xcc\x01", b"\xdc\x00\x07\x01"]
)
def test_garbage_is_malformed(raw: bytes) -> None:
    assert reason_of(raw) is Reason.malformed


@pytest.mark.parametrize("version", [0, 2, 127])
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
    assert raw[2] == 0xA5  # fixstr 'group', which str8 can say too
    longer = raw[:2] + b"\xd9\x05" + raw[3:]
    assert msgspec.msgpack.decode(longer) == msgspec.msgpack.decode(raw)
    assert reason_of(longer) is Reason.malformed


def test_every_changed_field_breaks_the_signature() -> None:
    other = Identity.from_seed(bytes(32)).peer_id
    for position, value in [(2, other), (2, "nobody"), (3, 5), (4, 2**62), (5, zlib.compress(b"x")), (6, bytes(64))]:
        assert reason_of(forged(position, value)) is Reason.bad_signature


def test_a_message_of_one_domain_is_none_of_another() -> None:
    assert reason_of(sealed(), domain=Domain.announcement) is Reason.malformed
    assert reason_of(forged(1, "announcement"), domain=Domain.announcement) is Reason.bad_signature


def test_time_window() -> None:
    raw = sealed()
    unseal(raw, Domain.group, max_bytes=4096, now=NOW - MAX_CLOCK_SKEW)
    assert reason_of(raw, now=NOW - MAX_CLOCK_SKEW - 0.001) is Reason.from_future
    unseal(raw, Domain.group, max_bytes=4096, now=NOW + 59.999)
    assert reason_of(raw, now=NOW + 60) is Reason.stale
    assert reason_of(sealed(expires=NOW)) is Reason.malformed


def test_a_bomb_stops_at_the_cap() -> None:
    raw = sealed(bytes(10_000_000))
    assert len(raw) < 20_000
    assert reason_of(raw, max_bytes=20_000) is Reason.too_large
    assert unseal(sealed(bytes(4096)), Domain.group, max_bytes=4096, now=NOW).payload == bytes(4096)
    assert reason_of(sealed(bytes(4097))) is Reason.too_large


def test_the_payload_is_one_whole_zlib_stream() -> None:
    packed = zlib.compress(b"payload")
    assert unseal(resigned(packed), Domain.group, max_bytes=4096, now=NOW).payload == b"payload"
    for broken in (packed[:-1], packed + b"x", packed + packed, b"", b"not zlib"):
        assert reason_of(resigned(broken)) is Reason.malformed
