"""A teacher among peers over the in-memory hub: who is answered, when, and how much each may ask."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import msgspec
import pytest

from protocol.identity import Identity
from protocol.teaching import TEACH_PROTOCOL, AskedGroup, TeachAnswer, TeachRequest, answer_of
from swarm import memory, teaching
from swarm.accounts import Accounts
from swarm.experience import ExperienceStore
from swarm.memory import MemoryHub, MemoryTransport
from swarm.reputation import Reputation
from swarm.teaching import MAX_OF_ONE, NotTaught, TeachServing, ask
from swarm.transport import LEAST_WAIT_SECONDS, Busy, RequestFailed
from tests.swarm.world import who

SWARM = b"s" * 32
encode = msgspec.msgpack.encode


def question(number: int) -> TeachRequest:
    return TeachRequest(SWARM, b"t" * 32, (AskedGroup((number,), ((1, 2),)),))


class Place:
    def __init__(self, path: Path) -> None:
        self.path, self.hub = path, MemoryHub()
        self.gate = asyncio.Event()
        self.gate.set()
        self.computed: list[TeachRequest] = []
        self.stores: list[ExperienceStore] = []
        self.now = time.time()

    def peer(self, identity: Identity) -> tuple[MemoryTransport, Accounts]:
        transport = self.hub.transport(identity)
        store = ExperienceStore(self.path / f"{len(self.stores)}.db", 1 << 20, time.time)
        self.stores.append(store)
        return transport, Accounts(transport, Reputation(store, time.time), time.time, lambda kind, said: None)

    async def compute(self, request: TeachRequest) -> TeachAnswer:
        await self.gate.wait()
        self.computed.append(request)
        return answer_of("teacher", 3, [-0.5] * request.answered)


@pytest.fixture
async def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Place]:
    monkeypatch.setattr(teaching, "COME_BACK_SECONDS", 0.01)
    monkeypatch.setattr(memory, "LEAST_WAIT_SECONDS", 0.01)
    made = Place(tmp_path)
    yield made
    for store in made.stores:
        store.close()


Started = Callable[..., Awaitable[tuple[TeachServing, Accounts, MemoryTransport, Accounts]]]


@pytest.fixture
async def started(place: Place) -> AsyncIterator[Started]:
    running: list[asyncio.Task[None]] = []

    async def start(
        tokens_a_minute: int = 10**6, refused: Callable[[str], bool] = lambda peer: False
    ) -> tuple[TeachServing, Accounts, MemoryTransport, Accounts]:
        transport, accounts = place.peer(who("teacher"))
        serving = TeachServing(
            place.compute, accounts, lambda: place.now, swarm=SWARM, tokens_a_minute=tokens_a_minute, refused=refused
        )
        serving.serve_on(transport)
        learner, learned = place.peer(who("learner"))
        for one in (transport, learner):
            await one.start()
        await learner.connect(transport.addresses()[0], timeout=1)
        running.append(asyncio.create_task(serving.run()))
        return serving, accounts, learner, learned

    yield start
    for task in running:
        assert not task.done(), task
        task.cancel()


TEACHER = who("teacher").peer_id


async def test_the_answer_is_fetched_once_it_is_computed(place: Place, started: Started) -> None:
    _, _, learner, accounts = await started()
    place.gate.clear()
    asking = asyncio.create_task(ask(learner, accounts, TEACHER, question(1), seconds=20, clock=time.monotonic))
    await asyncio.sleep(0.1)
    assert not asking.done()
    place.gate.set()
    answer, logprobs = await asking
    assert (answer.version, logprobs) == (3, (-0.5, -0.5))
    assert place.computed == [question(1)]  # asked many times, computed once


async def test_a_teacher_that_does_not_answer_costs_the_deadline_and_no_more(place: Place, started: Started) -> None:
    _, _, learner, accounts = await started()
    place.gate.clear()
    with pytest.raises(NotTaught, match="no answer in time: it is busy"):
        await ask(learner, accounts, TEACHER, question(1), seconds=0.2, clock=time.monotonic)
    nobody = Identity.generate().peer_id
    with pytest.raises(NotTaught, match="no answer in time"):
        await ask(learner, accounts, nobody, question(1), seconds=0.2, clock=time.monotonic)


async def test_a_teacher_that_asks_to_wait_for_no_time_is_asked_twice_a_second(
    place: Place, started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "LEAST_WAIT_SECONDS", LEAST_WAIT_SECONDS)
    _, _, learner, accounts = await started()
    asked: list[str] = []

    async def at_once(peer: str, data: bytes) -> bytes:
        asked.append(peer)
        raise Busy(0.0)

    hasty = place.hub.transport(who("hasty"))
    await hasty.start()
    hasty.serve(TEACH_PROTOCOL, at_once, max_request=1 << 20)
    await learner.connect(hasty.addresses()[0], timeout=1)
    with pytest.raises(NotTaught, match="it is busy"):
        await ask(learner, accounts, hasty.peer_id, question(1), seconds=0.8, clock=time.monotonic)
    assert len(asked) == 2


async def test_one_peer_does_not_fill_the_queue_and_pays_for_what_it_asks(place: Place, started: Started) -> None:
    _, _, learner, _ = await started(tokens_a_minute=1000)
    place.gate.clear()

    async def send(request: TeachRequest) -> str:
        with pytest.raises(RequestFailed) as caught:
            await learner.request(TEACHER, TEACH_PROTOCOL, encode(request), max_bytes=9999, timeout=1)
        return str(caught.value)

    for number in range(MAX_OF_ONE + 3):
        await send(question(number))
    place.gate.set()
    await asyncio.sleep(0.05)
    assert len(place.computed) == MAX_OF_ONE
    large = TeachRequest(SWARM, b"t" * 32, (AskedGroup((1,) * 60000, ((1,),)),))
    place.now += 400  # what was not fetched is forgotten
    await send(large)
    await send(msgspec.structs.replace(large, fingerprint=b"u" * 32))
    waits = float((await send(question(99))).split()[-2])  # it owes 120,000 of 65,536 tokens, at 1000 a minute
    assert 50 * 60 < waits < 60 * 60


async def test_garbage_is_noted_and_who_is_no_member_gets_nothing(place: Place, started: Started) -> None:
    _, accounts, learner, _ = await started()
    with pytest.raises(RequestFailed):
        await learner.request(TEACHER, TEACH_PROTOCOL, b"\xc1", max_bytes=99, timeout=1)
    assert accounts.counters.rejected == {"malformed": 1}


async def test_who_is_refused_is_not_answered(place: Place, started: Started) -> None:
    _, _, learner, accounts = await started(refused=lambda peer: True)
    with pytest.raises(NotTaught):
        await ask(learner, accounts, TEACHER, question(1), seconds=0.2, clock=time.monotonic)
    assert place.computed == []


async def test_a_refusal_and_a_lie_are_told(place: Place, started: Started) -> None:
    _, _, learner, accounts = await started()

    async def refuse(request: TeachRequest) -> TeachAnswer:
        return TeachAnswer("teacher", 0, b"", "another tokenizer")

    async def lie(request: TeachRequest) -> TeachAnswer:
        return TeachAnswer("teacher", 0, b"\0\0")

    with pytest.raises(NotTaught, match="another tokenizer"):
        await _ask_anew(place, learner, accounts, refuse)
    with pytest.raises(NotTaught, match="gave 1 log-probs of 2 tokens"):
        await _ask_anew(place, learner, accounts, lie)
    assert accounts.counters.rejected == {"malformed": 1}


async def _ask_anew(
    place: Place,
    learner: MemoryTransport,
    accounts: Accounts,
    compute: Callable[[TeachRequest], Awaitable[TeachAnswer]],
) -> None:
    other = Identity.generate()
    transport, own = place.peer(other)
    serving = TeachServing(compute, own, time.time, swarm=SWARM, tokens_a_minute=1000)
    serving.serve_on(transport)
    await transport.start()
    await learner.connect(transport.addresses()[0], timeout=1)
    running = asyncio.create_task(serving.run())
    try:
        await ask(learner, accounts, other.peer_id, question(1), seconds=5, clock=time.monotonic)
    finally:
        running.cancel()
