"""What a trainer keeps on disk: weights and optimizer state as safetensors, nothing pickled."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from node.checkpoint import CheckpointError
from node.models import ModelBundle
from node.training.optimizers import kind_of, moments_of, restore_moments

WEIGHTS = "model.safetensors"
FIRST_MOMENTS = "exp_avg.safetensors"
SECOND_MOMENTS = "exp_avg_sq.safetensors"
MOMENTS_8BIT = "moments8.safetensors"
TRAINER = "trainer.json"


def save_model(bundle: ModelBundle, weights: Mapping[str, torch.Tensor], directory: Path) -> None:
    """Write weights, config and tokenizer in the layout that `from_pretrained` and `node.models` load."""
    save_file({name: tensor.detach() for name, tensor in weights.items()}, directory / WEIGHTS, {"format": "pt"})
    bundle.model.config.save_pretrained(directory)
    bundle.model.generation_config.save_pretrained(directory)
    bundle.tokenizer.save_pretrained(directory)


def save_optimizer(
    optimizer: torch.optim.Optimizer, weights: Mapping[str, torch.Tensor], step: int, directory: Path
) -> None:
    """Write both moments by parameter name, and the step. Before the first update there are no moments."""
    kind = kind_of(optimizer)
    updates = {int(state["step"]) for state in optimizer.state.values()}
    counts = {"step": step, "updates": updates.pop() if updates else 0, "optimizer": kind}
    (directory / TRAINER).write_text(json.dumps(counts))
    if kind == "adamw8bit":
        save_file(moments_of(optimizer, weights), directory / MOMENTS_8BIT)
        return
    for file, key in ((FIRST_MOMENTS, "exp_avg"), (SECOND_MOMENTS, "exp_avg_sq")):
        moments = {name: optimizer.state[w][key] for name, w in weights.items() if w in optimizer.state}
        save_file(moments, directory / file)


def load_weights(weights: Mapping[str, torch.Tensor], path: Path) -> None:
    """Read weights into the given tensors. Raises CheckpointError, before anything is changed where it can."""
    for name, tensor in _read(path, weights):
        weights[name].detach().copy_(tensor)


def load_optimizer(optimizer: torch.optim.Optimizer, weights: Mapping[str, torch.Tensor], directory: Path) -> int:
    """Inverse of `save_optimizer`; returns the step. Raises CheckpointError."""
    try:
        counts = json.loads((directory / TRAINER).read_text())
        step, updates = int(counts["step"]), int(counts["updates"])
        kind = counts.get("optimizer", "adamw")  # Shoal 0.1 had no other
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{directory / TRAINER} cannot be read: {error}") from error
    if kind != kind_of(optimizer):
        raise CheckpointError(
            f"{directory} has the optimizer state of {kind}, and train.optimizer is {kind_of(optimizer)} ; set "
            f"train.optimizer to {kind}, or give another --home"
        )
    optimizer.state.clear()
    if updates and kind == "adamw8bit":
        path = directory / MOMENTS_8BIT
        try:
            restore_moments(optimizer, weights, load_file(path), updates)
        except (OSError, SafetensorError, KeyError, ValueError) as error:
            raise CheckpointError(f"{path} is of another model, or cannot be read: {error!r}") from error
    elif updates:
        for weight in weights.values():
            optimizer.state[weight] = {"step": torch.tensor(float(updates), dtype=torch.float32, device=weight.device)}
        for file, key in ((FIRST_MOMENTS, "exp_avg"), (SECOND_MOMENTS, "exp_avg_sq")):
            for name, tensor in _read(directory / file, weights):
                optimizer.state[weights[name]][key] = tensor.to(weights[name].device)
    return step


def _read(path: Path, weights: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors of a file one by one, after checking that names and shapes are those of the weights."""
    try:
        with safe_open(path, framework="pt") as file:
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 - no mapping
            wanted = {name: tuple(weight.shape) for name, weight in weights.items()}
            if shapes != wanted:
                odd = sorted(name for name in shapes.keys() | wanted.keys() if shapes.get(name) != wanted.get(name))
                raise CheckpointError(f"{path} is of another model: {len(odd)} tensors differ, the first is {odd[0]}")
            for name in wanted:
                yield name, file.get_tensor(name)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
