import math
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from node.algorithms.losses import LOSSES, kl_to_reference, sequence_mean, token_weights, value_loss
from node.config_train import TrainConfig

AGGREGATIONS = get_args(TrainConfig.model_fields["aggregation"].annotation)
CONFIG = TrainConfig()
K3 = math.exp(-0.5) - 0.5


def one(loss: str, log_ratio: float, advantage: float, config: TrainConfig = CONFIG) -> tuple[float, bool]:
    """Loss of a single token with old log-probability -1, and whether it is clipped."""
    old, index, mask = torch.tensor([-1.0]), torch.tensor([0]), torch.tensor([True])
    result = LOSSES[loss](old + log_ratio, old, torch.tensor([advantage]), index, mask, config)
    return result.loss.item(), bool(result.clipped.item())


def batch(seed: int, lengths: tuple[int, ...] = (3, 1, 5, 4)) -> dict[str, Tensor]:
    """Sequences end to end in float64, a tenth of the tokens masked; log-ratios on both sides of every clip."""
    random = torch.Generator().manual_seed(seed)
    count = sum(lengths)
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    old = -torch.rand(count, generator=random, dtype=torch.float64) * 3
    return {
        "logprobs": old + torch.randn(count, generator=random, dtype=torch.float64),
        "old": old,
        "advantages": torch.randn(len(lengths), generator=random, dtype=torch.float64)[sequence],
        "sequence": sequence,
        "mask": torch.rand(count, generator=random) > 0.1,
    }


def total(loss: str, weights: Tensor, tokens: dict[str, Tensor]) -> Tensor:
    return (weights * LOSSES[loss](**tokens, config=CONFIG).loss).sum()


def test_the_settings_offer_what_the_table_has() -> None:
    assert set(get_args(TrainConfig.model_fields["loss"].annotation)) == set(LOSSES)


# -- values ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "clipped"),
    [
        (1.0, 2.0, -2.0, False),
        (1.2, 1.0, -1.2, False),
        (1.5, 1.0, -1.28, True),  # up enough
        (0.5, 1.0, -0.5, False),  # down by mistake: pulled back without clip
        (1.5, -1.0, 1.5, False),
        (0.5, -1.0, 0.8, True),  # down enough
        (10.0, -1.0, 3.0, True),  # dual clip
    ],
)
def test_clip(ratio: float, advantage: float, loss: float, clipped: bool) -> None:
    assert one("dapo", math.log(ratio), advantage) == (pytest.approx(loss, abs=1e-5), clipped)
    assert LOSSES["dapo"] is LOSSES["ppo"]


def test_clip_takes_its_limits_from_the_settings() -> None:
    config = TrainConfig(clip_low=0.5, clip_high=1.0, dual_clip=2.0)
    assert one("ppo", math.log(3), 1.0, config) == (pytest.approx(-2), True)
    assert one("ppo", math.log(0.1), -1.0, config) == (pytest.approx(0.5), True)
    assert one("ppo", math.log(5), -1.0, config) == (pytest.approx(2), True)


def test_reinforce_is_minus_advantage_times_log_probability() -> None:
    assert one("reinforce", 0.25, 2.0) == (pytest.approx(1.5), False)


def test_cispo_clips_the_weight_and_keeps_the_gradient() -> None:
    logprobs = torch.tensor([1.0, -1.0]).requires_grad_()
    old = torch.tensor([-1.0, -1.0])
    result = LOSSES["cispo"](
        logprobs, old, torch.tensor([0.5, 0.5]), torch.tensor([0, 0]), torch.tensor([True, True]), CONFIG
    )
    result.loss.sum().backward()
    assert result.clipped.tolist() == [True, False]  # e^2 > 5
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [-5 * 0.5, -0.5]


