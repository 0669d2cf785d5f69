"""What a trainer keeps on disk: weights and optimizer state as safetensors, nothing pickled.

Several processes that hold a model together (node/training/fsdp.py, megatron.py) write rows of the moments each, side
by side: `exp_avg-00001-of-00002.safetensors`. A tensor's rows in the order of the files are the whole tensor, so any
number of processes reads what any other number wrote, each only the part it holds. A weight on the meta device is one
that only other processes hold. torch.distributed.checkpoint would pickle its metadata, and its safetensors storage
(hf_storage) wants a folder of its own and a pass over all files for the layout that inference loads.
"""

import functools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard

from node.checkpoint import TRAINER, CheckpointError
from node.disk import failed_write
from node.models import ModelBundle
from node.training.optimizers import kind_of, moments_of, restore_moments

WEIGHTS = "model.safetensors"
FIRST_MOMENTS = "exp_avg.safetensors"
SECOND_MOMENTS = "exp_avg_sq.safetensors"
MOMENTS_8BIT = "moments8.safetensors"


def save_model(bundle: ModelBundle, weights: Mapping[str, torch.Tensor], directory: Path) -> None:
    """Write weights, config and tokenizer in the layout that `from_pretrained` and `node.models` load."""
    save_file({name: tensor.detach() for name, tensor in weights.items()}, directory / WEIGHTS, {"format": "pt"})
    save_settings(bundle, directory)


def save_settings(bundle: ModelBundle, directory: Path) -> None:
    """Write what a model directory has besides weights."""
    bundle.model.config.save_pretrained(directory)
    bundle.model.generation_config.save_pretrained(directory)
    bundle.tokenizer.save_pretrained(directory)


def save_optimizer(
    optimizer: torch.optim.Optimizer,
    weights: Mapping[str, torch.Tensor],
    step: int,
    directory: Path,
    rank: int = 0,
    count: int = 1,
) -> None:
    """Write both moments by parameter name, and the step. Before the first update there are no moments.

    The `rank`th of `count` processes writes the rows that it holds.
    """
    kind = kind_of(optimizer)
    updates = {int(state["step"]) for state in optimizer.state.values()}
    counts = {"step": step, "updates": updates.pop() if updates else 0, "optimizer": kind}
    if kind == "adamw8bit":
        save_file(moments_of(optimizer, weights), directory / MOMENTS_8BIT)
    else:

        def write(file: str, key: str) -> None:
            moments = {name: _rows(optimizer.state[w][key]) for name, w in weights.items() if w in optimizer.state}
            path = directory / numbered(file, rank, count)
            save_file({name: rows for name, rows in moments.items() if len(rows)}, path)

        both = (FIRST_MOMENTS, "exp_avg"), (SECOND_MOMENTS, "exp_avg_sq")
        write_all(functools.partial(write, file, key) for file, key in both)
    if rank == 0:
        (directory / TRAINER).write_text(json.dumps(counts if count == 1 else {**counts, "processes": count}))


def write_all(writes: Iterable[Callable[[], None]]) -> None:
    """Do all of them, also after a failed write, which is raised at the end: other processes wait for this one's part
    in each."""
    failed: Exception | None = None
    for write in writes:
        try:
            write()
        except Exception as error:
            if not failed_write(error):
                raise
            failed = failed or error
    if failed is not None:
        raise failed


def numbered(file: str, number: int, count: int) -> str:
    """A file's name where it is the `number`th of several, counted from 0; as in the Hugging Face layout."""
    stem, dot, ending = file.partition(".")
    return file if count == 1 else f"{stem}-{number + 1:05}-of-{count:05}{dot}{ending}"


def weight_files(directory: Path) -> list[Path]:
    """The file with a model's weights, or the files, in order."""
    stem, _, ending = WEIGHTS.partition(".")
    return sorted(directory.glob(f"{stem}-*-of-*.{ending}")) or [directory / WEIGHTS]


def load_weights(weights: Mapping[str, torch.Tensor], paths: Sequence[Path]) -> None:
    """Read weights into the given tensors. Raises CheckpointError, before anything is changed where it can."""
    for name, tensor in _read(paths, weights):
        local(weights[name].detach()).copy_(tensor)


