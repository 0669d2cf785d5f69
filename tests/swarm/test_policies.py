"""Policies between nodes: heads, records and pieces over the in-memory hub, with peers that do what they should not."""

import asyncio
import hashlib
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from protocol.envelope import Domain, seal
from protocol.identity import Identity
from protocol.policy import (
    LEAST_PIECE_BYTES,
    MAX_PIECES,
    PIECES_PROTOCOL,
    POLICY_PROTOCOL,
    PieceRequest,
    PolicyHead,
    PolicyItem,
    PolicyRecord,
    PolicyRequest,
)
from protocol.rejection import Reason
from swarm import policy_pulling
from swarm.accounts import Accounts
from swarm.allowance import Allowance
from swarm.experience import ExperienceStore
from swarm.memory import MemoryHub, MemoryTransport
from swarm.policies import PolicyServing, PolicyStore
from swarm.policy_pulling import PolicyPuller, Pulled
from swarm.reputation import Reputation
from tests.swarm.world import until, who

SWARM = b"s" * 32
PIECE = LEAST_PIECE_BYTES


def state(version: int) -> bytes:
    return hashlib.sha256(b"weights of %d" % version).digest()


class Leader:
    """Signs heads and makes records of whatever bytes a test wants."""

    def __init__(self, store: PolicyStore, identity: Identity) -> None:
        self.store, self.identity, self.items = store, identity, list[PolicyItem]()
        self.signed = time.time() - 1000

    def offer(self, version: int, base: int | None, content: bytes, **changes: Any) -> PolicyRecord:
        size, pieces = self.store.cut([content], PIECE)
        base_state = b"" if base is None else state(base)
        record = PolicyRecord(version, base, base_state, "bfloat16", state(version), size, PIECE, pieces)
        record = msgspec.structs.replace(record, **changes)
        raw = msgspec.msgpack.encode(record)
        self.items.append(PolicyItem(version, base, self.store.put(raw), len(raw), record.size))
        self.sign()
        return record

    def sign(self, **changes: Any) -> None:
        self.signed += 1
        head = msgspec.structs.replace(PolicyHead(SWARM, "mark", tuple(self.items)), **changes)
        payload = msgspec.msgpack.encode(head)
        self.store.keep_head(
            seal(self.identity, Domain.policy, payload, issued=self.signed, expires=self.signed + 9999)
        )


class Peer:
    """A node that serves its store; `follow` has it pull what a leader publishes."""

    def __init__(self, hub: MemoryHub, path: Path, name: str, leader: str = "") -> None:
        self.identity = who(name)
        self.transport = hub.transport(self.identity)
        self.store = PolicyStore(path / name)
        self.experience = ExperienceStore(path / f"{name}.db", 1 << 20, time.time)
        self.told: list[str] = []
        self.accounts = Accounts(
            self.transport, Reputation(self.experience, time.time), time.time, lambda kind, said: self.told.append(said)
        )
        self.leader = leader or self.identity.peer_id
        self.serving = PolicyServing(self.store, self.leader, self.accounts, time.time)
        self.pulled: list[Pulled] = []
        self.running: asyncio.Task[None] | None = None

    async def start(self) -> "Peer":
        await self.transport.start()
        self.serving.serve_on(self.transport)
        return self

    def follow(self, have: tuple[int, bytes] | None = None, **options: Any) -> PolicyPuller:
        async def arrived(pulled: Pulled) -> None:
            self.pulled.append(pulled)
            self.puller.have = pulled.version, pulled.records[-1].state

        async def may_take(records: Sequence[PolicyRecord], size: int | None) -> None:
            pass

        options = {"model": "mark", "dtype": "bfloat16", "max_bytes": 64 << 20, "request_timeout": 1.0, **options}
        self.puller = PolicyPuller(
            self.transport, self.store, self.accounts, time.time,
            leader=self.leader, swarm=SWARM, poll_seconds=0.05, **{"arrived": arrived, "may_take": may_take, **options},
        )  # fmt: skip
        self.puller.have = have
        self.running = asyncio.create_task(self.puller.run())
        return self.puller

    def content(self, pulled: Pulled) -> list[bytes]:
        return [b"".join(self.store.pieces_of(record)) for record in pulled.records]

    def verdicts(self, peer: str) -> dict[str, int]:
        return self.experience.peers.verdicts([peer]).get(peer, {})

    async def stop(self) -> None:
        if self.running is not None:
            assert not self.running.done(), self.running
            self.running.cancel()
            await asyncio.gather(self.running, return_exceptions=True)
        await self.transport.stop()
        self.experience.close()


