"""A coordinator with members over the in-memory transport: rounds, boards, reports, restarts."""

import asyncio

import msgspec
import pytest

from protocol.messages import REPORT_PROTOCOL, ReportRequest, ReportResponse
from protocol.rounds import Pace, State, commitment_of, first
from swarm.coordination.complaints import OFFENCES
from swarm.coordination.coordinator import MAX_WAITING, ScoringUnavailable
from swarm.transport import Busy, RequestFailed, TransportError
from tests.swarm.coordinated import PACE, Hall, is_at, manifest_of, score
from tests.swarm.world import until, who


async def test_rounds_are_opened_closed_evaluated_and_followed_by_all(hall: Hall) -> None:
    lead = await hall.leader()
    anna, bert = await hall.swarm(lead, "anna", "bert")
    both = [anna, bert]
    await until(lambda: is_at(both, 1, State.open))
    opened = anna.chain.round
    assert opened is not None
    assert opened.mix == (333, 1000)  # the manifest's, before anything was measured
    hall.clock.ahead += PACE.round_seconds
    await until(lambda: is_at(both, 1, State.closing))
    told = anna.chain.round
    assert told is not None
    assert commitment_of(told.seed) == opened.commitment
    assert (await anna.answer([1, 0, 1, 1])).taken
    assert (await anna.answer([1, 1, 1, 1])) == ReportResponse(True, "handed in before; the first ones count")
    assert (await bert.answer([None, None, 0.5, 0.5], {anna.id: 3})).taken
    await until(lambda: all(member.chain.board is not None for member in both))
    board = bert.chain.board
    assert board is not None
    assert [(one.peer, one.scores, one.mean) for one in board.standings] == [
        (anna.id, (0.5, 1.0), 0.75),
        (bert.id, (None, 0.5), 0.25),
    ]
    await until(lambda: is_at(both, 2, State.open))  # all had answered: nobody waits for the time
    after = anna.chain.round
    assert after is not None
    # by what was measured, 0.5 and 0.75: 1 x 4 p (1 - p) to 3 x 0.75
    assert after.mix == (444, 1000)
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
    await until(lambda: anna.chain.board is not None)
    board = anna.chain.board
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
        await until(lambda: all(m.chain.board and m.chain.board.number == number for m in members))  # noqa: B023
    board = anna.chain.board
    assert board is not None
    # heard: 4 of carl in two rounds, of which 1000 were claimed; 2 of bert
    assert {one.peer: round(one.credit, 4) for one in board.standings} == {
        anna.id: 0.0,
        bert.id: round(0.1 / 3, 4),
        carl.id: 0.05,
    }


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
    opened = anna.chain.round
    await hall.kill(lead)
    lead = await hall.leader()
    assert lead.chain.round == opened
    await until(lambda: {anna.id, bert.id} <= set(lead.transport.peers()))  # they ask for the log
    hall.clock.ahead += PACE.round_seconds
    await until(lambda: is_at([anna, bert], 1, State.closing))
    assert (await anna.answer([1] * 4)).taken
    await hall.kill(lead)
    lead = await hall.leader()
    assert (await bert.answer([0] * 4)).taken
    await until(lambda: anna.chain.board is not None)
    board = anna.chain.board
    assert board is not None
    assert [(one.peer, one.mean) for one in board.standings] == [(anna.id, 1.0), (bert.id, 0.0)]
    assert not anna.chain.faults


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
    record = anna.chain.round
    assert record is not None
    assert (await report("long " * 200, "0 1", "0 1", "0 1")).taken  # 1,000 bytes where 4 tokens are allowed
    await until(lambda: anna.chain.board is not None)
    board = anna.chain.board
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
    await until(lambda: anna.chain.board is not None)
    assert lead.kinds("evaluate") == ["answers wait to be scored: out of breath"]
    board = anna.chain.board
    assert board is not None
    assert board.standings[0].mean == 1.0


def test_the_first_record_waits() -> None:
    manifest = manifest_of("lead")
    from protocol.rounds import Facts

    record = first(manifest, Facts(b"m" * 32, 0, 0, 0, b"", (1, 1)), PACE)
    assert record.state is State.waiting