def test_gspo_weighs_every_token_with_the_ratio_of_its_sequence() -> None:
    config = TrainConfig(gspo_clip_low=0.5, gspo_clip_high=0.5)
    logprobs = torch.tensor([-1.0, -0.8, -3.0, -2.0]).requires_grad_()
    old = torch.tensor([-1.1, -1.0, -0.1, -3.0])
    sequence, mask = torch.tensor([0, 0, 0, 1]), torch.tensor([True, True, False, True])
    advantages = torch.tensor([1.0, 1.0, 1.0, 1.0])
    result = LOSSES["gspo"](logprobs, old, advantages, sequence, mask, config)
    s = math.exp((0.1 + 0.2) / 2)
    assert result.loss[mask].tolist() == pytest.approx([-s, -s, -1.5])
    assert result.clipped[mask].tolist() == [False, False, True]
    result.loss[mask].sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad[mask].tolist() == pytest.approx([-s, -s, 0])


def test_soft_gate_fades_on_both_sides() -> None:
    assert one("soft_gate", 0.0, 1.0) == (pytest.approx(-2), False)  # 4 sigmoid(0)
    assert one("soft_gate", math.log(3), 1.0)[0] == pytest.approx(-4 / (1 + math.exp(-2)), abs=1e-5)
    assert one("soft_gate", math.log(3), -1.0)[0] == pytest.approx(4 / 1.05 / (1 + math.exp(-2.1)), abs=1e-5)
    config = TrainConfig(soft_gate_positive=2.0, soft_gate_negative=4.0)
    assert one("soft_gate", math.log(2), 1.0, config)[0] == pytest.approx(-2 / (1 + math.exp(-2)), abs=1e-5)
    assert one("soft_gate", math.log(2), -1.0, config)[0] == pytest.approx(1 / (1 + math.exp(-4)), abs=1e-5)


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected", "clipped"),
    [
        (1.2, 2.0, -2.4, False),
        (3.0, 2.0, -2 * math.exp(0.4), True),
        (0.1, 2.0, -0.2, False),
        (0.1, -2.0, 2 * math.exp(-0.4), True),
        (3.0, -2.0, 6.0, False),
    ],
)
def test_gmpo_clips_the_side_the_advantage_pushes_to(
    ratio: float, advantage: float, expected: float, clipped: bool
) -> None:
    assert one("gmpo", math.log(ratio), advantage) == (pytest.approx(expected, abs=1e-5), clipped)


def test_gmpo_is_the_geometric_mean_of_a_sequence() -> None:
    logprobs, old = torch.tensor([-0.8, -1.1, -9.0, -2.0]), torch.tensor([-1.0, -1.0, -1.0, -2.1])
    sequence, mask = torch.tensor([0, 0, 0, 1]), torch.tensor([True, True, False, True])
    advantages = torch.tensor([1.0, 3.0, 9.0, -1.0])  # of a sequence: their mean over its trained tokens
    found = LOSSES["gmpo"](logprobs, old, advantages, sequence, mask, CONFIG).loss
    assert found[mask].tolist() == pytest.approx([-2 * math.exp(0.05)] * 2 + [math.exp(0.1)])


def test_values_move_no_further_than_the_clip() -> None:
    values, old, returns = torch.tensor([0.5, 1.0, 0.2]), torch.tensor([0.5, 0.5, 0.5]), torch.tensor([1.0, 1.0, 0.0])
    values.requires_grad_()
    found = value_loss(values, old, returns, 0.2)
    assert found.tolist() == pytest.approx([0.125, 0.045, 0.045])
    assert torch.autograd.grad(found.sum(), values)[0].tolist() == pytest.approx([-0.5, 0, 0])


# -- gradients -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", ["ppo", "reinforce", "soft_gate", "gmpo"])
@pytest.mark.parametrize("seed", range(3))
def test_gradients_equal_finite_differences(loss: str, seed: int) -> None:
    tokens = batch(seed)
    weights = token_weights(tokens["sequence"], tokens["mask"], "token-mean", 1.0).double()
    logprobs = tokens["logprobs"].requires_grad_()
    assert torch.autograd.gradcheck(lambda x: total(loss, weights, {**tokens, "logprobs": x}), (logprobs,))


