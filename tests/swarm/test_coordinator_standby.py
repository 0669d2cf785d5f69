"""Take-over in mid round, standbys, clocks that are set, and a log without any coordinator."""

import asyncio

import pytest

from protocol.board import list_bytes
from protocol.messages import LISTS_PROTOCOL, ROUNDS_PROTOCOL
from protocol.rounds import Pace, State, seal_round
from swarm.coordination.attendance import PRESENT_SECONDS
from swarm.coordination.log_sync import MAX_WAITING as MAX_WAITING_PEERS
from swarm.coordination.reception import IDLE_ROUNDS
from swarm.coordination.succession import LIST_SECONDS
from swarm.database import StoreError
from tests.swarm.coordinated import PACE, Clock, Hall, Leader, is_at, manifest_of
from tests.swarm.world import until, who


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
    await until(lambda: lead.chain.round is not None and lead.chain.round.state is not at)


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
    await until(lambda: spare.chain.heard_from(lead.id) is not None)
    await asyncio.sleep(0.3)
    own.ahead += 40
    await asyncio.sleep(0.3)
    assert not spare.coordinator.leading
    own.ahead -= 3600  # it was an hour fast all the time
    await until(lambda: (spare.chain.heard_from(lead.id) or 0) <= own())
    await hall.kill(lead)
    spare.chain._heard[lead.id] = own() + 3600
    own.ahead += 9
    spare.coordinator._succession._patience = 5
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
    forged = seal_round(who("eve"), lead.chain.round, ahead())
    assert not anna.sync.hear(forged, "x")
    assert len(anna.kinds("clock")) == 1
    assert not lead.kinds("clock")
    ahead.ahead = 0
    await until(lambda: anna.entering.listed and anna.chain.round is not None)


async def test_a_leader_whose_clock_was_ahead_goes_on_when_it_is_set(hall: Hall) -> None:
    hall.clock.ahead = 3600
    lead = await hall.leader(settle=0.2)
    await asyncio.sleep(0.05)
    hall.clock.ahead = 0
    await until(lambda: lead.chain.round is not None)
    members = anna, bert = await hall.swarm(lead, "anna", "bert")
    await until(lambda: is_at(members, 1, State.open))
    own, hall.clock.ahead = Clock(), 86400  # the members' clocks are that of the hall, but anna's is right
    anna.chain._clock = bert.chain._clock = own
    await until(lambda: is_at([lead], 1, State.closing))
    hall.clock.ahead = 0
    await until(lambda: is_at(members, 2, State.open))
    assert not anna.chain.faults


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
    await until(lambda: is_at([spare], 1, at) and spare.chain.members == lead.chain.members)
    assert set(lead.coordinator.heard()) == {spare.id}
    assert lead.id in anna.chain.heard()
    await hall.kill(lead)
    await until(lambda: anna.chain.leader == bert.chain.leader == spare.id)
    assert spare.coordinator.leading
    assert is_at([anna, bert], 1, at)
    hall.clock.ahead += PACE.round_seconds if at is State.open else 0
    await until(lambda: is_at([anna, bert], 1, State.closing))
    assert (await anna.answer([1] * 4)).taken
    assert (await bert.answer([0] * 4)).taken
    await until(lambda: anna.chain.board is not None)
    # the old leader comes back, hears of the new term and stands by
    lead = await hall.leader(settle=0.5)
    await lead.transport.connect(anna.transport.addresses()[0], timeout=1)
    await until(lambda: lead.chain.leader == spare.id)
    assert not lead.coordinator.leading
    await asyncio.sleep(0.3)
    assert anna.chain.leader == spare.id
    assert not (anna.chain.faults)
    assert not (bert.chain.faults)
    assert not (lead.chain.faults)
    # and takes its turn when the other one dies
    await hall.kill(spare)
    await until(lambda: anna.chain.leader == lead.id)
    record = anna.chain.round
    assert record is not None
    assert record.term == 2
    assert {one.peer for one in lead.membership.members()} == {anna.id, bert.id}


async def test_strangers_that_never_answer_keep_no_standby_from_its_leader(hall: Hall) -> None:
    hall.manifest = manifest_of("lead", "spare", listed_only=False)
    lead, spare = await hall.leader(patience=3), await hall.leader("spare", patience=3)
    await spare.transport.connect(lead.transport.addresses()[0], timeout=1)
    await until(lambda: spare.chain.round is not None)
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
    await until(lambda: (spare.chain.heard_from(lead.id) or 0) > before + 1, 10)
    assert len(spare.sync._waiting) <= MAX_WAITING_PEERS + 2
    assert not spare.coordinator.leading


