import hashlib
from typing import Any

import msgspec
import pytest

from protocol.manifest import (
    MAX_GENESIS_AHEAD,
    Caps,
    EnvironmentSpec,
    Manifest,
    ManifestError,
    ManifestRefused,
    check_local_limits,
    embedded_manifest,
    make_manifest,
)

SPEC = EnvironmentSpec("chain_sum", "rg0.1.25-1", 1, {"max_tokens": 16})


def changed(**changes: Any) -> bytes:
    return msgspec.structs.replace(make_manifest("m", 1000, (SPEC,)), **changes).to_bytes()


def with_settings(**settings: Any) -> bytes:
    return changed(environments=(msgspec.structs.replace(SPEC, settings=settings),))


def test_bytes_come_back_and_name_the_swarm() -> None:
    manifest = embedded_manifest("lab", 1_800_000_000.9)
    raw = manifest.to_bytes()
    again = Manifest.from_bytes(raw)
    assert again == manifest
    assert again.to_bytes() == raw
    assert manifest.digest == hashlib.sha256(raw).digest()
    assert manifest.genesis == 1_800_000_000


def test_the_embedded_curriculum() -> None:
    manifest = embedded_manifest("lab", 0)
    assert [spec.name for spec in manifest.environments] == [
        "letter_counting",
        "chain_sum",
        "spell_backward",
        "word_sorting",
    ]
    assert all(spec.settings["examples"] == 3 for spec in manifest.environments)
    assert [spec.max_tokens for spec in manifest.environments] == [16, 16, 16, 24]
    assert (manifest.epoch_seconds, manifest.slots_per_epoch, manifest.shared_slots) == (600, 4096, 64)
    assert manifest.caps.group_ttl_seconds == 1800
    assert manifest.caps.max_group_bytes == 256 * 1024
    assert len(manifest.to_bytes()) < 512


def test_the_order_of_settings_does_not_change_the_digest() -> None:
    forwards = msgspec.structs.replace(SPEC, settings={"a": 1, "b": 2})
    backwards = msgspec.structs.replace(SPEC, settings={"b": 2, "a": 1})
    assert make_manifest("m", 0, (forwards,)).digest == make_manifest("m", 0, (backwards,)).digest


def test_every_field_is_in_the_digest() -> None:
    base = make_manifest("m", 1000, (SPEC,))
    changes: list[dict[str, Any]] = [
        {"name": "n"},
        {"genesis": 1001},
        {"epoch_seconds": 601},
        {"slots_per_epoch": 1},
        {"shared_slots": 1},
        {"shards": 2},
        {"environments": (SPEC, msgspec.structs.replace(SPEC, name="b"))},
        {"caps": Caps(max_turns=2)},
    ]
    digests = {msgspec.structs.replace(base, **change).digest for change in changes}
    assert len(digests | {base.digest}) == len(changes) + 1


def test_epochs() -> None:
    manifest = make_manifest("m", 1000, (SPEC,), epoch_seconds=600)
    assert [manifest.epoch_at(now) for now in (0, 999, 1000, 1599.9, 1600, 7000)] == [0, 0, 0, 0, 1, 10]
    assert manifest.epoch_ends(0) == 1600.0
    assert manifest.epoch_at(manifest.epoch_ends(7)) == 8


def test_shards_spread_producers() -> None:
    one, many = make_manifest("m", 0, (SPEC,)), make_manifest("m", 0, (SPEC,), shards=8)
    peers = [f"peer{number}" for number in range(200)]
    assert {one.shard_of(peer) for peer in peers} == {0}
    assert {many.shard_of(peer) for peer in peers} == set(range(8))


