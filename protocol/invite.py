"""An invite: all that a new node needs to join a swarm, as one `shoal:` link that survives mail and QR codes.

    'shoal:' base64url-without-padding( version byte || msgpack [digest, bootstrap, psk, name] || check )

An invite of a coordinator has its token behind the name, and version 2; all others keep version 1.

`check` is the first 4 bytes of SHA-256 over everything before it. Version byte and check stay where they are in
every future version, so that a damaged link and a newer one are told apart.
"""

import base64
import binascii
import hashlib
import ipaddress
import re
from dataclasses import dataclass, field
from typing import Annotated

import msgspec

from protocol.identity import IdentityError, public_key_of
from protocol.messages import Digest

INVITE_VERSION = 1
TOKEN_VERSION = 2
"""With a token for the coordinator."""
TOKEN_BYTES = 16
MAX_INVITE_CHARACTERS = 4096
MAX_BOOTSTRAP = 16
SCHEME = "shoal:"

_CHECK_BYTES = 4
_SHAPE = "/ip4|ip6|dns|dns4|dns6/HOST/tcp/PORT"
_HOST_NAME = re.compile(r"^(?=.{1,253}$)[A-Za-z0-9_]([A-Za-z0-9_-]*[A-Za-z0-9_])?(\.[A-Za-z0-9_-]+)*\.?\Z")


class InviteError(ValueError):
    """An invite cannot be used; the message says what is wrong with it and what to do."""


class _Body(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    manifest_digest: Digest
    bootstrap: Annotated[
        tuple[Annotated[str, msgspec.Meta(max_length=512)], ...], msgspec.Meta(max_length=MAX_BOOTSTRAP)
    ]
    psk: Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)] | None
    name: Annotated[str, msgspec.Meta(max_length=64)]


class _TokenBody(_Body, frozen=True, array_like=True, forbid_unknown_fields=True):
    token: Annotated[bytes, msgspec.Meta(min_length=TOKEN_BYTES, max_length=TOKEN_BYTES)]


@dataclass(frozen=True, slots=True)
class Invite:
    """A swarm's name, where to find it, and the key of its private network if it has one."""

    manifest_digest: bytes
    bootstrap: tuple[str, ...]
    """Multiaddrs `/ip4|ip6|dns|dns4|dns6/HOST/tcp/PORT/p2p/PEER_ID`."""
    psk: bytes | None = field(default=None, repr=False)
    """32 bytes, secret."""
    name: str = ""
    """The swarm's name, for people."""
    token: bytes | None = field(default=None, repr=False)
    """16 bytes, secret: what the coordinator lets its bearer in for."""

    def to_uri(self) -> str:
        """The link. Raises InviteError when a field is outside its limits."""
        fields = (self.manifest_digest, self.bootstrap, self.psk, self.name)
        if self.token is None:
            frame = bytes([INVITE_VERSION]) + msgspec.msgpack.encode(_Body(*fields))
        else:
            frame = bytes([TOKEN_VERSION]) + msgspec.msgpack.encode(_TokenBody(*fields, self.token))
        text = base64.urlsafe_b64encode(frame + _check(frame)).rstrip(b"=").decode()
        uri = SCHEME + text
        Invite.parse(uri)
        return uri

    @classmethod
    def parse(cls, text: str) -> "Invite":
        """Read a link; white space around and inside it (mail wraps long lines) is ignored. Raises InviteError."""
        if len(text) > MAX_INVITE_CHARACTERS:
            raise InviteError(f"the invite is {len(text)} characters long, at most {MAX_INVITE_CHARACTERS}")
        compact = "".join(text.split())
        if not compact:
            raise InviteError("the invite is empty; paste the whole link, beginning with shoal:")
        if compact[: len(SCHEME)].lower() != SCHEME:
            raise InviteError(
                f"this is no invite: it begins with {compact[:12]!r}; paste the whole link, which begins with {SCHEME}"
            )
        frame = _decode(compact[len(SCHEME) :])
        if len(frame) <= 1 + _CHECK_BYTES or _check(frame[:-_CHECK_BYTES]) != frame[-_CHECK_BYTES:]:
            raise InviteError("the invite is cut off or mistyped (its check does not match); copy the whole link again")
        kind = {INVITE_VERSION: _Body, TOKEN_VERSION: _TokenBody}.get(frame[0])
        if kind is None:
            raise InviteError(
                f"the invite has version {frame[0]}, this shoal reads {TOKEN_VERSION}; upgrade shoal to join"
            )
        try:
            body = msgspec.msgpack.decode(frame[1:-_CHECK_BYTES], type=kind)
        except (msgspec.DecodeError, RecursionError) as error:
            raise InviteError(f"the invite is broken ({error}); ask for a new one") from error
        if not all(character.isprintable() for character in body.name):
            raise InviteError("the invite is broken (unprintable characters in the name); ask for a new one")
        for address in body.bootstrap:
            check_peer_address(address)
        token = body.token if isinstance(body, _TokenBody) else None
        return cls(body.manifest_digest, body.bootstrap, body.psk, body.name, token)


def _check(frame: bytes) -> bytes:
    return hashlib.sha256(frame).digest()[:_CHECK_BYTES]


def _decode(text: str) -> bytes:
    try:
        return base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError) as error:
        raise InviteError(
            "the invite is broken: after shoal: only letters, digits, - and _ may follow; copy the whole link again"
        ) from error


def check_peer_address(address: str) -> str:
    """The peer id that a dialable multiaddr ends in. Raises InviteError naming what is wrong."""
    where, _, peer_id = address.rpartition("/p2p/")
    if not where or "/" in peer_id:
        raise InviteError(f"bootstrap address {address!r} does not look like {_SHAPE}/p2p/PEER_ID")
    try:
        check_address(where)
        public_key_of(peer_id)
    except (ValueError, IdentityError) as error:
        raise InviteError(f"bootstrap address {address!r}: {error}") from error
    return peer_id


def check_address(address: str, least_port: int = 1) -> None:
    """Raises ValueError saying what is wrong with a multiaddr without a peer id."""
    parts = address.split("/")
    if len(parts) != 5 or parts[0] or parts[3] != "tcp":
        raise ValueError(f"{address!r} does not look like {_SHAPE}")
    _, kind, host, _, port = parts
    if kind == "ip4":
        ipaddress.IPv4Address(host)
    elif kind == "ip6":
        ipaddress.IPv6Address(host)
    elif kind not in ("dns", "dns4", "dns6") or not _HOST_NAME.match(host):
        raise ValueError(f"{kind}/{host} is no host; expected {_SHAPE}")
    if not (port.isascii() and port.isdigit() and least_port <= int(port) <= 65535 and str(int(port)) == port):
        raise ValueError(f"port {port!r} is not in {least_port}..65535")
