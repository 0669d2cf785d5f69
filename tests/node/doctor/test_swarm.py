"""What is said of coordinators, of a policy that is followed or published, and of averagers."""

import socket
import time
from collections.abc import Mapping
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import pytest

from node.doctor import swarm
from node.doctor.finding import Finding, Subject
from node.home import Home
from protocol.board import MemberList, list_bytes
from protocol.identity import Identity
from protocol.manifest import Coordination, embedded_manifest
from protocol.rounds import Facts, Pace, first, open_round, seal_round
from swarm.coordination.round_log import RoundLog
from tests.node.doctor.test_examination import STATUS
from tests.node.doctor.test_network import free_port, listening, of, port_of

__all__ = ["listening"]

LEAD, SPARE = (Identity.from_seed(name.ljust(32, b".")) for name in (b"lead", b"spare"))
PEER = LEAD.peer_id


def words(findings: list[Finding]) -> list[tuple[str, str]]:
    return [(finding.verdict, finding.said) for finding in findings]


@pytest.fixture
def coordinated(home: Home) -> Home:
    home.found(embedded_manifest("lab", time.time(), Coordination((PEER, SPARE.peer_id), listed_only=True)), b"k" * 32)
    return home


def asked(coordinated: Home, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> list[Finding]:
    """What is found when the daemon tells this of its coordinators."""
    told = {
        "coordinators": [PEER, SPARE.peer_id], "leader": PEER, "leading": False, "listed_only": True, "listed": True,
        "said": "", "members": 3, "faults": [], "round": {"number": 7, "state": "open"},
        "heard": {PEER: time.time() - 4}, **changes,
    }  # fmt: skip
    client = SimpleNamespace(get=lambda *path: {"coordinator": told})
    monkeypatch.setattr(swarm, "connect", lambda home, timeout: client)
    return swarm.coordinator(of(coordinated, STATUS))


def test_a_swarm_without_coordinators_leaders_and_averagers_has_nothing_to_say(home: Home) -> None:
    node = of(home, STATUS)
    assert swarm.coordinator(node) == swarm.federation(node) == swarm.averaging(node) == []


def test_a_leader_that_answers(coordinated: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    assert words(asked(coordinated, monkeypatch)) == [
        ("ok", f"…{PEER[-8:]} leads, and answered 4 s ago: round 7 is open, 3 members")
    ]


@pytest.mark.parametrize(
    ("changes", "verdict", "said"),
    [
        ({"heard": {}}, "warn", "leads, and has not answered since the start; round 7"),
        ({"heard": {PEER: 1000.0}}, "warn", "leads, and answered last"),
        ({"leader": None}, "warn", "nobody leads: rounds stand still"),
        ({"listed": False}, "fail", "a coordinator answers, and did not refuse it"),
        ({"listed": False, "heard": {}}, "fail", "this node is no member: no coordinator has answered yet"),
        ({"listed": False, "said": "the invite is used up"}, "fail", "this node is no member: the invite is used up"),
        ({"faults": [{"coordinator": SPARE.peer_id, "reason": "equivocation", "detail": "signed two"}]}, "warn",
         "is not followed any more: equivocation, signed two"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_coordinator(
    coordinated: Home, monkeypatch: pytest.MonkeyPatch, changes: Mapping[str, Any], verdict: str, said: str
) -> None:
    found = asked(coordinated, monkeypatch, **changes)
    assert [one.verdict for one in found if said in one.said] == [verdict]
    assert all(one.fix for one in found if one.verdict != "ok")
    assert any("coordinator invite" in one.fix for one in found) == ("said" in changes)  # it has one that was taken


def test_a_coordinator_looks_for_its_standby(coordinated: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    there = asked(coordinated, monkeypatch, leading=True, heard={SPARE.peer_id: time.time() - 60})
    assert words(there) == [
        ("ok", "this one leads: round 7 is open, 3 members"),
        ("ok", f"…{SPARE.peer_id[-8:]} stands by, and was heard of 60 s ago"),
    ]
    gone = asked(coordinated, monkeypatch, leading=True, heard={SPARE.peer_id: time.time() - 600})
    assert words(gone)[1] == ("warn", f"…{SPARE.peer_id[-8:]} is to stand by, and answered last 10 min ago")
    alone = asked(coordinated, monkeypatch, leading=True, coordinators=[PEER], heard={})
    assert words(alone)[1][1].startswith("no standby is named")


def test_a_node_that_does_not_run_says_what_its_log_has(coordinated: Home) -> None:
    assert words(swarm.coordinator(of(coordinated))) == [("warn", "no round is known here yet")]
    assert not coordinated.database.exists()  # to examine is not to make
    manifest = coordinated.manifest()
    assert manifest is not None
    members = list_bytes(MemberList(manifest.digest, ()))[0]
    record = first(manifest, Facts(members, 0, 0, 0, b"", (1,) * 4), Pace(1, 1, 1, 1.0, 0, 2, 1))
    sealed = seal_round(LEAD, record, time.time())
    with closing(RoundLog(coordinated.database, manifest.digest)) as log:
        log.add(*open_round(sealed, manifest, time.time()), sealed)
    assert words(swarm.coordinator(of(coordinated))) == [("ok", "round 1 was waiting when this node last ran")]


def follower(home: Home, **changes: Any) -> list[Finding]:
    now = time.time()
    followed = {"leader": PEER, "newest": 12, "issued": now - 40, "answered": now - 1, "problem": "", **changes}
    return swarm.federation(
        of(home, {**STATUS, "policy_version": 12, "followed": followed}, federation={"follow": PEER})
    )


def test_a_policy_that_is_followed(home: Home) -> None:
    assert words(follower(home)) == [
        ("ok", f"…{PEER[-8:]} answered 1 s ago: version 12 is here, the newest known is 12, signed 40 s ago")
    ]
    for changes, said in (
        ({"answered": None}, "has not answered since the start; version 12 is here"),
        ({"answered": time.time() - 7200}, "answered last 2 h ago; version 12 is here"),
        ({"issued": time.time() - 86_400 * 3}, "the newest known is 12, signed 3 d ago"),
        ({"problem": "it is in float32; set federation.dtype to that"}, "it is in float32"),
    ):
        (found,) = follower(home, **changes)
        assert (found.verdict, said in found.said) == ("warn", True), found
    assert found.fix == "set federation.dtype to that"
    assert words(swarm.federation(of(home, {**STATUS, "followed": None}, federation={"follow": PEER})))[0][0] == "ok"
    (found,) = swarm.federation(of(home, federation={"follow": PEER}))
    assert found.said.endswith("is known while the node runs")


def test_a_policy_that_is_published(home: Home) -> None:
    settings = {"federation": {"publish": True}}
    assert words(swarm.federation(of(home, {**STATUS, "policy_version": 7}, **settings))) == [
        ("ok", "version 7 of the policy is published")
    ]
    assert swarm.federation(of(home, {**STATUS, "policy_version": None}, **settings))[0].verdict == "warn"


def test_averagers(home: Home, monkeypatch: pytest.MonkeyPatch, listening: socket.socket) -> None:
    def found(*ports: int) -> list[Finding]:
        peers = [f"/ip4/127.0.0.1/tcp/{port}/p2p/{PEER}" for port in ports]
        node: Subject = of(home, averaging={"method": "diloco", "peers": peers})
        return swarm.averaging(node)

    there, gone = port_of(listening), free_port()
    monkeypatch.setattr(swarm, "find_spec", lambda name: None)
    assert words(found(there)) == [("fail", "hivemind is not installed")]
    monkeypatch.setattr(swarm, "find_spec", lambda name: name)
    assert words(found(there)) == [("ok", "hivemind is installed; all 1 of averaging.peers answer")]
    assert words(found(there, gone)) == [("warn", f"/ip4/127.0.0.1/tcp/{gone}: Connection refused")]
    assert found()[0].said.startswith("hivemind is installed; averaging.peers names nobody")
    home.found(embedded_manifest("private", 0.0), b"k" * 32)
    assert found()[0].said == "hivemind is installed; members of the swarm tell each other where their averagers are"
