"""Has the first of several processes write a model that is spread over them, in the layout that inference loads."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from node.models import ModelBundle
from node.training.files import numbered, save_settings

PART_BYTES = 4 << 30
"""Weights are gathered and written in files of at most this, or one tensor: what the first process needs for it."""
INDEX = "model.safetensors.index.json"
FILE = "model.safetensors"


def write_whole(
    bundle: ModelBundle,
    shapes: Mapping[str, torch.Size],
    gather: Callable[[str], torch.Tensor | None],
    directory: Path,
    dtype: torch.dtype,
) -> list[str]:
    """Write weights of these shapes in a type; the names of the files.

    `gather` is called once for each name in the same order in all processes, and gives the whole tensor to the one that
    writes, None to the others. It goes on gathering after a failed write, since the others take part in it, and then
    raises what it was.
    """
    parts = split({name: shape.numel() * dtype.itemsize for name, shape in shapes.items()})
    files = [numbered(FILE, number, len(parts)) for number in range(len(parts))]
    failed: Exception | None = None
    writes = False
    for file, names in zip(files, parts, strict=True):
        whole: dict[str, torch.Tensor] = {}
        for name in names:
            tensor = gather(name)
            writes = tensor is not None
            if tensor is not None and failed is None:
                whole[name] = tensor.cpu()
        if writes and failed is None:
            try:
                save_file(whole, directory / file, {"format": "pt"})
            except (OSError, SafetensorError) as error:
                failed = error
    if failed is not None:
        raise failed
    if writes:
        if len(parts) > 1:
            where = {name: file for file, names in zip(files, parts, strict=True) for name in names}
            (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": where}))
        save_settings(bundle, directory)
    return files


def split(sizes: Mapping[str, int], most: int = PART_BYTES) -> list[list[str]]:
    """Names in order, in parts of at most `most` bytes or of one name."""
    parts: list[list[str]] = [[]]
    room = most
    for name, size in sizes.items():
        if parts[-1] and size > room:
            parts.append([])
            room = most
        parts[-1].append(name)
        room -= size
    return parts