class Place:
    def __init__(self, path: Path) -> None:
        self.path, self.hub, self.peers = path, MemoryHub(), list[Peer]()

    async def peer(self, name: str, leader: str = "") -> Peer:
        self.peers.append(Peer(self.hub, self.path, name, leader))
        return await self.peers[-1].start()

    async def leader(self) -> tuple[Peer, Leader]:
        peer = await self.peer("leader")
        return peer, Leader(peer.store, peer.identity)

    async def liar(self, name: str, answer: Callable[[str, bytes], Awaitable[bytes]]) -> MemoryTransport:
        """A peer that says that it holds the leader's policy and answers for pieces what the test wants."""
        transport = self.hub.transport(who(name))
        await transport.start()
        transport.serve(PIECES_PROTOCOL, answer, max_request=4096)
        self.hub.provide(policy_pulling.rendezvous(SWARM, who("leader").peer_id), transport.peer_id)
        self.others.append(transport)
        return transport

    others: list[MemoryTransport]


@pytest.fixture
async def place(tmp_path: Path) -> AsyncIterator[Place]:
    place = Place(tmp_path)
    place.others = []
    yield place
    for peer in place.peers:
        await peer.stop()
    for other in place.others:
        await other.stop()


async def join(a: Peer, b: Peer | MemoryTransport) -> None:
    there = b.transport if isinstance(b, Peer) else b
    await a.transport.connect(there.addresses()[0], timeout=1)


WHOLE = os.urandom(5 * PIECE + 17)
CHANGE = os.urandom(1000)


async def test_a_follower_has_the_whole_and_then_only_what_changed(place: Place) -> None:
    leader, made = await place.leader()
    made.offer(3, None, WHOLE)
    follower = await place.peer("follower", leader.identity.peer_id)
    await join(follower, leader)
    puller = follower.follow()
    await until(lambda: follower.pulled)
    assert follower.content(follower.pulled[0]) == [WHOLE]
    assert follower.pulled[0].version == 3
    assert follower.pulled[0].bytes_in > len(WHOLE)
    made.offer(4, 3, CHANGE)
    await until(lambda: len(follower.pulled) == 2)
    assert follower.content(follower.pulled[1]) == [CHANGE]
    assert follower.pulled[1].bytes_in < 2000
    await until(lambda: puller.up_to_date)
    assert (puller.problem, puller.have) == ("", (4, state(4)))
    assert leader.serving.bytes_out > len(WHOLE)
    held = {path.name for path in (follower.store.directory / "pieces").iterdir()}
    assert held == {path.name for path in (leader.store.directory / "pieces").iterdir()}


async def test_a_base_model_that_is_the_leaders_first_version_is_not_pulled(place: Place) -> None:
    leader, made = await place.leader()
    made.offer(0, None, WHOLE)
    follower = await place.peer("follower", leader.identity.peer_id)
    puller = follower.follow(have=(0, state(0)))
    await until(lambda: puller.up_to_date)
    assert not follower.pulled
    made.offer(1, 0, CHANGE)
    made.offer(2, 1, CHANGE[:500])
    await until(lambda: follower.pulled and follower.pulled[-1].version == 2)
    assert leader.serving.bytes_out < 4000


async def test_another_base_of_the_same_version_is_not_changed_but_replaced(place: Place) -> None:
    leader, made = await place.leader()
    made.offer(0, None, WHOLE)
    made.offer(1, 0, CHANGE)
    follower = await place.peer("follower", leader.identity.peer_id)
    follower.follow(have=(0, b"x" * 32))
    await until(lambda: follower.pulled)
    assert follower.content(follower.pulled[0]) == [WHOLE, CHANGE]


