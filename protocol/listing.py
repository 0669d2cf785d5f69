"""What a node of a public swarm says of it to whoever asks: the manifest, and where the swarm is entered.

It is signed by the node that says it. The manifest proves itself by its digest, which an invite would name; the number
of members is that node's word.
"""

import hashlib
from dataclasses import dataclass
from typing import Annotated

import msgspec

from protocol.envelope import Domain, seal, unseal
from protocol.identity import Identity
from protocol.invite import MAX_BOOTSTRAP, Invite, InviteError, check_peer_address
from protocol.manifest import Manifest, ManifestError
from protocol.messages import MAX_MANIFEST_BYTES
from protocol.rejection import Reason, Rejected
from protocol.rollout import UInt63

LISTING_SECONDS = 900.0
MAX_LISTING_BYTES = MAX_MANIFEST_BYTES + 16 * 1024
SHARDS = 8
"""Keys of the directory: a key of the DHT is good for some 20 providers."""


class _Body(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    manifest: Annotated[bytes, msgspec.Meta(max_length=MAX_MANIFEST_BYTES)]
    addresses: Annotated[
        tuple[Annotated[str, msgspec.Meta(max_length=512)], ...], msgspec.Meta(min_length=1, max_length=MAX_BOOTSTRAP)
    ]
    members: UInt63


@dataclass(frozen=True, slots=True)
class Listing:
    """A swarm as one of its nodes lists it."""

    manifest: Manifest
    addresses: tuple[str, ...]
    """Multiaddrs of the node that lists it, ending in its peer id."""
    members: int
    """Nodes it has seen in the last day, itself included."""

    def invite(self) -> Invite:
        return Invite(self.manifest.digest, self.addresses, None, self.manifest.name)


def directory_key(shard: int) -> bytes:
    """Key of the DHT under which nodes of listed swarms say that they are there."""
    return hashlib.sha256(b"shoal/1/directory\n" + bytes([shard])).digest()


def shard_of(manifest: Manifest) -> int:
    return manifest.digest[0] % SHARDS


def seal_listing(identity: Identity, listing: Listing, now: float) -> bytes:
    """Sign a listing for LISTING_SECONDS."""
    raw = msgspec.msgpack.encode(_Body(listing.manifest.to_bytes(), listing.addresses, listing.members))
    return seal(identity, Domain.listing, raw, issued=now, expires=now + LISTING_SECONDS)


def open_listing(sealed: bytes, peer: str, now: float) -> Listing:
    """Verify what `peer` answered. Raises Rejected: of the envelope, wrong_producer, malformed."""
    opened = unseal(sealed, Domain.listing, max_bytes=MAX_LISTING_BYTES, now=now)
    if opened.producer != peer:
        raise Rejected(Reason.wrong_producer, f"a listing of {opened.producer}")
    try:
        body = msgspec.msgpack.decode(opened.payload, type=_Body)
        manifest = Manifest.from_bytes(body.manifest)
        named = {check_peer_address(address) for address in body.addresses}
    except (msgspec.DecodeError, RecursionError, ManifestError, InviteError) as error:
        raise Rejected(Reason.malformed, f"listing: {error}") from error
    if named != {peer}:
        raise Rejected(Reason.malformed, "listing: it has addresses of somebody else")
    return Listing(manifest, body.addresses, body.members)
