"""What is pulled and from whom, what becomes of it, and what hostile or broken holders cannot do."""

import asyncio
import math
import time

import msgspec
import pytest

from protocol.envelope import digest_of
from protocol.messages import (
    BATCH_PROTOCOL,
    GROUPS_PROTOCOL,
    LIVE_PROTOCOL,
)
from protocol.rollout import RolloutGroup
from swarm.exchange import ScoringUnavailable
from swarm.records import Scored
from swarm.transport import Busy
from tests.swarm.world import MANIFEST, TOPIC, World, announce, join, make_group, sealed, truthful, until, who


async def test_a_broken_stream_is_resumed_where_it_broke(world: World) -> None:
    a, b = await world.node("a"), await world.node("b", pool_target=0)
    await join(a, b)
    digest = a.exchange.publish(make_group(a.identity, 0))
    size = a.store.find(digest.hex()).size
    await until(lambda: b.count("heard") == 1)
    c = await world.node("c", heal_seconds=100, pool_target=0)
    world.hub.partition(c.identity.peer_id, a.identity.peer_id)
    d = await world.node("d", heal_seconds=100, pool_target=0)
    for node in (c, d):  # two holders besides the producer
        node.store.add(a.store.find(digest.hex()), a.store.body(digest) or b"")
    e = await world.node("e", heal_seconds=100)
    await join(e, c)
    await join(e, d)
    world.hub.break_next_answer(c.identity.peer_id, 100)
    world.hub.break_next_answer(d.identity.peer_id, 50)
    world.hub.partition(e.identity.peer_id, a.identity.peer_id)
    await join(e, b)
    await until(lambda: digest in e.pool())
    served = c.count("bytes_out") + d.count("bytes_out")
    assert e.count("bytes_in") == size
    assert served < 3 * size, "what had arrived was not sent again"
    assert e.count("rejected") == {}


async def test_groups_of_one_producer_are_pulled_together(world: World) -> None:
    a, b = await world.node("a"), await world.node("b", heal_seconds=100)
    digests = {a.exchange.publish(make_group(a.identity, slot)) for slot in range(20)}
    streams = 0
    request = b.transport.request

    async def counted(peer: str, protocol: str, *arguments, **options) -> bytes:
        nonlocal streams
        streams += protocol in (GROUPS_PROTOCOL, BATCH_PROTOCOL)
        return await request(peer, protocol, *arguments, **options)

    b.transport.request = counted  # type: ignore[method-assign]
    await join(a, b)
    await until(lambda: b.pool() == digests)
    assert streams <= 10
    assert b.count("fetched") == a.count("served") == 20


async def test_wrong_rewards_are_rejected_and_kept_for_people(world: World) -> None:
    b = await world.node("b")
    group = make_group(who("bad"), 0)
    lie = tuple(msgspec.structs.replace(completion, reward=1 - completion.reward) for completion in group.completions)
    lying = msgspec.structs.replace(group, completions=lie)
    bad, digest = await announce(world, b, "bad", lying)
    await until(lambda: b.count("rejected") == {"reward_mismatch": 1})
    record = b.store.find(digest.hex())
    assert (record.verdict, record.claimed, record.local) == ("reward_mismatch", (1.0, 0.0), (0.0, 1.0))
    assert record.detail == "completion 0 claims reward 1, scored 0 here"
    assert b.store.group_body(digest) == lying
    assert b.pool() == set()
    assert b.store.body(digest) is None, "not served to others"
    assert b.exchange.weight(bad.peer_id) < b.exchange.weight("a stranger")


async def test_a_body_over_its_announced_size_or_the_cap_is_not_taken(world: World) -> None:
    b = await world.node("b")
    await announce(world, b, "long", make_group(who("long"), 0), body=bytes(60_000))
    await until(lambda: b.count("fetch_failures") == 1)
    await announce(world, b, "huge", make_group(who("huge"), 0), size=MANIFEST.caps.max_group_bytes + 1)
    await until(lambda: b.count("rejected") == {"too_large": 1})
    assert (b.count("fetched"), b.store.summaries(None, 10)) == (0, [])
    kind, message = b.events[0]
    assert kind == "fetch"
    assert "over the cap" in message


async def test_a_body_of_another_hash_is_taken_from_another_holder(world: World) -> None:
    b = await world.node("b", heal_seconds=100)
    body, raw = sealed(who("a"), make_group(who("a"), 0))
    liar = await world.peer("liar", {digest_of(body): bytes(len(body))})
    good = await world.peer("good", {digest_of(body): body})
    await join(liar, b)
    await join(good, b)
    await liar.publish(TOPIC, raw)
    await until(lambda: digest_of(body) in b.pool())
    assert b.count("rejected") == {"hash_mismatch": 1}
    assert b.verdicts(liar.peer_id) == {"hash_mismatch": 1}
    assert b.verdicts(who("a").peer_id) == {"announced": 1, "admitted": 1}, "its producer is not to blame"


