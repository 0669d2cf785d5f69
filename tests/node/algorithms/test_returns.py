import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from node.algorithms.returns import bilevel_gae, discounted, gae, turn_gae, whiten

ALL = torch.ones(3, dtype=torch.bool)


def row(seed: int, mask: list[bool]) -> tuple[Tensor, Tensor, Tensor]:
    """Rewards and values of a completion; what is outside the mask is large, and must not matter."""
    random = torch.Generator().manual_seed(seed)
    inside = torch.tensor(mask)
    rewards, values = torch.rand(2, len(mask), generator=random)
    return torch.where(inside, rewards, 0), torch.where(inside, values, 1e3), inside


def estimators(rewards: Tensor, values: Tensor, mask: Tensor) -> list[Tensor]:
    """Everything in the module, on one completion."""
    return [
        discounted(rewards, mask, 0.9),
        *gae(rewards, values, mask, 0.9, 0.8),
        *turn_gae(rewards, values, mask, 0.9, 0.8),
        *bilevel_gae(rewards, values, mask, 0.9, 0.8, 0.7),
    ]


def test_returns_are_discounted_and_carried_across_what_is_masked() -> None:
    rewards, mask = torch.tensor([0.0, 0.0, 0.0, 1.0]), torch.tensor([True, False, True, True])
    assert discounted(rewards, mask, 0.5).tolist() == [0.25, 0, 0.5, 1]


def test_gae_is_the_discounted_return_at_lambda_one_and_the_td_error_at_zero() -> None:
    rewards, values = torch.tensor([1.0, 0.0, 2.0]), torch.tensor([0.5, 0.25, 1.0])
    _, returns = gae(rewards, values, ALL, 0.5, 1.0)
    assert returns.tolist() == [1 + 0.5 * 0.5 * 2, 0.5 * 2, 2]
    assert returns.tolist() == discounted(rewards, ALL, 0.5).tolist()
    errors, _ = gae(rewards, values, ALL, 0.5, 0.0)
    assert errors.tolist() == [1 + 0.5 * 0.25 - 0.5, 0.5 * 1 - 0.25, 2 - 1]


def test_gae_of_turns_sees_a_turn_as_one_action() -> None:
    rewards, values = torch.tensor([0.0, 1.0, 0.0, 0.0, 2.0]), torch.tensor([9.0, 0.5, 9.0, 9.0, 1.0])
    mask = torch.tensor([True, True, False, True, True])
    advantages, returns = turn_gae(rewards, values, mask, 0.5, 0.5)
    last = 2 - 1
    first = 1 + 0.5 * 1 - 0.5 + 0.25 * last
    assert advantages.tolist() == [first, first, 0, last, last]
    assert returns.tolist() == [first + 0.5, first + 0.5, 0, last + 1, last + 1]


def test_bilevel_gae_of_one_turn_is_gae() -> None:
    rewards, values, mask = row(1, [True] * 5)
    rewards[:-1] = 0
    for ours, theirs in zip(
        bilevel_gae(rewards, values, mask, 0.9, 0.8, 0.7), gae(rewards, values, mask, 0.9, 0.8), strict=True
    ):
        torch.testing.assert_close(ours, theirs)


def test_bilevel_gae_resets_the_carry_at_the_end_of_a_turn() -> None:
    rewards, values = torch.tensor([0.0, 0.0, 0.0, 1.0]), torch.tensor([0.5, 0.5, 0.25, 0.0])
    mask = torch.tensor([True, False, True, True])
    advantages, _ = bilevel_gae(rewards, values, mask, 1.0, 1.0, 0.5)
    assert advantages.tolist() == [0.5 * 1 - 0.5, 0, 1 - 0.25, 1]


@given(mask=st.lists(st.booleans(), min_size=1, max_size=8), seed=st.integers(0, 99), padding=st.integers(1, 4))
def test_padding_changes_nothing_and_masked_tokens_get_nothing(mask: list[bool], seed: int, padding: int) -> None:
    rewards, values, inside = row(seed, mask)
    longer = [
        torch.cat([rewards, torch.zeros(padding)]),
        torch.cat([values, torch.full((padding,), -7.0)]),
        torch.cat([inside, torch.zeros(padding, dtype=torch.bool)]),
    ]
    for short, long in zip(estimators(rewards, values, inside), estimators(*longer), strict=True):
        assert torch.equal(short, long[: len(mask)])
        assert not short[~inside].any()
        assert not long[len(mask) :].any()


@given(seed=st.integers(0, 99))
def test_masked_tokens_inside_are_as_if_not_there(seed: int) -> None:
    rewards, values, mask = row(seed, [True, False, True, True, False])
    kept = (rewards[mask], values[mask], ALL)
    assert torch.equal(discounted(rewards, mask, 0.9)[mask], discounted(*kept[::2], 0.9))
    for whole, short in zip(gae(rewards, values, mask, 0.9, 0.8), gae(*kept, 0.9, 0.8), strict=True):
        assert torch.equal(whole[mask], short)


def test_whitening() -> None:
    values, mask = torch.tensor([1.0, 2.0, 3.0, 99.0]), torch.tensor([True, True, True, False])
    assert whiten(values, mask).tolist() == pytest.approx([-1, 0, 1, 0], abs=1e-6)
    assert whiten(torch.full((4,), 0.4264), mask).tolist() == [0] * 4
    assert whiten(values, torch.tensor([True, False, False, False])).tolist() == [0] * 4


@given(st.lists(st.floats(-4, 4, width=32), min_size=3, max_size=20))
def test_whitened_values_have_mean_zero_and_deviation_one(values: list[float]) -> None:
    given = torch.tensor([*values, 5.0, -5.0])
    found = whiten(given, torch.ones(len(given), dtype=torch.bool))
    assert found.mean().item() == pytest.approx(0, abs=1e-4)
    assert found.std().item() == pytest.approx(1, abs=1e-3)
