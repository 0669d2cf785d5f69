"""The signed envelope around everything that travels: who says it, as what, from when until when.

A sealed message is one msgpack array in canonical form, so its bytes, and with them its SHA-256 name, cannot be
changed by anybody but the signer:

    [version=2, domain, producer's public key, issued, lifetime, deflate(payload), signature]

The Ed25519 signature covers the domain, so that bytes signed as one kind of message never pass as another. The
payload repeats nothing of the envelope: who made a group, and when it expires, is said here once.
"""

import hashlib
import math
import struct
import zlib
from dataclasses import dataclass
from enum import IntEnum
from typing import Annotated

import msgspec

from protocol.identity import PUBLIC_KEY_BYTES, SIGNATURE_BYTES, Identity, peer_id_of, verify
from protocol.rejection import Reason, Rejected
from protocol.rollout import UInt63

ENVELOPE_VERSION = 2
MAX_CLOCK_SKEW = 30.0
"""Seconds a sender's clock may be ahead of ours."""

_COMPRESSION_LEVEL = 6
_RAW_DEFLATE = -zlib.MAX_WBITS
"""Without zlib's header and checksum: the signature is the better check, and every group pays for each byte."""


class Domain(IntEnum):
    """What kind of message was signed; the number travels, the name is signed."""

    group = 1
    announcement = 2
    round = 3
    listing = 5
    policy = 8


class _Envelope(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    version: int
    domain: Domain
    producer: Annotated[bytes, msgspec.Meta(min_length=PUBLIC_KEY_BYTES, max_length=PUBLIC_KEY_BYTES)]
    issued: UInt63
    lifetime: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
    payload: bytes
    signature: Annotated[bytes, msgspec.Meta(min_length=SIGNATURE_BYTES, max_length=SIGNATURE_BYTES)]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Envelope)


@dataclass(frozen=True, slots=True)
class Opened:
    """A verified envelope."""

    producer: str
    """Peer id of the signer."""
    payload: bytes
    issued: int
    """Unix seconds."""
    expires: int
    digest: bytes
    """SHA-256 of the sealed bytes."""


def digest_of(raw: bytes) -> bytes:
    """SHA-256 of sealed bytes: the name of a group."""
    return hashlib.sha256(raw).digest()


def _signed_bytes(domain: Domain, producer: bytes, issued: int, lifetime: int, payload: bytes) -> bytes:
    # Everything before the payload has a fixed length once the domain is known.
    head = f"shoal/{ENVELOPE_VERSION}/{domain.name}\n".encode()
    return head + producer + struct.pack(">QI", issued, lifetime) + payload


def seal(identity: Identity, domain: Domain, payload: bytes, *, issued: float, expires: float) -> bytes:
    """Compress, sign and encode. Times in unix seconds; `issued` is kept to the second before, the lifetime to the
    nearest. Raises ValueError when it expires less than a second after it was issued."""
    at, lifetime = math.floor(issued), round(expires - issued)
    if lifetime < 1:
        raise ValueError(f"expires {expires - issued:g} s after it was issued ; a sealed message lives 1 s at least")
    deflater = zlib.compressobj(_COMPRESSION_LEVEL, wbits=_RAW_DEFLATE)
    packed = deflater.compress(payload) + deflater.flush()
    signature = identity.sign(_signed_bytes(domain, identity.public_key, at, lifetime, packed))
    return _encoder.encode(_Envelope(ENVELOPE_VERSION, domain, identity.public_key, at, lifetime, packed, signature))


def unseal(raw: bytes, domain: Domain, *, max_bytes: int, now: float) -> Opened:
    """Verify sealed bytes, in the order size, form, signature, time, decompression.

    `max_bytes` bounds the sealed bytes and, apart from them, the decompressed payload. `now` in unix seconds.
    Raises Rejected: too_large, malformed, unsupported_version, bad_signature, from_future, stale.
    """
    if len(raw) > max_bytes:
        raise Rejected(Reason.too_large, f"{len(raw)} sealed bytes, at most {max_bytes}")
    envelope = _decode(raw)
    if envelope.domain is not domain:
        raise Rejected(Reason.malformed, f"sealed as {envelope.domain.name}, expected {domain.name}")
    producer, issued = peer_id_of(envelope.producer), envelope.issued
    signed = _signed_bytes(domain, envelope.producer, issued, envelope.lifetime, envelope.payload)
    if not verify(envelope.producer, signed, envelope.signature):
        raise Rejected(Reason.bad_signature, f"not signed by {producer}")
    if issued > now + MAX_CLOCK_SKEW:
        raise Rejected(
            Reason.from_future, f"issued {issued - now:.1f} s ahead of the clock here, at most {MAX_CLOCK_SKEW:.0f} s"
        )
    expires = issued + envelope.lifetime
    if expires <= now:
        raise Rejected(Reason.stale, f"expired {now - expires:.1f} s ago")
    return Opened(producer, _inflate(envelope.payload, max_bytes), issued, expires, digest_of(raw))


def _decode(raw: bytes) -> _Envelope:
    # The first two bytes are fixed for every version: a fixarray, then the version as a positive fixint.
    if len(raw) < 2 or raw[0] & 0xF0 != 0x90 or raw[1] > 0x7F:
        raise Rejected(Reason.malformed, "not a sealed message")
    if raw[1] != ENVELOPE_VERSION:
        raise Rejected(
            Reason.unsupported_version,
            f"envelope version {raw[1]}, this node speaks {ENVELOPE_VERSION}: the older of the two must upgrade",
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
    inflater = zlib.decompressobj(wbits=_RAW_DEFLATE)
    try:
        payload = inflater.decompress(packed, max_bytes + 1)
    except zlib.error as error:
        raise Rejected(Reason.malformed, f"payload: {error}") from error
    if len(payload) > max_bytes:
        raise Rejected(Reason.too_large, f"payload decompresses to more than {max_bytes} bytes")
    if not inflater.eof or inflater.unused_data:
        raise Rejected(Reason.malformed, "payload is not one whole deflate stream")
    return payload