async def test_followers_serve_each_other_when_the_leader_is_gone(place: Place) -> None:
    leader, made = await place.leader()
    made.offer(1, None, WHOLE)
    first = await place.peer("first", leader.identity.peer_id)
    second = await place.peer("second", leader.identity.peer_id)
    await join(first, leader)
    await join(first, second)
    first.follow()
    await until(lambda: first.pulled)
    place.peers.remove(leader)
    await leader.stop()
    puller = second.follow()
    await until(lambda: second.pulled)
    assert second.content(second.pulled[0]) == [WHOLE]
    assert puller.answered_at is None
    assert first.serving.bytes_out > len(WHOLE)


async def test_pieces_come_from_all_holders(place: Place) -> None:
    leader, made = await place.leader()
    made.offer(1, None, os.urandom(24 * PIECE))
    peers = [await place.peer(name, leader.identity.peer_id) for name in ("first", "second", "third")]
    for peer in peers[:2]:
        await join(peer, leader)
        peer.follow()
    await until(lambda: all(peer.pulled for peer in peers[:2]))
    before = [peer.serving.bytes_out for peer in (leader, *peers[:2])]
    for peer in (leader, *peers[:2]):
        await join(peers[2], peer)
    await peers[2].follow()._find()
    await until(lambda: peers[2].pulled)
    given = [peer.serving.bytes_out - old for peer, old in zip((leader, *peers[:2]), before, strict=True)]
    assert min(given) >= 2 * PIECE
    assert sum(given) == pytest.approx(24 * PIECE, abs=10_000)


async def test_a_peer_that_sends_other_bytes_is_found_out_and_costs_nothing_else(place: Place) -> None:
    leader, made = await place.leader()
    made.offer(1, None, os.urandom(12 * PIECE))

    async def garbage(peer: str, data: bytes) -> bytes:
        return os.urandom(PIECE)

    liar = await place.liar("liar", garbage)
    follower = await place.peer("follower", leader.identity.peer_id)
    await join(follower, leader)
    await join(follower, liar)
    await follower.follow()._find()
    await until(lambda: follower.pulled)
    assert follower.verdicts(liar.peer_id)[Reason.hash_mismatch] >= 1
    assert follower.verdicts(leader.identity.peer_id) == {}
    assert len(follower.content(follower.pulled[0])[0]) == 12 * PIECE


@pytest.mark.parametrize("kind", ["short", "long", "silent", "nothing"])
async def test_peers_that_are_slow_or_send_too_little_or_too_much(place: Place, kind: str) -> None:
    leader, made = await place.leader()
    made.offer(1, None, os.urandom(4 * PIECE))

    async def answer(peer: str, data: bytes) -> bytes:
        if kind == "silent":
            await asyncio.sleep(60)
        request = msgspec.msgpack.decode(data, type=PieceRequest)
        piece = leader.store.read(request.piece)[request.offset :]
        return {"short": piece[:10], "long": piece + b"x"}.get(kind, b"")

    liar = await place.liar("liar", answer)
    follower = await place.peer("follower", leader.identity.peer_id)
    await join(follower, leader)
    await join(follower, liar)
    await follower.follow(request_timeout=0.3)._find()
    await until(lambda: follower.pulled)
    assert follower.verdicts(leader.identity.peer_id) == {}


async def test_a_pull_that_was_killed_goes_on_where_it_was(place: Place) -> None:
    leader, made = await place.leader()
    record = made.offer(1, None, os.urandom(20 * PIECE))
    asked: list[bytes] = []
    serve, held = leader.serving.piece, asyncio.Event()

    async def counted(peer: str, data: bytes) -> bytes:
        asked.append(msgspec.msgpack.decode(data, type=PieceRequest).piece)
        if len(asked) > 10:
            await held.wait()
        return await serve(peer, data)

    leader.transport.serve(PIECES_PROTOCOL, counted, max_request=4096)
    follower = await place.peer("follower", leader.identity.peer_id)
    puller = follower.follow(request_timeout=30.0)
    await until(lambda: len(asked) > 12)
    assert follower.running is not None
    follower.running.cancel()
    await asyncio.gather(follower.running, return_exceptions=True)
    kept = sum(follower.store.has(piece) for piece in record.pieces)
    assert 0 < kept < 20
    # a power cut leaves a name with other bytes, and a file written aside
    first = next(piece for piece in record.pieces if follower.store.has(piece))
    (follower.store.directory / "pieces" / first.hex()).write_bytes(b"")
    (follower.store.directory / "pieces" / ".aside").write_bytes(b"x")
    asked.clear()
    held.set()
    assert PolicyStore(follower.store.directory).verify() == 2
    puller = follower.follow()
    puller.recall()
    assert puller.known is not None
    await until(lambda: follower.pulled)
    assert len(asked) == 20 - kept + 1
    assert not {piece for piece in record.pieces if not follower.store.has(piece)}


