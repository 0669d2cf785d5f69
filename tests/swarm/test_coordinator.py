"""A coordinator with members over the in-memory transport: rounds, boards, invites, kicks, take-over, false ones."""

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from protocol.messages import (
    ENTER_PROTOCOL,
    REPORT_PROTOCOL,
    ROUNDS_PROTOCOL,
    EnterRequest,
    EnterResponse,
    ReportRequest,
    ReportResponse,
    RoundsRequest,
    RoundsResponse,
    rounds_topic,
)
from protocol.rounds import Pace, Round, State, commitment_of, first, seal_round
from swarm.attendance import PRESENT_SECONDS
from swarm.complaints import OFFENCES
from swarm.coordinator import MAX_WAITING, STEP_SECONDS, ScoringUnavailable
from swarm.membership import Membership, NoSuchMember, NotAdmitted, network_of
from swarm.memory import MemoryHub
from swarm.reception import IDLE_ROUNDS
from swarm.rounds import MAX_WAITING as MAX_WAITING_PEERS
from swarm.rounds import Following
from swarm.transport import Busy, RequestFailed, TransportError
from tests.swarm.coordinated import PACE, Bare, Clock, Leader, Peer, manifest_of, score
from tests.swarm.world import until, who


class Hall:
    """Makes peers on one hub and ends them."""

    def __init__(self, path: Path) -> None:
        self.path, self.hub, self.clock = path, MemoryHub(), Clock()
        self.manifest = manifest_of("lead", "spare")
        self.peers: list[Peer] = []

    async def leader(self, name: str = "lead", **options) -> Leader:
        peer = Leader(self.hub, self.path, name, self.manifest, self.clock, **options)
        self.peers.append(peer)
        return await peer.start()

    async def member(self, name: str, *to: Peer, token: bytes | None = None) -> Bare:
        peer = Bare(self.hub, self.path, name, self.manifest, self.clock, token=token)
        self.peers.append(peer)
        await peer.start()
        for other in to:
            await peer.transport.connect(other.transport.addresses()[0], timeout=1)
        return peer

    async def swarm(self, lead: Leader, *names: str) -> list[Bare]:
        """Members with invites, all connected to the leader and listed."""
        token = lead.membership.invite(uses=len(names), expires=self.clock() + 60, role="member")
        members = [await self.member(name, lead, token=token) for name in names]
        await until(lambda: all(member.entering.listed for member in members))
        return members

    async def wait(self, lead: Leader, seconds: float) -> None:
        """So many seconds pass, in steps that are not taken for a clock that was set."""
        end = self.clock() + seconds
        while self.clock() < end:
            self.clock.ahead += STEP_SECONDS / 2
            now = self.clock()
            await until(lambda: lead.coordinator._looked >= now)  # noqa: B023

    async def kill(self, peer: Peer) -> None:
        await peer.stop()
        self.peers.remove(peer)

    async def stop(self) -> None:
        for peer in self.peers:
            await peer.stop()


@pytest.fixture
async def hall(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Hall]:
    monkeypatch.setattr("swarm.coordinator.TICK_SECONDS", 0.02)
    monkeypatch.setattr("swarm.coordinator.REVISE_SECONDS", 0.0)
    monkeypatch.setattr("swarm.access.LOOK_SECONDS", 0.05)
    monkeypatch.setattr("swarm.coordinator.ASK_RATE", 100.0)
    hall = Hall(tmp_path)
    yield hall
    await hall.stop()


def is_at(peers: list[Bare] | list[Leader], number: int, state: State) -> bool:
    return all(
        peer.following.round is not None
        and (peer.following.round.number, peer.following.round.state) == (number, state)
        for peer in peers
    )


