"""The outer optimizer of DiLoCo (Douillard et al., arXiv 2311.08105): Nesterov momentum on a pseudo-gradient.

Every node trains alone for H steps. Then the outer gradient is where it was at the last outer step (the anchor) minus
the mean of where all nodes are now, and the anchor takes one step of SGD with Nesterov momentum along it. As long as
all take part, anchors are equal, and this is DiLoCo's mean of pseudo-gradients. A node that missed a round is drawn
back to the others, which a mean of differences to different anchors would not do.

All weights are one flat float32 vector here, in the order of their names.
"""

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from node.checkpoint import CheckpointError

FILE = "outer.safetensors"
CHUNK = 1 << 20
"""Numbers that are worked on at a time."""
BYTES = 4
"""Of a number."""
Robust = Literal["none", "median", "trimmed"]


@dataclass(frozen=True, slots=True)
class Outer:
    """State of the outer optimizer."""

    anchor: torch.Tensor
    """The weights after the last outer step; float32, flat."""
    momentum: torch.Tensor
    step: int
    """Inner step of the last outer step."""


@dataclass(frozen=True, slots=True)
class OuterStats:
    """What an outer step was made of; lengths are Euclidean norms of the difference to the anchor."""

    norms: tuple[float, ...]
    """Of each contribution, before clipping; inf for one that is not finite and was left out."""
    cosines: tuple[float, ...]
    """Of each contribution with the own one; 0 where left out."""
    limit: float
    """What longer ones were scaled to."""
    combined: float
    """Length of the outer gradient."""


class NoOuterStep(Exception):
    """The contributions make no outer step; the message says why."""


