import msgspec
import pytest
from libp2p.crypto.ed25519 import Ed25519PublicKey, create_new_key_pair
from libp2p.peer.id import ID

from protocol.identity import MAX_KEY_FILE_BYTES, Identity, IdentityError, peer_id_of, public_key_of, verify


@pytest.mark.parametrize("seed", [bytes(32), bytes(range(32)), b"\xff" * 32])
def test_peer_id_is_the_one_libp2p_derives(seed: bytes) -> None:
    pair = create_new_key_pair(seed)
    identity = Identity.from_seed(seed)
    assert identity.peer_id == ID.from_pubkey(pair.public_key).to_base58()
    assert identity.peer_id.startswith("12D3KooW")
    assert public_key_of(identity.peer_id) == pair.public_key.to_bytes()
    assert identity.private_bytes == seed


def test_signatures_are_those_of_libp2p() -> None:
    pair = create_new_key_pair(bytes(range(32)))
    identity = Identity.from_seed(bytes(range(32)))
    signature = identity.sign(b"data")
    assert signature == pair.private_key.sign(b"data")
    assert Ed25519PublicKey.from_bytes(public_key_of(identity.peer_id)).verify(b"data", signature)


def test_verify_wants_key_data_and_signature_to_agree() -> None:
    identity, other = Identity.generate(), Identity.generate()
    signature = identity.sign(b"data")
    assert verify(identity.public_key, b"data", signature)
    assert not verify(identity.public_key, b"date", signature)
    assert not verify(other.public_key, b"data", signature)
    assert not verify(identity.public_key, b"data", signature[:-1])
    assert not verify(identity.public_key[:-1], b"data", signature)


@pytest.mark.parametrize("key", [bytes(32), b"\xff" * 32, bytes(range(32))])
def test_public_key_comes_back_out_of_the_peer_id(key: bytes) -> None:
    assert public_key_of(peer_id_of(key)) == key


@pytest.mark.parametrize(
    "peer_id",
    [
        "",
        "12D3KooW",
        "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N",
        "1" * 52,
        "z" * 52,
        "12D3KooW" + "0" * 44,
        "2" + Identity.from_seed(bytes(32)).peer_id[1:],
        "é" * 52,
    ],
)
def test_anything_but_an_ed25519_peer_id_is_refused(peer_id: str) -> None:
    with pytest.raises(IdentityError, match="peer id"):
        public_key_of(peer_id)


def test_repr_shows_no_secret() -> None:
    identity = Identity.from_seed(bytes(range(32)))
    assert identity.private_bytes.hex() not in repr(identity)
    assert repr(identity) == f"Identity(peer_id={identity.peer_id!r})"


@pytest.mark.parametrize("passphrase", [None, "correct horse", "ключ", "\udcff"])
def test_key_file_comes_back(passphrase: str | None) -> None:
    identity = Identity.generate()
    content = identity.seal_bytes(passphrase)
    assert Identity.open_bytes(content, passphrase).private_bytes == identity.private_bytes
    if passphrase is not None:
        assert identity.private_bytes not in content
        assert msgspec.json.decode(content)["n"] >= 2**15


def test_a_plain_file_opens_whatever_the_passphrase() -> None:
    identity = Identity.generate()
    assert Identity.open_bytes(identity.seal_bytes(None), "unneeded").peer_id == identity.peer_id


def test_wrong_missing_and_empty_passphrase() -> None:
    identity = Identity.generate()
    content = identity.seal_bytes("right")
    with pytest.raises(IdentityError, match="wrong passphrase"):
        Identity.open_bytes(content, "wrong")
    with pytest.raises(IdentityError, match="give its passphrase"):
        Identity.open_bytes(content, None)
    with pytest.raises(IdentityError, match="passphrase is empty"):
        identity.seal_bytes("")


def test_every_damaged_byte_is_noticed_before_the_passphrase_is_tried() -> None:
    content = Identity.from_seed(bytes(32)).seal_bytes("right").rstrip()
    for position in range(len(content)):
        damaged = content[:position] + bytes([content[position] ^ 1]) + content[position + 1 :]
        with pytest.raises(IdentityError, match=r"damaged|newer shoal"):
            Identity.open_bytes(damaged, "right")
    for length in range(len(content)):
        with pytest.raises(IdentityError, match="damaged"):
            Identity.open_bytes(content[:length], "right")


@pytest.mark.parametrize(
    "content",
    [b"", b"\xff", b"[]", b"{}", b"null", b"[" * 3000, b'{"shoal_identity":"x"}', b" " * (MAX_KEY_FILE_BYTES + 1)],
)
def test_other_files_are_named_damaged(content: bytes) -> None:
    with pytest.raises(IdentityError, match="damaged"):
        Identity.open_bytes(content, None)


def test_a_newer_file_asks_for_an_upgrade() -> None:
    with pytest.raises(IdentityError, match="upgrade shoal"):
        Identity.open_bytes(b'{"shoal_identity":2,"whatever":[]}', None)


def test_a_seed_has_32_bytes() -> None:
    with pytest.raises(IdentityError, match="32 bytes, got 31"):
        Identity.from_seed(bytes(31))
