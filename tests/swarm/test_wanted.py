from collections import Counter

from protocol.messages import Announcement
from protocol.rollout import TaskRef
from swarm.wanted import HALF_LIFE, MAX_ATTEMPTS, MAX_WAITS, RETRY_SECONDS, Candidate, Wanted

NOW = 1_700_000_000.0


def candidate(n: int, producer: str = "alice", expires: float = NOW + 1000) -> Candidate:
    announcement = Announcement(
        b"s" * 32, n.to_bytes(32, "big"), 100, 0, TaskRef("chain_sum", "1", 0, n), "tiny", 2, 0.5, 0.5, 16
    )
    return Candidate(announcement, producer, expires, producer)


def everybody(candidate: Candidate) -> bool:
    return True


def test_each_comes_out_once() -> None:
    wanted = Wanted(10, 1)
    for n in range(5):
        wanted.add(candidate(n), 1.0, NOW)
    popped = [wanted.pop(NOW, everybody) for _ in range(5)]
    assert {c.announcement.task.index for c in popped if c} == {0, 1, 2, 3, 4}
    assert wanted.pop(NOW, everybody) is None
    assert (len(wanted), wanted.producers()) == (0, set())


def test_trusted_producers_come_first_in_proportion_to_their_weight() -> None:
    first: Counter[str] = Counter()
    for seed in range(2000):
        wanted = Wanted(10, seed)
        wanted.add(candidate(1, "trusted"), 0.75, NOW)
        wanted.add(candidate(2, "new"), 0.25, NOW)
        popped = wanted.pop(NOW, everybody)
        assert popped is not None
        first[popped.producer] += 1
    assert abs(first["trusted"] - 1500) < 100


def test_new_ones_come_before_old_ones() -> None:
    newer = 0
    for seed in range(1000):
        wanted = Wanted(10, seed)
        wanted.add(candidate(1, "a"), 1.0, NOW)
        wanted.add(candidate(2, "b"), 1.0, NOW + 2 * HALF_LIFE)
        popped = wanted.pop(NOW + 2 * HALF_LIFE, everybody)
        newer += popped is not None and popped.producer == "b"
    assert abs(newer - 800) < 65  # rates 1 and 1/4


def test_announcing_more_does_not_get_more_chosen() -> None:
    first: Counter[str] = Counter()
    for seed in range(500):
        wanted = Wanted(200, seed)
        for n in range(100):
            wanted.add(candidate(n, "flood"), 1.0, NOW)
        wanted.add(candidate(200, "a"), 1.0, NOW)
        popped = wanted.pop(NOW, everybody)
        assert popped is not None
        first[popped.producer] += 1
    assert abs(first["a"] - 500 / 6.19) < 40  # 1 in 1 + H(100)


def test_the_queue_is_bounded_and_counts_what_it_drops() -> None:
    wanted = Wanted(3, 1)
    for n in range(10):
        wanted.add(candidate(n), 1.0, NOW)
    assert (len(wanted), wanted.dropped) == (3, 7)


def test_expired_ones_are_forgotten_and_forbidden_ones_stay() -> None:
    wanted = Wanted(10, 1)
    wanted.add(candidate(1, expires=NOW + 1), 1.0, NOW)
    wanted.add(candidate(2, "bob"), 1.0, NOW)
    assert wanted.pop(NOW + 1, lambda candidate: candidate.producer != "bob") is None
    assert wanted.producers() == {"bob"}
    assert wanted.pop(NOW + 1, everybody) == candidate(2, "bob")


def test_a_failed_one_is_tried_later_and_then_given_up() -> None:
    wanted, now = Wanted(10, 1), NOW
    wanted.add(candidate(1), 1.0, now)
    for attempt in range(1, MAX_ATTEMPTS):
        popped = wanted.pop(now, everybody)
        assert popped is not None
        wanted.retry(popped, 1.0, now)
        assert wanted.pop(now, everybody) is None
        now += RETRY_SECONDS * 2**attempt
    popped = wanted.pop(now, everybody)
    assert popped is not None
    wanted.retry(popped, 1.0, now)
    assert (len(wanted), wanted.dropped) == (0, 1)
    wanted.retry(candidate(2), 0.0, now)
    assert (len(wanted), wanted.dropped) == (0, 2), "of a banned producer"


def test_one_that_is_put_off_comes_when_it_may_and_is_given_up_in_the_end() -> None:
    wanted, now = Wanted(10, 1), NOW
    wanted.add(candidate(1, expires=NOW + 1e6), 1.0, now)
    for _ in range(MAX_WAITS - 1):
        popped = wanted.pop(now, everybody)
        assert popped is not None
        assert popped.attempts == 0, "waiting is no failure"
        wanted.put_off(popped, 1.0, now, until=now + 7)
        assert wanted.pop(now + 6.9, everybody) is None
        now += 7
    popped = wanted.pop(now, everybody)
    assert popped is not None
    wanted.put_off(popped, 1.0, now, until=now + 7)
    assert (len(wanted), wanted.dropped) == (0, 1)