async def test_an_answer_that_breaks_off_is_gone_on_with(place: Place) -> None:
    leader, made = await place.leader()
    made.offer(1, None, WHOLE)
    follower = await place.peer("follower", leader.identity.peer_id)
    place.hub.break_next_answer(leader.identity.peer_id, 10)
    follower.follow()
    await until(lambda: follower.pulled)
    assert follower.content(follower.pulled[0]) == [WHOLE]
    assert follower.verdicts(leader.identity.peer_id) == {}


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"pieces": (b"1" * 32,) * (MAX_PIECES + 1)}, "version 1: policy record"),
        ({"size": 2**40}, "pieces of 65536 bytes for"),
        ({"piece_bytes": 2**40}, "version 1: policy record"),
        ({"dtype": "float32"}, "set federation.dtype to that"),
        ({"base_state": b"x" * 32}, "a base without its state"),
    ],
)
async def test_records_of_a_hostile_leader(place: Place, changes: dict[str, Any], problem: str) -> None:
    leader, made = await place.leader()
    made.offer(1, None, WHOLE, **changes)
    follower = await place.peer("follower", leader.identity.peer_id)
    puller = follower.follow()
    await until(lambda: puller.problem)
    assert problem in puller.problem
    assert not follower.pulled
    assert sum(path.stat().st_size for path in (follower.store.directory / "pieces").iterdir()) < 2 << 20


async def test_more_than_a_model_can_take_is_not_pulled(place: Place) -> None:
    leader, made = await place.leader()
    made.offer(1, None, WHOLE)
    follower = await place.peer("follower", leader.identity.peer_id)
    puller = follower.follow(max_bytes=len(WHOLE) - 1)
    await until(lambda: puller.problem)
    assert "more than this model's weights can" in puller.problem
    made.items[0] = msgspec.structs.replace(made.items[0], record_size=10)
    made.sign()
    puller.problem = ""
    await until(lambda: puller.problem)
    assert not follower.pulled


async def test_a_leader_of_another_base_model_or_without_a_way_is_said(place: Place) -> None:
    leader, made = await place.leader()
    made.offer(4, 3, CHANGE)
    follower = await place.peer("follower", leader.identity.peer_id)
    puller = follower.follow(have=(1, state(1)))
    await until(lambda: puller.problem)
    assert puller.problem == "nothing leads from version 1 to 4; its leader must offer a whole one"
    made.sign(model="other")
    await until(lambda: "base model is other" in puller.problem)


async def test_a_leader_that_went_back_is_followed(place: Place) -> None:
    leader, made = await place.leader()
    made.offer(5, None, WHOLE)
    follower = await place.peer("follower", leader.identity.peer_id)
    puller = follower.follow()
    await until(lambda: follower.pulled)
    made.items.clear()
    made.offer(2, None, CHANGE)
    await until(lambda: len(follower.pulled) == 2)
    assert puller.have == (2, state(2))


async def test_of_heads_of_the_same_second_the_leaders_last_word_counts(place: Place) -> None:
    leader, made = await place.leader()
    made.offer(1, None, WHOLE)
    follower = await place.peer("follower", leader.identity.peer_id)
    puller = follower.follow()
    await until(lambda: puller.up_to_date)
    made.signed -= 1
    made.offer(2, 1, CHANGE)
    await until(lambda: puller.have == (2, state(2)))
    made.items.pop()
    made.signed -= 1
    made.sign()
    await until(lambda: puller.have == (1, state(1)))


