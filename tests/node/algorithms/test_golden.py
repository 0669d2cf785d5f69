"""Values computed by an independent implementation (golden.json), held to 1e-5."""

import json
from pathlib import Path

import pytest
import torch

from node.algorithms.advantages import ADVANTAGES
from node.algorithms.corrections import CORRECTIONS
from node.algorithms.losses import LOSSES, token_weights
from node.algorithms.returns import gae
from node.config_train import TrainConfig

GOLDEN = json.loads((Path(__file__).parent / "golden.json").read_text())
TOLERANCE = {"atol": 1e-5, "rtol": 0}


def flat(rows: list[list[float]]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float32).flatten()


@pytest.mark.parametrize("name", ["grpo", "rloo"])
def test_advantages(name: str) -> None:
    data = GOLDEN["advantages"]
    for scores, lengths, expected in zip(data["scores"], data["lengths"], data[name], strict=True):
        found = ADVANTAGES[name](torch.tensor(scores, dtype=torch.float32), torch.tensor(lengths))
        torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float32), **TOLERANCE)


@pytest.mark.parametrize(
    ("entry", "loss", "aggregation"),
    [
        ("ppo_0.2_0.28_token_mean", "ppo", "token-mean"),
        ("ppo_0.2_0.28_token_mean", "dapo", "token-mean"),
        ("gspo_3e-4_4e-4_seq_mean", "gspo", "seq-mean-token-mean"),
        ("cispo_lo1.0_hi4.0", "cispo", "token-mean"),
    ],
)
def test_losses_with_default_settings(entry: str, loss: str, aggregation: str) -> None:
    data = GOLDEN["losses"]
    width = len(data["mask"][0])
    mask = flat(data["mask"]).bool()
    sequence = torch.arange(len(data["mask"])).repeat_interleave(width)
    advantages = torch.tensor(data["advantage_per_row"]).repeat_interleave(width)
    losses = LOSSES[loss](flat(data["logp"]), flat(data["old"]), advantages, sequence, mask, TrainConfig())
    total = (token_weights(sequence, mask, aggregation, 1.0) * losses.loss).sum()
    assert total.item() == pytest.approx(data[entry], abs=1e-5)


def test_truncated_importance_weights() -> None:
    data = GOLDEN["corrections"]
    mask = flat(data["mask"])
    sequence = torch.arange(len(data["mask"])).repeat_interleave(len(data["mask"][0]))
    weights = CORRECTIONS["tis"](flat(data["old"]), flat(data["mu"]), sequence, mask.bool(), TrainConfig()) * mask
    torch.testing.assert_close(weights, flat(data["tis_token_C2"]), **TOLERANCE)


def test_gae_returns() -> None:
    data = GOLDEN["gae"]
    mask = torch.tensor(data["mask"]).bool()
    advantages, returns = gae(
        torch.tensor(data["reward"], dtype=torch.float32),
        torch.tensor(data["value"], dtype=torch.float32),
        mask,
        data["gamma"],
        data["lambda"],
    )
    torch.testing.assert_close(returns[mask], torch.tensor(data["returns_where_mask"]), **TOLERANCE)
    assert advantages[~mask].tolist() == returns[~mask].tolist() == [0.0]


def test_every_entry_is_held() -> None:
    assert {name: sorted(section) for name, section in GOLDEN.items()} == {
        "advantages": ["grpo", "lengths", "rloo", "scores"],
        "losses": [
            "advantage_per_row",
            "cispo_lo1.0_hi4.0",
            "gspo_3e-4_4e-4_seq_mean",
            "logp",
            "mask",
            "old",
            "ppo_0.2_0.28_token_mean",
        ],
        "corrections": ["mask", "mu", "old", "tis_token_C2"],
        "gae": ["gamma", "lambda", "mask", "returns_where_mask", "reward", "value"],
    }
