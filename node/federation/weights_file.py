"""All weights of one version in one safetensors file, read tensor by tensor as integer words, and their digest.

The format (github.com/huggingface/safetensors): u64 little-endian length of a JSON header, the header, the tensors.
"""

import hashlib
import json
import math
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from node.disk import sync
from node.federation.changes import Changes
from protocol.policy import Weights

MAX_HEADER_BYTES = 16 << 20
MAX_NAME, MAX_SAID = 80, 200
"""Characters of a file's own words in a message: of a name, of a sentence with one."""
WORDS: Mapping[Weights, type[np.unsignedinteger[Any]]] = {"float32": np.uint32, "bfloat16": np.uint16}
CODES: Mapping[str, Weights] = {"F32": "float32", "BF16": "bfloat16"}
Shapes = Mapping[str, tuple[int, ...]]
Words = NDArray[np.unsignedinteger[Any]]


class BadWeights(Exception):
    """A file does not hold the weights that it should."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """Where a tensor lies in the file, in bytes."""

    name: str
    shape: tuple[int, ...]
    begin: int
    end: int


class WeightsFile:
    """A file whose tensors are these, all of one type. Raises BadWeights, OSError."""

    def __init__(self, path: Path, shapes: Shapes, dtype: Weights) -> None:
        self.path, self.dtype = path, dtype
        self.tensors = _read_header(path, shapes, dtype)
        """By name."""

    def words(self, tensor: Tensor, mode: str = "r") -> Words:
        """The tensor's bits, flat, from the file or (mode r+) to it."""
        kind, count = WORDS[self.dtype], math.prod(tensor.shape)
        if count == 0:
            return np.empty(0, kind)
        found: Words = np.memmap(self.path, kind, mode, tensor.begin, (count,))  # type: ignore[call-overload]
        return found

    def changed(self, changes: Sequence[Changes]) -> Iterator[tuple[Tensor, Words]]:
        """Every tensor with all these changes made to a copy of it. Raises BadChanges."""
        for tensor in self.tensors:
            words = np.array(self.words(tensor))
            for change in changes:
                change.apply(words)
            yield tensor, words
        for change in changes:
            change.finish()

    def finite(self) -> bool:
        """Whether no weight is infinite or not a number: whether no exponent has all bits set."""
        exponent = WORDS[self.dtype](0x7F80 if self.dtype == "bfloat16" else 0x7F800000)
        return not any(bool(((self.words(tensor) & exponent) == exponent).any()) for tensor in self.tensors)

    def digest(self) -> bytes:
        return digest_of(self.dtype, ((tensor, self.words(tensor)) for tensor in self.tensors))


def digest_of(dtype: Weights, tensors: Iterator[tuple[Tensor, Words]]) -> bytes:
    """The state: SHA-256 over name, type, shape and bytes of each tensor, in the order of the names' UTF-8."""
    found = hashlib.sha256()
    for tensor, words in tensors:
        found.update(f"{tensor.name}\n{dtype}\n{','.join(map(str, tensor.shape))}\n".encode())
        found.update(np.ascontiguousarray(words).data)
    return found.digest()


def write_weights(weights: Mapping[str, torch.Tensor], path: Path, dtype: Weights) -> WeightsFile:
    """Write tensors that are all of this type, in place: the caller renames. Raises OSError, and there is no file."""
    try:
        save_file({name: tensor.contiguous() for name, tensor in weights.items()}, path, {"format": "pt"})
        sync(path)
    except BaseException as error:
        path.unlink(missing_ok=True)
        if isinstance(error, SafetensorError):  # what it makes of a full disk
            raise OSError(f"{path} cannot be written: {error}") from error
        raise
    return WeightsFile(path, {name: tuple(tensor.shape) for name, tensor in weights.items()}, dtype)


def write_changed(source: WeightsFile, changes: Sequence[Changes], path: Path, state: bytes) -> WeightsFile:
    """The weights of `source` with all these changes, if they are those of `state`; memory: that of one tensor.

    Raises BadWeights and BadChanges, and then there is no file, and OSError.
    """
    aside = path.with_name(f".aside-{path.name}")
    try:
        shutil.copyfile(source.path, aside)
        target = WeightsFile(aside, {tensor.name: tensor.shape for tensor in source.tensors}, source.dtype)

        def written() -> Iterator[tuple[Tensor, Words]]:
            for tensor, words in source.changed(changes):
                if len(words):
                    target.words(tensor, "r+")[:] = words
                yield tensor, words

        if digest_of(source.dtype, written()) != state:
            raise BadWeights("the changes do not lead to the weights that were announced")
        sync(aside)
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)
    return WeightsFile(path, {tensor.name: tensor.shape for tensor in source.tensors}, source.dtype)


def write_whole(pieces: Iterator[bytes], path: Path, shapes: Shapes, dtype: Weights, state: bytes) -> WeightsFile:
    """A file from its bytes, in place, if they are the weights of `state`: the caller renames.

    Raises BadWeights and OSError, and then there is no file.
    """
    try:
        with path.open("wb") as file:
            for piece in pieces:
                file.write(piece)
        sync(path)
        whole = WeightsFile(path, shapes, dtype)
        if whole.digest() != state:
            raise BadWeights("the whole is not the weights that were announced")
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    return whole


def _read_header(path: Path, shapes: Shapes, dtype: Weights) -> list[Tensor]:
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > min(MAX_HEADER_BYTES, size - 8):
            raise BadWeights(f"{path.name}: a header of {length} bytes, at most {MAX_HEADER_BYTES}")
        raw = file.read(length)
    try:
        # no digest covers the header, and the weights are loaded by this library, which is stricter than `json`: it
        # wants every tensor to lie where the one before ends, the last one at the end of the file
        with safe_open(path, framework="pt"):
            header = json.loads(raw)
        header.pop("__metadata__", None)
        found = {
            name: (CODES.get(entry["dtype"]), Tensor(name, tuple(entry["shape"]), *entry["data_offsets"]))
            for name, entry in header.items()
        }
    except (SafetensorError, ValueError) as error:
        raise BadWeights(f"{path.name}: no safetensors header: {str(error)[:MAX_SAID]}") from error
    kinds = {name: (kind, tensor.shape) for name, (kind, tensor) in found.items()}
    if kinds != {name: (dtype, shape) for name, shape in shapes.items()}:
        odd = sorted(n for n in kinds.keys() | shapes.keys() if kinds.get(n) != (dtype, shapes.get(n)))
        raise BadWeights(
            f"{path.name} is of another model or type: {len(odd)} tensors differ, the first is {odd[0][:MAX_NAME]}"
        )
    start = 8 + length
    ordered = sorted((tensor for _, tensor in found.values()), key=lambda tensor: tensor.name.encode())
    return [Tensor(tensor.name, tensor.shape, start + tensor.begin, start + tensor.end) for tensor in ordered]