@pytest.mark.parametrize("seed", range(3))
def test_cispo_gradient_equals_finite_differences_at_a_fixed_weight(seed: int) -> None:
    tokens = batch(seed)
    weights = token_weights(tokens["sequence"], tokens["mask"], "token-mean", 1.0).double()
    held = (tokens["logprobs"] - tokens["old"]).exp().clamp(0, 5)
    logprobs = tokens["logprobs"].requires_grad_()

    def surrogate(x: Tensor) -> Tensor:
        return (weights * -held * tokens["advantages"] * x).sum()

    assert torch.autograd.gradcheck(surrogate, (logprobs,))
    (found,) = torch.autograd.grad(total("cispo", weights, {**tokens, "logprobs": logprobs}), logprobs)
    torch.testing.assert_close(found, torch.autograd.grad(surrogate(logprobs), logprobs)[0])


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_and_value_gradients_equal_finite_differences(estimator: str) -> None:
    logprobs, reference = batch(1)["logprobs"].requires_grad_(), batch(1)["old"]
    assert torch.autograd.gradcheck(lambda x: kl_to_reference(x, reference, estimator).sum(), (logprobs,))
    assert torch.autograd.gradcheck(lambda x: value_loss(x, reference, reference + 0.3, 0.2).sum(), (logprobs,))


@pytest.mark.parametrize("seed", range(3))
def test_gspo_gradient_is_the_sequence_surrogates(seed: int) -> None:
    """sg[s] pi/sg[pi] has, under seq-mean-token-mean, the gradient of the plain sequence objective (GSPO, sec. 4.3)."""
    tokens = batch(seed)
    tokens["logprobs"] = tokens["old"] + 1e-4 * torch.randn_like(tokens["old"])  # inside the clip
    sequence, mask = tokens["sequence"], tokens["mask"]
    weights = token_weights(sequence, mask, "seq-mean-token-mean", 1.0).double()

    def surrogate(x: Tensor) -> Tensor:
        ratio = sequence_mean(x - tokens["old"], sequence, mask)[sequence].exp()
        return (weights * -ratio * tokens["advantages"]).sum()

    logprobs = tokens["logprobs"].requires_grad_()
    (expected,) = torch.autograd.grad(surrogate(logprobs), logprobs)
    (found,) = torch.autograd.grad(total("gspo", weights, {**tokens, "logprobs": logprobs}), logprobs)
    torch.testing.assert_close(found, expected, atol=1e-7, rtol=0)


@pytest.mark.parametrize("loss", LOSSES)
def test_on_policy_every_loss_has_the_policy_gradient(loss: str) -> None:
    tokens = batch(0)
    tokens["logprobs"] = tokens["old"].clone().requires_grad_()
    tokens["advantages"] = tokens["advantages"].abs()  # the tau of soft_gate is 1 there
    weights = token_weights(tokens["sequence"], tokens["mask"], "seq-mean-token-mean", 1.0).double()
    (found,) = torch.autograd.grad(total(loss, weights, tokens), tokens["logprobs"])
    torch.testing.assert_close(found, -weights * tokens["advantages"])


@pytest.mark.parametrize("loss", LOSSES)
def test_extreme_ratios_stay_finite(loss: str) -> None:
    for log_ratio in (-1e4, -30.0, 30.0, 1e4):
        for advantage in (-1.0, 1.0):
            assert math.isfinite(one(loss, log_ratio, advantage)[0])


# -- aggregation -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        ("token-mean", [1 / 4] * 4),
        ("seq-mean-token-mean", [1 / 6, 1 / 6, 1 / 6, 1 / 2]),
        ("seq-mean-token-sum", [1 / 2] * 4),
        ("seq-mean-token-sum-norm", [1 / 20] * 4),
    ],
)
def test_token_weights(aggregation: str, expected: list[float]) -> None:
    sequence = torch.tensor([0, 0, 0, 0, 1, 1, 2])
    mask = torch.tensor([True, True, False, True, True, False, False])  # sequence 2 has no trained token: not counted
    weights = token_weights(sequence, mask, aggregation, 10.0)
    assert weights[mask].tolist() == pytest.approx(expected)
    assert weights[~mask].tolist() == [0, 0, 0]


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_nothing_to_train_on_weighs_nothing(aggregation: str) -> None:
    assert token_weights(torch.tensor([0, 1]), torch.tensor([False, False]), aggregation, 8.0).tolist() == [0, 0]


