"""Policies between nodes: heads, records and pieces over the in-memory hub, with peers that do what they should not."""

import asyncio
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from protocol.policy import (
    PIECES_PROTOCOL,
    POLICY_PROTOCOL,
    PieceRequest,
    PolicyRequest,
)
from protocol.rejection import Reason
from swarm import policy_pulling
from swarm.allowance import Allowance
from swarm.policies import PolicyServing, PolicyStore
from swarm.policy_pulling import Pulled
from tests.swarm.policies import CHANGE, PIECE, SWARM, WHOLE, Place, held, join, state
from tests.swarm.world import until


@pytest.fixture
async def place(tmp_path: Path) -> AsyncIterator[Place]:
    place = Place(tmp_path)
    yield place
    await place.stop()


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
    assert held(follower) == held(leader)


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
    assert leader.transport.stats().bytes_out < 4000


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
    assert first.transport.stats().bytes_out > len(WHOLE)


async def test_pieces_come_from_all_holders(place: Place) -> None:
    leader, made = await place.leader()
    made.offer(1, None, os.urandom(24 * PIECE))
    peers = [await place.peer(name, leader.identity.peer_id) for name in ("first", "second", "third")]
    for peer in peers[:2]:
        await join(peer, leader)
        peer.follow()
    await until(lambda: all(peer.pulled for peer in peers[:2]))
    before = [peer.transport.stats().bytes_out for peer in (leader, *peers[:2])]
    for peer in (leader, *peers[:2]):
        await join(peers[2], peer)
    await peers[2].follow()._find()
    await until(lambda: peers[2].pulled)
    given = [peer.transport.stats().bytes_out - old for peer, old in zip((leader, *peers[:2]), before, strict=True)]
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


async def test_a_leader_cannot_have_wholes_piled_up(place: Place) -> None:
    leader, made = await place.leader()
    follower = await place.peer("follower", leader.identity.peer_id)
    follower.follow(max_bytes=20 * PIECE)
    for version in range(1, 7):  # each a whole, and all of them named for ever
        made.offer(version, None, os.urandom(8 * PIECE))
        await until(lambda version=version: follower.pulled and follower.pulled[-1].version == version)  # type: ignore[misc]
    await until(lambda: len(held(follower)) <= 2 * (8 + 1))


async def test_who_starts_up_to_date_says_that_it_holds_the_policy(place: Place) -> None:
    leader, made = await place.leader()
    made.offer(1, None, WHOLE)
    key = policy_pulling.rendezvous(SWARM, leader.identity.peer_id)
    follower = await place.peer("follower", leader.identity.peer_id)
    await join(follower, leader)
    follower.follow(have=(1, state(1)))
    await until(lambda: follower.transport.peer_id in place.hub.providers(key, leader.identity.peer_id))


async def test_how_much_of_a_pull_is_to_come_is_told(place: Place) -> None:
    leader, made = await place.leader()
    made.offer(1, None, os.urandom(8 * PIECE))
    serve, go_on = leader.serving.piece, asyncio.Event()
    given = 0

    async def some(peer: str, data: bytes) -> bytes:
        nonlocal given
        given += 1
        if given > 4:
            await go_on.wait()
        return await serve(peer, data)

    leader.transport.serve(PIECES_PROTOCOL, some, max_request=4096)
    follower = await place.peer("follower", leader.identity.peer_id)
    await join(follower, leader)
    puller = follower.follow(request_timeout=30.0)
    await until(lambda: puller.missing == 5 * PIECE)  # the record is one of the four
    go_on.set()
    await until(lambda: follower.pulled and puller.missing is None)


def test_a_piece_that_is_removed_while_all_are_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = PolicyStore(tmp_path)
    piece = tmp_path / "pieces" / store.put(b"good").hex()
    piece.write_bytes(b"bad")
    unlink = Path.unlink
    monkeypatch.setattr(Path, "unlink", lambda path, **how: (unlink(path), unlink(path, **how)))
    assert store.verify() == 1


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
    assert leader.serving._allowance.refused == 1
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