async def test_without_any_coordinator_the_log_is_still_had_from_members(hall: Hall) -> None:
    lead = await hall.leader()
    (anna,) = await hall.swarm(lead, "anna")
    await until(lambda: is_at([anna], 1, State.open) and anna.chain.members is not None)
    head = anna.chain.round
    await hall.kill(lead)
    bert = await hall.member("bert", anna)
    await until(lambda: bert.chain.round == head and bert.chain.members == anna.chain.members)
    assert bert.access.refused(who("eve").peer_id)


async def test_a_standby_that_cannot_write_does_not_tell_that_it_took_over(
    hall: Hall, monkeypatch: pytest.MonkeyPatch
) -> None:
    lead, spare = await hall.leader(), await hall.leader("spare")
    await spare.transport.connect(lead.transport.addresses()[0], timeout=1)
    await until(lambda: spare.chain.members is not None)
    with monkeypatch.context() as full:
        full.setattr(spare.log, "add", no_room)
        await hall.kill(lead)
        await until(lambda: spare.kinds("store") != [])
        assert not [said for said in spare.kinds("coordinator") if "over from" in said]
    await until(lambda: f"took over from {lead.id}, term 1" in spare.kinds("coordinator"))


async def test_a_leader_that_cannot_write_is_taken_over_from_and_stands_by(
    hall: Hall, monkeypatch: pytest.MonkeyPatch
) -> None:
    pace = Pace(1, 30, 1, 1.0, groups=0, tasks=2, samples=1)
    lead, spare = await hall.leader(pace=pace), await hall.leader("spare", pace=pace)
    await spare.transport.connect(lead.transport.addresses()[0], timeout=1)
    (anna,) = await hall.swarm(lead, "anna")
    await anna.transport.connect(spare.transport.addresses()[0], timeout=1)
    await until(lambda: is_at([anna], 1, State.open) and spare.chain.head == anna.chain.head)
    with monkeypatch.context() as full:
        full.setattr(lead.log, "add", no_room)
        await until(lambda: is_at([anna], 1, State.closing) and anna.chain.leader == spare.id)
        assert lead.coordinator.leading  # as far as it can tell
    await until(lambda: lead.chain.leader == spare.id)
    assert not lead.coordinator.leading
    assert not anna.chain.faults


def no_room(*_: object) -> None:
    raise StoreError("database or disk is full")


async def keep_lists_back(lead: Leader) -> None:
    """As one that is killed between a record and the question for the list that it names."""

    async def dying(peer: str, data: bytes) -> bytes:
        raise ConnectionError

    lead.transport.serve(LISTS_PROTOCOL, dying, max_request=4096)


async def test_a_standby_without_any_member_list_waits_for_one(hall: Hall) -> None:
    lead = await hall.leader()
    (anna,) = await hall.swarm(lead, "anna")
    await until(lambda: is_at([anna], 1, State.open))
    await keep_lists_back(lead)
    spare = await hall.leader("spare")
    await spare.transport.connect(lead.transport.addresses()[0], timeout=1)
    await until(lambda: spare.chain.round == lead.chain.round)
    await hall.kill(lead)
    await hall.wait(spare, 3 * LIST_SECONDS)
    assert not spare.coordinator.leading
    (said,) = spare.kinds("members")
    assert said.startswith("cannot take over from a silent leader: the member list is not here")
    await anna.transport.connect(spare.transport.addresses()[0], timeout=1)
    await until(lambda: anna.chain.leader == spare.id)
    assert [one.peer for one in spare.membership.members()] == [anna.id]
    await asyncio.sleep(0.3)
    assert anna.entering.listed


@pytest.mark.parametrize("told", [True, False])
async def test_a_standby_with_an_older_list_asks_for_the_last_one_and_waits_for_it(hall: Hall, told: bool) -> None:
    lead, spare = await hall.leader(), await hall.leader("spare")
    await spare.transport.connect(lead.transport.addresses()[0], timeout=1)
    anna, eve = await hall.swarm(lead, "anna", "eve")
    await anna.transport.connect(spare.transport.addresses()[0], timeout=1)
    await until(lambda: spare.chain.members is not None and spare.chain.members == lead.chain.members)
    await keep_lists_back(lead)
    lead.membership.kick(eve.id, "")
    await until(lambda: lead.chain.members is not None and eve.id in lead.chain.members.kicked)
    await until(lambda: spare.chain.head == lead.chain.head)
    digest, body = list_bytes(lead.membership.signed_list())
    await hall.kill(lead)
    await hall.wait(spare, 10)
    assert not spare.coordinator.leading
    if told:
        anna.chain.keep_list(digest, body)
    else:
        await hall.wait(spare, LIST_SECONDS + 2)
    await until(lambda: spare.coordinator.leading)
    assert bool(spare.membership.kicked()) is told