def test_an_unknown_aggregation_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown aggregation 'mean'"):
        token_weights(torch.tensor([0]), torch.tensor([True]), "mean", 1.0)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("loss", LOSSES)
@settings(max_examples=5)
@given(lengths=st.lists(st.integers(1, 6), min_size=2, max_size=6), cut=st.integers(1, 5), seed=st.integers(0, 99))
def test_a_split_along_sequences_changes_neither_loss_nor_gradient(
    loss: str, aggregation: str, lengths: list[int], cut: int, seed: int
) -> None:
    tokens = batch(seed, tuple(lengths))
    logprobs = tokens["logprobs"].requires_grad_()
    weights = token_weights(tokens["sequence"], tokens["mask"], aggregation, 7.0).double()
    whole = total(loss, weights, tokens)
    (gradient,) = torch.autograd.grad(whole, logprobs)
    parts = []
    for rows in (tokens["sequence"] < cut, tokens["sequence"] >= cut):
        part = {name: values[rows] for name, values in tokens.items()}
        part["sequence"] = torch.unique(part["sequence"], return_inverse=True)[1]
        parts.append(total(loss, weights[rows], part))
    torch.testing.assert_close(parts[0] + parts[1], whole)
    torch.testing.assert_close(torch.autograd.grad(parts[0] + parts[1], logprobs)[0], gradient)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("loss", LOSSES)
def test_padding_changes_neither_loss_nor_gradient(loss: str, aggregation: str) -> None:
    lengths, width = (3, 1, 5, 4), 8
    tokens = batch(5, lengths)
    place = torch.cat([torch.arange(n) + i * width for i, n in enumerate(lengths)])
    padded = {name: torch.full((len(lengths) * width,), 3.0, dtype=torch.float64) for name in tokens}
    padded["sequence"] = torch.arange(len(lengths)).repeat_interleave(width)
    padded["mask"] = torch.zeros(len(lengths) * width, dtype=torch.bool)
    for name in ("logprobs", "old", "advantages", "mask"):
        padded[name][place] = tokens[name]
    results = []
    for some in (tokens, padded):
        logprobs = some["logprobs"].requires_grad_()
        weights = token_weights(some["sequence"], some["mask"], aggregation, 7.0).double()
        value = total(loss, weights, some)
        results.append((value, torch.autograd.grad(value, logprobs)[0]))
    torch.testing.assert_close(results[0][0], results[1][0])
    torch.testing.assert_close(results[0][1], results[1][1][place])


# -- KL --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [(name, [value, 0.0]) for name, value in (("k1", 0.5), ("k2", 0.125), ("k3", K3), ("k3+", K3))],
)
def test_kl(estimator: str, expected: list[float]) -> None:
    found = kl_to_reference(torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -2.0]), estimator)
    assert found.tolist() == pytest.approx(expected)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_kl_estimators_are_unbiased(estimator: str) -> None:
    policy, reference = torch.randn(2, 50, generator=torch.Generator().manual_seed(1)).log_softmax(-1)
    exact = (policy.exp() * (policy - reference)).sum()
    torch.testing.assert_close((policy.exp() * kl_to_reference(policy, reference, estimator)).sum(), exact)


@pytest.mark.parametrize("estimator", ["k2", "k3", "k3+"])
def test_kl_pulls_the_policy_to_the_reference(estimator: str) -> None:
    logprobs = torch.tensor([-1.0, -3.0]).requires_grad_()
    (gradient,) = torch.autograd.grad(kl_to_reference(logprobs, torch.tensor([-2.0, -2.0]), estimator).sum(), logprobs)
    assert gradient[0] > 0 > gradient[1]


def test_kl_of_far_apart_policies_stays_finite() -> None:
    for estimator in ("k1", "k2", "k3", "k3+"):
        found = kl_to_reference(torch.tensor([-1e4, 0.0]), torch.tensor([0.0, -1e4]), estimator)
        assert torch.isfinite(found).all()
    with pytest.raises(ValueError, match="unknown KL estimator 'k4'"):
        kl_to_reference(torch.zeros(1), torch.zeros(1), "k4")
