"""Values that verl, verl-agent, VAGEN and slime give for small inputs (golden_frameworks.json), held to 1e-5."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from node.algorithms.advantages import ADVANTAGES, gdpo, gigpo
from node.algorithms.corrections import CORRECTIONS, opsm, topr
from node.algorithms.losses import LOSSES, kl_to_reference, token_weights, value_loss
from node.algorithms.returns import bilevel_gae, discounted, gae, turn_gae, whiten
from node.config_train import TrainConfig

GOLDEN: dict[str, Any] = json.loads((Path(__file__).parent / "golden_frameworks.json").read_text())


def tensor(section: str, entry: str) -> Tensor:
    return torch.tensor(GOLDEN[section][entry], dtype=torch.float32)


def holds(found: Tensor, section: str, entry: str) -> None:
    torch.testing.assert_close(found, tensor(section, entry), atol=1e-5, rtol=0)


def flat(section: str, *entries: str) -> list[Tensor]:
    """Padded rows as the flat tensors of the losses, and the row of each token."""
    rows = [tensor(section, entry) for entry in entries]
    return [*(r.flatten() for r in rows), torch.arange(len(rows[0])).repeat_interleave(rows[0].shape[1])]


# -- advantages ------------------------------------------------------------------------------------------------


def grouped() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Scores, lengths, group of each completion, and the mask of the padded batch."""
    lengths = tensor("groups", "lengths").long()
    mask = torch.arange(int(lengths.max()))[None, :] < lengths[:, None]
    return tensor("groups", "scores"), lengths, tensor("groups", "index").long(), mask


@pytest.mark.parametrize("name", ["opo", "dr_grpo"])
def test_advantages_of_a_group(name: str) -> None:
    scores, lengths, index, _ = grouped()
    found = [ADVANTAGES[name](scores[index == g], lengths[index == g]) for g in (0, 1)]
    holds(torch.cat(found), "groups", name)


def test_reinforce_pp() -> None:
    scores, lengths, _, mask = grouped()
    rewards = torch.zeros(mask.shape)
    rewards[torch.arange(len(scores)), lengths - 1] = scores
    returns = torch.stack([discounted(r, m, 0.9) for r, m in zip(rewards, mask, strict=True)])
    holds(whiten(returns.flatten(), mask.flatten()).view(mask.shape), "groups", "reinforce_pp_0.9")


def test_reinforce_pp_baseline() -> None:
    scores, lengths, index, mask = grouped()
    centred = torch.cat([ADVANTAGES["dr_grpo"](scores[index == g], lengths) for g in (0, 1)])
    tokens = centred[:, None].expand(mask.shape)
    holds(whiten(tokens.flatten(), mask.flatten()).view(mask.shape), "groups", "reinforce_pp_baseline")


def test_gdpo() -> None:
    _, _, index, mask = grouped()
    parts = tensor("groups", "parts").T
    tokens = torch.cat([gdpo(parts[index == g]) for g in (0, 1)])[:, None].expand(mask.shape)
    holds(whiten(tokens.flatten(), mask.flatten()).view(mask.shape), "groups", "gdpo")


def test_gigpo() -> None:
    found = gigpo(
        tensor("gigpo", "scores"),
        GOLDEN["gigpo"]["states"],
        gamma=GOLDEN["gigpo"]["gamma"],
        step_weight=GOLDEN["gigpo"]["step_weight"],
    )
    for ours, theirs in zip(found, GOLDEN["gigpo"]["advantages"], strict=True):
        assert ours.tolist() == pytest.approx(theirs, abs=1e-5)


# -- generalised advantage estimation --------------------------------------------------------------------------


def estimated(name: str) -> tuple[Tensor, Tensor, Tensor]:
    """Advantages, returns and mask of the three completions, by `gae`, `turn_gae` or `bilevel_gae`."""
    rewards, values, mask = (tensor("inputs", entry) for entry in ("reward", "value", "mask"))
    gamma, lam, turn_gamma = (GOLDEN["inputs"][entry] for entry in ("gamma", "lambda", "turn_gamma"))
    rows = []
    for row in zip(rewards, values, mask.bool(), strict=True):
        if name == "gae":
            rows.append(gae(*row, gamma, lam))
        elif name == "turn_gae":
            rows.append(turn_gae(*row, turn_gamma, lam))
        else:
            rows.append(bilevel_gae(*row, gamma, lam, turn_gamma))
    return torch.stack([a for a, _ in rows]), torch.stack([g for _, g in rows]), mask.bool()


@pytest.mark.parametrize("name", ["gae", "bilevel_gae"])
def test_gae_of_tokens(name: str) -> None:
    advantages, returns, mask = estimated(name)
    holds(advantages, name, "advantages")
    holds(returns, name, "returns")
    holds(whiten(advantages.flatten(), mask.flatten()).view(mask.shape), name, "whitened")


