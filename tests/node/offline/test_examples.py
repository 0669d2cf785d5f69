"""What is taken of scored answers, and what each method says when there is nothing to take."""

import random

import pytest

from node.offline.examples import (
    Answer,
    AnsweredTask,
    Labelled,
    OfflineError,
    Pair,
    labelled,
    preference_pairs,
    to_imitate,
)


def task(prompt: int, *answers: tuple[int, float] | tuple[int, float, bool]) -> AnsweredTask:
    """Answers as (token, reward, finished)."""
    return AnsweredTask((prompt,), tuple(Answer((a[0],), a[1], a[2] if len(a) > 2 else True) for a in answers))


def rng() -> random.Random:
    return random.Random(0)


def test_the_best_answer_is_paired_with_the_worst() -> None:
    tasks = [task(1, (10, 0.5), (11, 1.0), (12, 0.0)), task(2, (20, 0.0), (21, 0.25))]
    found = preference_pairs(tasks, per_task=1, threshold=0, rng=rng())
    assert set(found) == {Pair((1,), (11,), (12,)), Pair((2,), (21,), (20,))}


def test_further_pairs_go_inwards_and_never_tie() -> None:
    tasks = [task(1, (10, 1.0), (11, 0.75), (12, 0.5), (13, 0.25), (14, 0.0))]
    found = preference_pairs(tasks, per_task=9, threshold=0, rng=rng())
    assert set(found) == {Pair((1,), (10,), (14,)), Pair((1,), (11,), (13,))}


def test_equal_pairs_uniform_tasks_and_repeated_answers_count_once_or_not() -> None:
    same = task(1, (10, 1.0), (10, 1.0), (11, 0.0), (11, 0.0))
    found = preference_pairs([same, same, task(3, (30, 1.0), (31, 1.0))], per_task=4, threshold=0, rng=rng())
    assert found == [Pair((1,), (10,), (11,))]


def test_an_answer_that_was_cut_off_is_rejected_at_most() -> None:
    cut = task(1, (10, 1.0, False), (11, 0.5), (12, 0.0, False))
    assert preference_pairs([cut], per_task=1, threshold=0, rng=rng()) == [Pair((1,), (11,), (12,))]
    assert set(labelled([cut], threshold=0.5, rng=rng())) == {Labelled((1,), (11,), True), Labelled((1,), (12,), False)}
    assert to_imitate([cut], threshold=0.5, rng=rng()) == [Labelled((1,), (11,), True)]


def test_a_threshold_holds_for_the_chosen_answer() -> None:
    tasks = [task(1, (10, 0.2), (11, 0.0)), task(2, (20, 1.0), (21, 0.0))]
    assert preference_pairs(tasks, per_task=1, threshold=0.5, rng=rng()) == [Pair((2,), (20,), (21,))]
    with pytest.raises(OfflineError, match=r"reward 0.9 or more beside a worse one ; lower --threshold"):
        preference_pairs(tasks[:1], per_task=1, threshold=0.9, rng=rng())


def test_the_order_is_the_seeds() -> None:
    tasks = [task(i, (10, 1.0), (11, 1.0), (12, 0.0), (13, 0.0)) for i in range(20)]
    once, again, other = (
        preference_pairs(tasks, per_task=1, threshold=0, rng=random.Random(seed)) for seed in (1, 1, 2)
    )
    assert once == again != other
    assert len({pair.chosen_ids for pair in once}) == 2, "equally good answers take turns"


def test_rewards_that_are_all_equal_make_no_pair() -> None:
    with pytest.raises(OfflineError, match=r"all answers to 2 tasks got the same reward, 0 ; .* --from-environments"):
        preference_pairs([task(1, (10, 0.0), (11, 0.0)), task(2, (20, 0.0))], per_task=1, threshold=0, rng=rng())


def test_labels_need_both_kinds() -> None:
    with pytest.raises(OfflineError, match=r"none of 2 answers is wanted at a threshold of 0.5 ; lower --threshold"):
        labelled([task(1, (10, 0.0), (11, 0.4))], threshold=0.5, rng=rng())
    with pytest.raises(OfflineError, match=r"none of 1 answers is unwanted at a threshold of 0.5 ; raise --threshold"):
        labelled([task(1, (10, 1.0))], threshold=0.5, rng=rng())


def test_only_full_scores_are_imitated() -> None:
    tasks = [task(1, (10, 1.0), (10, 1.0), (11, 0.9)), task(2, (20, 1 - 1e-9))]
    assert set(to_imitate(tasks, threshold=1, rng=rng())) == {Labelled((1,), (10,), True), Labelled((2,), (20,), True)}
    with pytest.raises(OfflineError, match=r"no finished answer to 1 tasks scores 1, the best 0.4 ; lower --threshold"):
        to_imitate([task(1, (10, 0.4))], threshold=1, rng=rng())
