"""A machine of the cluster, room on it for one part of a large node, and what parts need. Light: Ray's processes import
it."""

from dataclasses import dataclass
from typing import Literal

GB = 1 << 30

Layout = Literal["disjoint", "mixed", "colocated"]


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


@dataclass(frozen=True, slots=True)
class Need:
    """Memory that one part takes of each of its devices."""

    bytes: int
    said: str
    """The sum in words."""


@dataclass(frozen=True, slots=True)
class Needs:
    """Of all kinds of parts."""

    on_gpu: bool
    """Memory is that of a GPU; else that of a machine."""
    trainer: Need
    """A worker with a device to itself."""
    engine: Need
    """An engine with devices to itself, of each of them."""
    shared: Need
    """A worker and an engine on the same device, which take turns."""
    kept: int
    """What a worker holds of a device that it shares while the engine samples."""
    model: str
    """The model in words."""
