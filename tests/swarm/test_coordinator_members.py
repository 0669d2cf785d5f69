"""Who takes part in a coordinated swarm: invites, kicks, networks, and who makes room."""

import asyncio
import time
from pathlib import Path

import msgspec
import pytest

from protocol.messages import ENTER_PROTOCOL, REPORT_PROTOCOL, EnterRequest, EnterResponse, ReportRequest
from protocol.rounds import State
from swarm.coordination.membership import Membership, NoSuchMember, NotAdmitted, network_of
from swarm.coordination.reception import IDLE_ROUNDS
from swarm.transport import RequestFailed
from tests.swarm.coordinated import PACE, Clock, Hall, manifest_of
from tests.swarm.world import until, who


async def test_without_an_invite_nobody_gets_in_and_who_stays_is_parted_from(hall: Hall) -> None:
    lead = await hall.leader()
    (anna,) = await hall.swarm(lead, "anna")
    eve = await hall.member("eve", lead, anna)
    await until(lambda: eve.entering.said != "")
    assert eve.entering.said == "this swarm takes invites of its coordinator only; ask for one"
    await until(lambda: eve.id not in anna.transport.peers())
    assert any(eve.id in message for message in anna.kinds("unlisted"))
    assert anna.access.refused(eve.id)
    assert not anna.access.refused(lead.id)
    with pytest.raises(RequestFailed):
        await eve.transport.request(
            lead.id,
            REPORT_PROTOCOL,
            msgspec.msgpack.encode(ReportRequest(hall.manifest.digest, 1, ())),
            max_bytes=100,
            timeout=1,
        )


async def test_invites_have_uses_an_expiry_and_a_role(hall: Hall) -> None:
    lead = await hall.leader()
    once = lead.membership.invite(uses=1, expires=hall.clock() + 60, role="observer")
    old = lead.membership.invite(uses=9, expires=hall.clock() - 1, role="member")
    anna = await hall.member("anna", lead, token=once)
    await until(lambda: anna.entering.listed)
    bert = await hall.member("bert", lead, token=once)
    carl = await hall.member("carl", lead, token=old)
    dora = await hall.member("dora", lead, token=b"x" * 16)
    await until(lambda: all(peer.entering.said for peer in (bert, carl, dora)))
    assert bert.entering.said.startswith("the invite is used up")
    assert carl.entering.said.startswith("the invite has expired")
    assert dora.entering.said.startswith("this coordinator does not know the invite")
    assert [(one.peer, one.role) for one in lead.membership.members()] == [(anna.id, "observer")]
    assert lead.coordinator.access.barred(anna.id)
    assert once not in lead.path.read_bytes()  # only its hash is kept
    assert lead.membership.enter(anna.id, once) == "observer"  # again, without a use


async def test_who_is_let_in_is_on_the_list_before_it_is_told(hall: Hall, monkeypatch: pytest.MonkeyPatch) -> None:
    lead = await hall.leader()
    token = lead.membership.invite(uses=2, expires=hall.clock() + 60, role="member")
    await until(lambda: lead.chain.members is not None)
    request = msgspec.msgpack.encode(EnterRequest(hall.manifest.digest, token))
    names = [who(name).peer_id for name in ("anna", "bert")]
    monkeypatch.setattr("swarm.coordination.coordinator.TICK_SECONDS", 1000)
    await asyncio.sleep(0.1)  # the last short tick
    for revise in (0, 1000):  # the second one comes within the time between two lists
        monkeypatch.setattr("swarm.coordination.coordinator.REVISE_SECONDS", revise)
        await lead.coordinator._enter(names[revise > 0], request)
    assert lead.chain.members is not None
    assert [one.peer for one in lead.chain.members.members] == names[:1]


async def test_a_kicked_member_is_banned_by_all_until_it_is_forgiven(hall: Hall) -> None:
    lead = await hall.leader()
    anna, eve = await hall.swarm(lead, "anna", "eve")
    await eve.transport.connect(anna.transport.addresses()[0], timeout=1)
    lead.membership.kick(eve.id, "tired of it")
    await until(lambda: anna.access.refused(eve.id))
    await until(lambda: eve.id not in anna.transport.peers() and eve.id not in lead.transport.peers())
    assert anna.transport.refuses(eve.id)
    record = anna.chain.round
    assert record is not None
    assert (record.number, record.state) == (1, State.open)  # in the middle of the round
    with pytest.raises(NoSuchMember):
        lead.membership.kick(eve.id, "")
    lead.membership.forgive(eve.id)
    await until(lambda: not anna.transport.refuses(eve.id))
    assert anna.access.refused(eve.id)  # not a member again yet


def test_who_was_kicked_does_not_come_back_by_the_same_invite_under_another_name(tmp_path: Path) -> None:
    clock = Clock()
    membership = Membership(tmp_path / "lead.db", b"s" * 32, clock, listed_only=True)
    anna, bert, eve, twin = (who(name).peer_id for name in ("anna", "bert", "eve", "twin"))
    shared, other = (membership.invite(uses=3, expires=clock() + 60, role="member") for _ in range(2))
    for peer in (anna, eve):
        membership.enter(peer, shared)
    assert membership.kick(eve, "") == 1
    with pytest.raises(NotAdmitted, match="used up"):
        membership.enter(twin, shared)
    assert membership.enter(bert, other) == "member"
    assert {one.peer for one in membership.members()} == {anna, bert}


