from typing import Any

import msgspec
import pytest

from protocol.assignment import own_task
from protocol.envelope import Domain, seal
from protocol.identity import Identity
from protocol.manifest import Caps, EnvironmentSpec, make_manifest
from protocol.messages import Announcement
from protocol.rules import Reason
from swarm.gate import BURST, MAX_OFFENCES, RATE, AnnouncementGate

NOW = 1_800_000_000.0
MANIFEST = make_manifest("test", NOW - 100, (EnvironmentSpec("chain_sum", "1", 1, {}),), caps=Caps(max_completions=8))
PRODUCER = Identity.from_seed(b"p" * 32)


@pytest.fixture
def banned() -> set[str]:
    return set()


@pytest.fixture
def gate(clock: Any, banned: set[str]) -> AnnouncementGate:
    return AnnouncementGate(MANIFEST, clock, banned=banned.__contains__)


def announcement(*, issued: float = NOW, **changes: Any) -> bytes:
    task = own_task(MANIFEST, 0, PRODUCER.peer_id, 0)
    content = Announcement(MANIFEST.digest, b"g" * 32, 100, 0, task, "tiny", 2, 0.5, 0.5, 16)
    payload = msgspec.msgpack.encode(msgspec.structs.replace(content, **changes))
    return seal(PRODUCER, Domain.announcement, payload, issued=issued, expires=issued + 100)


def test_a_good_announcement_passes(gate: AnnouncementGate) -> None:
    assert gate.check("forwarder", announcement())
    assert gate.drain() == []


def test_size_is_capped_before_parsing(gate: AnnouncementGate) -> None:
    assert not gate.check("forwarder", bytes(2049))
    ((rejected, peers),) = gate.drain()
    assert (peers, rejected.reason) == (("forwarder",), Reason.too_large)
    assert gate.drain() == []


def test_what_nobody_signed_is_the_forwarders(gate: AnnouncementGate) -> None:
    good = announcement()
    assert not gate.check("forwarder", good[:-1] + bytes([good[-1] ^ 1]))
    assert not gate.check("forwarder", b"garbage")
    assert [(rejected.reason, peers) for rejected, peers in gate.drain()] == [
        (Reason.bad_signature, ("forwarder",)),
        (Reason.malformed, ("forwarder",)),
    ]


def test_what_every_node_refuses_is_the_forwarders_too(gate: AnnouncementGate) -> None:
    other = own_task(MANIFEST, 0, "somebody else", 0)
    for changes, reason in (
        ({"completions": 9}, Reason.too_large),
        ({"size": 0}, Reason.malformed),
        ({"model": "a\x00b"}, Reason.malformed),
        ({"swarm": bytes(32)}, Reason.wrong_swarm),
        ({"task": other}, Reason.unassigned_task),
    ):
        for forwarder, guilty in (
            ("forwarder", (PRODUCER.peer_id, "forwarder")),
            (PRODUCER.peer_id, (PRODUCER.peer_id,)),
        ):
            assert not gate.check(forwarder, announcement(**changes))
            ((rejected, peers),) = gate.drain()
            assert (rejected.reason, peers) == (reason, guilty)


def test_what_clocks_bans_and_versions_make_differ_is_not_the_forwarders(
    gate: AnnouncementGate, banned: set[str]
) -> None:
    task = msgspec.structs.replace(own_task(MANIFEST, 0, PRODUCER.peer_id, 0), version="2")
    for content, reason in (
        (announcement(epoch=5), Reason.from_future),
        (announcement(task=task), Reason.unknown_environment),
    ):
        assert not gate.check("forwarder", content)
        ((rejected, peers),) = gate.drain()
        assert (rejected.reason, peers) == (reason, (PRODUCER.peer_id,))
    banned.add(PRODUCER.peer_id)
    assert not gate.check("forwarder", announcement())
    ((rejected, peers),) = gate.drain()
    assert (rejected.reason, peers) == (Reason.banned, (PRODUCER.peer_id,))


@pytest.mark.parametrize(("issued", "reason"), [(NOW - 200, Reason.stale), (NOW + 60, Reason.from_future)])
def test_a_clock_that_is_off_costs_nobody_anything(gate: AnnouncementGate, issued: float, reason: Reason) -> None:
    """An envelope out of its time proves no signer to this node, and its reason has no penalty."""
    assert not gate.check("forwarder", announcement(issued=issued))
    ((rejected, peers),) = gate.drain()
    assert (rejected.reason, peers) == (reason, ("forwarder",))


def test_banned_forwarders_do_not_pass(gate: AnnouncementGate, banned: set[str]) -> None:
    banned.add("forwarder")
    assert not gate.check("forwarder", announcement())
    assert gate.drain() == []


def test_each_forwarder_has_its_own_rate(gate: AnnouncementGate, clock: Any) -> None:
    good = announcement()
    assert all(gate.check("loud", good) for _ in range(int(BURST)))
    assert not gate.check("loud", good)
    assert gate.check("quiet", good)
    assert gate.dropped == 1
    clock.now += 10 / RATE
    assert [gate.check("loud", good) for _ in range(11)] == [True] * 10 + [False]


def test_memory_is_bounded(gate: AnnouncementGate) -> None:
    for n in range(MAX_OFFENCES + 100):
        gate.check(f"sybil{n}", b"garbage")
    assert len(gate.drain()) == MAX_OFFENCES
