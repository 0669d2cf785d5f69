import msgspec
import pytest

from protocol.assignment import own_task
from protocol.envelope import Domain, seal
from protocol.identity import Identity
from protocol.manifest import EnvironmentSpec, make_manifest
from protocol.messages import Announcement
from protocol.rules import Reason
from swarm.gate import BURST, MAX_OFFENCES, RATE, AnnouncementGate

NOW = 1_700_000_000.0
MANIFEST = make_manifest("test", NOW - 100, (EnvironmentSpec("chain_sum", "1", 1, {}),))
PRODUCER = Identity.from_seed(b"p" * 32)


class Clock:
    now = NOW

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def banned() -> set[str]:
    return set()


@pytest.fixture
def gate(clock: Clock, banned: set[str]) -> AnnouncementGate:
    return AnnouncementGate(MANIFEST, clock, environments=[("chain_sum", "1")], banned=banned.__contains__)


def announcement(**changes) -> bytes:
    task = own_task(MANIFEST, 0, PRODUCER.peer_id, 0)
    content = Announcement(MANIFEST.digest, b"g" * 32, 100, 0, task, "tiny", 2, 0.5, 0.5, 16)
    payload = msgspec.msgpack.encode(msgspec.structs.replace(content, **changes))
    return seal(PRODUCER, Domain.announcement, payload, issued=NOW, expires=NOW + 100)


def test_a_good_announcement_passes(gate: AnnouncementGate) -> None:
    assert gate.check("forwarder", announcement())
    assert gate.drain() == []


def test_size_is_capped_before_parsing(gate: AnnouncementGate) -> None:
    assert not gate.check("forwarder", bytes(2049))
    ((peer, rejected),) = gate.drain()
    assert (peer, rejected.reason) == ("forwarder", Reason.too_large)
    assert gate.drain() == []


def test_the_signer_answers_for_what_it_signed_and_the_forwarder_for_the_rest(gate: AnnouncementGate) -> None:
    good = announcement()
    assert not gate.check("forwarder", good[:-1] + bytes([good[-1] ^ 1]))
    assert not gate.check("forwarder", announcement(epoch=5))
    assert not gate.check("forwarder", b"garbage")
    assert [(peer, rejected.reason) for peer, rejected in gate.drain()] == [
        ("forwarder", Reason.bad_signature),
        (PRODUCER.peer_id, Reason.from_future),
        ("forwarder", Reason.malformed),
    ]


def test_banned_forwarders_and_producers_do_not_pass(gate: AnnouncementGate, banned: set[str]) -> None:
    banned.add("forwarder")
    assert not gate.check("forwarder", announcement())
    banned.add(PRODUCER.peer_id)
    assert not gate.check("other", announcement())
    ((peer, rejected),) = gate.drain()
    assert (peer, rejected.reason) == (PRODUCER.peer_id, Reason.banned)


def test_each_forwarder_has_its_own_rate(gate: AnnouncementGate, clock: Clock) -> None:
    for _ in range(int(BURST)):
        assert gate._within_rate("loud", clock.now)
    assert not gate.check("loud", announcement())
    assert gate.check("quiet", announcement())
    assert gate.dropped == 1
    clock.now += 10 / RATE
    assert [gate._within_rate("loud", clock.now) for _ in range(11)] == [True] * 10 + [False]


def test_memory_is_bounded(gate: AnnouncementGate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm.gate.MAX_FORWARDERS", 3)
    for n in range(MAX_OFFENCES + 100):
        gate.check(f"sybil{n}", b"garbage")
    assert len(gate._allowances) == 3
    assert len(gate.drain()) == MAX_OFFENCES