def test_description_is_json() -> None:
    manifest = embedded_manifest("lab", 5)
    described = msgspec.json.decode(msgspec.json.encode(manifest.describe()))
    assert described["digest"] == manifest.digest.hex()
    assert described["caps"]["max_completions"] == 64
    assert described["environments"][1]["settings"]["max_digits"] == 1


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (b"", "not a manifest"),
        (b"\xff\xff", "not a manifest"),
        (b"\x99\x03", "version 3.*upgrade shoal"),
        (b"\x99\x01", "manifest: "),
        (b"\x99\x01" + bytes(70_000), "at most 65536"),
        (changed(name=""), "length >= 1"),
        (changed(name="a\x07b"), r"name 'a\\x07b': only printable"),
        (changed(name="a\u202eb"), r"name 'a\\u202eb': only printable"),
        (changed(genesis=-1), "Expected `int` >= 0 - at `genesis`"),
        (changed(epoch_seconds=1), ">= 10 - at `epoch_seconds`"),
        (changed(slots_per_epoch=0), ">= 1 - at `slots_per_epoch`"),
        (changed(shards=2000), "<= 1024"),
        (changed(environments=()), "length >= 1"),
        (changed(environments=(SPEC, SPEC)), "chain_sum named more than once"),
        (changed(environments=(msgspec.structs.replace(SPEC, weight=0),)), r">= 1 - at `environments\[0\].weight`"),
        (changed(environments=(msgspec.structs.replace(SPEC, name="../x"),)), "regex"),
        (changed(caps=Caps(max_producer_share=0.0)), "> 0.0 - at `caps.max_producer_share`"),
        (changed(caps=Caps(max_group_bytes=2**40)), "<= 67108864 - at `caps.max_group_bytes`"),
        (with_settings(x=float("nan")), "chain_sum.settings.x: nan is not a finite number"),
        (with_settings(x="a" * 257), "chain_sum.settings.x: longer than 256"),
        (with_settings(x="a\u202eb"), r"chain_sum.settings.x: forbidden control character U\+202E"),
        (with_settings(x="a\x1b[2J"), r"chain_sum.settings.x: forbidden control character U\+001B"),
        (with_settings(**{"a\u2066b": 1}), r"chain_sum.settings: key 'a\\u2066b' has unprintable characters"),
        (with_settings(**{"a\nb": 1}), r"chain_sum.settings: key 'a\\nb' has unprintable characters"),
        (with_settings(x=[1]), r"Expected .* at `environments\[0\].settings\[...\]`"),
        (with_settings(max_tokens=0), "max_tokens: 0, expected an integer from 1 to"),
        (with_settings(max_tokens=5000), "max_tokens: 5000, .*4096"),
        (with_settings(max_tokens=True), "max_tokens: True"),
        (with_settings(max_tokens="16"), "max_tokens: '16'"),
    ],
)
def test_a_bad_manifest_is_named(raw: bytes, says: str) -> None:
    with pytest.raises(ManifestError, match=says):
        Manifest.from_bytes(raw)


def test_settings_may_say_anything_readable() -> None:
    text = "Думай\n\tстрого: שלום"
    manifest = Manifest.from_bytes(with_settings(prompt=text))
    assert manifest.environments[0].settings == {"prompt": text}


def test_a_manifest_that_asks_too_much_of_this_node_is_refused_with_the_way_out() -> None:
    embedded = embedded_manifest("m", 1_000_000)
    check_local_limits(embedded, 1_000_000, max_group_mb=1)
    large = make_manifest("m", 1_000_000, (SPEC,), caps=Caps(max_group_bytes=(16 << 20) + 1))
    check_local_limits(large, 1_000_000, max_group_mb=17)
    with pytest.raises(ManifestRefused) as refused:
        check_local_limits(large, 1_000_000, max_group_mb=16)
    assert str(refused.value) == (
        "the manifest allows groups of 16777217 bytes (caps.max_group_bytes), this node 16777216 ; "
        "set limits.group_mb to 17 to take part, or ask for a manifest with smaller groups"
    )


def test_a_swarm_that_begins_long_after_now_is_not_entered_yet() -> None:
    manifest = embedded_manifest("m", 1_000_000)
    check_local_limits(manifest, 1_000_000 - MAX_GENESIS_AHEAD, max_group_mb=1)
    with pytest.raises(ManifestRefused, match=r"genesis 1000000 is 3\.0 days ahead, at most 1 ; check .* clock"):
        check_local_limits(manifest, 1_000_000 - 3 * 86400, max_group_mb=1)


def test_only_the_canonical_form_is_a_manifest() -> None:
    raw = make_manifest("m", 1000, (SPEC,)).to_bytes()
    assert raw[2:4] == b"\xa1m"
    with pytest.raises(ManifestError, match="canonical"):
        Manifest.from_bytes(raw[:2] + b"\xd9\x01m" + raw[4:])
    with pytest.raises(ManifestError, match="manifest: "):
        Manifest.from_bytes(raw + b"\x00")


def test_making_a_bad_manifest_fails_at_once() -> None:
    with pytest.raises(ManifestError, match=">= 10 - at `epoch_seconds`"):
        make_manifest("m", 0, (SPEC,), epoch_seconds=5)


@pytest.mark.parametrize("changes", [{"shards": 2**70}, {"caps": object()}])
def test_what_msgpack_cannot_say_is_a_manifest_error_too(changes: dict[str, Any]) -> None:
    with pytest.raises(ManifestError, match="manifest: "):
        make_manifest("m", 0, (SPEC,), **changes)
    with pytest.raises(ManifestError, match="surrogate"):
        make_manifest("m\udcff", 0, (SPEC,))
