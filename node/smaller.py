"""A model that is not the embedded one and speaks its language: the embedded one with two layers left out.

For a swarm of several models on a machine without a model hub (`shoal local --others`). Which layers: those that change
their input least (block influence, ShortGPT, arXiv 2403.03853), measured on text like the embedded tasks'.
"""

import json
import logging
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from node.models import EMBEDDED, make_once, model_directory

log = logging.getLogger(__name__)

LEFT_OUT = (14, 17)
NAME = "SmolLM2-128M-Instruct"
LAYER = "model.layers."


def smaller_model(models: Path) -> Path:
    """Its directory, beside the embedded model's in `models`; made at the first use. Raises ModelError."""
    source, target = model_directory(EMBEDDED, models), models / NAME
    if target.is_dir():
        return target
    log.info("making %s of the embedded model, once, in %s", NAME, target)
    make_once(target, lambda aside: _leave_out(source, aside))
    return target


def _leave_out(source: Path, aside: Path) -> None:
    for file in source.iterdir():
        if file.suffix != ".safetensors":
            shutil.copy(file, aside)
    config = json.loads((source / "config.json").read_bytes())
    save_file(without(load_file(source / "model.safetensors"), LEFT_OUT), aside / "model.safetensors")
    config["num_hidden_layers"] -= len(LEFT_OUT)
    if "layer_types" in config:
        config["layer_types"] = [kind for i, kind in enumerate(config["layer_types"]) if i not in LEFT_OUT]
    (aside / "config.json").write_text(json.dumps(config, indent=2))


def without(weights: dict[str, torch.Tensor], layers: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """A checkpoint's tensors without some layers, the others numbered anew."""
    kept = {}
    for name, tensor in weights.items():
        if name.startswith(LAYER):
            number, rest = name.removeprefix(LAYER).split(".", 1)
            if int(number) in layers:
                continue
            name = f"{LAYER}{int(number) - sum(left < int(number) for left in layers)}.{rest}"
        kept[name] = tensor.contiguous()
    return kept
