import msgspec
import pytest

from protocol.envelope import Domain, seal
from protocol.identity import Identity
from protocol.listing import (
    LISTING_SECONDS,
    MAX_LISTING_BYTES,
    SHARDS,
    Listing,
    directory_key,
    open_listing,
    seal_listing,
    shard_of,
)
from protocol.manifest import embedded_manifest
from protocol.rejection import Reason, Rejected

NOW = 1_800_000_000.0
ME, OTHER = Identity.from_seed(b"m" * 32), Identity.from_seed(b"o" * 32)
ADDRESS = f"/ip4/192.0.2.1/tcp/7946/p2p/{ME.peer_id}"
LISTING = Listing(embedded_manifest("reef", NOW), (ADDRESS,), 7)


def reason(sealed: bytes, peer: str = ME.peer_id, now: float = NOW) -> Reason:
    with pytest.raises(Rejected) as rejected:
        open_listing(sealed, peer, now)
    return rejected.value.reason


def test_a_listing_comes_back_and_is_an_invite() -> None:
    opened = open_listing(seal_listing(ME, LISTING, NOW), ME.peer_id, NOW + LISTING_SECONDS - 1)
    assert opened == LISTING
    invite = opened.invite()
    assert (invite.manifest_digest, invite.bootstrap, invite.psk, invite.name) == (
        LISTING.manifest.digest, (ADDRESS,), None, "reef",
    )  # fmt: skip


def test_it_is_the_word_of_who_was_asked_and_not_for_ever() -> None:
    sealed = seal_listing(ME, LISTING, NOW)
    assert reason(sealed, OTHER.peer_id) is Reason.wrong_producer
    assert reason(sealed, now=NOW + LISTING_SECONDS) is Reason.stale
    assert reason(sealed[:-1] + b"x") in (Reason.bad_signature, Reason.malformed)
    assert reason(bytes(MAX_LISTING_BYTES + 1)) is Reason.too_large


@pytest.mark.parametrize(
    "body",
    [
        b"",
        msgspec.msgpack.encode([b"no manifest", [ADDRESS], 1]),
        msgspec.msgpack.encode([LISTING.manifest.to_bytes(), [], 1]),
        msgspec.msgpack.encode([LISTING.manifest.to_bytes(), [ADDRESS] * 17, 1]),
        msgspec.msgpack.encode([LISTING.manifest.to_bytes(), ["/ip4/192.0.2.1/tcp/7946"], 1]),
        msgspec.msgpack.encode([LISTING.manifest.to_bytes(), [ADDRESS.replace(ME.peer_id, OTHER.peer_id)], 1]),
        msgspec.msgpack.encode([LISTING.manifest.to_bytes(), [ADDRESS], -1]),
        msgspec.msgpack.encode([LISTING.manifest.to_bytes(), [ADDRESS], 1, "more"]),
    ],
)
def test_what_is_no_listing_is_refused(body: bytes) -> None:
    assert reason(seal(ME, Domain.listing, body, issued=NOW, expires=NOW + 9)) is Reason.malformed


def test_another_kind_of_message_is_none() -> None:
    body = msgspec.msgpack.encode([LISTING.manifest.to_bytes(), [ADDRESS], 1])
    assert reason(seal(ME, Domain.group, body, issued=NOW, expires=NOW + 9)) is Reason.malformed


def test_every_swarm_has_one_of_a_few_keys() -> None:
    keys = {directory_key(shard) for shard in range(SHARDS)}
    assert len(keys) == SHARDS
    manifests = [embedded_manifest(f"swarm {i}", NOW) for i in range(200)]
    assert {shard_of(manifest) for manifest in manifests} == set(range(SHARDS))
