import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from node.algorithms.advantages import ADVANTAGES, gdpo, gigpo

REWARDS = st.lists(st.floats(0, 1, width=32), min_size=2, max_size=16)


def advantages(name: str, scores: list[float]) -> torch.Tensor:
    return ADVANTAGES[name](torch.tensor(scores), torch.ones(len(scores), dtype=torch.int64))


@pytest.mark.parametrize("name", ADVANTAGES)  # opo's lengths are all 1 here
@given(scores=REWARDS)
def test_advantages_of_a_group_sum_to_zero(name: str, scores: list[float]) -> None:
    assert advantages(name, scores).sum().item() == pytest.approx(0, abs=1e-3)


@pytest.mark.parametrize("name", ADVANTAGES)
@pytest.mark.parametrize("scores", [[1.0], [0.0], [1.0, 1.0, 1.0], [0.0, 0.0], [0.4264, 0.4264, 0.4264]])
def test_a_group_that_teaches_nothing_gives_zeros(name: str, scores: list[float]) -> None:
    assert advantages(name, scores).tolist() == [0.0] * len(scores)


def test_dr_grpo_is_the_distance_from_the_mean() -> None:
    assert advantages("dr_grpo", [1, 0, 0, 1.0]).tolist() == [0.5, -0.5, -0.5, 0.5]


def test_grpo_divides_by_the_sample_deviation() -> None:
    deviation = math.sqrt(4 * 0.25 / 3)
    torch.testing.assert_close(
        advantages("grpo", [1, 0, 0, 1.0]), torch.tensor([0.5, -0.5, -0.5, 0.5]) / (deviation + 1e-6)
    )


@given(scores=REWARDS)
def test_rloo_is_the_distance_from_the_mean_of_the_others(scores: list[float]) -> None:
    for i, found in enumerate(advantages("rloo", scores).tolist()):
        others = scores[:i] + scores[i + 1 :]
        assert found == pytest.approx(scores[i] - sum(others) / len(others), abs=1e-5)


def test_opo_weighs_the_baseline_by_length() -> None:
    scores, lengths = torch.tensor([1.0, 0.0, 0.0]), torch.tensor([6, 2, 0])
    assert ADVANTAGES["opo"](scores, lengths).tolist() == [0.25, -0.75, -0.75]
    assert ADVANTAGES["opo"](scores, torch.zeros(3, dtype=torch.int64)).tolist() == [0, 0, 0]


@given(scores=REWARDS)
def test_gdpo_of_one_component_is_grpo_and_a_uniform_component_adds_nothing(scores: list[float]) -> None:
    one = torch.tensor(scores)
    two = torch.stack([one, torch.full_like(one, 0.3)], 1)
    expected = advantages("grpo", scores)
    torch.testing.assert_close(gdpo(one[:, None]), expected)
    torch.testing.assert_close(gdpo(two), expected)


def test_gdpo_keeps_apart_what_the_sum_of_rewards_confuses() -> None:
    parts = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 1.0]])  # the sums are all 1
    found = gdpo(parts)
    assert found.abs().max() < 1e-6  # mirror images cancel
    parts = torch.tensor([[1.0, 1.0], [0.0, 1.0], [0.0, 0.0]])
    first, second, third = gdpo(parts).tolist()
    assert first > second > third


def test_gigpo_tells_turns_of_one_episode_apart() -> None:
    scores = torch.tensor([1.0, 0.0])
    good, bad = gigpo(scores, [["start", "door"], ["start", "wall"]], gamma=0.5)
    episode = advantages("grpo", [1.0, 0.0]).tolist()
    # both began in one state with returns 0.5 and 0; the second states were met once each
    assert good.tolist() == pytest.approx([2 * episode[0], episode[0]], abs=1e-4)
    assert bad.tolist() == pytest.approx([2 * episode[1], episode[1]], abs=1e-4)
    alone = gigpo(scores, [["start", "door"], ["start", "wall"]], gamma=0.5, step_weight=0.0)
    assert [turns.tolist() for turns in alone] == [[episode[0]] * 2, [episode[1]] * 2]


@pytest.mark.parametrize("scores", [[1.0, 1.0], [0.4264, 0.4264]])
def test_gigpo_of_a_group_that_teaches_nothing(scores: list[float]) -> None:
    found = gigpo(torch.tensor(scores), [["s", "a"], ["s", "b"]])
    assert [turns.tolist() for turns in found] == [[0, 0], [0, 0]]