async def test_rounds_are_opened_closed_evaluated_and_followed_by_all(hall: Hall) -> None:
    lead = await hall.leader()
    anna, bert = await hall.swarm(lead, "anna", "bert")
    both = [anna, bert]
    await until(lambda: is_at(both, 1, State.open))
    opened = anna.following.round
    assert opened is not None
    assert opened.mix == (333, 1000)  # the manifest's, before anything was measured
    hall.clock.ahead += PACE.round_seconds
    await until(lambda: is_at(both, 1, State.closing))
    told = anna.following.round
    assert told is not None
    assert commitment_of(told.seed) == opened.commitment
    assert (await anna.answer([1, 0, 1, 1])).taken
    assert (await anna.answer([1, 1, 1, 1])) == ReportResponse(False, "this round's answers were handed in before")
    assert (await bert.answer([None, None, 0.5, 0.5], {anna.id: 3})).taken
    await until(lambda: all(member.following.board is not None for member in both))
    board = bert.following.board
    assert board is not None
    assert [(one.peer, one.scores, one.mean) for one in board.standings] == [
        (anna.id, (0.5, 1.0), 0.75),
        (bert.id, (None, 0.5), 0.25),
    ]
    await until(lambda: is_at(both, 2, State.open))  # all had answered: nobody waits for the time
    following = anna.following.round
    assert following is not None
    # by what was measured, 0.5 and 0.75: 1 x 4 p (1 - p) to 3 x 0.75
    assert following.mix == (444, 1000)
    assert anna.kinds("coordinator_fault") == []


async def test_who_is_late_is_absent_and_late_answers_are_refused(hall: Hall) -> None:
    lead = await hall.leader()
    anna, bert = await hall.swarm(lead, "anna", "bert")
    await until(lambda: is_at([anna, bert], 1, State.open))
    assert (await anna.answer([0] * 4)).detail == "round 1 is open"
    hall.clock.ahead += PACE.round_seconds
    await until(lambda: is_at([anna, bert], 1, State.closing))
    assert (await anna.answer([1] * 4)).taken
    hall.clock.ahead += PACE.answer_seconds + 3
    await until(lambda: anna.following.board is not None)
    board = anna.following.board
    assert board is not None
    assert [(one.peer, one.mean, one.best) for one in board.standings] == [(anna.id, 1.0, 1.0), (bert.id, None, None)]
    assert not (await bert.answer([1] * 4)).taken


async def test_a_gain_is_credited_to_whom_it_was_learned_from(hall: Hall) -> None:
    lead = await hall.leader()
    anna, bert, carl = members = await hall.swarm(lead, "anna", "bert", "carl")
    for number, rewards in ((1, [0, 0, 0, 0]), (2, [0, 0, 0.4, 0])):
        await until(lambda: is_at(members, number, State.open))  # noqa: B023
        lead.reports.hear(number, {bert.id: 2, carl.id: 2})
        hall.clock.ahead += PACE.round_seconds
        await until(lambda: is_at(members, number, State.closing))  # noqa: B023
        # whatever anna says of herself and of what was never announced counts nothing
        for member in members:
            trained = {anna.id: 1000, bert.id: 2, carl.id: 1000} if member is anna else {}
            assert (await member.answer(rewards if member is anna else [0] * 4, trained)).taken
        await until(lambda: all(m.following.board and m.following.board.number == number for m in members))  # noqa: B023
    board = anna.following.board
    assert board is not None
    # heard: 4 of carl in two rounds, of which 1000 were claimed; 2 of bert
    assert {one.peer: round(one.credit, 4) for one in board.standings} == {
        anna.id: 0.0,
        bert.id: round(0.1 / 3, 4),
        carl.id: 0.05,
    }


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


async def test_a_kicked_member_is_banned_by_all_until_it_is_forgiven(hall: Hall) -> None:
    lead = await hall.leader()
    anna, eve = await hall.swarm(lead, "anna", "eve")
    await eve.transport.connect(anna.transport.addresses()[0], timeout=1)
    lead.membership.kick(eve.id, "tired of it")
    await until(lambda: anna.access.refused(eve.id))
    await until(lambda: eve.id not in anna.transport.peers() and eve.id not in lead.transport.peers())
    assert anna.transport.refuses(eve.id)
    record = anna.following.round
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
    await until(lambda: lead.following.round is not None)
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


async def test_a_quorum_that_published_enough_closes_early(hall: Hall) -> None:
    pace = Pace(600, 30, 2, 0.5, groups=2, tasks=1, samples=1)
    lead = await hall.leader(pace=pace)
    (anna,) = await hall.swarm(lead, "anna")
    await asyncio.sleep(0.1)
    assert is_at([anna], 1, State.waiting)  # for a second member
    (bert,) = await hall.swarm(lead, "bert")
    await until(lambda: is_at([anna, bert], 1, State.open))
    lead.reports.hear(1, {anna.id: 2, bert.id: 1})
    await until(lambda: is_at([anna, bert], 1, State.closing))


