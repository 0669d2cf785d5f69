"""A node in a coordinated swarm: it practises the round's mix, answers its held-out tasks, and reports whom it used."""

import asyncio
import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

import node.rounds
from node.assign import DataPosition
from node.rounds import Rounds
from protocol.assignment import is_assigned, round_task
from protocol.rollout import TaskRef
from protocol.rounds import Pace, State
from swarm.coordination.round_log import RoundLog
from swarm.exchange import Exchange
from swarm.experience import ExperienceStore
from swarm.memory import MemoryHub
from tests.swarm.coordinated import Clock, Leader, manifest_of, score
from tests.swarm.world import truthful, until, who

MANIFEST = manifest_of("lead")
PACE = Pace(2, 30, 1, 1.0, groups=0, tasks=3, samples=2)


class Member:
    """A node's rounds and exchange without a model: `sample` is a stand-in that answers 1 for `even` tasks, else 0."""

    def __init__(self, hub: MemoryHub, path: Path, token: bytes | None, clock: Clock) -> None:
        self.identity = who("anna")
        self.transport = hub.transport(self.identity)
        self.events: list[tuple[str, str]] = []
        self.store = ExperienceStore(path / "anna.db", 1 << 20, clock)
        self.rounds = Rounds(
            MANIFEST, self.transport, RoundLog(path / "anna.db", MANIFEST.digest), token, clock,
            request_timeout=5.0, seed=0,
            on_event=lambda kind, message: self.events.append((kind, message)),
        )  # fmt: skip
        self.exchange = Exchange(
            self.transport, self.store, self.identity, MANIFEST, truthful, clock,
            log_sync=self.rounds.sync, access=self.rounds.access,
        )  # fmt: skip
        self.tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        await self.transport.start()
        self.tasks = [asyncio.create_task(run) for run in (self.exchange.run(), self.rounds.run())]

    async def stop(self) -> None:
        for task in self.tasks:
            assert not task.done(), task
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        await self.transport.stop()
        self.store.close()


@pytest.fixture
async def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[Leader, Member]]:
    monkeypatch.setattr("swarm.coordination.coordinator.TICK_SECONDS", 0.02)
    monkeypatch.setattr("swarm.coordination.coordinator.REVISE_SECONDS", 0.0)
    monkeypatch.setattr("node.rounds.SEND_SECONDS", 0.05)
    hub, clock = MemoryHub(), Clock()
    lead = Leader(hub, tmp_path, "lead", MANIFEST, clock, pace=PACE)
    await lead.start()
    member = Member(hub, tmp_path, lead.membership.invite(uses=1, expires=clock() + 60, role="member"), clock)
    await member.start()
    await member.transport.connect(lead.transport.addresses()[0], timeout=1)
    yield lead, member
    await member.stop()
    await lead.stop()


@asynccontextmanager
async def during(stage: str) -> AsyncIterator[None]:
    assert stage == "evaluate"
    yield


PARTS: Any = SimpleNamespace(
    config=SimpleNamespace(node=SimpleNamespace(seed=0), limits=SimpleNamespace(stage_seconds=0.2)),
    engine=None,
    bundle=None,
    scorer=None,
    progress=SimpleNamespace(during=during),
)


def answered(monkeypatch: pytest.MonkeyPatch) -> list[list[TaskRef]]:
    """What `sample` was asked for."""
    asked: list[list[TaskRef]] = []

    async def sample(engine: Any, bundle: Any, scorer: Any, config: Any, refs: Any, seeds: Any, n: int) -> list[Any]:
        asked.append(list(refs))
        assert len(set(seeds)) == len(refs)
        return [SimpleNamespace(texts=[f"{ref.seed % 1000} {float(ref.environment == 'even')}"] * n) for ref in refs]

    monkeypatch.setattr(node.rounds, "sample", sample)
    return asked


