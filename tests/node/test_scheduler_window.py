"""Which finished groups make up a step."""

import random

from node.scheduling.window import Candidate, choose


def begun(place: int, finished: int | None = None, oldest: int | None = None) -> Candidate:
    return Candidate(place, finished, oldest)


def take(candidates: list[Candidate], count: int, *, version: int = 0, stale: int = 1, window: int = 0) -> object:
    return choose(candidates, count, version=version, max_staleness=stale, window=window)


def test_the_first_to_finish_are_taken_and_given_in_the_order_begun() -> None:
    candidates = [begun(0), begun(1, finished=2), begun(2, finished=0), begun(3, finished=1), begun(4)]
    assert take(candidates, 2) == [2, 3]
    assert take(candidates, 3) == [1, 2, 3]
    assert take(candidates, 4) is None


def test_what_would_be_too_stale_later_is_waited_for() -> None:
    """Begun under version 4, two of staleness 1 at version 5: they must be in this step."""
    candidates = [begun(0, None, 4), begun(1, 3, 4), begun(2, 0, 5), begun(3, 1, 5), begun(4, 2, 5)]
    assert take(candidates, 2, version=5) is None
    assert take(candidates, 2, version=5, stale=2) == [2, 3]
    finished = [begun(0, 4, 4), *candidates[1:]]
    assert take(finished, 2, version=5) == [0, 1]
    assert take(finished, 3, version=5) == [0, 1, 2]


def test_no_more_is_left_than_can_be_taken_in_time() -> None:
    """Two a step, staleness 1: of what has tokens of version 0, two may be left for the next step."""
    candidates = [begun(0, None, 0), begun(1, None, 0), begun(2, 0), begun(3, 1)]
    assert take(candidates, 2) == [2, 3]
    candidates = [begun(0, 2, 0), begun(1, None, 0), begun(2, None, 0), begun(3, 0), begun(4, 1)]
    assert take(candidates, 2) == [0, 3]
    assert take([begun(0, None, 0), *candidates[1:]], 2) is None


def test_short_answers_overtake_the_oldest_only_within_the_window() -> None:
    candidates = [begun(10), begun(11, 1), begun(12), begun(14, 0), begun(15, 2)]
    assert take(candidates, 2) == [11, 14]
    assert take(candidates, 2, window=5) == [11, 14]
    assert take(candidates, 2, window=4) is None
    # the window moves once the oldest one is finished: 12 is the next that is not
    assert take([begun(10, 3), *candidates[1:]], 2, window=4) == [11, 14]
    assert take([begun(10, 3), *candidates[1:]], 2, window=2) == [10, 11]
    assert take([begun(10, 1), begun(90, 0), begun(99, 2)], 3, window=2) == [10, 90, 99]


def test_staleness_is_bounded_whatever_finishes_first() -> None:
    """Any order of finishing, window of count * (1 + staleness): nothing taken or left is ever too stale."""
    for seed in range(40):
        draw = random.Random(seed)
        count, stale = draw.randint(1, 4), draw.randint(0, 3)
        flying: dict[int, Candidate] = {}
        place = finished = 0
        for version in range(12):
            while len(flying) < count * (1 + stale):
                flying[place] = begun(place, oldest=version)
                place += 1
            while (chosen := take(list(flying.values()), count, version=version, stale=stale)) is None:
                unfinished = [one for one in flying.values() if one.finished is None]
                one = draw.choice(unfinished)
                flying[one.place] = begun(one.place, finished, one.oldest)
                finished += 1
            assert isinstance(chosen, list)
            assert len(chosen) == count
            for number in chosen:
                assert version - (flying.pop(number).oldest or 0) <= stale