async def test_a_coordinator_killed_in_mid_round_goes_on_and_loses_nothing(hall: Hall) -> None:
    lead = await hall.leader()
    anna, bert = await hall.swarm(lead, "anna", "bert")
    await until(lambda: is_at([anna, bert], 1, State.open))
    opened = anna.following.round
    await hall.kill(lead)
    lead = await hall.leader()
    assert lead.following.round == opened
    await until(lambda: {anna.id, bert.id} <= set(lead.transport.peers()))  # they ask for the log
    hall.clock.ahead += PACE.round_seconds
    await until(lambda: is_at([anna, bert], 1, State.closing))
    assert (await anna.answer([1] * 4)).taken
    await hall.kill(lead)
    lead = await hall.leader()
    assert (await bert.answer([0] * 4)).taken
    await until(lambda: anna.following.board is not None)
    board = anna.following.board
    assert board is not None
    assert [(one.peer, one.mean) for one in board.standings] == [(anna.id, 1.0), (bert.id, 0.0)]
    assert not anna.following.faults


@pytest.mark.parametrize("at", [State.open, State.closing])
async def test_a_killed_coordinator_does_not_take_who_is_back_first_for_all(hall: Hall, at: State) -> None:
    pace = Pace(600, 300, 1, 0.8, groups=3, tasks=2, samples=1)
    lead = await hall.leader(pace=pace)
    members = anna, bert = await hall.swarm(lead, "anna", "bert")
    await until(lambda: is_at(members, 1, State.open))
    if at is State.open:
        lead.reports.hear(1, {anna.id: 3})
    else:
        hall.clock.ahead += pace.round_seconds
        await until(lambda: is_at(members, 1, State.closing))
        assert (await anna.answer([1] * 4)).taken
    await hall.kill(lead)
    hall.hub.partition(bert.id, who("lead").peer_id)
    lead = await hall.leader(pace=pace)
    await anna.transport.connect(lead.transport.addresses()[0], timeout=1)
    await until(lambda: lead.coordinator.present() == {anna.id})
    await asyncio.sleep(0.3)
    assert is_at([lead], 1, at)
    await hall.wait(lead, PRESENT_SECONDS + 1)  # bert does not come back
    await until(lambda: lead.following.round is not None and lead.following.round.state is not at)


async def test_a_standby_forgets_old_rounds_and_counts_on_in_new_ones(hall: Hall) -> None:
    pace = Pace(60, 30, 1, 1.0, groups=0, tasks=2, samples=1)
    lead, spare = await hall.leader(pace=pace, patience=600), await hall.leader("spare", pace=pace, patience=600)
    await spare.transport.connect(lead.transport.addresses()[0], timeout=1)
    members = await hall.swarm(lead, "anna")
    both, (anna,) = [lead, spare], members
    for number in range(1, IDLE_ROUNDS + 3):
        await until(lambda: is_at(both, number, State.open) and is_at(members, number, State.open))  # noqa: B023
        await until(lambda: all(one.coordinator._number == number for one in both))  # noqa: B023
        for one in both:  # the same group every time
            one.coordinator._attendance.announced(anna.id, b"g" * 32)
        hall.clock.ahead += pace.round_seconds
        await until(lambda: is_at(members, number, State.closing))  # noqa: B023
        assert (await anna.answer([1] * 4)).taken
    await until(lambda: is_at(both, number + 1, State.open))
    await until(lambda: all(one.coordinator._number == number + 1 for one in both))
    for one in both:
        assert one.reports._db.all("SELECT number, groups FROM coordinator_heard ORDER BY number") == [
            (old, 1) for old in range(number + 1 - IDLE_ROUNDS, number + 1)
        ]


async def test_a_standby_that_slept_hears_its_leader_before_it_takes_over(hall: Hall) -> None:
    lead = await hall.leader(patience=30)
    own = Clock()
    spare = Leader(hall.hub, hall.path, "spare", hall.manifest, own, patience=30, settle=0.2)
    hall.peers.append(await spare.start())
    await spare.transport.connect(lead.transport.addresses()[0], timeout=1)
    await until(lambda: spare.following.heard_from(lead.id) is not None)
    await asyncio.sleep(0.3)
    own.ahead += 40
    await asyncio.sleep(0.3)
    assert not spare.coordinator.leading
    own.ahead -= 3600  # it was an hour fast all the time
    await until(lambda: (spare.following.heard_from(lead.id) or 0) <= own())
    await hall.kill(lead)
    spare.following._heard[lead.id] = own() + 3600
    own.ahead += 9
    spare.coordinator._patience = 5
    await until(lambda: spare.coordinator.leading)


