"""Advantages of whole steps: by every name, whatever the padding, and with what only the update knows."""

import random
from typing import Any, get_args

import pytest
import torch

from node.algorithms.estimate import estimate
from node.config_train import TrainConfig
from node.interfaces import TrainGroup, TrainSequence

NAMES = get_args(TrainConfig.model_fields["advantage"].annotation)
CRITIC = ("gae", "turn_gae", "bilevel_gae")


def group(rewards: list[float], lengths: list[int], masked: int = 0, **others: list[dict[str, float]]) -> TrainGroup:
    """Completions of some lengths, the last `masked` tokens of each seen and not trained on."""
    parts = others.get("parts") or [{}] * len(rewards)
    return TrainGroup(
        (1, 2),
        tuple(
            TrainSequence((7,) * (n + masked), (True,) * n + (False,) * masked, reward, None, parts=part)
            for reward, n, part in zip(rewards, lengths, parts, strict=True)
        ),
        "own",
    )


def values_of(groups: list[TrainGroup], seed: int = 0) -> torch.Tensor:
    """Something for a critic to say of every token."""
    rng = random.Random(seed)
    tokens = [trained for g in groups for s in g.sequences for trained in s.mask]
    return torch.tensor([rng.random() if trained else -50.0 for trained in tokens])


def advantages(name: str, groups: list[TrainGroup], **settings: Any) -> list[float]:
    config = TrainConfig(advantage=name, **settings)
    found = estimate(groups, config, values=values_of(groups) if config.critic else None)
    assert (found.returns is not None) == config.critic
    return found.advantages.tolist()


@pytest.mark.parametrize("name", NAMES)
def test_masked_tokens_change_nothing_and_get_nothing(name: str) -> None:
    short = [group([1, 0, 0.5], [3, 2, 4]), group([0, 1], [1, 2])]
    padded = [group([1, 0, 0.5], [3, 2, 4], masked=3), group([0, 1], [1, 2], masked=3)]
    mask = [trained for g in padded for s in g.sequences for trained in s.mask]
    found = advantages(name, padded)
    assert [value for value, trained in zip(found, mask, strict=True) if trained] == pytest.approx(
        advantages(name, short)
    )
    assert {value for value, trained in zip(found, mask, strict=True) if not trained} == {0}


@pytest.mark.parametrize("name", NAMES)
def test_empty_completions_are_no_hindrance(name: str) -> None:
    with_empty = [group([1, 0, 0], [3, 2, 0]), TrainGroup((1,), (), "foreign")]
    assert len(advantages(name, with_empty)) == 5


@pytest.mark.parametrize("name", NAMES)
def test_a_step_that_teaches_nothing_gives_zeros(name: str) -> None:
    uniform = [group([0.4264] * 3, [1, 1, 1]), group([0.4264] * 2, [1, 1])]
    if name in CRITIC:
        config = TrainConfig(advantage=name)
        found = estimate(uniform, config, values=torch.full((5,), 0.4264)).advantages.tolist()
    else:
        found = advantages(name, uniform)
    assert found == [0] * 5


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "opo"])
def test_group_advantages_do_not_depend_on_other_groups(name: str) -> None:
    one, other = group([1, 0, 0.5], [3, 2, 4]), group([0, 0, 1], [5, 1, 2])
    assert advantages(name, [one, other]) == pytest.approx(advantages(name, [one]) + advantages(name, [other]))


@pytest.mark.parametrize("name", ["gdpo", "reinforce_pp", "reinforce_pp_baseline", *CRITIC])
def test_the_others_are_white_over_the_step(name: str) -> None:
    found = torch.tensor(advantages(name, [group([1, 0, 0.5], [3, 2, 4]), group([0, 1], [1, 2])]))
    assert found.mean().item() == pytest.approx(0, abs=1e-5)
    assert found.std().item() == pytest.approx(1, abs=1e-4)


def test_opo_counts_trained_tokens_only() -> None:
    cut = group([1, 0, 0], [2, 2, 0], masked=4)
    first = advantages("opo", [cut])[0]
    assert first == pytest.approx(0.5)  # (2 1 + 2 0) / 4, and nothing of the completion that was cut off


def test_gdpo_takes_the_components_it_is_told() -> None:
    parts = [{"parsed": 1.0, "style": 0.0}, {"parsed": 1.0, "style": 1.0}, {"parsed": 0.0}]
    made = [group([1, 0, 0], [2, 2, 2], parts=parts)]
    by_style = advantages("gdpo", made, gdpo_parts=("style",))
    assert by_style[2] > by_style[0]  # the second has style 1, the first 0
    assert by_style[4] == by_style[0]  # who lacks a part counts with the reward
    assert advantages("gdpo", made, gdpo_parts=("reward", "nothing of the kind")) == pytest.approx(
        advantages("gdpo", made, gdpo_parts=("reward",))
    )


def test_gamma_discounts_towards_the_last_token() -> None:
    found = advantages("reinforce_pp", [group([1, 0], [3, 1])], gamma=0.5)
    assert found[0] < found[1] < found[2]
    assert found[3] < found[0]
    assert len(set(advantages("reinforce_pp", [group([1, 0], [3, 1])])[:3])) == 1


def test_kl_comes_off_the_reward_of_its_token() -> None:
    config = TrainConfig(advantage="gae", gae_lambda=0.0, kl_coefficient=0.1, kl_in="reward")
    made = [group([1, 0], [2, 2], masked=1)]
    values, kl = torch.zeros(6), torch.tensor([1.0, 2.0, 99.0, 0.0, 0.0, 99.0])
    returns = estimate(made, config, values=values, kl=kl).returns
    assert returns is not None
    assert returns.tolist() == pytest.approx([-0.1, 0.8, 0, 0, 0, 0])


def test_a_critic_must_have_spoken() -> None:
    with pytest.raises(ValueError, match="gae needs the values of a critic"):
        estimate([group([1, 0], [1, 1])], TrainConfig(advantage="gae"))
