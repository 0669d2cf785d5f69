"""Coordinators that sign what they must not are named by all, and followed by nobody."""

import asyncio
import hashlib

import msgspec
import pytest

from protocol.messages import ROUNDS_PROTOCOL, RoundsRequest, RoundsResponse, rounds_topic
from protocol.rounds import Round, State, commitment_of, seal_round, take_over
from swarm.coordination.chain import Chain
from swarm.coordination.log_sync import LogSync
from swarm.coordination.round_log import Kept
from swarm.transport import RequestFailed
from tests.swarm.coordinated import PACE, Bare, Hall, Leader, is_at
from tests.swarm.world import until, who


async def test_a_coordinator_that_signs_two_records_for_one_place_is_named_by_all(hall: Hall) -> None:
    lead = await hall.leader()
    anna, bert, _carl = members = await hall.swarm(lead, "anna", "bert", "carl")
    await until(lambda: is_at(members, 1, State.open))
    record = anna.chain.round
    assert record is not None
    await bert.transport.connect(anna.transport.addresses()[0], timeout=1)
    await hall.kill(lead)
    # the other version is shown to bert only
    other = seal_round(who("lead"), msgspec.structs.replace(record, closes=record.closes + 60), hall.clock())
    assert bert.sync.hear(other, who("lead").peer_id) is False
    await until(lambda: anna.chain.faults and bert.chain.faults)  # bert hands the proof on
    for member in (anna, bert):
        assert member.chain.faults[lead.id].reason == "equivocation"
        assert member.chain.round is None  # by the clock's epochs from now on
        assert member.chain.leader is None
        assert len(member.kinds("coordinator_fault")) == 1
        assert f"coordinator {lead.id}: equivocation: signed two records for open of round 1" in member.events[-1][1]
    # it stays so after a restart
    await hall.kill(anna)
    again = Bare(hall.hub, hall.path, "anna", hall.manifest, hall.clock)
    assert lead.id in again.chain.faults
    assert again.chain.round is None
    assert again.sync.hear(other, "x") is False


def forged(record: Round, **changes) -> bytes:
    return seal_round(who("lead"), msgspec.structs.replace(record, **changes), record.opened)


async def test_of_a_false_coordinator_only_the_proof_is_relayed_and_a_third_node_learns_by_it(hall: Hall) -> None:
    lead = await hall.leader()
    anna, bert = members = await hall.swarm(lead, "anna", "bert")
    await until(lambda: is_at(members, 1, State.open))
    head = anna.chain.head
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
    assert anna.sync.check("x", first_of_two)
    assert anna.sync.hear(first_of_two, "x")
    assert anna.sync.check("x", second_of_two)  # it is relayed before it is known what it proves
    anna.sync.hear(second_of_two, "x")
    assert set(anna.chain.faults) == {lead.id}
    broken = forged(
        head.record, state=State.closing, previous=head.digest, seed=b"x" * 32, answers_by=9, members=b"b" * 32
    )
    proof, rest = [first_of_two, second_of_two], [*others, broken]
    again = Chain(anna.log, hall.manifest, hall.clock, me=anna.id)
    for sync in (anna.sync, LogSync(anna.transport, again, hall.clock)):  # a restart
        assert [sync.check("x", sealed) for sealed in proof] == [True, True]
        assert [sync.check("x", sealed) for sealed in rest] == [False, False, False]
    assert all(bert.sync.check("x", sealed) for sealed in rest)  # it knows of no fault

    request = msgspec.msgpack.encode(RoundsRequest(hall.manifest.digest))
    answer = msgspec.msgpack.decode(await anna.sync._answer_rounds(bert.id, request), type=RoundsResponse)
    assert (answer.records, list(answer.proofs)) == ((), proof)
    for sealed in proof:
        bert.sync.hear(sealed, anna.id)
    assert bert.chain.faults[lead.id].reason == "equivocation"