def load_optimizer(optimizer: torch.optim.Optimizer, weights: Mapping[str, torch.Tensor], directory: Path) -> int:
    """Inverse of `save_optimizer`, whatever number of processes wrote; returns the step. Raises CheckpointError."""
    try:
        counts = json.loads((directory / TRAINER).read_text())
        step, updates, processes = int(counts["step"]), int(counts["updates"]), int(counts.get("processes", 1))
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
            if weight.is_meta:
                continue
            optimizer.state[weight] = {"step": torch.tensor(float(updates), dtype=torch.float32, device=weight.device)}
        for file, key in ((FIRST_MOMENTS, "exp_avg"), (SECOND_MOMENTS, "exp_avg_sq")):
            paths = [directory / numbered(file, number, processes) for number in range(processes)]
            for name, tensor in _read(paths, weights):
                moment = optimizer.state[weights[name]][key] = torch.empty_like(weights[name].detach())
                local(moment).copy_(tensor)
    return step


def local(tensor: Any) -> torch.Tensor:
    """What of a tensor is in this process: all of it, or its part where it is shared out (a DTensor)."""
    part: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part


def place_of(weight: torch.Tensor) -> tuple[slice, ...]:
    """Where in a weight this process's part of it lies, dimension by dimension."""
    if isinstance(weight, DTensor):
        return placed(weight.shape, weight.placements, weight.device_mesh)
    return placed(weight.shape)


def placed(
    shape: torch.Size, placements: Sequence[Placement] = (), mesh: DeviceMesh | None = None
) -> tuple[slice, ...]:
    """The same for a tensor of that shape, shared out so over the processes of a mesh."""
    place = [slice(0, length) for length in shape]
    for axis, placement in enumerate(placements):
        if isinstance(placement, Shard):
            assert mesh is not None
            outer = place[placement.dim]
            inner = rows_of(outer.stop - outer.start, mesh.get_local_rank(axis), mesh.size(axis))
            place[placement.dim] = slice(outer.start + inner.start, outer.start + inner.stop)
    return tuple(place)


def rows_of(length: int, rank: int, count: int) -> slice:
    """Rows that the `rank`th of `count` processes holds of a tensor of `length` rows, as FSDP2 deals them out."""
    chunk = -(-length // count)
    return slice(min(length, rank * chunk), min(length, (rank + 1) * chunk))


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """This process's rows of a tensor: in the order of the processes they are the whole."""
    if isinstance(tensor, DTensor):
        return local(tensor.redistribute(placements=[Shard(0)] * tensor.device_mesh.ndim)).contiguous()
    return tensor


def _read(paths: Sequence[Path], weights: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors one by one, of shared-out weights the part that is here; names and shapes are checked before."""
    with ExitStack() as opened:
        pieces: dict[str, list[Any]] = {}
        for path in paths:
            try:
                file = opened.enter_context(safe_open(path, framework="pt"))
                for name in file.keys():  # noqa: SIM118 - no mapping
                    pieces.setdefault(name, []).append(file.get_slice(name))
            except (OSError, SafetensorError) as error:
                raise CheckpointError(f"{path} cannot be read: {error}") from error
        shapes = {name: _whole([tuple(piece.get_shape()) for piece in those]) for name, those in pieces.items()}
        wanted = {name: tuple(weight.shape) for name, weight in weights.items()}
        if shapes != wanted:
            odd = sorted(name for name in shapes.keys() | wanted.keys() if shapes.get(name) != wanted.get(name))
            raise CheckpointError(f"{paths[0]} is of another model: {len(odd)} tensors differ, the first is {odd[0]}")
        for name, weight in weights.items():
            if weight.is_meta:
                continue
            try:
                yield name, _joined(pieces[name], place_of(weight))
            except (OSError, SafetensorError) as error:
                raise CheckpointError(f"{paths[0]} cannot be read: {error}") from error


def _whole(shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """Of rows in several files; shapes that do not go together give one that no weight has."""
    if len(shapes) == 1:
        return shapes[0]
    if not all(shapes) or len({shape[1:] for shape in shapes}) > 1:
        return (-1,)
    return sum(shape[0] for shape in shapes), *shapes[0][1:]


def _joined(pieces: Sequence[Any], wanted: tuple[slice, ...]) -> torch.Tensor:
    """The part `wanted` of what lies in pieces, rows after rows."""
    found, start = [], 0
    rows, *others = wanted
    for piece in pieces:
        length = piece.get_shape()[0]
        low, high = max(rows.start - start, 0), min(rows.stop - start, length)
        if low < high:
            found.append(piece[low:high, *others])
        start += length
    return found[0] if len(found) == 1 else torch.cat(found or [pieces[0][0:0, *others]])