async def test_held_out_tasks_are_answered_once_and_scored(
    pair: tuple[Leader, Member], monkeypatch: pytest.MonkeyPatch
) -> None:
    (lead, member), asked = pair, answered(monkeypatch)
    rounds = member.rounds
    await rounds.answer(PARTS)  # nothing to answer yet, and nobody is asked
    await until(lambda: rounds.chain.round and rounds.chain.round.state is State.closing)
    record = rounds.chain.round
    assert record is not None
    rounds.trained[lead.id] = 3
    await rounds.answer(PARTS)
    await rounds.answer(PARTS)
    assert asked == [[round_task(MANIFEST, record.seed, name, i) for name in ("even", "odd") for i in range(3)]]
    assert rounds.trained == {}
    await until(lambda: rounds.chain.board is not None)
    board = rounds.chain.board
    assert board is not None
    assert [(one.peer, one.scores, one.mean) for one in board.standings] == [(member.identity.peer_id, (1.0, 0.0), 0.5)]
    assert ("round", "answers to round 1 were taken") in member.events
    assert lead.reports.scored(1)[member.identity.peer_id].trained[0].groups == 3
    # a new round's tasks are others
    await until(lambda: (found := rounds.chain.round) and (found.number, found.state) == (2, State.closing), 10)
    await rounds.answer(PARTS)
    assert len(asked) == 2
    assert not set(asked[0]) & set(asked[1])