async def test_members_are_told_of_a_coordinator_whose_clock_is_ahead(hall: Hall) -> None:
    hall.clock.ahead = 3600
    lead = await hall.leader()
    hall.clock, ahead = Clock(), hall.clock
    token = lead.membership.invite(uses=1, expires=ahead() + 60, role="member")
    anna = await hall.member("anna", lead, token=token)
    await until(lambda: anna.kinds("clock"))
    await asyncio.sleep(0.5)  # it asks for the log some times
    (said,) = anna.kinds("clock")
    assert (
        said.startswith(f"the clock of coordinator {lead.id[-8:]} is 3600 s ahead of this machine's: ")
        or "3599" in said
    )
    forged = seal_round(who("eve"), lead.following.round, ahead())
    assert not anna.following.hear(forged, "x")
    assert len(anna.kinds("clock")) == 1
    assert not lead.kinds("clock")
    ahead.ahead = 0
    await until(lambda: anna.entering.listed and anna.following.round is not None)


async def test_a_leader_whose_clock_was_ahead_goes_on_when_it_is_set(hall: Hall) -> None:
    hall.clock.ahead = 3600
    lead = await hall.leader(settle=0.2)
    await asyncio.sleep(0.05)
    hall.clock.ahead = 0
    await until(lambda: lead.following.round is not None)
    members = anna, bert = await hall.swarm(lead, "anna", "bert")
    await until(lambda: is_at(members, 1, State.open))
    own, hall.clock.ahead = Clock(), 86400  # the members' clocks are that of the hall, but anna's is right
    anna.following._clock = bert.following._clock = own
    await until(lambda: is_at([lead], 1, State.closing))
    hall.clock.ahead = 0
    await until(lambda: is_at(members, 2, State.open))
    assert not anna.following.faults


@pytest.mark.parametrize("at", [State.open, State.closing])
async def test_a_standby_takes_over_in_mid_round(hall: Hall, at: State) -> None:
    pace = PACE if at is State.open else Pace(1, 30, 1, 1.0, groups=0, tasks=2, samples=1)
    lead = await hall.leader(pace=pace)
    spare = await hall.leader("spare", pace=pace)
    await spare.transport.connect(lead.transport.addresses()[0], timeout=1)
    anna, bert = await hall.swarm(lead, "anna", "bert")
    for member in (anna, bert):
        await member.transport.connect(spare.transport.addresses()[0], timeout=1)
    if at is State.open:
        await until(lambda: is_at([anna, bert], 1, State.open))
    else:
        await until(lambda: is_at([anna, bert], 1, State.closing))
        assert (await anna.answer([1] * 4)).taken
    await until(lambda: is_at([spare], 1, at) and spare.following.members == lead.following.members)
    assert set(lead.coordinator.heard()) == {spare.id}
    assert lead.id in anna.following.heard()
    await hall.kill(lead)
    await until(lambda: anna.following.leader == bert.following.leader == spare.id)
    assert spare.coordinator.leading
    assert is_at([anna, bert], 1, at)
    hall.clock.ahead += PACE.round_seconds if at is State.open else 0
    await until(lambda: is_at([anna, bert], 1, State.closing))
    assert (await anna.answer([1] * 4)).taken
    assert (await bert.answer([0] * 4)).taken
    await until(lambda: anna.following.board is not None)
    # the old leader comes back, hears of the new term and stands by
    lead = await hall.leader(settle=0.5)
    await lead.transport.connect(anna.transport.addresses()[0], timeout=1)
    await until(lambda: lead.following.leader == spare.id)
    assert not lead.coordinator.leading
    await asyncio.sleep(0.3)
    assert anna.following.leader == spare.id
    assert not (anna.following.faults)
    assert not (bert.following.faults)
    assert not (lead.following.faults)
    # and takes its turn when the other one dies
    await hall.kill(spare)
    await until(lambda: anna.following.leader == lead.id)
    record = anna.following.round
    assert record is not None
    assert record.term == 2
    assert {one.peer for one in lead.membership.members()} == {anna.id, bert.id}


