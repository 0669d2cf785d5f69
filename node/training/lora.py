"""Low-rank adapters: y = W x + (alpha / rank) B A x, with W frozen and A and B trained. Hu et al., arXiv 2106.09685.

peft puts them into the model in place, so that engine and trainer still share one module and whatever computes with it
sees them at once. Switched off, what is left is the initial model: a reference for the KL costs no copy.

A is random and the same at every start, B is 0: a journal that begins at the initial model can be repeated.
"""

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from node.checkpoint import CheckpointError
from node.config_train import TrainConfig
from node.models import ModelBundle, ModelError
from node.training.files import load_weights

WEIGHTS, SETTINGS = "adapter_model.safetensors", "adapter_config.json"
"""Names of peft's, whose `PeftModel.from_pretrained` loads the directory."""
MARK = ".lora_"
"""In the names of adapters' parameters, and of no others."""
NAME = "default"
"""peft's for the only set of adapters that there is."""
PREFIX = "base_model.model."
SEED = 0


def require_peft() -> None:
    """Raises ModelError where peft is not installed."""
    if find_spec("peft") is None:
        raise ModelError(
            "train.lora_rank needs peft, which is not installed; run `.venv/bin/pip install -e '.[lora]'`, or set "
            "train.lora_rank to 0"
        )


def add_adapters(bundle: ModelBundle, config: TrainConfig) -> None:
    """Put fresh adapters into a model, in its compute type, and freeze all else. Raises ModelError."""
    require_peft()
    from peft import LoraConfig, inject_adapter_in_model  # it takes seconds to import

    model = bundle.model
    # the output layer is not among them: log-probabilities are computed from its weight alone (node/logprobs.py)
    linear = [name for name, module in model.base_model.named_modules() if isinstance(module, torch.nn.Linear)]
    # peft takes names of feed-forward layers for those of experts where there are some, at twice the rank
    there = {name.rpartition(".")[2] for name in linear if bundle.routing is None or ".self_attn." in name}
    targets = there if config.lora_targets == ("all-linear",) else set(config.lora_targets)
    if not targets or targets - there:
        raise ModelError(
            f"train.lora_targets = {','.join(config.lora_targets)}: {bundle.name} has no such linear layers; use "
            f"all-linear, or some of {', '.join(sorted(there))}"
        )
    settings = LoraConfig(
        r=config.lora_rank,
        lora_alpha=config.lora_alpha,
        target_modules=sorted(targets),
        base_model_name_or_path=str(bundle.directory),
    )
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(SEED)
        inject_adapter_in_model(settings, model, NAME)


def adapters(model: Any) -> dict[str, torch.nn.Parameter]:
    """The adapters' parameters by name; none in a model without."""
    return {name: parameter for name, parameter in model.named_parameters() if MARK in name}


@contextmanager
def switched_off(model: Any) -> Iterator[None]:
    """Inside this, the model computes what it did before adapters were added."""
    layers = [module for module in model.modules() if hasattr(module, "enable_adapters") and hasattr(module, "lora_A")]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


# -- files ---------------------------------------------------------------------------------------------------


def save_adapters(model: Any, weights: Mapping[str, torch.Tensor], directory: Path) -> None:
    """Write adapters (by parameter name) in peft's layout."""
    tensors = {_filed(name): weight.detach().contiguous() for name, weight in weights.items()}
    save_file(tensors, directory / WEIGHTS, {"format": "pt"})
    model.peft_config[NAME].save_pretrained(directory)


def load_adapters(model: Any, weights: Mapping[str, torch.Tensor], directory: Path) -> None:
    """Read adapters into the given tensors. Raises CheckpointError, before anything is changed where it can."""
    wanted, found = model.peft_config[NAME], settings_of(directory)
    ours = (wanted.r, wanted.lora_alpha, tuple(sorted(wanted.target_modules)))
    theirs = (found.lora_rank, found.lora_alpha, tuple(sorted(found.lora_targets)))
    if ours != theirs:
        raise CheckpointError(
            f"{directory} has adapters of rank {theirs[0]}, alpha {theirs[1]} on {','.join(theirs[2])}, and the "
            f"settings say rank {ours[0]}, alpha {ours[1]} on {','.join(ours[2])} ; set train.lora_rank, "
            "train.lora_alpha and train.lora_targets back, or give another --home"
        )
    load_weights({_filed(name): weight for name, weight in weights.items()}, [directory / WEIGHTS])


def _filed(name: str) -> str:
    """A parameter's name in peft's files."""
    return PREFIX + name.replace(f".{NAME}.", ".")


def has_adapters(directory: Path) -> bool:
    """Whether a checkpoint or an export is of adapters, and not of a whole model."""
    return (directory / SETTINGS).exists()


def check_kind(directory: Path, rank: int) -> None:
    """Raises CheckpointError where a checkpoint is of adapters and a run is not, or the other way round."""
    there = settings_of(directory).lora_rank if has_adapters(directory) else 0
    if bool(there) != bool(rank):
        raise CheckpointError(
            f"{directory} is of a run with train.lora_rank = {there}, and it is {rank} now ; set it back, or give "
            "another --home"
        )


def settings_of(directory: Path) -> TrainConfig:
    """The settings that adapters on disk were trained with, the `lora_` ones of them. Raises CheckpointError."""
    path = directory / SETTINGS
    try:
        said = json.loads(path.read_text())
        return TrainConfig(
            lora_rank=said["r"], lora_alpha=said["lora_alpha"], lora_targets=tuple(said["target_modules"])
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error} ; it is not what was written") from error


def load_with_adapters(bundle: ModelBundle, directory: Path) -> None:
    """Give a model the adapters of a checkpoint or an export. Raises ModelError, CheckpointError."""
    add_adapters(bundle, settings_of(directory))
    load_adapters(bundle.model, adapters(bundle.model), directory)


def merge(base: Path, directory: Path, target: Path) -> None:
    """Write the model of `base` with adapters added to its weights, file by file, in the types it has there.

    `target` is an existing directory; `from_pretrained` loads it without peft. Raises CheckpointError.
    """
    settings = settings_of(directory)
    scale = settings.lora_alpha / settings.lora_rank
    try:
        left = load_file(directory / WEIGHTS)
        for file in sorted(base.iterdir()):
            if file.suffix in (".json", ".jinja", ".txt", ".model"):
                shutil.copyfile(file, target / file.name)
            if file.suffix != ".safetensors":
                continue
            weights = load_file(file)
            for name, weight in weights.items():
                stem = f"{PREFIX}{name.removesuffix('.weight')}."
                if f"{stem}lora_A.weight" in left:
                    a, b = (left.pop(f"{stem}lora_{side}.weight").float() for side in "AB")
                    weights[name] = (weight.float() + scale * (b @ a)).to(weight.dtype)
            save_file(weights, target / file.name, {"format": "pt"})
            (target / file.name).chmod(0o644)  # safetensors makes it private
    except (OSError, SafetensorError, KeyError, RuntimeError) as error:
        raise CheckpointError(f"{directory} cannot be merged into {base}: {error}") from error
    if left:
        raise CheckpointError(
            f"{directory} cannot be merged into {base}: its files have no weight for {len(left)} tensors, the first is "
            f"{min(left)} ; set model.path to the model that was trained, or export with --adapters"
        )
