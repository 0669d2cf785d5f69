import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from node.algorithms.corrections import effective_sample_size, tis_weights


def test_weights_are_ratios_cut_at_the_cap() -> None:
    mu = torch.tensor([-1.0, -1.0, -1.0, -1.0])
    old = mu + torch.tensor([0.0, math.log(1.5), 5.0, math.log(0.25)])
    assert tis_weights(old, mu, cap=2.0).tolist() == pytest.approx([1, 1.5, 2, 0.25])


def test_the_same_policy_weighs_exactly_one() -> None:
    mu = torch.tensor([-0.3, -17.123, -1e-7])
    assert tis_weights(mu, mu, cap=2.0).tolist() == [1, 1, 1]


def test_weights_carry_no_gradient_and_stay_finite() -> None:
    old = torch.tensor([-1e4, 0.0]).requires_grad_()
    weights = tis_weights(old, torch.tensor([0.0, -1e4]), cap=3.0)
    assert not weights.requires_grad
    assert weights.tolist() == pytest.approx([math.exp(-20), 3.0])


def test_effective_sample_size_counts_the_masked_tokens_only() -> None:
    weights, mask = torch.tensor([1.0, 1.0, 0.0, 0.0, 9.0]), torch.tensor([True, True, True, True, False])
    assert effective_sample_size(weights, mask).item() == 0.5
    assert effective_sample_size(weights, torch.zeros(5, dtype=torch.bool)).item() == 1


@given(st.lists(st.floats(0.0625, 2, width=32), min_size=1, max_size=50))
def test_effective_sample_size_is_a_share(values: list[float]) -> None:
    weights = torch.tensor(values)
    size = effective_sample_size(weights, torch.ones(len(values), dtype=torch.bool)).item()
    assert 1 / len(values) - 1e-5 <= size <= 1 + 1e-5
