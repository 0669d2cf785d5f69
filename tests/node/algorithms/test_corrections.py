import math
from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from node.algorithms.corrections import CORRECTIONS, effective_sample_size, opsm, topr
from node.config_train import TrainConfig


def weigh(name: str, old: Tensor, mu: Tensor, sequence: list[int] | None = None, **settings: float) -> Tensor:
    """Weights of tokens that are all trained, in one sequence where none are named."""
    at = torch.tensor(sequence or [0] * len(old))
    return CORRECTIONS[name](old, mu, at, torch.ones(len(old), dtype=torch.bool), TrainConfig(**settings))


def test_the_settings_offer_what_the_table_has() -> None:
    assert set(get_args(TrainConfig.model_fields["correction"].annotation)) == set(CORRECTIONS)


def test_tis_weights_are_ratios_cut_at_the_cap() -> None:
    mu = torch.tensor([-1.0, -1.0, -1.0, -1.0])
    old = mu + torch.tensor([0.0, math.log(1.5), 5.0, math.log(0.25)])
    assert weigh("tis", old, mu).tolist() == pytest.approx([1, 1.5, 2, 0.25])
    assert weigh("none", old, mu).tolist() == [1, 1, 1, 1]


def test_a_sequence_is_weighed_as_a_whole() -> None:
    mu = torch.tensor([-1.0, -1.0, -1.0])
    old = mu + torch.tensor([math.log(1.5), math.log(0.8), math.log(3.0)])
    assert weigh("tis-sequence", old, mu, [0, 0, 1]).tolist() == pytest.approx([1.2, 1.2, 2])
    root = math.sqrt(1.2)
    assert weigh("mis-geometric", old, mu, [0, 0, 1]).tolist() == pytest.approx([root, root, 0])


def test_icepop_and_mis_drop_what_is_outside() -> None:
    mu = torch.tensor([-1.0, -1.0, -1.0])
    old = mu + torch.tensor([math.log(0.4), math.log(3), math.log(6)])
    assert weigh("icepop", old, mu).tolist() == pytest.approx([0, 3, 0])
    assert weigh("icepop", old, mu, icepop_low=0.3, icepop_high=10).tolist() == pytest.approx([0.4, 3, 6])
    assert weigh("mis", old, mu).tolist() == [0, 0, 0]
    assert weigh("mis", old, mu, mis_low=0.3, mis_high=4).tolist() == pytest.approx([0.4, 3, 0])


def test_one_impossible_token_vetoes_its_sequence_only() -> None:
    mu = torch.tensor([-1.0, -1.0, -1.0])
    old = mu + torch.tensor([0.0, math.log(1e-5), 0.0])
    assert weigh("mis", old, mu, [0, 0, 1]).tolist() == [0, 0, 1]
    assert weigh("mis", old, mu, [0, 0, 1], mis_veto=1e-6).tolist() == [1, 0, 1]
    mask = torch.tensor([True, False, True])
    masked = CORRECTIONS["mis"](old, mu, torch.tensor([0, 0, 1]), mask, TrainConfig())
    assert masked[mask].tolist() == [1, 1]


@pytest.mark.parametrize("name", CORRECTIONS)
def test_the_same_policy_weighs_exactly_one(name: str) -> None:
    mu = torch.tensor([-0.3, -17.123, -1e-7])
    assert weigh(name, mu, mu, [0, 0, 1]).tolist() == [1, 1, 1]


@pytest.mark.parametrize("name", CORRECTIONS)
def test_weights_carry_no_gradient_and_stay_finite(name: str) -> None:
    old = torch.tensor([-1e4, 0.0, -1e4]).requires_grad_()
    weights = weigh(name, old, torch.tensor([0.0, -1e4, -1e4]), [0, 1, 2])
    assert not weights.requires_grad
    assert torch.isfinite(weights).all()
    if name == "tis":
        assert weights.tolist() == pytest.approx([math.exp(-20), 2.0, 1.0])


@pytest.mark.parametrize("name", CORRECTIONS)
@given(cut=st.integers(1, 3), seed=st.integers(0, 99))
def test_a_split_along_sequences_and_padding_change_no_weight(name: str, cut: int, seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    sequence = torch.tensor([0, 0, 0, 1, 2, 2, 2, 2, 3])
    old, mu = -torch.rand(2, 9, generator=random) * 3
    mask = torch.rand(9, generator=random) > 0.2
    whole = CORRECTIONS[name](old, mu, sequence, mask, TrainConfig())
    for rows in (sequence < cut, sequence >= cut):
        part = torch.unique(sequence[rows], return_inverse=True)[1]
        found = CORRECTIONS[name](old[rows], mu[rows], part, mask[rows], TrainConfig())
        torch.testing.assert_close(found, whole[rows])
    padded = CORRECTIONS[name](
        torch.cat([old, torch.full((4,), 7.0)]),
        torch.cat([mu, torch.full((4,), -7.0)]),
        torch.cat([sequence, torch.arange(4)]),
        torch.cat([mask, torch.zeros(4, dtype=torch.bool)]),
        TrainConfig(),
    )
    torch.testing.assert_close(padded[:9][mask], whole[mask])


def test_opsm_drops_bad_answers_that_the_policy_has_left_behind() -> None:
    sampled, new = torch.tensor([-1.0, -1.0, -1.0, -1.0]), torch.tensor([-1.5, -0.9, -0.5, -1.5])
    advantages, mask = torch.tensor([-1.0, -1.0, -1.0, 1.0]), torch.ones(4, dtype=torch.bool)
    kept = opsm(new, sampled, advantages, torch.tensor([0, 0, 1, 2]), mask, 0.1)
    assert kept.tolist() == [False, False, True, True]
    assert opsm(new, sampled, advantages, torch.tensor([0, 0, 1, 2]), mask, 0.3).tolist() == [True] * 4
    # a masked token says nothing of the drift
    assert opsm(
        new, sampled, advantages, torch.tensor([0, 0, 1, 2]), torch.tensor([False, True, True, True]), 0.1
    ).all()


def test_topr_tapers_negatives_only() -> None:
    new = torch.tensor([-2.0, -2.0, -0.5]).requires_grad_()
    weights = topr(new, torch.tensor([-1.0, -1.0, -1.0]), torch.tensor([-1.0, 1.0, -1.0]))
    assert weights.tolist() == pytest.approx([math.exp(-1), 1, 1])
    assert not weights.requires_grad


def test_effective_sample_size_counts_the_masked_tokens_only() -> None:
    weights, mask = torch.tensor([1.0, 1.0, 0.0, 0.0, 9.0]), torch.tensor([True, True, True, True, False])
    assert effective_sample_size(weights, mask).item() == 0.5
    assert effective_sample_size(weights, torch.zeros(5, dtype=torch.bool)).item() == 1
    assert effective_sample_size(torch.zeros(5), mask).item() == 0


@given(st.lists(st.floats(0.0625, 2, width=32), min_size=1, max_size=50))
def test_effective_sample_size_is_a_share(values: list[float]) -> None:
    weights = torch.tensor(values)
    size = effective_sample_size(weights, torch.ones(len(values), dtype=torch.bool)).item()
    assert 1 / len(values) - 1e-5 <= size <= 1 + 1e-5