async def test_a_part_that_was_rubbish_does_not_blame_who_sent_the_rest(world: World) -> None:
    b = await world.node("b", heal_seconds=100)
    body, raw = sealed(who("a"), make_group(who("a"), 0))
    liar = await world.peer("liar", {digest_of(body): bytes(40)})  # a short answer, so the rest is asked elsewhere
    good = await world.peer("good", {digest_of(body): body})
    await join(liar, b)
    await join(good, b)
    await liar.publish(TOPIC, raw)
    await until(lambda: digest_of(body) in b.pool())
    assert b.count("rejected") == {}


async def test_a_peer_that_says_nothing_costs_one_deadline(world: World) -> None:
    b = await world.node("b", heal_seconds=100, request_timeout=1.0)
    body, raw = sealed(who("silent"), make_group(who("silent"), 0))
    silent, good = await world.peer("silent"), await world.peer("good", {digest_of(body): body})

    async def hang(peer: str, data: bytes) -> bytes:
        await asyncio.sleep(60)
        return b""

    silent.serve(GROUPS_PROTOCOL, hang, max_request=4096)
    silent.serve(LIVE_PROTOCOL, hang, max_request=4096)
    await join(silent, b)
    await join(good, b)
    begin = time.monotonic()
    await silent.publish(TOPIC, raw)
    await until(lambda: digest_of(body) in b.pool())
    assert 1.0 <= time.monotonic() - begin < 4.0
    second, raw = sealed(who("silent"), make_group(who("silent"), 1))
    good.serve(GROUPS_PROTOCOL, lambda peer, data: asyncio.sleep(0, second), max_request=4096)
    begin = time.monotonic()
    await silent.publish(TOPIC, raw)
    await until(lambda: digest_of(second) in b.pool())
    assert time.monotonic() - begin < 0.9, "it is asked last for a while"