def test_gae_of_turns() -> None:
    advantages, returns, _ = estimated("turn_gae")
    holds(advantages, "turn_gae", "advantages")
    theirs = tensor("turn_gae", "returns_at_turn_ends")
    torch.testing.assert_close(returns[theirs != 0], theirs[theirs != 0], atol=1e-5, rtol=0)


# -- losses ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("entry", "loss", "logp", "aggregation"),
    [
        ("soft_gate_1.0_1.05_seq_mean", "soft_gate", "logp", "seq-mean-token-mean"),
        ("soft_gate_wide", "soft_gate", "wide", "seq-mean-token-mean"),
        ("gmpo_0.4_0.4_seq_mean", "gmpo", "logp", "seq-mean-token-mean"),
        ("gmpo_wide", "gmpo", "wide", "seq-mean-token-mean"),
        ("gpg_token_mean", "gpg", "logp", "token-mean"),
        ("dual_clip_3_wide_token_mean", "ppo", "wide", "token-mean"),
    ],
)
def test_losses_with_default_settings(entry: str, loss: str, logp: str, aggregation: str) -> None:
    logprobs, old, mask, sequence = flat("losses", logp, "old", "mask")
    advantages = tensor("losses", "advantage_per_row")[sequence]
    losses = LOSSES[loss](logprobs, old, advantages, sequence, mask.bool(), TrainConfig()).loss
    total = (token_weights(sequence, mask.bool(), aggregation, 1.0) * losses).sum()
    assert total.item() == pytest.approx(GOLDEN["losses"][entry], abs=1e-5)


@pytest.mark.parametrize(("estimator", "value"), [("k1", "k1"), ("k2", "k2"), ("k3", "k3"), ("k3+", "k3")])
def test_kl(estimator: str, value: str) -> None:
    logprobs = tensor("kl", "logp").requires_grad_()
    found = kl_to_reference(logprobs, tensor("kl", "reference"), estimator)
    holds(found.detach(), "kl", value)
    if estimator in ("k2", "k3+"):
        holds(torch.autograd.grad(found.sum(), logprobs)[0], "kl", "k2_gradient")


def test_value_loss() -> None:
    values, old, returns = (tensor("value_loss", entry) for entry in ("value", "old", "returns"))
    found = value_loss(values, old, returns, GOLDEN["value_loss"]["clip"]).mean()
    assert found.item() == pytest.approx(GOLDEN["value_loss"]["mean"], abs=1e-5)


# -- corrections -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["tis-sequence", "icepop", "mis", "mis-sequence", "mis-geometric"])
def test_corrections_with_default_settings(name: str) -> None:
    old, mu, mask, sequence = flat("corrections", "old", "mu", "mask")
    weights = CORRECTIONS[name](old, mu, sequence, mask.bool(), TrainConfig())
    holds((weights * mask).view(3, 4), "corrections", name)


def test_off_policy_sequence_mask() -> None:
    new, sampled, mask, sequence = flat("opsm", "new", "sampled", "mask")
    advantages = tensor("opsm", "advantage_per_row")[sequence]
    kept = opsm(new, sampled, advantages, sequence, mask.bool(), GOLDEN["opsm"]["delta"])
    rows = tensor("opsm", "keep_per_row").bool()
    assert torch.equal(kept, rows[sequence])


def test_truncated_negatives() -> None:
    new, sampled, sequence = flat("topr", "new", "sampled")
    holds(topr(new, sampled, tensor("topr", "advantage_per_row")[sequence]).view(3, 4), "topr", "weights")


def test_every_entry_is_held() -> None:
    assert {name: sorted(section) for name, section in GOLDEN.items()} == {
        "inputs": ["gamma", "lambda", "mask", "reward", "turn_gamma", "value"],
        "groups": [
            "dr_grpo",
            "gdpo",
            "index",
            "lengths",
            "opo",
            "parts",
            "reinforce_pp_0.9",
            "reinforce_pp_baseline",
            "scores",
        ],
        "gae": ["advantages", "returns", "whitened"],
        "bilevel_gae": ["advantages", "returns", "whitened"],
        "turn_gae": ["advantages", "returns_at_turn_ends"],
        "gigpo": ["advantages", "gamma", "scores", "states", "step_weight"],
        "losses": [
            "advantage_per_row",
            "dual_clip_3_wide_token_mean",
            "gmpo_0.4_0.4_seq_mean",
            "gmpo_wide",
            "gpg_token_mean",
            "logp",
            "mask",
            "old",
            "soft_gate_1.0_1.05_seq_mean",
            "soft_gate_wide",
            "wide",
        ],
        "kl": ["k1", "k2", "k2_gradient", "k3", "logp", "reference"],
        "value_loss": ["clip", "mean", "old", "returns", "value"],
        "corrections": ["icepop", "mask", "mis", "mis-geometric", "mis-sequence", "mu", "old", "tis-sequence"],
        "opsm": ["advantage_per_row", "delta", "keep_per_row", "mask", "new", "sampled"],
        "topr": ["advantage_per_row", "new", "sampled", "weights"],
    }
