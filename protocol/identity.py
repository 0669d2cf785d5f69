"""Who a node is: an Ed25519 key and the libp2p peer id derived from it. Key file contents, but no file I/O.

Peer id: base58btc(0x00 0x24 || protobuf PublicKey{Type=1, Data=32 bytes}), an identity multihash, so the public
key is read back out of the id itself (https://github.com/libp2p/specs/blob/master/peer-ids/peer-ids.md).
"""

import hashlib
import os
from dataclasses import dataclass, field
from typing import Literal

import msgspec
from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.kdf.scrypt import Scrypt

MAX_KEY_FILE_BYTES = 4096
PUBLIC_KEY_BYTES = 32
SIGNATURE_BYTES = 64

_BASE58 = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
_BASE58_VALUE = {character: value for value, character in enumerate(_BASE58)}
# identity multihash (code 0, length 36), then protobuf: field 1 varint 1 (Ed25519), field 2 of 32 bytes
_PEER_ID_PREFIX = bytes.fromhex("002408011220")
_PEER_ID_CHARACTERS = 52

_SCRYPT_N, _SCRYPT_R, _SCRYPT_P = 2**15, 8, 1
# A damaged or hostile key file must not make scrypt take more than about 1 GiB.
_MAX_SCRYPT_N = 2**20


class IdentityError(Exception):
    """A key, peer id or key file cannot be used; the message says what to do."""


class _KeyFile(msgspec.Struct, forbid_unknown_fields=True):
    """JSON content of a key file. `checksum` tells damage from a wrong passphrase."""

    shoal_identity: int
    peer_id: str
    protection: Literal["none", "scrypt-chacha20poly1305"]
    key: bytes
    """The 32-byte Ed25519 seed, or its AEAD ciphertext."""
    salt: bytes = b""
    nonce: bytes = b""
    n: int = 0
    r: int = 0
    p: int = 0
    checksum: str = ""


def _checksum(content: _KeyFile) -> str:
    unsigned = msgspec.structs.replace(content, checksum="")
    return hashlib.sha256(msgspec.json.encode(unsigned)).hexdigest()[:16]


def _passphrase_key(passphrase: str, content: _KeyFile) -> bytes:
    kdf = Scrypt(salt=content.salt, length=32, n=content.n, r=content.r, p=content.p)
    # surrogateescape: bytes of a terminal or environment variable that are not UTF-8 still make a key
    return kdf.derive(passphrase.encode("utf-8", "surrogateescape"))


def _associated_data(content: _KeyFile) -> bytes:
    return f"shoal-identity/{content.shoal_identity}/{content.peer_id}".encode()


def peer_id_of(public_key: bytes) -> str:
    """libp2p peer id of a raw 32-byte Ed25519 public key."""
    number = int.from_bytes(_PEER_ID_PREFIX + public_key, "big")
    digits = []
    while number:
        number, digit = divmod(number, 58)
        digits.append(_BASE58[digit])
    # The one leading zero byte (multihash code 0) is one leading '1'.
    return "1" + "".join(reversed(digits))


def public_key_of(peer_id: str) -> bytes:
    """Raw 32-byte Ed25519 public key inlined in a peer id. Raises IdentityError when it holds none."""
    if len(peer_id) != _PEER_ID_CHARACTERS:
        raise IdentityError(f"{peer_id[:64]!r} is no Ed25519 peer id: they have 52 characters and begin with 12D3KooW")
    number = 0
    for character in peer_id:
        value = _BASE58_VALUE.get(character)
        if value is None:
            raise IdentityError(f"{peer_id!r} is no peer id: {character!r} is not a base58 character")
        number = number * 58 + value
    raw = number.to_bytes(39, "big")[1:]
    if not raw.startswith(_PEER_ID_PREFIX) or peer_id_of(raw[len(_PEER_ID_PREFIX) :]) != peer_id:
        raise IdentityError(f"{peer_id!r} is no Ed25519 peer id: only those (12D3KooW...) can sign here")
    return raw[len(_PEER_ID_PREFIX) :]


def verify(public_key: bytes, data: bytes, signature: bytes) -> bool:
    """Whether the owner of a raw 32-byte Ed25519 key signed `data`. False also for bytes that are no key."""
    try:
        Ed25519PublicKey.from_public_bytes(public_key).verify(signature, data)
    except (InvalidSignature, ValueError):
        return False
    return True


