"""AdamW over the masters: torch's, or bitsandbytes' with moments in 8 bits (Dettmers et al., arXiv 2110.02861).

8-bit moments are quantised in blocks of 256 numbers, each block with a scale of its own: 2 bytes a parameter instead
of 8. Tensors of less than 4096 numbers keep theirs in 32 bits.
"""

from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from typing import Any

import torch

from node.config_train import TrainConfig
from node.models import ModelError

MOMENTS = ("state1", "state2", "absmax1", "absmax2")
"""What bitsandbytes keeps of a parameter, besides constant tables; the last two of large tensors only."""


def check_optimizer(config: TrainConfig, device: torch.device) -> None:
    """Raises ModelError where train.optimizer cannot be had."""
    if config.optimizer == "adamw":
        return
    if device.type != "cuda":
        raise ModelError(
            f"train.optimizer = {config.optimizer} works on a GPU only, and the model is on the {device.type}; set "
            "train.optimizer to adamw, or train.lora_rank for a small optimizer"
        )
    if find_spec("bitsandbytes") is None:
        raise ModelError(
            f"train.optimizer = {config.optimizer} needs the package bitsandbytes, which is not installed; run "
            "`.venv/bin/pip install -e '.[gpu]'`, or set train.optimizer to adamw"
        )


def make_optimizer(
    config: TrainConfig, masters: Iterable[torch.nn.Parameter], device: torch.device
) -> torch.optim.Optimizer:
    """The optimizer of `train.optimizer`. Raises ModelError."""
    check_optimizer(config, device)
    settings: dict[str, Any] = {
        "lr": config.learning_rate,
        "betas": config.betas,
        "weight_decay": config.weight_decay,
    }
    if config.optimizer == "adamw8bit":
        from bitsandbytes.optim import AdamW8bit  # it looks for CUDA libraries as it is imported

        optimizer: torch.optim.Optimizer = AdamW8bit(masters, **settings)
        return optimizer
    # fused: one pass over each tensor, no temporaries
    return torch.optim.AdamW(masters, **settings, fused=True)


def kind_of(optimizer: torch.optim.Optimizer) -> str:
    """The `train.optimizer` that made it."""
    return "adamw" if isinstance(optimizer, torch.optim.AdamW) else "adamw8bit"


def moments_of(optimizer: torch.optim.Optimizer, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """8-bit moments as one table for a file, '<parameter>:<moment>' -> tensor; empty before the first update."""
    return {
        f"{name}:{kind}": optimizer.state[weight][kind]
        for name, weight in weights.items()
        for kind in MOMENTS
        if kind in optimizer.state.get(weight, {})
    }


def restore_moments(
    optimizer: torch.optim.Optimizer,
    weights: Mapping[str, torch.Tensor],
    tensors: Mapping[str, torch.Tensor],
    updates: int,
) -> None:
    """Inverse of `moments_of`. Raises KeyError, ValueError for what is not of these weights."""
    optimizer.fill_qmap()  # type: ignore[attr-defined]
    tables = optimizer.name2qmap  # type: ignore[attr-defined]
    for name, weight in weights.items():
        state = {kind: tensors[f"{name}:{kind}"].to(weight.device) for kind in MOMENTS if f"{name}:{kind}" in tensors}
        if state["state1"].shape != weight.shape or state["state2"].shape != weight.shape:
            raise ValueError(f"the moments of {name} are of another shape")
        if "absmax1" in state:
            state |= {"qmap1": tables["dynamic"].to(weight.device), "qmap2": tables["udynamic"].to(weight.device)}
        optimizer.state[weight] = {"step": updates, **state}