@pytest.mark.parametrize("of_before", [False, True])
def test_a_kick_takes_no_use_of_an_invite_that_came_later(tmp_path: Path, of_before: bool) -> None:
    clock = Clock()
    membership = Membership(tmp_path / "lead.db", b"s" * 32, clock, listed_only=True)
    old = membership.invite(uses=1, expires=clock() + 60, role="member")
    membership.enter(who("eve").peer_id, old)
    clock.ahead += 61
    new = membership.invite(uses=2, expires=clock() + 60, role="member")  # the old one is deleted
    assert membership._db.all("SELECT id FROM coordinator_invites") == [(2,)]
    if of_before:  # an earlier version gave it the same id
        membership._db.execute("UPDATE coordinator_invites SET id = 1")
    assert membership.kick(who("eve").peer_id, "") == 0
    assert membership.enter(who("anna").peer_id, new) == "member"


async def test_an_open_swarm_takes_whoever_asks(hall: Hall) -> None:
    hall.manifest = manifest_of("lead", listed_only=False)
    lead = await hall.leader()
    anna = await hall.member("anna", lead)
    await until(lambda: anna.entering.listed)
    assert not anna.access.refused(who("stranger").peer_id)
    small = Membership(lead.path, hall.manifest.digest, time.time, listed_only=False, most=1)
    with pytest.raises(NotAdmitted, match="full: 1 members"):
        small.enter(who("bert").peer_id, b"")
    small.close()
    lead.membership.kick(anna.id, "")
    await until(lambda: lead.transport.refuses(anna.id))
    assert lead.coordinator.access.refused(anna.id)


async def test_one_network_brings_so_many_an_hour_and_others_go_on(hall: Hall) -> None:
    hall.manifest = manifest_of("lead", listed_only=False)
    lead = await hall.leader(from_network=3)
    request = EnterRequest(hall.manifest.digest, b"")

    async def enter(name: str, host: str, token: bytes = b"") -> EnterResponse:
        peer = hall.hub.transport(who(name), host=host)
        await peer.start()
        await peer.connect(lead.transport.addresses()[0], timeout=1)
        raw = msgspec.msgpack.encode(msgspec.structs.replace(request, token=token))
        answer = await peer.request(lead.id, ENTER_PROTOCOL, raw, max_bytes=1024, timeout=1)
        await peer.stop()
        return msgspec.msgpack.decode(answer, type=EnterResponse)

    flood = [await enter(f"sybil {n}", f"192.0.2.{n}") for n in range(1, 30)]
    assert [answer.role for answer in flood[:3]] == ["member"] * 3
    assert {answer.detail for answer in flood[3:]} == {
        "many peers of 192.0.2.0/24 came in lately; ask later, or with an invite"
    }
    assert (await enter("sybil 1", "192.0.2.77")).role == "member"  # it is one already
    assert (await enter("anna", "192.0.3.1")).role == "member"
    token = lead.membership.invite(uses=1, expires=hall.clock() + 60, role="member")
    assert (await enter("invited", "192.0.2.99", token)).role == "member"
    assert (await enter("sybil 40", "192.0.2.40", b"x" * 16)).role == ""
    hall.clock.ahead += 1300  # a third of an hour, and a little
    assert [(await enter(f"late {n}", "192.0.2.7")).role for n in range(2)] == ["member", ""]
    assert lead.coordinator._reception._newcomers is not None
    assert len(lead.coordinator._reception._newcomers) == 2


@pytest.mark.parametrize(
    ("host", "network"),
    [
        ("203.0.113.9", "203.0.113.0/24"),
        ("::ffff:203.0.113.9", "203.0.113.0/24"),
        ("2001:db8:5:6::1", "2001:db8:5::/48"),
        ("fe80::1%eth0", "fe80::/48"),
    ],
)
def test_the_network_of_an_address(host: str, network: str) -> None:
    assert network_of(host) == network


async def test_who_supplied_nothing_for_long_makes_room_in_a_full_swarm(hall: Hall) -> None:
    hall.manifest = manifest_of("lead", listed_only=False)
    lead = await hall.leader()
    membership, reports = lead.membership, lead.reports
    membership._most = 4
    token = membership.invite(uses=1, expires=hall.clock() + 60, role="member")
    for name, key in (("invited", token), ("idle", b""), ("busy", b""), ("idle too", b"")):
        assert membership.enter(who(name).peer_id, key) == "member"
        hall.clock.ahead += 1
    await hall.member("idle", lead)  # it is there, at least
    with pytest.raises(NotAdmitted, match="full: 4 members"):  # all came lately
        membership.enter(who("anna").peer_id, b"", lead.coordinator._reception.idle)
    hall.clock.ahead += IDLE_ROUNDS * (PACE.round_seconds + PACE.answer_seconds)
    await until(lambda: lead.chain.round is not None)
    reports.hear(1, {who("busy").peer_id: 1})
    await until(lambda: who("idle").peer_id in lead.coordinator.present())
    assert membership.enter(who("anna").peer_id, b"", lead.coordinator._reception.idle) == "member"
    assert membership.role_of(who("idle too").peer_id) is None
    assert membership.enter(who("bert").peer_id, b"", lead.coordinator._reception.idle) == "member"
    with pytest.raises(NotAdmitted, match="full: 4 members"):
        membership.enter(who("carl").peer_id, b"", lead.coordinator._reception.idle)
    names = {who(name).peer_id for name in ("invited", "busy", "anna", "bert")}
    assert {one.peer for one in membership.members()} == names
    assert not membership.kicked()  # whoever made room may ask again


def test_nobody_makes_room_where_all_came_by_invite(tmp_path: Path) -> None:
    membership = Membership(tmp_path / "lead.db", b"s" * 32, time.time, listed_only=True, most=1)
    token = membership.invite(uses=2, expires=time.time() + 60, role="member")
    membership.enter(who("anna").peer_id, token)
    with pytest.raises(NotAdmitted, match="full"):
        membership.enter(who("bert").peer_id, token, lambda: [who("anna").peer_id])
    assert membership.enter(who("anna").peer_id, b"") == "member"
