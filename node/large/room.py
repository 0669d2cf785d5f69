"""A machine of the cluster, and room on it for one part of a large node. Light: Ray's processes import it."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Host:
    """A machine of the cluster, as far as it is free."""

    name: str
    """Its address."""
    node: str
    """What Ray calls it."""
    cpus: float
    gpus: int
    gpu_bytes: int
    """Memory of each GPU, of the smallest one; 0: not known."""
    gpu_name: str
    memory: int
    """Main memory, in bytes."""


@dataclass(frozen=True, slots=True)
class Bundle:
    """Room for one part on one machine."""

    kind: Literal["trainer", "engine", "rewards"]
    number: int
    """Among those of its kind, from 0."""
    host: str
    node: str
    cpus: float
    gpus: int = 0
    shares: tuple[int, ...] = ()
    """Of an engine: the trainer workers whose GPUs it uses in turn with them; empty: it has its own."""
