import hashlib
import json
from collections import Counter

import pytest

from swarm.experience import PoolEntry
from swarm.sampler import REMEMBERED_BESIDES, Sampler


def pool(**groups: int) -> list[PoolEntry]:
    """So many groups of each producer."""
    return [
        PoolEntry(hashlib.sha256(f"{producer}{i}".encode()).digest(), producer, (0.0, 1.0), float(i))
        for producer, count in groups.items()
        for i in range(count)
    ]


def choose(sampler: Sampler, entries: list[PoolEntry], count: int, *, uses: int = 1, share: float = 1.0, weight=None):
    by_producer = weight or (lambda producer: 1.0)
    return sampler.choose(
        entries, count, max_uses=uses, max_producer_share=share, weight=lambda entry: by_producer(entry.producer)
    )


def available(sampler: Sampler, entries: list[PoolEntry], count: int, *, uses: int = 1, share: float = 1.0) -> int:
    return sampler.available(entries, count, max_uses=uses, max_producer_share=share)


def test_draws_without_replacement_and_counts_uses() -> None:
    sampler, entries = Sampler(1), pool(a=6)
    first = choose(sampler, entries, 4)
    assert len({entry.digest for entry in first}) == 4
    assert available(sampler, entries, 9) == 2
    second = choose(sampler, entries, 4)
    assert {e.digest for e in first} | {e.digest for e in second} == {e.digest for e in entries}
    assert choose(sampler, entries, 4) == []
    assert available(sampler, entries, 9, uses=2) == 6
    assert available(sampler, [], 9, uses=2) == 0


def test_fresh_groups_come_before_used_ones() -> None:
    sampler, entries = Sampler(1), pool(a=6)
    first = choose(sampler, entries, 4, uses=3)
    second = choose(sampler, entries, 4, uses=3)
    assert {e.digest for e in entries} - {e.digest for e in first} <= {e.digest for e in second}


def test_the_draw_is_uniform() -> None:
    counts: Counter[bytes] = Counter()
    entries = pool(a=2, b=6)
    for seed in range(2000):
        counts.update(entry.digest for entry in choose(Sampler(seed), entries, 2))
    assert len(counts) == 8
    assert all(abs(count - 500) < 100 for count in counts.values()), counts  # 5 sigma is about 97


def test_the_draw_follows_the_weights() -> None:
    counts: Counter[str] = Counter()
    entries = pool(a=1, b=1)
    for seed in range(2000):
        counts.update(e.producer for e in choose(Sampler(seed), entries, 1, weight={"a": 0.75, "b": 0.25}.get))
    assert abs(counts["a"] - 1500) < 100


def test_a_banned_producer_gets_nothing() -> None:
    chosen = choose(Sampler(1), pool(a=4, b=4), 8, weight={"a": 0.5, "b": 0.0}.get)
    assert Counter(e.producer for e in chosen) == {"a": 4}


def test_a_flood_does_not_fill_the_update() -> None:
    chosen = choose(Sampler(1), pool(flood=1000, a=2, b=2), 4, share=0.5)
    assert len(chosen) == 4
    assert Counter(e.producer for e in chosen)["flood"] <= 2


@pytest.mark.parametrize("groups", [{"a": 9}, {"a": 9, "b": 1}, {"a": 9, "b": 1, "c": 1}, {"a": 1, "b": 2}, {}])
def test_what_is_available_is_what_a_choice_gives(groups: dict[str, int]) -> None:
    for share in (0.25, 0.5, 1.0):
        assert available(Sampler(1), pool(**groups), 4, share=share) == len(
            choose(Sampler(1), pool(**groups), 4, share=share)
        )
    assert available(Sampler(1), pool(a=9, b=1), 4, share=0.5) == 3


def test_the_only_producer_of_a_small_swarm_fills_the_update() -> None:
    assert len(choose(Sampler(1), pool(a=9), 4, share=0.25)) == 4
    assert Counter(e.producer for e in choose(Sampler(1), pool(a=9, b=9), 4, share=0.25)) == {"a": 2, "b": 2}


def test_no_count_and_no_pool_choose_nothing() -> None:
    assert choose(Sampler(1), pool(a=3), 0) == []
    assert choose(Sampler(1), [], 4) == []


def test_the_same_state_and_pool_give_the_same_choice() -> None:
    entries = pool(a=20, b=20)
    sampler = Sampler(7)
    for _ in range(3):
        choose(sampler, entries, 4, uses=2)
    saved = json.loads(json.dumps(sampler.state()))
    expected = [choose(sampler, entries, 4, uses=2) for _ in range(5)]
    restored = Sampler(99)
    restored.restore(saved)
    assert [choose(restored, list(reversed(entries)), 4, uses=2) for _ in range(5)] == expected
    assert restored.state() == sampler.state()


def test_uses_are_remembered_as_long_as_a_group_is_in_the_pool() -> None:
    """And the state, which every journal record has, grows with the pool and not with the steps."""
    sampler, entries = Sampler(1), pool(a=4000)
    for step in range(1000):  # a group lives for 100 steps here, and 4 are chosen in each
        choose(sampler, entries[4 * step :][:400], 4, uses=2)
        again = Sampler(2)
        again.restore(json.loads(json.dumps(sampler.state())))
        sampler = again
    uses = sampler.state()["uses"]
    assert len(uses) <= 400 + REMEMBERED_BESIDES
    left = entries[4 * step :][:400]
    assert len({e.digest for e in left} - {bytes.fromhex(digest) for digest, _ in uses}) == available(
        sampler, left, 400
    ), "whatever was used is known"
    assert len(json.dumps(sampler.state())) < 50_000


def test_uses_outlive_a_pool_that_lost_its_newest_groups() -> None:
    sampler, entries = Sampler(1), pool(a=20)
    chosen = choose(sampler, entries, 4)
    lost = [entry for entry in entries if entry not in chosen]
    assert len(choose(sampler, lost, 4)) == 4
    assert available(sampler, entries, 20) == 12


def test_a_state_that_is_none_is_refused() -> None:
    with pytest.raises((KeyError, TypeError, ValueError)):
        Sampler(1).restore({"random": [3, [1, 2], None], "uses": []})
