"""The signed envelope around everything that travels: who says it, as what, from when until when.

A sealed message is one msgpack array in canonical form, so its bytes, and with them its SHA-256 name, cannot be
changed by anybody but the signer:

    [version=1, domain, producer, issued_ms, expires_ms, zlib(payload), signature]

The Ed25519 signature covers the domain, so that bytes signed as one kind of message never pass as another.
"""

import hashlib
import struct
import zlib
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

import msgspec

from protocol.identity import SIGNATURE_BYTES, Identity, verify
from protocol.rejection import Reason, Rejected
from protocol.rollout import UInt63

ENVELOPE_VERSION = 1
MAX_CLOCK_SKEW = 30.0
"""Seconds a sender's clock may be ahead of ours."""

_COMPRESSION_LEVEL = 6
_FIELDS = 7


class Domain(StrEnum):
    """What kind of message was signed."""

    group = "group"
    announcement = "announcement"


class _Envelope(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    version: int
    domain: Annotated[str, msgspec.Meta(max_length=32)]
    producer: Annotated[str, msgspec.Meta(max_length=64)]
    issued: UInt63
    expires: UInt63
    payload: bytes
    signature: Annotated[bytes, msgspec.Meta(min_length=SIGNATURE_BYTES, max_length=SIGNATURE_BYTES)]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Envelope)


@dataclass(frozen=True, slots=True)
class Opened:
    """A verified envelope."""

    producer: str
    payload: bytes
    issued: float
    """Unix seconds."""
    expires: float
    digest: bytes
    """SHA-256 of the sealed bytes."""


def digest_of(raw: bytes) -> bytes:
    """SHA-256 of sealed bytes: the name of a group."""
    return hashlib.sha256(raw).digest()


def _signed_bytes(domain: str, producer: str, issued: int, expires: int, payload: bytes) -> bytes:
    head = f"shoal/{ENVELOPE_VERSION}/{domain}\n{producer}\n".encode()
    return head + struct.pack(">QQ", issued, expires) + payload


def seal(identity: Identity, domain: Domain, payload: bytes, *, issued: float, expires: float) -> bytes:
    """Compress, sign and encode. Times in unix seconds, kept to the millisecond."""
    issued_ms, expires_ms = round(issued * 1000), round(expires * 1000)
    packed = zlib.compress(payload, _COMPRESSION_LEVEL)
    signature = identity.sign(_signed_bytes(domain.value, identity.peer_id, issued_ms, expires_ms, packed))
    return _encoder.encode(
        _Envelope(ENVELOPE_VERSION, domain.value, identity.peer_id, issued_ms, expires_ms, packed, signature)
    )


def unseal(raw: bytes, domain: Domain, *, max_bytes: int, now: float) -> Opened:
    """Verify sealed bytes, in the order size, form, signature, time, decompression.

    `max_bytes` bounds the sealed bytes and, apart from them, the decompressed payload. `now` in unix seconds.
    Raises Rejected: too_large, malformed, unsupported_version, bad_signature, from_future, stale.
    """
    if len(raw) > max_bytes:
        raise Rejected(Reason.too_large, f"{len(raw)} sealed bytes, at most {max_bytes}")
    envelope = _decode(raw)
    if envelope.domain != domain:
        raise Rejected(Reason.malformed, f"sealed as {envelope.domain!r}, expected {domain.value!r}")
    signed = _signed_bytes(envelope.domain, envelope.producer, envelope.issued, envelope.expires, envelope.payload)
    if not verify(envelope.producer, signed, envelope.signature):
        raise Rejected(Reason.bad_signature, f"not signed by {envelope.producer!r}")
    issued, expires = envelope.issued / 1000, envelope.expires / 1000
    if expires <= issued:
        raise Rejected(Reason.malformed, f"expires {issued - expires:.3f} s before it was issued")
    if issued > now + MAX_CLOCK_SKEW:
        raise Rejected(
            Reason.from_future, f"issued {issued - now:.1f} s ahead of the clock here, at most {MAX_CLOCK_SKEW:.0f} s"
        )
    if expires <= now:
        raise Rejected(Reason.stale, f"expired {now - expires:.1f} s ago")
    return Opened(envelope.producer, _inflate(envelope.payload, max_bytes), issued, expires, digest_of(raw))


def _decode(raw: bytes) -> _Envelope:
    # The first two bytes are fixed for every version: a fixarray, then the version as a positive fixint.
    if len(raw) < 2 or raw[0] & 0xF0 != 0x90 or raw[1] > 0x7F:
        raise Rejected(Reason.malformed, "not a sealed message")
    if raw[1] != ENVELOPE_VERSION:
        raise Rejected(
            Reason.unsupported_version, f"envelope version {raw[1]}, this node speaks {ENVELOPE_VERSION}: upgrade"
        )
    try:
        envelope = _decoder.decode(raw)
    except (msgspec.DecodeError, RecursionError) as error:
        raise Rejected(Reason.malformed, f"envelope: {error}") from error
    # Another encoding of the same array would carry a valid signature under a new digest: a free replay.
    if _encoder.encode(envelope) != raw:
        raise Rejected(Reason.malformed, "envelope is not in canonical msgpack")
    return envelope


def _inflate(packed: bytes, max_bytes: int) -> bytes:
    inflater = zlib.decompressobj()
    try:
        payload = inflater.decompress(packed, max_bytes + 1)
    except zlib.error as error:
        raise Rejected(Reason.malformed, f"payload: {error}") from error
    if len(payload) > max_bytes:
        raise Rejected(Reason.too_large, f"payload decompresses to more than {max_bytes} bytes")
    if not inflater.eof or inflater.unused_data:
        raise Rejected(Reason.malformed, "payload is not one whole zlib stream")
    return payload