@dataclass(frozen=True, slots=True)
class Identity:
    """A private key and its peer id. `repr` shows the peer id only."""

    _key: Ed25519PrivateKey = field(repr=False)
    peer_id: str

    @classmethod
    def generate(cls) -> "Identity":
        return cls.from_seed(os.urandom(32))

    @classmethod
    def from_seed(cls, seed: bytes) -> "Identity":
        """From the 32-byte Ed25519 seed (RFC 8032 private key). Raises IdentityError on another length."""
        if len(seed) != 32:
            raise IdentityError(f"an Ed25519 seed has 32 bytes, got {len(seed)}")
        key = Ed25519PrivateKey.from_private_bytes(seed)
        return cls(key, peer_id_of(key.public_key().public_bytes_raw()))

    @property
    def public_key(self) -> bytes:
        """The raw 32-byte public key."""
        return self._key.public_key().public_bytes_raw()

    @property
    def private_bytes(self) -> bytes:
        """The 32-byte seed. Secret."""
        return self._key.private_bytes_raw()

    def sign(self, data: bytes) -> bytes:
        """64-byte Ed25519 signature; deterministic (RFC 8032)."""
        return self._key.sign(data)

    def seal_bytes(self, passphrase: str | None) -> bytes:
        """Content of a key file: plain, or encrypted (scrypt, ChaCha20-Poly1305) when there is a passphrase."""
        if passphrase is None:
            content = _KeyFile(1, self.peer_id, "none", self.private_bytes)
        else:
            if not passphrase:
                raise IdentityError("the passphrase is empty; give one, or none at all for an unencrypted key file")
            content = _KeyFile(
                1, self.peer_id, "scrypt-chacha20poly1305", b"", os.urandom(16), os.urandom(12),
                _SCRYPT_N, _SCRYPT_R, _SCRYPT_P,
            )  # fmt: skip
            cipher = ChaCha20Poly1305(_passphrase_key(passphrase, content))
            content.key = cipher.encrypt(content.nonce, self.private_bytes, _associated_data(content))
        content.checksum = _checksum(content)
        return msgspec.json.encode(content) + b"\n"

    @classmethod
    def open_bytes(cls, content: bytes, passphrase: str | None) -> "Identity":
        """Inverse of `seal_bytes`. Raises IdentityError: damaged, newer version, passphrase missing or wrong."""
        damaged = "the identity file is damaged ({}); restore it from a backup, or move it away for a new identity"
        if len(content) > MAX_KEY_FILE_BYTES:
            raise IdentityError(damaged.format(f"{len(content)} bytes, at most {MAX_KEY_FILE_BYTES}"))
        try:
            version = msgspec.json.decode(content, type=dict[str, msgspec.Raw]).get("shoal_identity", msgspec.Raw(b"1"))
            if msgspec.json.decode(version, type=int) > 1:
                raise IdentityError("the identity file was written by a newer shoal; upgrade shoal to use it")
            key_file = msgspec.json.decode(content, type=_KeyFile)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise IdentityError(damaged.format(error)) from error
        if key_file.shoal_identity != 1 or key_file.checksum != _checksum(key_file):
            raise IdentityError(damaged.format("its checksum does not match"))
        seed = key_file.key
        if key_file.protection != "none":
            seed = _decrypt(key_file, passphrase)
        identity = cls.from_seed(seed)
        if identity.peer_id != key_file.peer_id:
            raise IdentityError(damaged.format(f"its key is not that of {key_file.peer_id}"))
        return identity


def _decrypt(key_file: _KeyFile, passphrase: str | None) -> bytes:
    if passphrase is None:
        raise IdentityError(f"the identity file of {key_file.peer_id} is encrypted; give its passphrase")
    if not 2 <= key_file.n <= _MAX_SCRYPT_N or not 1 <= key_file.r <= 32 or not 1 <= key_file.p <= 4:
        raise IdentityError(
            f"the identity file asks for scrypt n={key_file.n} r={key_file.r} p={key_file.p}, beyond n=2^20 r=32 p=4; "
            "restore it from a backup"
        )
    try:
        cipher = ChaCha20Poly1305(_passphrase_key(passphrase, key_file))
        return cipher.decrypt(key_file.nonce, key_file.key, _associated_data(key_file))
    except (InvalidTag, ValueError) as error:
        raise IdentityError(f"wrong passphrase for the identity {key_file.peer_id}; try again") from error