async def test_what_breaks_a_promise_is_named(hall: Hall) -> None:
    lead = await hall.leader()
    anna, bert = await hall.swarm(lead, "anna", "bert")
    await until(lambda: is_at([anna, bert], 1, State.open))
    head, record = anna.chain.head, anna.chain.round
    assert head is not None
    assert record is not None
    await hall.kill(lead)
    lie = {"state": State.closing, "previous": head.digest, "seed": b"x" * 32, "answers_by": 9}
    assert not anna.sync.hear(forged(record, **lie), "x")
    assert anna.chain.faults[lead.id].reason == "broken_commitment"
    changed = {**lie, "commitment": commitment_of(b"x" * 32)}
    assert not bert.sync.hear(forged(record, **changed), "x")
    assert bert.chain.faults[lead.id].reason in {"broken_chain", "broken_commitment"}


async def left(hall: Hall) -> tuple[Leader, Bare, Kept]:
    """A leader that is gone, a member that knows of its first round, and the newest record of that."""
    lead = await hall.leader()
    (anna,) = await hall.swarm(lead, "anna")
    await until(lambda: is_at([anna], 1, State.open))
    await hall.kill(lead)
    assert anna.chain.head is not None
    return lead, anna, anna.chain.head


async def test_what_may_not_follow_is_found_out_whichever_comes_first(hall: Hall) -> None:
    lead, anna, head = await left(hall)
    revised = forged(head.record, revision=head.record.revision + 1, previous=head.digest, members=b"m" * 32)
    later = {"revision": head.record.revision + 2, "closes": head.record.closes + 60}
    assert anna.sync.hear(forged(head.record, previous=hashlib.sha256(revised).digest(), **later), "x")
    assert not anna.chain.faults  # nobody can tell yet
    anna.sync.hear(revised, "x")
    assert anna.chain.faults[lead.id].reason == "broken_chain"
    assert anna.chain.round is None


async def test_two_records_after_the_same_one_are_two_versions_too(hall: Hall) -> None:
    lead, anna, head = await left(hall)
    # another revision, after the record that the known one follows
    assert not anna.sync.hear(forged(head.record, revision=head.record.revision + 7, members=b"x" * 32), "x")
    assert anna.chain.faults[lead.id].reason == "equivocation"


async def test_a_term_that_a_coordinator_gives_itself_is_no_way_to_a_second_version(hall: Hall) -> None:
    lead, anna, head = await left(hall)
    before = anna.chain.log.find(head.record.previous)
    assert before is not None
    again = take_over(before.record, before.digest, head.record.term + 2, hall.clock(), PACE, lambda number: b"s" * 32)
    anna.sync.hear(seal_round(who("lead"), again, hall.clock()), "x")
    assert anna.chain.faults[lead.id].reason == "equivocation"


async def test_hostile_bytes_change_nothing(hall: Hall) -> None:
    lead = await hall.leader()
    (anna,) = await hall.swarm(lead, "anna")
    await until(lambda: is_at([anna], 1, State.open))
    head = anna.chain.round
    assert head is not None
    topic = rounds_topic(hall.manifest.digest)
    for raw in (b"", b"\x97\x02" + b"\x91" * 100, seal_round(who("eve"), head, hall.clock())):
        assert not anna.sync.check("x", raw)
        assert not anna.sync.hear(raw, "x")
    eve = await hall.member("eve", anna)
    await eve.transport.publish(topic, seal_round(who("eve"), head, hall.clock()))

    async def lying(peer: str, data: bytes) -> bytes:
        return msgspec.msgpack.encode(RoundsResponse((b"rubbish", seal_round(who("eve"), head, 1.0)), (b"no proof",)))

    eve.transport.serve(ROUNDS_PROTOCOL, lying, max_request=1024)
    await anna.sync.ask(eve.id)
    eve.transport.serve(ROUNDS_PROTOCOL, lambda peer, data: asyncio.sleep(0, b"\xff" * 9), max_request=1024)
    await anna.sync.ask(eve.id)
    assert anna.chain.heard_from(eve.id) is None  # only coordinators' times are kept: there may be any number of peers
    for data in (b"\xc1", msgspec.msgpack.encode(RoundsRequest(b"x" * 32))):
        with pytest.raises(RequestFailed):
            await eve.transport.request(anna.id, ROUNDS_PROTOCOL, data, max_bytes=1 << 20, timeout=1)
    assert anna.chain.round == head
    assert not anna.chain.faults
    flood = [anna.sync.check("flooder", b"") for _ in range(100)]
    assert not any(flood)