async def test_strangers_that_never_answer_keep_no_standby_from_its_leader(hall: Hall) -> None:
    hall.manifest = manifest_of("lead", "spare", listed_only=False)
    lead, spare = await hall.leader(patience=3), await hall.leader("spare", patience=3)
    await spare.transport.connect(lead.transport.addresses()[0], timeout=1)
    await until(lambda: spare.following.round is not None)
    asked = asyncio.Event()

    async def silent(peer: str, data: bytes) -> bytes:
        asked.set()
        await asyncio.sleep(1000)
        return b""

    for number in range(MAX_WAITING_PEERS + 8):
        stranger = hall.hub.transport(who(f"stranger {number}"))
        stranger.serve(ROUNDS_PROTOCOL, silent, max_request=1024)
        await stranger.start()
        await stranger.connect(spare.transport.addresses()[0], timeout=1)
    await asyncio.wait_for(asked.wait(), 5)
    before = hall.clock()
    await until(lambda: (spare.following.heard_from(lead.id) or 0) > before + 1, 10)
    assert len(spare.following._waiting) <= MAX_WAITING_PEERS + 2
    assert not spare.coordinator.leading


async def test_without_any_coordinator_the_log_is_still_had_from_members(hall: Hall) -> None:
    lead = await hall.leader()
    (anna,) = await hall.swarm(lead, "anna")
    await until(lambda: is_at([anna], 1, State.open) and anna.following.members is not None)
    head = anna.following.round
    await hall.kill(lead)
    bert = await hall.member("bert", anna)
    await until(lambda: bert.following.round == head and bert.following.members == anna.following.members)
    assert bert.access.refused(who("eve").peer_id)


async def test_a_coordinator_that_signs_two_records_for_one_place_is_named_by_all(hall: Hall) -> None:
    lead = await hall.leader()
    anna, bert, _carl = members = await hall.swarm(lead, "anna", "bert", "carl")
    await until(lambda: is_at(members, 1, State.open))
    record = anna.following.round
    assert record is not None
    await bert.transport.connect(anna.transport.addresses()[0], timeout=1)
    await hall.kill(lead)
    # the other version is shown to bert only
    other = seal_round(who("lead"), msgspec.structs.replace(record, closes=record.closes + 60), hall.clock())
    assert bert.following.hear(other, who("lead").peer_id) is False
    await until(lambda: anna.following.faults and bert.following.faults)  # bert hands the proof on
    for member in (anna, bert):
        assert member.following.faults[lead.id].reason == "equivocation"
        assert member.following.round is None  # by the clock's epochs from now on
        assert member.following.leader is None
        assert len(member.kinds("coordinator_fault")) == 1
        assert f"coordinator {lead.id}: equivocation: signed two records for open of round 1" in member.events[-1][1]
    # it stays so after a restart
    await hall.kill(anna)
    again = Bare(hall.hub, hall.path, "anna", hall.manifest, hall.clock)
    assert lead.id in again.following.faults
    assert again.following.round is None
    assert again.following.hear(other, "x") is False


def forged(record: Round, **changes) -> bytes:
    return seal_round(who("lead"), msgspec.structs.replace(record, **changes), record.opened)


async def test_of_a_false_coordinator_only_the_proof_is_relayed_and_a_third_node_learns_by_it(hall: Hall) -> None:
    lead = await hall.leader()
    anna, bert = members = await hall.swarm(lead, "anna", "bert")
    await until(lambda: is_at(members, 1, State.open))
    head = anna.following.head
    assert head is not None
    await hall.kill(lead)
    # it may sign any number of revisions, each after the one before
    signed, previous = list[bytes](), head.digest
    for more in (1, 2, 3):
        revision = head.record.revision + more
        signed.append(forged(head.record, revision=revision, previous=previous, members=bytes([more]) * 32))
        previous = hashlib.sha256(signed[-1]).digest()
    first_of_two, *others = signed
    second_of_two = forged(head.record, revision=head.record.revision + 1, previous=head.digest, members=b"m" * 32)
    assert anna.following.check("x", first_of_two)
    assert anna.following.hear(first_of_two, "x")
    assert anna.following.check("x", second_of_two)  # it is relayed before it is known what it proves
    anna.following.hear(second_of_two, "x")
    assert set(anna.following.faults) == {lead.id}
    broken = forged(
        head.record, state=State.closing, previous=head.digest, seed=b"x" * 32, answers_by=9, members=b"b" * 32
    )
    proof, rest = [first_of_two, second_of_two], [*others, broken]
    for following in (anna.following, Following(anna.transport, anna.log, hall.manifest, hall.clock)):  # a restart
        assert [following.check("x", sealed) for sealed in proof] == [True, True]
        assert [following.check("x", sealed) for sealed in rest] == [False, False, False]
    assert all(bert.following.check("x", sealed) for sealed in rest)  # it knows of no fault

    request = msgspec.msgpack.encode(RoundsRequest(hall.manifest.digest))
    answer = msgspec.msgpack.decode(await anna.following._answer_rounds(bert.id, request), type=RoundsResponse)
    assert (answer.records, list(answer.proofs)) == ((), proof)
    for sealed in proof:
        bert.following.hear(sealed, anna.id)
    assert bert.following.faults[lead.id].reason == "equivocation"