async def test_answers_that_do_not_fit_a_request_are_left_out_and_the_rest_counts(
    pair: tuple[Leader, Member], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, member = pair
    rounds = member.rounds

    async def sample(engine: Any, bundle: Any, scorer: Any, config: Any, refs: Any, seeds: Any, n: int) -> list[Any]:
        return [SimpleNamespace(texts=[f"{ref.seed % 1000} 1.0", "x" * 70_000][:n]) for ref in refs]

    monkeypatch.setattr(node.rounds, "sample", sample)
    await until(lambda: rounds.chain.round and rounds.chain.round.state is State.closing)
    await rounds.answer(PARTS)
    assert ("round", "round 1: 6 of its 12 answers are too long to be handed in, and score 0") in member.events
    await until(lambda: rounds.chain.board is not None)
    assert rounds.chain.board is not None
    assert [one.scores for one in rounds.chain.board.standings] == [(0.5, 0.5)]


async def test_an_observer_answers_nothing(pair: tuple[Leader, Member], monkeypatch: pytest.MonkeyPatch) -> None:
    (_, member), asked = pair, answered(monkeypatch)
    rounds = member.rounds
    await until(lambda: rounds.chain.round and rounds.chain.round.state is State.closing)
    assert rounds.chain.members is not None
    watching = tuple(msgspec.structs.replace(one, role="observer") for one in rounds.chain.members.members)
    rounds.chain.members = msgspec.structs.replace(rounds.chain.members, members=watching)
    assert rounds.entering.listed
    await rounds.answer(PARTS)
    assert asked == []


async def test_more_tasks_than_there_is_time_for_hold_nobody_up(
    pair: tuple[Leader, Member], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, member = pair
    rounds = member.rounds

    async def sample(*_: Any) -> list[Any]:
        await asyncio.sleep(60)
        return []

    monkeypatch.setattr(node.rounds, "sample", sample)
    await until(lambda: rounds.chain.round and rounds.chain.round.state is State.closing)
    rounds.trained[who("bert").peer_id] = 3
    await asyncio.wait_for(rounds.answer(PARTS), 5)
    assert ("round", "round 1 is not answered: its 6 tasks were not done within 0 s") in member.events
    assert rounds.trained == {who("bert").peer_id: 3}  # credited with the next answers
    await asyncio.wait_for(rounds.answer(PARTS), 0.1)  # and are not tried again


async def test_rounds_back_to_back_leave_a_node_its_time_to_train(
    pair: tuple[Leader, Member], monkeypatch: pytest.MonkeyPatch
) -> None:
    (_, member), asked = pair, answered(monkeypatch)
    rounds, now = member.rounds, [1000.0]
    await until(lambda: rounds.chain.round and rounds.chain.round.state is State.closing)
    head = rounds.chain.head
    assert head is not None
    rounds._clock = lambda: now[0]
    parts = SimpleNamespace(**{**vars(PARTS), "config": SimpleNamespace(
        node=PARTS.config.node, limits=SimpleNamespace(stage_seconds=600.0))})  # fmt: skip
    sample = node.rounds.sample

    async def slowly(*args: Any) -> Any:
        now[0] += 100
        return await sample(*args)

    monkeypatch.setattr(node.rounds, "sample", slowly)
    rounds._spent, rounds._spent_at, began, number = 0.0, now[0], now[0], 0
    while now[0] < began + 10_000:  # a step of ten seconds after each round, and another round at once
        number += 1
        record = msgspec.structs.replace(
            head.record, number=number, seed=number.to_bytes(32, "big"), answers_by=int(now[0]) + 1000
        )
        rounds.chain.head = type(head)(head.digest, head.coordinator, record, head.sealed)
        for _ in range(2):
            await rounds.answer(parts)
        now[0] += 10
    assert 0.2 < 100 * len(asked) / (now[0] - began) < 0.25 + 400 / 10_000
    said = [message for kind, message in member.events if "is not answered yet" in message]
    assert len(said) == len(set(said)) == number - len(asked)
    assert "answers took more than 25% of the time lately" in said[0]


async def test_the_mix_steers_which_assigned_tasks_are_taken(pair: tuple[Leader, Member]) -> None:
    _, member = pair
    rounds, me = member.rounds, member.identity.peer_id
    now = MANIFEST.genesis + 10.0

    def share() -> float:
        taken = DataPosition().take(MANIFEST, me, 2000, now, takes=rounds.takes)
        assert all(is_assigned(MANIFEST, 0, me, ref) for ref in taken)
        return sum(ref.environment == "even" for ref in taken) / len(taken)

    if rounds.chain.round is None:
        assert share() == pytest.approx(0.25, abs=0.08)
    await until(lambda: rounds.chain.round is not None)
    assert share() == pytest.approx(0.25, abs=0.08)  # the manifest's weights: 1 and 3
    head = rounds.chain.head
    assert head is not None
    for mix, wanted in (((1000, 1000), 0.5), ((1000, 1), 1.0), ((1, 1000), 0.0)):
        record = msgspec.structs.replace(head.record, mix=mix)
        rounds.chain.head = type(head)(head.digest, head.coordinator, record, head.sealed)
        assert share() == pytest.approx(wanted, abs=0.08)


async def test_a_stranger_is_not_served_and_its_groups_are_not_taken(pair: tuple[Leader, Member]) -> None:
    from protocol.messages import LIVE_PROTOCOL, announce_topic
    from swarm.transport import RequestFailed

    _, member = pair
    await until(lambda: member.rounds.entering.listed)
    hub = member.transport._hub
    eve = hub.transport(who("eve"))
    await eve.start()
    await eve.connect(member.transport.addresses()[0], timeout=1)
    with pytest.raises(RequestFailed):
        await eve.request(member.identity.peer_id, LIVE_PROTOCOL, b"", max_bytes=100, timeout=1)
    await eve.publish(announce_topic(MANIFEST.digest, 0), hashlib.sha256(b"x").digest())
    await asyncio.sleep(0.1)
    assert member.exchange.counters()["heard"] == 0
    assert member.exchange.counters()["rejected"] == {}  # it is not even looked at
    await eve.stop()


def test_the_scores_of_the_stand_in_are_those_of_the_world() -> None:
    ref = round_task(MANIFEST, b"s" * 32, "even", 0)
    assert asyncio.run(score([(ref, f"{ref.seed % 1000} 1.0"), (ref, "0 1.0")])) == [1.0, 0.0]


def test_an_epoch_whose_few_slots_the_mix_does_not_take_is_practised_all_the_same() -> None:
    few = msgspec.structs.replace(MANIFEST, slots_per_epoch=1, shared_slots=0)
    taken = DataPosition().take(few, "me", 3, MANIFEST.genesis + 10.0, takes=lambda ref: False)
    assert len(taken) == 3
