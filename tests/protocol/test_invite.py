import base64
import hashlib
from typing import Any

import msgspec
import pytest

from protocol.identity import Identity
from protocol.invite import MAX_INVITE_CHARACTERS, Invite, InviteError, check_peer_address

PEER = Identity.from_seed(bytes(range(32))).peer_id
ADDRESS = f"/ip4/192.0.2.7/tcp/4001/p2p/{PEER}"
INVITE = Invite(bytes(range(32)), (ADDRESS,), None, "lab")


def link(version: int, body: Any) -> str:
    frame = bytes([version]) + (body if isinstance(body, bytes) else msgspec.msgpack.encode(body))
    return "shoal:" + base64.urlsafe_b64encode(frame + hashlib.sha256(frame).digest()[:4]).rstrip(b"=").decode()


@pytest.mark.parametrize("psk", [None, bytes(range(32))])
@pytest.mark.parametrize("bootstrap", [(), (ADDRESS,), (ADDRESS, f"/dns4/node.example.org/tcp/443/p2p/{PEER}")])
def test_an_invite_comes_back(psk: bytes | None, bootstrap: tuple[str, ...]) -> None:
    invite = Invite(bytes(range(32)), bootstrap, psk, "Лаборатория")
    assert Invite.parse(invite.to_uri()) == invite


def test_it_is_small_and_url_safe() -> None:
    uri = INVITE.to_uri()
    assert len(uri) < 200
    assert all(character.isalnum() or character in ":-_" for character in uri)


def test_white_space_of_a_wrapped_line_does_not_matter() -> None:
    uri = INVITE.to_uri()
    assert Invite.parse(f"  {uri[:40]}\r\n{uri[40:90]}\n  {uri[90:]}\n") == INVITE
    assert Invite.parse("SHOAL:" + uri[6:]) == INVITE


def test_the_key_stays_out_of_repr() -> None:
    psk = b"k" * 32
    assert "kkkk" not in repr(Invite(bytes(32), (), psk, ""))


def test_every_truncation_and_every_changed_character_is_noticed() -> None:
    uri = INVITE.to_uri()
    for length in range(len("shoal:"), len(uri)):
        with pytest.raises(InviteError, match=r"cut off or mistyped|broken"):
            Invite.parse(uri[:length])
    for position in range(len("shoal:"), len(uri) - 1):
        damaged = uri[:position] + ("A" if uri[position] != "A" else "B") + uri[position + 1 :]
        with pytest.raises(InviteError, match="cut off or mistyped"):
            Invite.parse(damaged)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "empty"),
        (" \n", "empty"),
        ("https://example.org/join", "begins with shoal:"),
        ("shoal", "begins with shoal:"),
        ("shoal:", "cut off"),
        ("shoal:****", "only letters, digits"),
        ("shoal:é", "only letters, digits"),
        ("shoal:" + "A" * MAX_INVITE_CHARACTERS, "characters long, at most 4096"),
        (link(3, ["anything"]), "version 3.*upgrade shoal"),
        (link(1, b"\xff\xff"), "broken"),
        (link(1, [bytes(31), [], None, ""]), "length >= 32"),
        (link(1, [bytes(32), [], bytes(31), ""]), "length >= 32"),
        (link(1, [bytes(32), [ADDRESS] * 17, None, ""]), "length <= 16"),
        (link(1, [bytes(32), [], None, "x" * 65]), "length <= 64"),
        (link(1, [bytes(32), [], None, "a\x1b[2Jb"]), "unprintable"),
        (link(1, [bytes(32), [], None, "", 1]), "length 4"),
        (link(1, [bytes(32), ["/ip4/1.2.3.4"], None, ""]), "does not look like"),
    ],
)
def test_each_way_to_be_broken_has_its_own_words(text: str, says: str) -> None:
    with pytest.raises(InviteError, match=says):
        Invite.parse(text)


def test_a_bad_invite_cannot_be_made() -> None:
    with pytest.raises(InviteError, match="does not look like"):
        Invite(bytes(32), ("localhost:4001",), None, "").to_uri()
    with pytest.raises(InviteError, match="length >= 32"):
        Invite(b"short", (), None, "").to_uri()


@pytest.mark.parametrize("host", ["ip4/127.0.0.1", "ip6/::1", "dns/example.org", "dns4/a-b.example", "dns6/x"])
def test_good_addresses(host: str) -> None:
    assert check_peer_address(f"/{host}/tcp/4001/p2p/{PEER}") == PEER


@pytest.mark.parametrize(
    ("address", "says"),
    [
        ("", "does not look like"),
        (f"/ip4/1.2.3.4/udp/1/p2p/{PEER}", "does not look like"),
        (f"x/ip4/1.2.3.4/tcp/1/p2p/{PEER}", "does not look like"),
        (f"/ip4/1.2.3.256/tcp/1/p2p/{PEER}", "256"),
        (f"/ip6/1.2.3.4/tcp/1/p2p/{PEER}", "1.2.3.4"),
        (f"/dns/exa mple/tcp/1/p2p/{PEER}", "is no host"),
        (f"/onion/abc/tcp/1/p2p/{PEER}", "is no host"),
        (f"/ip4/1.2.3.4/tcp/0/p2p/{PEER}", "1..65535"),
        (f"/ip4/1.2.3.4/tcp/65536/p2p/{PEER}", "1..65535"),
        (f"/ip4/1.2.3.4/tcp/٣/p2p/{PEER}", "1..65535"),
        ("/ip4/1.2.3.4/tcp/1/p2p/12D3KooW", "no Ed25519 peer id"),
    ],
)
def test_bad_addresses(address: str, says: str) -> None:
    with pytest.raises(InviteError, match=says):
        check_peer_address(address)


def test_a_token_is_of_the_version_that_has_one() -> None:
    body = [bytes(32), [], None, "n"]
    invite = Invite(bytes(32), (), None, "n", bytes(range(16)))
    assert Invite.parse(invite.to_uri()) == invite
    assert "token" not in repr(invite)
    for broken in (
        link(1, [*body, bytes(16)]),
        link(2, body),
        link(2, [*body, bytes(15)]),
        link(2, [*body, bytes(16), 1]),
    ):
        with pytest.raises(InviteError, match="the invite is broken"):
            Invite.parse(broken)
