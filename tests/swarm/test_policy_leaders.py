"""What followers make of heads and records that are odd: of hostile leaders, of those with another clock, or gone."""

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from protocol.envelope import Domain, seal
from protocol.policy import (
    MAX_PIECES,
    POLICY_PROTOCOL,
    PolicyHead,
)
from swarm.policy_pulling import Pulled
from tests.swarm.policies import CHANGE, SWARM, WHOLE, Place, join, state
from tests.swarm.world import until


@pytest.fixture
async def place(tmp_path: Path) -> AsyncIterator[Place]:
    place = Place(tmp_path)
    yield place
    await place.stop()


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
