"""Whatever the bytes, admission answers with Rejected, and the other parsers with their own error."""

import contextlib
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from protocol.envelope import Domain, unseal
from protocol.identity import Identity, IdentityError, public_key_of
from protocol.invite import Invite, InviteError, check_peer_address
from protocol.manifest import Manifest, ManifestError, embedded_manifest
from protocol.rejection import Rejected

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=80)
    | st.binary(max_size=80)
)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=9) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
)
EDITS = st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255), st.sampled_from("xid")), min_size=1, max_size=6)


def edited(raw: bytes, edits: list[tuple[int, int, str]]) -> bytes:
    """Overwrite, insert or delete single bytes."""
    data = bytearray(raw)
    for position, value, kind in edits:
        at = position % max(1, len(data))
        data[at : at + (kind != "i")] = b"" if kind == "d" else bytes([value])
    return bytes(data)


def try_everything(swarm: Any, raw: bytes, announced: Any = None) -> None:
    announced = announced or swarm.announcement(swarm.group(), raw)
    for domain in Domain:
        with contextlib.suppress(Rejected):
            unseal(raw, domain, max_bytes=100_000, now=swarm.now)
    with contextlib.suppress(Rejected):
        swarm.hear(raw)
    with contextlib.suppress(Rejected):
        swarm.admit(raw, announced)


@given(st.binary(max_size=600))
@example(b"\x97\x02" + b"\x91" * 5000)
@example(b"\x97\x02\xdd\xff\xff\xff\xff")
def test_random_bytes(swarm: Any, raw: bytes) -> None:
    try_everything(swarm, raw)


@given(EDITS)
def test_mutated_sealed_bytes(swarm: Any, edits: list[tuple[int, int, str]]) -> None:
    group = swarm.group()
    raw = swarm.seal(group)
    try_everything(swarm, edited(raw, edits))
    changed = edited(raw, edits)
    if changed != raw:
        with pytest.raises(Rejected):
            swarm.admit(changed, swarm.announcement(group, changed))


@given(st.binary(max_size=300) | VALUES.map(msgspec.msgpack.encode), st.sampled_from(Domain))
@example(b"\x96" + b"\x91" * 5000, Domain.group)
@example(b"\x96" + b"\xdd\xff\xff\xff\xff" * 3, Domain.group)
def test_validly_signed_garbage(swarm: Any, payload: bytes, domain: Domain) -> None:
    try_everything(swarm, swarm.seal(payload, domain))


@settings(max_examples=300)
@given(EDITS)
def test_validly_signed_mutated_payloads(swarm: Any, edits: list[tuple[int, int, str]]) -> None:
    group = swarm.group()
    announcement = swarm.announcement(group, swarm.seal(group))
    try_everything(swarm, swarm.seal(edited(msgspec.msgpack.encode(group), edits)))
    try_everything(swarm, swarm.seal(edited(msgspec.msgpack.encode(announcement), edits), Domain.announcement))


def substituted(value: Any, path: list[int], replacement: Any) -> Any:
    if not path or not isinstance(value, list) or not value:
        return replacement
    at = path[0] % len(value)
    return [*value[:at], substituted(value[at], path[1:], replacement), *value[at + 1 :]]


@settings(max_examples=300)
@given(st.lists(st.integers(0, 50), min_size=1, max_size=5), VALUES)
def test_validly_signed_groups_with_one_field_replaced(swarm: Any, path: list[int], replacement: Any) -> None:
    group = swarm.group()
    builtins = msgspec.msgpack.decode(msgspec.msgpack.encode(group))
    raw = swarm.seal(msgspec.msgpack.encode(substituted(builtins, path, replacement)))
    try_everything(swarm, raw, swarm.announcement(group, raw))


@given(st.binary(max_size=400))
def test_manifest_bytes(raw: bytes) -> None:
    for content in (raw, b"\x99\x01" + raw):
        with contextlib.suppress(ManifestError):
            assert Manifest.from_bytes(content).to_bytes() == content


@given(EDITS)
def test_mutated_manifests(edits: list[tuple[int, int, str]]) -> None:
    content = edited(embedded_manifest("m", 0).to_bytes(), edits)
    with contextlib.suppress(ManifestError):
        manifest = Manifest.from_bytes(content)
        assert manifest.to_bytes() == content
        msgspec.json.encode(manifest.describe())
        manifest.epoch_at(2e9)


@given(st.text(max_size=200), st.binary(max_size=200))
def test_text_and_files(text: str, content: bytes) -> None:
    for candidate in (text, "shoal:" + text):
        with contextlib.suppress(InviteError):
            Invite.parse(candidate)
    with contextlib.suppress(InviteError):
        check_peer_address(text)
    with contextlib.suppress(IdentityError):
        public_key_of(text)
    with contextlib.suppress(IdentityError):
        Identity.open_bytes(content, None)