async def test_what_nobody_holds_is_given_up(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm.wanted.RETRY_SECONDS", 0.05)
    b = await world.node("b")
    await announce(world, b, "bad", make_group(who("bad"), 0), body=b"")
    await until(lambda: b.count("dropped_wanted") == 1)
    assert b.count("fetch_failures") == 3
    assert b.count("rejected") == {}


async def test_a_scorer_that_is_away_rejects_nobody(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm.admission.SCORE_RETRY_SECONDS", 0.01)
    monkeypatch.setattr("swarm.pulling.UNSCORED_SECONDS", 0.1)
    away = 2

    async def sometimes(group: RolloutGroup) -> list[Scored]:
        nonlocal away
        away -= 1
        if away >= 0:
            raise ScoringUnavailable("scorer restarts")
        return await truthful(group)

    a, b = await world.node("a"), await world.node("b", rescore=sometimes)
    await join(a, b)
    digest = a.exchange.publish(make_group(a.identity, 0))
    await until(lambda: digest in b.pool())
    away = 3 * 4
    second = a.exchange.publish(make_group(a.identity, 1))
    await until(lambda: second in b.pool())
    assert (b.count("unscored"), b.count("rejected"), b.count("dropped_wanted")) == (4, {}, 0)
    assert ("scorer", "groups cannot be scored: scorer restarts") in b.events


@pytest.mark.parametrize("scores", [(0.0,), (0.0, math.nan), (0.0, math.inf)])
async def test_scores_that_are_none_admit_nothing(world: World, scores: tuple[float, ...]) -> None:
    async def broken(group: RolloutGroup) -> tuple[Scored, ...]:
        return tuple(map(Scored, scores))

    b = await world.node("b", rescore=broken)
    await announce(world, b, "a", make_group(who("a"), 0))
    await until(lambda: b.count("rejected") == {"scorer_failed": 1})
    assert (b.count("admitted"), b.pool()) == (0, set())


async def test_over_budget_and_uninformative_groups_are_kept_but_not_trained_on(world: World) -> None:
    b = await world.node("b")
    group = make_group(who("long"), 0)
    longer = tuple(msgspec.structs.replace(completion, token_count=17) for completion in group.completions)
    _, over = await announce(world, b, "long", msgspec.structs.replace(group, completions=longer))
    _, equal = await announce(world, b, "equal", make_group(who("equal"), 0, rewards=(1.0, 1.0)), reward_std=0.5)
    await until(lambda: b.count("rejected") == {"over_budget": 1, "uninformative": 1})
    assert (b.verdict(over), b.verdict(equal), b.pool()) == ("over_budget", "uninformative", set())


async def test_announcing_anothers_group_takes_nothing_from_its_producer(world: World) -> None:
    b = await world.node("b", heal_seconds=100)
    body, raw = sealed(who("a"), make_group(who("a"), 0))
    thief, honest = await world.peer("thief", {digest_of(body): body}), await world.peer("a", {digest_of(body): body})
    await join(thief, b)
    await join(honest, b)
    _, stolen = sealed(who("thief"), make_group(who("thief"), 0), group=digest_of(body), size=len(body))
    await thief.publish(TOPIC, stolen)
    await until(lambda: b.count("rejected") == {"wrong_producer": 1})
    assert b.verdicts(thief.peer_id)["wrong_producer"] == 1
    await honest.publish(TOPIC, raw)
    await until(lambda: digest_of(body) in b.pool())


async def test_a_flood_from_one_producer_leaves_room_for_others(world: World) -> None:
    flood, b = await world.node("flood"), await world.node("b", pool_target=8)
    a = await world.node("a")
    await join(flood, b)
    for slot in range(200):
        flood.exchange.publish(make_group(flood.identity, slot))
    await until(lambda: (b.count("heard"), b.count("admitted")) == (200, 8))
    await join(a, b)
    honest = {a.exchange.publish(make_group(a.identity, slot)) for slot in range(4)}
    await until(lambda: b.count("heard") == 204)
    assert b.count("admitted") == 8
    b.store.mark_used(list(b.pool())[:4])
    await until(lambda: honest <= b.pool())
    assert b.store.unused(time.time()) == {flood.identity.peer_id: 4, a.identity.peer_id: 4}


async def test_peers_that_never_answer_leave_pullers_for_others(world: World) -> None:
    b = await world.node("b", heal_seconds=100, request_timeout=1.0)

    async def hang(peer: str, data: bytes) -> bytes:
        await asyncio.sleep(60)
        return b""

    for name in ("sybil0", "sybil1", "sybil2", "sybil3"):
        sybil = await world.peer(name)
        for protocol in (GROUPS_PROTOCOL, BATCH_PROTOCOL, LIVE_PROTOCOL):
            sybil.serve(protocol, hang, max_request=1 << 16)
        await join(sybil, b)
        for slot in range(20):
            await sybil.publish(TOPIC, sealed(who(name), make_group(who(name), slot))[1])
    await until(lambda: b.count("heard") == 80)
    a = await world.node("a")
    await join(a, b)
    honest = {a.exchange.publish(make_group(a.identity, slot)) for slot in range(8)}
    begin = time.monotonic()
    await until(lambda: honest <= b.pool())
    assert time.monotonic() - begin < 6.0, "about one deadline; it would be 16 of each puller"
    assert b.count("rejected") == {}, "silence is no offence"


async def test_one_bad_record_never_drops_another(world: World) -> None:
    b = await world.node("b")
    bodies: dict[bytes, bytes] = {}
    peer = await world.peer("a", bodies)
    await join(peer, b)
    good, wrong = set(), set()
    for slot in range(12):
        group = make_group(who("a"), slot)
        if slot % 4 == 3:
            group = msgspec.structs.replace(group, completions=group.completions[::-1] + group.completions[:1])
            lie = msgspec.structs.replace(group.completions[0], reward=0.5)
            group = msgspec.structs.replace(group, completions=(lie, *group.completions[1:]))
        body, raw = sealed(who("a"), group)
        bodies[digest_of(body)] = body
        (wrong if slot % 4 == 3 else good).add(digest_of(body))
        await peer.publish(TOPIC, raw)
    await until(lambda: b.pool() == good)
    await until(lambda: b.count("rejected") == {"reward_mismatch": 3})
    assert {b.verdict(digest) for digest in wrong} == {"reward_mismatch"}


async def test_a_holder_that_asks_to_wait_is_waited_for(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm.serving.ANSWER_BURST", 4000.0)
    monkeypatch.setattr("swarm.serving.ANSWER_RATE", 8000.0)
    monkeypatch.setattr("swarm.serving.LIVE_COST", 0.0)
    monkeypatch.setattr("swarm.memory.LEAST_WAIT_SECONDS", 0.05)
    a, b = await world.node("a"), await world.node("b", heal_seconds=100, pool_target=100)
    digests = {a.exchange.publish(make_group(a.identity, slot)) for slot in range(60)}
    await join(a, b)
    await until(lambda: b.pool() == digests)
    assert a.count("turned_away") > 0
    assert b.count("put_off") > 0
    assert (b.count("fetch_failures"), b.count("dropped_wanted"), b.count("rejected")) == (0, 0, {})


async def test_while_one_holder_asks_to_wait_another_is_asked(world: World) -> None:
    b = await world.node("b", heal_seconds=100)
    body, raw = sealed(who("a"), make_group(who("a"), 0))
    busy, good = await world.peer("a"), await world.peer("good", {digest_of(body): body})

    async def later(peer: str, data: bytes) -> bytes:
        raise Busy(60.0)

    busy.serve(GROUPS_PROTOCOL, later, max_request=4096)
    await join(busy, b)
    await join(good, b)
    begin = time.monotonic()
    await busy.publish(TOPIC, raw)
    await until(lambda: digest_of(body) in b.pool())
    assert time.monotonic() - begin < 3.0
