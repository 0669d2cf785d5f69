"""Whatever the bytes, admission answers with Rejected, and the other parsers with their own error."""

import math
from collections.abc import Callable
from typing import Any

import msgspec
from hypothesis import example, given, settings
from hypothesis import strategies as st

from protocol.envelope import Domain, unseal
from protocol.identity import Identity, IdentityError, public_key_of
from protocol.invite import Invite, InviteError, check_peer_address
from protocol.manifest import Manifest, ManifestError, embedded_manifest
from protocol.rejection import Reason, Rejected
from protocol.rollout import RolloutGroup

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


def outcome(call: Callable[[], Any], error: type[Exception] = Rejected) -> Any:
    """What a call gives, or the error that it may raise, which says why; any other error fails the test."""
    try:
        found = call()
    except error as refused:
        found = refused
    assert str(found)
    return found


def refused_by_all(swarm: Any, raw: bytes, announced: Any = None) -> list[Reason | None]:
    """Why each reader of sealed bytes refuses these; None: it does not."""
    announced = announced or swarm.announcement(swarm.group(), raw)
    outcomes = [
        *(outcome(lambda: unseal(raw, domain, max_bytes=100_000, now=swarm.now)) for domain in Domain),  # noqa: B023
        outcome(lambda: swarm.hear(raw)),
        outcome(lambda: swarm.admit(raw, announced)),
    ]
    return [found.reason if isinstance(found, Rejected) else None for found in outcomes]


@given(st.binary(max_size=600))
@example(b"\x97\x02" + b"\x91" * 5000)
@example(b"\x97\x02\xdd\xff\xff\xff\xff")
def test_random_bytes(swarm: Any, raw: bytes) -> None:
    reasons = refused_by_all(swarm, raw)
    assert len(reasons) == len(Domain) + 2
    assert None not in reasons


@given(EDITS)
def test_mutated_sealed_bytes(swarm: Any, edits: list[tuple[int, int, str]]) -> None:
    group = swarm.group()
    raw = swarm.seal(group)
    domains = [None if domain is Domain.group else Reason.malformed for domain in Domain]
    assert refused_by_all(swarm, raw, swarm.announcement(group, raw)) == [*domains, Reason.malformed, None]
    changed = edited(raw, edits)
    if changed != raw:
        assert None not in refused_by_all(swarm, changed, swarm.announcement(group, changed))


@given(st.binary(max_size=300) | VALUES.map(msgspec.msgpack.encode), st.sampled_from(Domain))
@example(b"\x96" + b"\x91" * 5000, Domain.group)
@example(b"\x96" + b"\xdd\xff\xff\xff\xff" * 3, Domain.group)
def test_validly_signed_garbage(swarm: Any, payload: bytes, domain: Domain) -> None:
    """The envelope is good and opens as what it was sealed as; nothing else takes it."""
    *opened, heard, admitted = refused_by_all(swarm, swarm.seal(payload, domain))
    assert [reason is None for reason in opened] == [one is domain for one in Domain]
    assert heard is Reason.malformed
    assert admitted is Reason.malformed


@settings(max_examples=300)
@given(EDITS)
def test_validly_signed_mutated_payloads(swarm: Any, edits: list[tuple[int, int, str]]) -> None:
    """What is still taken is a record of the right type and within the caps, however it came about."""
    group = swarm.group()
    announcement = swarm.announcement(group, swarm.seal(group))
    raw = swarm.seal(edited(msgspec.msgpack.encode(group), edits))
    admitted = outcome(lambda: swarm.admit(raw, swarm.announcement(group, raw)))
    if not isinstance(admitted, Rejected):
        opened, taken = admitted
        assert opened.producer == swarm.me.peer_id
        assert taken.task == group.task
        assert len(taken.completions) == 8
        assert all(0 <= one.token_count <= swarm.manifest.caps.max_tokens_per_completion for one in taken.completions)
        assert all(math.isfinite(reward) for reward in taken.rewards)
    heard = outcome(
        lambda: swarm.hear(swarm.seal(edited(msgspec.msgpack.encode(announcement), edits), Domain.announcement))
    )
    if not isinstance(heard, Rejected):
        assert heard[1].swarm == swarm.manifest.digest
        assert 0 < heard[1].size <= swarm.manifest.caps.max_group_bytes
        assert math.isfinite(heard[1].reward_mean)
        assert heard[1].reward_std >= 0


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
    payload = msgspec.msgpack.encode(substituted(builtins, path, replacement))
    raw = swarm.seal(payload)
    *_, admitted = refused_by_all(swarm, raw, swarm.announcement(group, raw))
    if admitted is None:  # another value of the right type, or the same: it says what was sealed
        taken = swarm.admit(raw, swarm.announcement(group, raw))[1]
        assert msgspec.msgpack.decode(payload, type=RolloutGroup) == taken
        assert (taken.task, taken.epoch) == (group.task, group.epoch)
    else:
        assert admitted in Reason


@given(st.binary(max_size=400))
def test_manifest_bytes(raw: bytes) -> None:
    for content in (raw, b"\x99\x01" + raw):
        found = outcome(lambda: Manifest.from_bytes(content), ManifestError)  # noqa: B023
        assert isinstance(found, ManifestError) or found.to_bytes() == content


@given(EDITS)
def test_mutated_manifests(edits: list[tuple[int, int, str]]) -> None:
    content = edited(embedded_manifest("m", 0).to_bytes(), edits)
    found = outcome(lambda: Manifest.from_bytes(content), ManifestError)
    if isinstance(found, Manifest):
        assert found.to_bytes() == content
        assert msgspec.json.decode(msgspec.json.encode(found.describe()))["digest"] == found.digest.hex()
        assert found.epoch_at(2e9) >= 0
    else:
        assert isinstance(found, ManifestError)


@given(st.text(max_size=200), st.binary(max_size=200))
def test_text_and_files(text: str, content: bytes) -> None:
    """None of these is what it should be: checks and checksums make that as good as certain."""
    for candidate in (text, "shoal:" + text):
        assert isinstance(outcome(lambda: Invite.parse(candidate), InviteError), InviteError)  # noqa: B023
    assert isinstance(outcome(lambda: check_peer_address(text), InviteError), InviteError)
    assert isinstance(outcome(lambda: public_key_of(text), IdentityError), IdentityError)
    assert isinstance(outcome(lambda: Identity.open_bytes(content, None), IdentityError), IdentityError)