async def test_an_older_head_changes_nothing(place: Place) -> None:
    leader, made = await place.leader()
    made.offer(1, None, WHOLE)
    old = leader.store.head()
    made.offer(2, 1, CHANGE)
    follower = await place.peer("follower", leader.identity.peer_id)
    puller = follower.follow()
    await until(lambda: puller.up_to_date)
    leader.store.keep_head(old)
    await asyncio.sleep(0.3)
    assert puller.have == (2, state(2))
    assert puller.known is not None
    assert puller.known.head.version == 2


@pytest.mark.parametrize("issued", [-4000.0, 400.0])  # of a leader that is gone, or whose clock is ahead
async def test_a_head_that_is_not_of_now_is_on_nobodys_account(place: Place, issued: float) -> None:
    leader, made = await place.leader()
    made.offer(1, None, WHOLE)
    first = await place.peer("first", leader.identity.peer_id)
    payload = msgspec.msgpack.encode(PolicyHead(SWARM, "mark", tuple(made.items)))
    at = time.time() + issued
    first.store.keep_head(seal(leader.identity, Domain.policy, payload, issued=at, expires=at + 3600))
    place.peers.remove(leader)
    await leader.stop()
    asked = asyncio.Event()
    serve = first.serving.head

    async def counted(peer: str, data: bytes) -> bytes:
        asked.set()
        return await serve(peer, data)

    first.transport.serve(POLICY_PROTOCOL, counted, max_request=4096)
    second = await place.peer("second", leader.identity.peer_id)
    await join(second, first)
    puller = second.follow()
    await until(asked.is_set)
    asked.clear()
    await until(asked.is_set)  # what it said the first time was looked at
    assert puller.known is None
    assert second.verdicts(first.identity.peer_id) == {}
    assert second.told == []


@pytest.mark.parametrize(
    ("amiss", "problem"),
    [
        ("clock", "ahead of the clock here, at most 30 s; see that both clocks are right"),
        ("swarm", "what its leader gives cannot be used: a policy of swarm 7878"),
        ("nothing", "its leader has published nothing yet; see federation.publish there"),
    ],
)
async def test_a_leader_that_answers_is_there_and_what_is_wrong_is_said(place: Place, amiss: str, problem: str) -> None:
    leader, made = await place.leader()
    if amiss == "clock":
        made.signed = time.time() + 100
    if amiss != "nothing":
        made.offer(1, None, WHOLE)
    if amiss == "swarm":
        made.sign(swarm=b"x" * 32)
    follower = await place.peer("follower", leader.identity.peer_id)
    puller = follower.follow()
    await until(lambda: puller.problem)
    assert problem in puller.problem
    assert puller.answered_at is not None
    made.signed = time.time() - 10
    made.items.clear()
    made.offer(2, None, WHOLE)
    await until(lambda: follower.pulled)
    await until(lambda: not puller.problem)
    if amiss == "clock":  # it goes wrong later
        made.signed = time.time() + 100
        made.sign()
        await until(lambda: problem in puller.problem)
        assert (puller.up_to_date, puller.have) == (True, (2, state(2)))


async def test_records_that_lead_elsewhere_are_refused_for_a_whole_and_then_for_good(place: Place) -> None:
    leader, made = await place.leader()
    made.offer(1, None, WHOLE)
    made.offer(2, 1, CHANGE)
    follower = await place.peer("follower", leader.identity.peer_id)
    refused: list[int | None] = []

    async def arrived(pulled: Pulled) -> None:
        refused.append(pulled.records[0].base)
        follower.puller.refuse(pulled)

    puller = follower.follow(have=(1, state(1)), arrived=arrived)
    await until(lambda: puller.problem)
    assert refused == [1, None]
    assert "is not what its leader says it is" in puller.problem
    await asyncio.sleep(0.2)
    assert refused == [1, None]
    made.offer(3, None, WHOLE)
    await until(lambda: len(refused) == 3)


def held(peer: Peer) -> set[str]:
    return {path.name for path in (peer.store.directory / "pieces").iterdir()}


async def test_versions_that_never_become_whole_do_not_pile_up(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy_pulling, "GIVE_UP_ATTEMPTS", 1)
    leader, made = await place.leader()
    follower = await place.peer("follower", leader.identity.peer_id)
    puller = follower.follow()
    for version in range(1, 5):
        made.items.clear()
        record = made.offer(version, None, os.urandom(8 * PIECE))
        leader.store.keep_only({made.items[0].record, *record.pieces[:-1]})  # the last one is never given
        here = {made.items[0].record.hex(), *(piece.hex() for piece in record.pieces[:-1])}
        await until(lambda here=here: held(follower) == here)  # type: ignore[misc]
        assert puller.have is None
    assert not follower.pulled


