"""The state machine of rounds, what one record and two of them must satisfy, and the held-out seeds."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.assignment import held_out_task, is_assigned, round_task
from protocol.envelope import Domain, digest_of, seal
from protocol.identity import Identity
from protocol.manifest import Coordination, Manifest, ManifestError, embedded_manifest
from protocol.messages import MAX_ANNOUNCEMENT_BYTES
from protocol.rejection import Reason, Rejected
from protocol.rounds import (
    Facts,
    Pace,
    Round,
    State,
    advance,
    check_successor,
    commitment_of,
    first,
    leader_of,
    measured_mix,
    next_term,
    open_round,
    seal_round,
    seed_for,
    take_over,
)

NOW = 1_800_000_000.0
KEYS = [Identity.from_seed(bytes([number]) * 32) for number in range(3)]
MANIFEST = embedded_manifest("rounds", NOW, Coordination(tuple(key.peer_id for key in KEYS), listed_only=True))
PACE = Pace(600, 60, least_members=2, quorum=0.8, groups=4, tasks=8, samples=1)
MEMBERS, OTHERS, BOARD = b"m" * 32, b"o" * 32, b"b" * 32
FACTS = Facts(MEMBERS, present=2, awaited=2, through=0, board=b"", mix=(1000,) * 4)


MANY = msgspec.structs.replace(
    MANIFEST,
    environments=tuple(
        msgspec.structs.replace(MANIFEST.environments[0], name=f"e{number}", settings={}) for number in range(256)
    ),
)


def seed_of(number: int) -> bytes:
    return seed_for(KEYS[0], MANIFEST.digest, number, 0)


def step(record: Round, now: float = NOW, **facts: Any) -> Round | None:
    return advance(record, b"p" * 32, now, _facts(facts), PACE, seed_of)


def _facts(changes: dict[str, Any]) -> Facts:
    values = {name: getattr(FACTS, name) for name in Facts.__slots__} | changes
    return Facts(**values)


def opened() -> Round:
    record = step(first(MANIFEST, FACTS, PACE))
    assert record is not None
    return record


def closing() -> Round:
    record = step(opened(), NOW + 600)
    assert record is not None
    return record


def evaluated() -> Round:
    record = step(closing(), board=BOARD)
    assert record is not None
    return record


def test_a_round_goes_from_state_to_state() -> None:
    waiting = first(MANIFEST, FACTS, PACE)
    assert (waiting.number, waiting.state, waiting.previous) == (1, State.waiting, b"")
    assert step(waiting, present=1) is None
    record = opened()
    assert (record.number, record.state, record.previous) == (1, State.open, b"p" * 32)
    assert (record.opened, record.closes) == (NOW, NOW + 600)
    assert record.commitment == commitment_of(seed_of(1))
    assert record.seed == b""
    assert step(record, NOW + 599) is None
    told = closing()
    assert (told.state, told.seed, told.answers_by) == (State.closing, seed_of(1), NOW + 660)
    assert step(told, NOW + 10_000) is None  # evaluated when there is a board, not by the clock
    done = evaluated()
    assert (done.state, done.board) == (State.evaluated, BOARD)
    following = step(done, NOW + 700, mix=(1000, 100, 100, 100))
    assert following is not None
    assert (following.number, following.state, following.opened) == (2, State.open, NOW + 700)
    assert following.mix == (1000, 100, 100, 100)
    assert (following.seed, following.board, following.answers_by) == (b"", b"", 0)
    assert following.commitment != record.commitment
    alone = step(done, present=1)
    assert alone is not None
    assert (alone.number, alone.state, alone.opened) == (2, State.waiting, 0)


def test_a_round_that_a_wrong_clock_opened_ends() -> None:
    record = opened()
    assert step(record, NOW - 30) is None
    early = step(record, NOW - 31)  # it opened at a time that is still to come
    assert early is not None
    assert early.state is State.closing
    endless = step(msgspec.structs.replace(record, closes=record.opened + 30 * 86400), NOW + 1)
    assert endless is not None
    assert endless.state is State.closing


def test_a_quorum_closes_a_round_before_its_time() -> None:
    record = opened()
    assert step(record, awaited=5, through=3) is None
    early = step(record, awaited=5, through=4)
    assert early is not None
    assert early.state is State.closing
    by_time_only = advance(record, b"", NOW, _facts({"through": 2}), _pace(groups=0), seed_of)
    assert by_time_only is None


def _pace(**changes: Any) -> Pace:
    return Pace(**({name: getattr(PACE, name) for name in Pace.__slots__} | changes))


def test_a_new_member_list_is_a_revision() -> None:
    record = step(opened(), members=OTHERS)
    assert record is not None
    assert (record.state, record.revision, record.members) == (State.open, 1, OTHERS)
    check_successor(opened(), record)
    again = advance(record, b"q" * 32, NOW, FACTS, PACE, seed_of)
    assert again is not None
    assert again.revision == 2


@pytest.mark.parametrize("before", [lambda: first(MANIFEST, FACTS, PACE), opened, closing, evaluated])
def test_a_standby_takes_the_same_round_over(before: Callable[[], Round]) -> None:
    head = before()
    record = take_over(
        head, b"p" * 32, 1, NOW + 630, PACE, lambda number: seed_for(KEYS[1], MANIFEST.digest, number, 1)
    )
    check_successor(head, record)
    assert (record.number, record.state, record.term, record.closes) == (head.number, head.state, 1, head.closes)
    assert record.position > head.position
    assert record.seed == head.seed
    if head.state is State.open:
        assert record.commitment != head.commitment
    if head.state is State.closing:
        assert record.answers_by == NOW + 690


def test_terms_are_led_in_turn() -> None:
    assert [leader_of(MANIFEST, term) for term in range(4)] == [KEYS[i].peer_id for i in (0, 1, 2, 0)]
    assert [next_term(MANIFEST, KEYS[1].peer_id, term) for term in (0, 1, 2)] == [1, 4, 4]
    assert [next_term(MANIFEST, KEYS[0].peer_id, term) for term in (0, 1, 2)] == [3, 3, 3]
    assert [next_term(MANIFEST, KEYS[2].peer_id, term) for term in (0, 1, 2)] == [2, 2, 5]


CHANGES: list[tuple[Callable[[], Round], Callable[[Round], Round]]] = [
    (opened, lambda r: msgspec.structs.replace(r, number=2)),
    (opened, lambda r: msgspec.structs.replace(r, state=State.evaluated, seed=seed_of(1), board=BOARD)),
    (opened, lambda r: msgspec.structs.replace(r, revision=1, closes=r.closes + 1, members=OTHERS)),
    (opened, lambda r: msgspec.structs.replace(r, revision=2, members=OTHERS)),
    (opened, lambda r: msgspec.structs.replace(r, revision=1)),
    (opened, lambda r: msgspec.structs.replace(closing(), commitment=commitment_of(b"x" * 32), seed=b"x" * 32)),
    (opened, lambda r: msgspec.structs.replace(closing(), mix=(1, 1, 1, 1))),
    (opened, lambda r: msgspec.structs.replace(closing(), tasks=1)),
    (closing, lambda r: opened()),
    (closing, lambda r: msgspec.structs.replace(r, term=9, answers_by=r.answers_by + 1)),
    (closing, lambda r: msgspec.structs.replace(r, term=1, seed=b"x" * 32, commitment=commitment_of(b"x" * 32))),
    (closing, lambda r: msgspec.structs.replace(evaluated(), revision=1)),
    (evaluated, lambda r: msgspec.structs.replace(r, number=3, state=State.waiting)),
    (evaluated, lambda r: msgspec.structs.replace(r, term=1, board=OTHERS)),
    (evaluated, lambda r: msgspec.structs.replace(r, term=2, number=2, state=State.waiting)),
    (lambda: msgspec.structs.replace(opened(), term=1), lambda r: closing()),
]


@pytest.mark.parametrize(("before", "change"), CHANGES)
def test_what_must_not_follow_is_refused(before: Callable[[], Round], change: Callable[[Round], Round]) -> None:
    head = before()
    with pytest.raises(Rejected) as refused:
        check_successor(head, change(head))
    assert refused.value.reason is Reason.broken_chain


def read(sealed: bytes, manifest: Manifest = MANIFEST) -> Round:
    return open_round(sealed, manifest, NOW)[1]


def test_a_sealed_record_is_read_back_and_fits_gossip() -> None:
    record = evaluated()
    sealed = seal_round(KEYS[0], record, NOW)
    assert read(sealed) == record
    assert len(sealed) < 700
    most = msgspec.structs.replace(record, previous=b"p" * 32)
    many = Manifest.from_bytes(MANY.to_bytes())
    noise = tuple((number * 7919) % 10_000 for number in range(256))
    largest = seal_round(KEYS[0], msgspec.structs.replace(most, swarm=many.digest, mix=noise), NOW)
    assert len(largest) <= MAX_ANNOUNCEMENT_BYTES
    assert read(largest, many).mix == noise


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (lambda: msgspec.structs.replace(opened(), swarm=bytes(32)), Reason.wrong_swarm),
        (lambda: msgspec.structs.replace(opened(), term=1), Reason.wrong_producer),
        (lambda: msgspec.structs.replace(opened(), commitment=b""), Reason.malformed),
        (lambda: msgspec.structs.replace(opened(), commitment=b"short"), Reason.malformed),
        (lambda: msgspec.structs.replace(opened(), board=BOARD), Reason.malformed),
        (lambda: msgspec.structs.replace(opened(), mix=(1,)), Reason.malformed),
        (lambda: msgspec.structs.replace(opened(), mix=(0,) * 4), Reason.malformed),
        (lambda: msgspec.structs.replace(opened(), closes=1), Reason.malformed),
        (lambda: msgspec.structs.replace(opened(), closes=int(NOW) + 30 * 86400 + 1), Reason.malformed),
        (lambda: msgspec.structs.replace(opened(), closes=2**63 - 1), Reason.malformed),
        (lambda: msgspec.structs.replace(opened(), opened=2**62, closes=2**62), Reason.malformed),
        (lambda: msgspec.structs.replace(closing(), answers_by=int(NOW) + 30 * 86400 + 1), Reason.malformed),
        (lambda: msgspec.structs.replace(opened(), number=int(NOW) + 1, previous=b"?" * 32), Reason.malformed),
        (lambda: msgspec.structs.replace(opened(), term=2**31 - 2, previous=b"?" * 32), Reason.malformed),
        (lambda: msgspec.structs.replace(opened(), seed=seed_of(1)), Reason.malformed),
        (lambda: msgspec.structs.replace(closing(), seed=b"x" * 32), Reason.broken_commitment),
        (lambda: msgspec.structs.replace(opened(), tasks=257), Reason.malformed),
        (
            lambda: msgspec.structs.replace(opened(), swarm=MANY.digest, mix=(1,) * 256, tasks=256, samples=2),
            Reason.malformed,
        ),
    ],
)
def test_a_record_that_cannot_be_is_refused(record: Callable[[], Round], reason: Reason) -> None:
    made = record()
    with pytest.raises(Rejected) as refused:
        read(seal_round(KEYS[0], made, NOW), MANY if made.swarm == MANY.digest else MANIFEST)
    assert refused.value.reason is reason


def test_the_longest_round_is_read_and_so_is_what_ends_one_that_a_clock_ahead_opened() -> None:
    longest = msgspec.structs.replace(opened(), closes=int(NOW) + 30 * 86400)
    assert read(seal_round(KEYS[0], longest, NOW)) == longest
    ahead = 86400  # when it was opened
    ended = msgspec.structs.replace(
        closing(), opened=int(NOW) + ahead, closes=int(NOW) + ahead + 600, answers_by=int(NOW) + ahead + 60
    )
    assert read(seal_round(KEYS[0], ended, NOW)) == ended


def test_only_coordinators_sign_rounds() -> None:
    stranger = Identity.from_seed(b"s" * 32)
    with pytest.raises(Rejected, match="does not lead term 0"):
        read(seal_round(stranger, opened(), NOW))
    without = embedded_manifest("rounds", NOW)
    with pytest.raises(Rejected, match="does not lead"):
        read(seal_round(KEYS[0], msgspec.structs.replace(opened(), swarm=without.digest), NOW), without)
    as_group = seal(KEYS[0], Domain.group, msgspec.msgpack.encode(opened()), issued=NOW, expires=NOW + 60)
    with pytest.raises(Rejected, match="sealed as group"):
        read(as_group)


@given(st.binary(max_size=400))
def test_garbage_is_refused(payload: bytes) -> None:
    with pytest.raises(Rejected):
        read(payload)
    with pytest.raises(Rejected):
        read(seal(KEYS[0], Domain.round, payload, issued=NOW, expires=NOW + 60))


def test_a_seed_is_the_keys_alone_and_its_tasks_nobodys() -> None:
    assert seed_of(1) == seed_for(Identity.from_seed(bytes(32)), MANIFEST.digest, 1, 0)
    assert (
        len({seed_of(1), seed_of(2), seed_for(KEYS[0], MANIFEST.digest, 1, 3), seed_for(KEYS[1], bytes(32), 1, 0)}) == 4
    )
    task = round_task(MANIFEST, seed_of(1), "chain_sum", 3)
    assert (task.environment, task.index) == ("chain_sum", 3)
    assert task.seed != round_task(MANIFEST, seed_of(2), "chain_sum", 3).seed
    assert task.seed != round_task(MANIFEST, seed_of(1), "word_sorting", 3).seed
    assert task.seed != held_out_task(MANIFEST, "chain_sum", 3).seed
    assert not any(is_assigned(MANIFEST, epoch, KEYS[0].peer_id, task) for epoch in range(50))
    with pytest.raises(ValueError, match="no environment 'other'"):
        round_task(MANIFEST, seed_of(1), "other", 0)


def test_the_mix_follows_what_there_is_to_learn() -> None:
    rates = {"letter_counting": 0.5, "chain_sum": 0.9, "spell_backward": 0.0}
    assert measured_mix(MANIFEST, rates) == (1000, 360, 100, 1000)  # not measured: its whole weight
    assert measured_mix(MANIFEST, {}) == (1000,) * 4


def test_a_manifest_without_coordinators_keeps_its_bytes() -> None:
    plain = embedded_manifest("rounds", NOW)
    assert plain.to_bytes()[:2] == b"\x99\x01"
    assert MANIFEST.to_bytes()[:2] == b"\x9a\x02"
    assert Manifest.from_bytes(MANIFEST.to_bytes()) == MANIFEST
    assert "coordination" not in plain.describe()
    assert MANIFEST.describe()["coordination"]["listed_only"] is True
    for broken in (
        msgspec.structs.replace(MANIFEST, version=1),
        msgspec.structs.replace(plain, version=2),
        msgspec.structs.replace(MANIFEST, coordination=Coordination((KEYS[0].peer_id,) * 2, listed_only=False)),
        msgspec.structs.replace(MANIFEST, coordination=Coordination(("1" * 52,), listed_only=False)),
        msgspec.structs.replace(MANIFEST, coordination=Coordination((), listed_only=False)),
    ):
        with pytest.raises(ManifestError, match="coordination"):
            Manifest.from_bytes(broken.to_bytes())


def test_digests_name_records() -> None:
    assert digest_of(seal_round(KEYS[0], opened(), NOW)) != digest_of(seal_round(KEYS[0], closing(), NOW))
