import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from node.algorithms.advantages import ADVANTAGES, gae
from node.config import TrainConfig

REWARDS = st.lists(st.floats(0, 1, width=32), min_size=2, max_size=16)


def advantages(name: str, scores: list[float]) -> torch.Tensor:
    return ADVANTAGES[name](torch.tensor(scores), torch.ones(len(scores), dtype=torch.int64))


def test_the_settings_offer_what_the_table_has() -> None:
    offered = TrainConfig.model_fields["advantage"].annotation
    assert set(offered.__args__) == set(ADVANTAGES)


@pytest.mark.parametrize("name", ADVANTAGES)
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


def test_gae_is_the_discounted_return_at_lambda_one_and_the_td_error_at_zero() -> None:
    rewards, values = torch.tensor([1.0, 0.0, 2.0]), torch.tensor([0.5, 0.25, 1.0])
    mask = torch.ones(3, dtype=torch.bool)
    _, returns = gae(rewards, values, mask, 0.5, 1.0)
    assert returns.tolist() == [1 + 0.5 * 0.5 * 2, 0.5 * 2, 2]
    errors, _ = gae(rewards, values, mask, 0.5, 0.0)
    assert errors.tolist() == [1 + 0.5 * 0.25 - 0.5, 0.5 * 1 - 0.25, 2 - 1]


def test_gae_does_not_see_tokens_outside_the_mask() -> None:
    mask = torch.tensor([True, False, True, False])
    whole, _ = gae(torch.tensor([0.0, 0, 1, 0]), torch.tensor([0.2, 7, 0.4, -9]), mask, 0.99, 0.95)
    short, _ = gae(torch.tensor([0.0, 1]), torch.tensor([0.2, 0.4]), torch.tensor([True, True]), 0.99, 0.95)
    assert whole[mask].tolist() == short.tolist()