async def test_a_version_that_was_refused_is_not_kept(place: Place) -> None:
    leader, made = await place.leader()
    made.offer(1, None, WHOLE)
    follower = await place.peer("follower", leader.identity.peer_id)

    async def arrived(pulled: Pulled) -> None:
        assert held(follower)
        follower.puller.refuse(pulled)

    follower.follow(arrived=arrived)
    await until(lambda: follower.puller.problem and not held(follower))


async def test_requests_that_are_none_cost_their_sender(place: Place) -> None:
    leader, made = await place.leader()
    made.offer(1, None, WHOLE)
    asker = await place.peer("asker")
    me = leader.identity.peer_id

    async def ask(protocol: str, data: bytes) -> bytes:
        return await asker.transport.request(me, protocol, data, max_bytes=1 << 20, timeout=1.0)

    for protocol in (POLICY_PROTOCOL, PIECES_PROTOCOL):
        for data in (b"", b"\x91\x01", msgspec.msgpack.encode([b"short"]), b"\x91" * 1000):
            with pytest.raises(Exception, match="reset the stream"):
                await ask(protocol, data)
            if leader.accounts.reputation.is_banned(asker.identity.peer_id):
                return
    raise AssertionError(leader.verdicts(asker.identity.peer_id))


async def test_what_is_not_held_and_what_is_too_much(place: Place) -> None:
    leader, made = await place.leader()
    record = made.offer(1, None, WHOLE)
    me = leader.identity
    head = await leader.serving.head("peer", msgspec.msgpack.encode(PolicyRequest(me.public_key)))
    assert head == leader.store.head()
    assert await leader.serving.head("peer", msgspec.msgpack.encode(PolicyRequest(b"x" * 32))) == b""
    piece = msgspec.msgpack.encode(PieceRequest(record.pieces[0], 10))
    assert await leader.serving.piece("peer", piece) == WHOLE[10:PIECE]
    assert await leader.serving.piece("peer", msgspec.msgpack.encode(PieceRequest(b"x" * 32))) == b""
    damaged = leader.store.directory / "pieces" / record.pieces[1].hex()
    damaged.write_bytes(b"x" * PIECE)
    assert await leader.serving.piece("peer", msgspec.msgpack.encode(PieceRequest(record.pieces[1]))) == b""
    assert not damaged.exists()
    with pytest.raises(FileNotFoundError):
        list(leader.store.pieces_of(record))
    past = msgspec.msgpack.encode(PieceRequest(record.pieces[0], 2**63 - 1))
    assert await leader.serving.piece("peer", past) == b""
    # what is read and hashed for an answer of nothing is on the asker's account all the same
    leader.serving._allowance = Allowance(1000.0, 1000.0, time.time)
    await leader.serving.piece("peer", past)
    with pytest.raises(Exception, match="asks to wait"):
        await leader.serving.piece("peer", past)
    leader.serving._allowance = Allowance(1000.0, 1000.0, time.time)
    await leader.serving.piece("peer", piece)
    with pytest.raises(Exception, match="asks to wait"):
        await leader.serving.piece("peer", piece)
    assert leader.serving.turned_away == 1
    await leader.serving.piece("another", piece)


async def test_who_may_not_take_part_gets_nothing(place: Place) -> None:
    leader, made = await place.leader()
    record = made.offer(1, None, WHOLE)
    serving = PolicyServing(leader.store, leader.leader, leader.accounts, time.time, refused=lambda peer: peer == "eve")
    head = msgspec.msgpack.encode(PolicyRequest(leader.identity.public_key))
    piece = msgspec.msgpack.encode(PieceRequest(record.pieces[0]))
    for ask, data in ((serving.head, head), (serving.piece, piece)):
        assert await ask("anna", data)
        with pytest.raises(Exception, match="not on the coordinator's member list"):
            await ask("eve", data)
    assert leader.verdicts("eve") == {}