def flatten(weights: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """All weights as one float32 vector in main memory."""
    return torch.cat([weights[name].detach().to("cpu", torch.float32).reshape(-1) for name in sorted(weights)])


def put(flat: torch.Tensor, weights: Mapping[str, torch.Tensor]) -> None:
    """Inverse of `flatten`, into the given tensors."""
    at = 0
    for name in sorted(weights):
        weight = weights[name].detach()
        weight.copy_(flat[at : at + weight.numel()].view(weight.shape))
        at += weight.numel()


def layout(weights: Mapping[str, torch.Tensor]) -> str:
    """Names what numbers of the flat vector mean: nodes with the same one can be averaged."""
    listed = ";".join(f"{name}:{tuple(weights[name].shape)}" for name in sorted(weights))
    return hashlib.sha256(listed.encode()).hexdigest()


def write(flat: torch.Tensor, path: Path) -> bytes:
    """Write a vector as little-endian float32, replacing the file; returns its SHA-256. Raises OSError."""
    hashed, aside = hashlib.sha256(), path.with_suffix(".aside")
    try:
        with aside.open("wb") as file:
            for part in flat.split(CHUNK):
                data = part.numpy().astype("<f4", copy=False).tobytes()
                hashed.update(data)
                file.write(data)
        aside.replace(path)
    except OSError:  # it would hold on to the room that there is too little of
        aside.unlink(missing_ok=True)
        raise
    return hashed.digest()


@dataclass(frozen=True, slots=True)
class Vector:
    """A vector that `write` wrote, read part by part: a mapped file that somebody cuts short would end the process."""

    path: Path

    def __getitem__(self, part: slice) -> np.ndarray:
        """Numbers `part.start` to `part.stop`. Raises OSError, also where there are not so many."""
        wanted = BYTES * (part.stop - part.start)
        with self.path.open("rb") as file:
            file.seek(BYTES * part.start)
            data = file.read(wanted)
        if len(data) < wanted:
            raise OSError(f"{self.path} was cut short")
        return np.frombuffer(data, dtype="<f4")


def nesterov(
    weights: torch.Tensor, momentum: torch.Tensor, gradient: torch.Tensor, *, rate: float, mu: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """New weights and momentum, as `torch.optim.SGD(lr=rate, momentum=mu, nesterov=True)` has them (dampening 0)."""
    velocity = momentum.mul(mu).add_(gradient)
    return weights.add(gradient.add(velocity, alpha=mu), alpha=-rate), velocity


def combine(differences: torch.Tensor, robust: Robust) -> torch.Tensor:
    """The mean of rows, coordinate by coordinate: plain, median, or without the outer ones. [n, m] -> [m].

    `trimmed` leaves out a quarter at each end, at least one. Source: Yin et al., arXiv 1803.01498.
    """
    count = len(differences)
    if robust == "none" or count < 3:
        return differences.sum(0) / count
    ordered = differences.sort(0).values
    off = (count - 1) // 2 if robust == "median" else max(1, count // 4)
    return ordered[off : count - off].sum(0) / (count - 2 * off)


def outer_step(
    outer: Outer,
    contributions: Sequence[Vector | np.ndarray],
    own: int,
    *,
    step: int,
    rate: float,
    mu: float,
    max_norm: float,
    robust: Robust,
    least: int,
) -> tuple[Outer, OuterStats]:
    """One outer step; `outer` stays as it was.

    `contributions`: weights of all nodes of a round, the own ones at `own`, in the same order on all of them. One that
    is further from the anchor than `max_norm` times the own one is scaled down to that; one that is not finite is left
    out. Nodes with the same anchor get the same sum, to the bit, unless one was scaled down: each node's limit is its
    own, since of two nodes neither may set that of the other, and the next round draws them together. Raises
    NoOuterStep, also where fewer than `least` are left, and OSError.
    """
    norms, cosines = _measure(outer.anchor, contributions, own)
    limit = max_norm * norms[own]
    good = [at for at, norm in enumerate(norms) if math.isfinite(norm)]
    if own not in good or norms[own] == 0:
        raise NoOuterStep("the own weights have not moved since the last outer step, or are not finite")
    if len(good) < least:
        raise NoOuterStep(f"only {len(good)} contributions are finite numbers, and averaging.min_peers is {least}")
    scales = torch.tensor([[min(1.0, limit / norms[at]) if norms[at] else 1.0] for at in good])
    anchor, momentum = torch.empty_like(outer.anchor), torch.empty_like(outer.momentum)
    squared = 0.0
    for part in _parts(len(outer.anchor)):
        here = outer.anchor[part]
        differences = torch.stack([here - _tensor(contributions[at][part]) for at in good]) * scales
        gradient = combine(differences, robust)
        squared += float(gradient.double().square().sum())
        anchor[part], momentum[part] = nesterov(here, outer.momentum[part], gradient, rate=rate, mu=mu)
    length = math.sqrt(squared) if math.isfinite(squared) else math.inf
    # no vector is longer than `most`, and no coordinate of any of these means is outside theirs
    most = max(limit, norms[own])
    if length > 1.01 * math.sqrt(len(good)) * most:
        raise NoOuterStep(
            f"contributions changed while they were read: the mean is {length:.3g} long, at most {most:.3g}"
        )
    return Outer(anchor, momentum, step), OuterStats(norms, cosines, limit, length)


def _measure(
    anchor: torch.Tensor, contributions: Sequence[Vector | np.ndarray], own: int
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Norms of differences to the anchor (inf: not finite), and cosines with the own difference; in float64."""
    squares, products = [0.0] * len(contributions), [0.0] * len(contributions)
    for part in _parts(len(anchor)):
        here = anchor[part].double()
        mine = here - _tensor(contributions[own][part]).double()
        for at, contribution in enumerate(contributions):
            difference = here - _tensor(contribution[part]).double()
            squares[at] += float(difference.square().sum())
            products[at] += float((difference * mine).sum())
    norms = tuple(math.sqrt(square) if math.isfinite(square) else math.inf for square in squares)
    lengths = [norm * norms[own] for norm in norms]
    return norms, tuple(
        product / length if math.isfinite(length) and length else 0.0
        for product, length in zip(products, lengths, strict=True)
    )


def _parts(length: int) -> Iterator[slice]:
    return (slice(start, min(start + CHUNK, length)) for start in range(0, length, CHUNK))


def _tensor(numbers: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.array(numbers, dtype=np.float32))


def save(outer: Outer, directory: Path) -> None:
    """Write the state beside a checkpoint's other files."""
    save_file({"anchor": outer.anchor, "momentum": outer.momentum}, directory / FILE, {"step": str(outer.step)})


def load(directory: Path, numbers: int) -> Outer | None:
    """What `save` wrote; None where there is nothing. Raises CheckpointError."""
    path = directory / FILE
    if not path.exists():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            anchor, momentum = file.get_tensor("anchor"), file.get_tensor("momentum")
            step = int(file.metadata()["step"])
    except (OSError, SafetensorError, KeyError, ValueError, TypeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if len(anchor) != numbers or len(momentum) != numbers or anchor.dtype != torch.float32:
        raise CheckpointError(f"{path} is of another model: {len(anchor)} numbers, not {numbers}")
    return Outer(anchor, momentum, step)
