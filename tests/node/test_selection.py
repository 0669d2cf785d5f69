import time

import pytest

from node.assign import DataPosition
from node.config_train import TrainConfig
from node.interfaces import Sample, Score
from node.rollouts import Rollout, train_group
from node.selection import (
    REVISIT_EVERY,
    SAME_REWARDS_ALARM,
    Curriculum,
    ForeignShare,
    SameRewards,
    overlong_penalty,
)
from protocol.assignment import is_assigned
from protocol.manifest import embedded_manifest
from protocol.rollout import TaskRef


@pytest.mark.parametrize(("length", "penalty"), [(0, 0.0), (80, 0.0), (85, -0.25), (100, -1.0), (110, -1.5)])
def test_the_last_tokens_of_the_budget_cost_reward(length: int, penalty: float) -> None:
    assert overlong_penalty(length, 100, 20, 1.0) == pytest.approx(penalty)
    assert overlong_penalty(length, 100, 20, 0.5) == pytest.approx(penalty / 2)
    assert overlong_penalty(length, 100, 0, 1.0) == 0


def test_a_buffer_longer_than_the_budget_is_the_budget() -> None:
    assert overlong_penalty(5, 10, 40, 1.0) == -0.5
    assert overlong_penalty(0, 10, 40, 1.0) == 0


def rollout() -> Rollout:
    """A full answer, one that was cut off, and an empty one."""
    samples = (
        Sample((4, 5, 6), (-1.0, -1.0, -1.0), "stop", 0),
        Sample((4, 5, 6, 7), (-1.0,) * 4, "length", 0),
        Sample((), (), "aborted", 0),
    )
    scores = (Score(1.0, True, {"style": 0.5}), Score(0.0, True), Score(0.0, False))
    return Rollout("own", TaskRef("a", "1", 0, 0), (1, 2), samples, ("x", "y", ""), scores, budget=4)


def test_what_the_trainer_gets_of_a_rollout() -> None:
    made = train_group(rollout(), TrainConfig())
    assert [s.reward for s in made.sequences] == [1, 0, 0]
    assert [s.mask for s in made.sequences] == [(True,) * 3, (True,) * 4, ()]
    assert [s.parts for s in made.sequences] == [{}] * 3
    shaped = train_group(rollout(), TrainConfig(overlong_buffer=2, mask_truncated=True, advantage="gdpo"))
    assert [s.reward for s in shaped.sequences] == [0.5, -1, 0]
    assert [s.mask for s in shaped.sequences] == [(True,) * 3, (False,) * 4, ()]
    assert [s.parts for s in shaped.sequences] == [{"parsed": 1, "style": 0.5}, {"parsed": 1}, {"parsed": 0}]


def test_environments_outside_the_window_are_passed_over_until_they_are_back() -> None:
    curriculum = Curriculum(0.1, 0.9)
    names = ["easy", "fit", "hard", "new"]
    curriculum.observe("easy", [1, 1, 1, 1])
    curriculum.observe("fit", [1, 0, 0, 0])
    curriculum.observe("hard", [0, 0, 0, 0])
    assert curriculum.outside(names) == {"easy", "hard"}
    curriculum.observe("hard", [1, 1, 1, 1])  # 0.2 of the way up
    assert curriculum.outside(names) == {"easy"}
    again = Curriculum(0.1, 0.9)
    again.restore(curriculum.state())
    assert again.rates == {"easy": 1.0, "fit": 0.25, "hard": pytest.approx(0.2)}


def test_a_curriculum_that_fits_nothing_passes_nothing_over() -> None:
    curriculum = Curriculum(0.3, 0.7)
    for name, reward in (("easy", 1.0), ("hard", 0.0)):
        curriculum.observe(name, [reward])
    assert curriculum.outside(["easy", "hard"]) == frozenset()
    assert curriculum.outside(["easy", "hard", "new"]) == {"easy", "hard"}


def test_the_whole_window_is_no_curriculum() -> None:
    curriculum = Curriculum(0.0, 1.0)
    for name, reward in (("easy", 1.0), ("hard", 0.0)):
        curriculum.observe(name, [reward])
    assert curriculum.outside(["easy", "hard", "new"]) == frozenset()


def test_passing_over_leaves_out_assigned_tasks_and_picks_no_others() -> None:
    now = time.time()
    manifest = embedded_manifest("one", now - 60)
    names = [spec.name for spec in manifest.environments]
    every, some = DataPosition(), DataPosition()
    tasks = every.take(manifest, "12D3", 200, now)
    chosen = some.take(manifest, "12D3", 24, now, frozenset(names[1:]))
    assert chosen == tuple(
        ref for i, ref in enumerate(tasks[: some.taken]) if ref.environment == names[0] or i % REVISIT_EVERY == 0
    )
    assert {ref.environment for ref in chosen} > {names[0]}, "the others are looked at now and then"
    assert all(is_assigned(manifest, some.epoch, "12D3", ref) for ref in chosen)
    resumed = DataPosition(some.epoch, some.taken)
    assert resumed.take(manifest, "12D3", 4, now) == tuple(tasks[some.taken : some.taken + 4])


def test_the_foreign_share_falls_with_the_held_out_score_and_comes_back() -> None:
    share, seen = ForeignShare(4), []
    for score in (0.5, 0.49, 0.4, 0.41, 0.42, 0.3, 0.55, 0.54):
        share.judge(score)
        seen.append(share.now)
    assert seen == [4, 4, 2, 1, 0, 0, 1, 2], "0.49 is chance, 0.4 to 0.3 are below the best"
    again = ForeignShare(1)
    again.restore(share.state())
    assert again.now == 1, "not above what the settings allow now"
    again.judge(0.4)
    assert again.now == 0


def test_an_alarm_after_many_steps_of_one_reward() -> None:
    same = SameRewards()
    said = [same.see([0.0, 0.0]) for _ in range(2 * SAME_REWARDS_ALARM)]
    assert [i + 1 for i, words in enumerate(said) if words] == [SAME_REWARDS_ALARM, 2 * SAME_REWARDS_ALARM]
    assert f"last {SAME_REWARDS_ALARM} steps got the reward 0" in str(said[SAME_REWARDS_ALARM - 1])
    assert same.see([0.0, 1.0]) is None
    assert same.steps == 0
    assert [same.see([1.0]) for _ in range(SAME_REWARDS_ALARM - 1)] == [None] * (SAME_REWARDS_ALARM - 1)
    assert same.see([0.5]) is None, "another reward begins anew"
    assert same.steps == 1