async def test_what_breaks_a_promise_is_named(hall: Hall) -> None:
    lead = await hall.leader()
    anna, bert = await hall.swarm(lead, "anna", "bert")
    await until(lambda: is_at([anna, bert], 1, State.open))
    head, record = anna.following.head, anna.following.round
    assert head is not None
    assert record is not None
    await hall.kill(lead)
    lie = {"state": State.closing, "previous": head.digest, "seed": b"x" * 32, "answers_by": 9}
    assert not anna.following.hear(forged(record, **lie), "x")
    assert anna.following.faults[lead.id].reason == "broken_commitment"
    changed = {**lie, "commitment": commitment_of(b"x" * 32)}
    assert not bert.following.hear(forged(record, **changed), "x")
    assert bert.following.faults[lead.id].reason in {"broken_chain", "broken_commitment"}


async def test_what_may_not_follow_is_found_out_whichever_comes_first(hall: Hall) -> None:
    lead = await hall.leader()
    (anna,) = await hall.swarm(lead, "anna")
    await until(lambda: is_at([anna], 1, State.open))
    head = anna.following.head
    assert head is not None
    await hall.kill(lead)
    revised = forged(head.record, revision=head.record.revision + 1, previous=head.digest, members=b"m" * 32)
    later = {"revision": head.record.revision + 2, "closes": head.record.closes + 60}
    assert anna.following.hear(forged(head.record, previous=hashlib.sha256(revised).digest(), **later), "x")
    assert not anna.following.faults  # nobody can tell yet
    anna.following.hear(revised, "x")
    assert anna.following.faults[lead.id].reason == "broken_chain"
    assert anna.following.round is None


async def test_two_records_after_the_same_one_are_two_versions_too(hall: Hall) -> None:
    lead = await hall.leader()
    (anna,) = await hall.swarm(lead, "anna")
    await until(lambda: is_at([anna], 1, State.open))
    await hall.kill(lead)
    record = anna.following.round
    assert record is not None
    # another revision, after the record that the known one follows
    assert not anna.following.hear(forged(record, revision=record.revision + 7, members=b"x" * 32), "x")
    assert anna.following.faults[lead.id].reason == "equivocation"


async def test_hostile_bytes_change_nothing(hall: Hall) -> None:
    lead = await hall.leader()
    (anna,) = await hall.swarm(lead, "anna")
    await until(lambda: is_at([anna], 1, State.open))
    head = anna.following.round
    assert head is not None
    topic = rounds_topic(hall.manifest.digest)
    for raw in (b"", b"\x97\x02" + b"\x91" * 100, seal_round(who("eve"), head, hall.clock())):
        assert not anna.following.check("x", raw)
        assert not anna.following.hear(raw, "x")
    eve = await hall.member("eve", anna)
    await eve.transport.publish(topic, seal_round(who("eve"), head, hall.clock()))

    async def lying(peer: str, data: bytes) -> bytes:
        return msgspec.msgpack.encode(RoundsResponse((b"rubbish", seal_round(who("eve"), head, 1.0)), (b"no proof",)))

    eve.transport.serve(ROUNDS_PROTOCOL, lying, max_request=1024)
    await anna.following.ask(eve.id)
    eve.transport.serve(ROUNDS_PROTOCOL, lambda peer, data: asyncio.sleep(0, b"\xff" * 9), max_request=1024)
    await anna.following.ask(eve.id)
    for data in (b"\xc1", msgspec.msgpack.encode(RoundsRequest(b"x" * 32))):
        with pytest.raises(RequestFailed):
            await eve.transport.request(anna.id, ROUNDS_PROTOCOL, data, max_bytes=1 << 20, timeout=1)
    assert anna.following.round == head
    assert not anna.following.faults
    flood = [anna.following.check("flooder", b"") for _ in range(100)]
    assert not any(flood)


async def test_a_report_that_does_not_fit_is_refused_and_long_answers_score_nothing(hall: Hall) -> None:
    lead = await hall.leader()
    (anna,) = await hall.swarm(lead, "anna")
    await until(lambda: is_at([anna], 1, State.open))
    hall.clock.ahead += PACE.round_seconds
    await until(lambda: is_at([anna], 1, State.closing))
    digest = hall.manifest.digest

    async def report(*answers: str | None) -> ReportResponse:
        raw = await anna.transport.request(
            lead.id,
            REPORT_PROTOCOL,
            msgspec.msgpack.encode(ReportRequest(digest, 1, answers)),
            max_bytes=1000,
            timeout=2,
        )
        return msgspec.msgpack.decode(raw, type=ReportResponse)

    assert await report("one") == ReportResponse(False, "1 answers, 4 were asked for")
    with pytest.raises(RequestFailed):
        await anna.transport.request(lead.id, REPORT_PROTOCOL, b"\xc1", max_bytes=1000, timeout=2)
    with pytest.raises(RequestFailed):
        await report("x" * (1 << 20))
    # together at most 2 x 512 + 2 x 65,536: what is scored at all
    assert "longer than" in (await report(*("x" * 40_000,) * 4)).detail
    lead.reports.waiting_bytes += MAX_WAITING  # as if all others had just handed in
    with pytest.raises(Busy):
        await report("0 1", "0 1", "0 1", "0 1")
    lead.reports.waiting_bytes -= MAX_WAITING
    record = anna.following.round
    assert record is not None
    assert (await report("long " * 200, "0 1", "0 1", "0 1")).taken  # 1,000 bytes where 4 tokens are allowed
    await until(lambda: anna.following.board is not None)
    board = anna.following.board
    assert board is not None
    assert board.standings[0].scores == (0.0, 0.0)


async def test_a_member_whose_answers_are_too_large_is_not_banned_for_it(hall: Hall) -> None:
    hall.manifest = manifest_of("lead", listed_only=False)
    lead = await hall.leader()
    anna, eve = await hall.member("anna", lead), hall.hub.transport(who("eve"))
    await eve.start()
    await eve.connect(lead.transport.addresses()[0], timeout=1)
    await until(lambda: anna.entering.listed and lead.coordinator.access.takes_part(anna.id))
    for transport in (anna.transport, eve):
        for _ in range(2 * OFFENCES):
            with pytest.raises(TransportError):
                await transport.request(lead.id, REPORT_PROTOCOL, bytes(2 << 20), max_bytes=1000, timeout=2)
            await asyncio.sleep(0.01)
    assert lead.coordinator.access.bans.of("reputation") == {eve.peer_id}


async def test_a_scorer_that_fails_for_a_while_holds_the_round_up(hall: Hall) -> None:
    failures = iter(range(3))

    async def unsteady(items):
        if next(failures, None) is not None:
            raise ScoringUnavailable("out of breath")
        return await score(items)

    lead = await hall.leader(score=unsteady)
    (anna,) = await hall.swarm(lead, "anna")
    await until(lambda: is_at([anna], 1, State.open))
    hall.clock.ahead += PACE.round_seconds
    await until(lambda: is_at([anna], 1, State.closing))
    assert (await anna.answer([1, 1, 1, 1])).taken
    await until(lambda: anna.following.board is not None)
    assert lead.kinds("evaluate") == ["answers wait to be scored: out of breath"]
    board = anna.following.board
    assert board is not None
    assert board.standings[0].mean == 1.0


def test_the_first_record_waits() -> None:
    manifest = manifest_of("lead")
    from protocol.rounds import Facts

    record = first(manifest, Facts(b"m" * 32, 0, 0, 0, b"", (1, 1)), PACE)
    assert record.state is State.waiting
