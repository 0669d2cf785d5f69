"""Which part of a large node goes to which machine, and why in plain sentences. No Ray here: a function of numbers.

A trainer worker takes one GPU, so that engines, which take several of one machine, are placed first: then the trainer
fits wherever GPUs are left, if it fits at all. It is put on as few machines as possible, as its workers exchange every
layer of every pass; the order is the other way round where that keeps it on one machine. Where CPUs are so short that
neither way has room for all, parts are placed one by one, by what machines have left, in several ways.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from node.large.cluster_file import Cluster, ClusterFileError
from node.large.plan_words import (
    fix,
    of_gpus,
    said_of,
    said_of_engines,
    said_of_layout,
    said_of_rewards,
    said_of_trainer,
)
from node.large.room import GB, Bundle, Host, Layout, Need, Needs


@dataclass(frozen=True, slots=True)
class Placement:
    layout: Layout
    trainer: tuple[Bundle, ...]
    engines: tuple[Bundle, ...]
    rewards: tuple[Bundle, ...]
    why: tuple[str, ...]
    """Sentences."""

    @property
    def bundles(self) -> tuple[Bundle, ...]:
        return (*self.trainer, *self.engines, *self.rewards)

    def __str__(self) -> str:
        return "\n".join(self.why)


class DoesNotFit(ClusterFileError):
    """The cluster is too small for what its file asks; the message has the sum and what would fit."""


@dataclass(slots=True)
class _Room:
    """What is left of a machine while parts are placed."""

    host: Host
    cpus: float
    gpus: int
    memory: int

    def take(self, cpus: float, gpus: int, memory: int) -> bool:
        """`memory`: of each GPU, or of the machine where there is none to be taken."""
        enough = self.holds(cpus, gpus, memory)
        if enough:
            self.cpus -= cpus
            self.gpus -= gpus
            if not gpus:
                self.memory -= memory
        return enough

    def holds(self, cpus: float, gpus: int, memory: int) -> bool:
        if gpus:
            fits = gpus <= self.gpus and (not self.host.gpu_bytes or memory <= self.host.gpu_bytes)
        else:
            fits = memory <= self.memory
        return fits and cpus <= self.cpus + 1e-9


_Key = Callable[[_Room], tuple[float, float]]
"""The part goes to the machine for which it is least, of those that hold it."""


def _fewest_gpus(room: _Room) -> tuple[float, float]:
    return room.gpus, -room.cpus


def _fewest_cpus(room: _Room) -> tuple[float, float]:
    return room.cpus, room.gpus


def _most_cpus(room: _Room) -> tuple[float, float]:
    return -room.cpus, room.gpus


_KEYS: Sequence[_Key] = (_fewest_gpus, _fewest_cpus, _most_cpus)


def place(hosts: Sequence[Host], cluster: Cluster, needs: Needs) -> Placement:
    """A machine for every part of `cluster`, or DoesNotFit."""
    hosts = sorted(hosts, key=lambda host: (-host.gpus, -host.cpus, host.name))
    layouts: tuple[Layout, ...] = ("disjoint",)
    if needs.on_gpu:
        layouts = ("disjoint", "mixed", "colocated") if cluster.layout == "auto" else (cluster.layout,)
    refused: list[str] = []
    for layout in layouts:
        found, why_not = _try(hosts, cluster, needs, layout)
        if found is not None:
            trainer, engines, rewards = found
            why = (
                said_of(hosts, needs),
                said_of_trainer(trainer, cluster, needs, layout),
                said_of_engines(engines, cluster, needs),
                *said_of_rewards(rewards),
                said_of_layout(layout, cluster, refused),
            )
            return Placement(layout, trainer, engines, rewards, why)
        refused.append(f"{layout}: {why_not}")
    raise DoesNotFit(
        f"{said_of(hosts, needs)} {cluster.trainer.workers} trainer workers and {cluster.engines.number} engines do "
        f"not fit ({'; '.join(refused)}) ; {fix(hosts, cluster, needs)}"
    )


_Found = tuple[tuple[Bundle, ...], tuple[Bundle, ...], tuple[Bundle, ...]]


def _try(hosts: Sequence[Host], cluster: Cluster, needs: Needs, layout: Layout) -> tuple[_Found | None, str]:
    """The bundles of a layout; or None, and the first thing that has no room."""
    number = cluster.engines.number
    # as few engines as possible share the trainer's GPUs
    sharing = {"disjoint": range(1), "mixed": range(1, number), "colocated": range(number, number + 1)}[layout]
    why_not = "there is one engine only" if layout == "mixed" and number < 2 else ""
    for shared in sharing:
        tried = [_try_order(hosts, cluster, needs, shared, first, _fewest_gpus, None) for first in (False, True)]
        found = [one for one in tried if not isinstance(one, str)]
        if found:
            return min(found, key=lambda one: len({bundle.node for bundle in one[0]})), ""
        why_not = next(one for one in tried if isinstance(one, str))
        for order in itertools.product((False, True), _KEYS, _KEYS):
            one = _try_order(hosts, cluster, needs, shared, *order)
            if not isinstance(one, str):
                return one, ""
    return None, why_not


def _try_order(
    hosts: Sequence[Host],
    cluster: Cluster,
    needs: Needs,
    shared: int,
    engines_first: bool,
    engines_by: _Key,
    trainer_by: _Key | None,
) -> _Found | str:
    """`trainer_by`: None keeps it together."""
    rooms = [_Room(host, host.cpus, host.gpus, host.memory) for host in hosts]
    own = range(shared, cluster.engines.number)
    engines = _place_engines(rooms, cluster, needs.engine, own, engines_by) if engines_first else []
    trainer = _place_trainer(rooms, cluster, needs.shared if shared else needs.trainer, trainer_by)
    if not engines_first:
        engines = _place_engines(rooms, cluster, needs.engine, own, engines_by)
    for part in (trainer, engines):
        if isinstance(part, str):
            return part
    assert not isinstance(trainer, str)
    beside = _share(rooms, cluster, trainer, shared)
    if isinstance(beside, str):
        return beside
    rewards = _place_rewards(rooms, cluster)
    if isinstance(rewards, str):
        return rewards
    return tuple(trainer), (*beside, *engines), tuple(rewards)


def _place_trainer(rooms: Sequence[_Room], cluster: Cluster, need: Need, key: _Key | None) -> list[Bundle] | str:
    """Each worker by `key`; None: on as few machines as possible."""
    wanted = cluster.trainer
    bundles: list[Bundle] = []
    order = rooms if key is not None else _together(rooms, cluster, need)
    while len(bundles) < wanted.workers:
        fit = [room for room in order if room.holds(wanted.cpus, wanted.gpus, need.bytes)]
        if not fit:
            break
        room = fit[0] if key is None else min(fit, key=key)
        room.take(wanted.cpus, wanted.gpus, need.bytes)
        bundles.append(Bundle("trainer", len(bundles), room.host.name, room.host.node, wanted.cpus, wanted.gpus))
    if len(bundles) < wanted.workers:
        return (
            f"there is room for {len(bundles)} of {wanted.workers} trainer workers, each with {of_gpus(wanted.gpus)}"
            f"{wanted.cpus:g} CPUs and {need.bytes / GB:.1f} GB ({need.said})"
        )
    return bundles


def _together(rooms: Sequence[_Room], cluster: Cluster, need: Need) -> list[_Room]:
    """The machine that holds all of the trainer and is left with the least; else all, the roomiest ones first."""
    wanted = cluster.trainer
    holds = [(_held(room, wanted.cpus, wanted.gpus, need.bytes), room) for room in rooms]
    enough = [(held, room) for held, room in holds if held >= wanted.workers]
    return [min(enough, key=_first)[1]] if enough else [room for _, room in sorted(holds, key=_first, reverse=True)]


def _place_engines(
    rooms: Sequence[_Room], cluster: Cluster, need: Need, numbers: range, key: _Key
) -> list[Bundle] | str:
    wanted = cluster.engines
    memory = need.bytes
    bundles: list[Bundle] = []
    for number in numbers:
        fit = [room for room in rooms if room.holds(wanted.cpus, wanted.gpus, memory)]
        if not fit:
            return (
                f"there is room for {len(bundles)} of {len(numbers)} engines with {of_gpus(wanted.gpus)}"
                f"{wanted.cpus:g} CPUs and {memory / GB:.1f} GB{' on each GPU' if wanted.gpus else ''} ({need.said})"
            )
        room = min(fit, key=key)
        room.take(wanted.cpus, wanted.gpus, memory)
        bundles.append(Bundle("engine", number, room.host.name, room.host.node, wanted.cpus, wanted.gpus))
    return bundles


def _share(rooms: Sequence[_Room], cluster: Cluster, trainer: Sequence[Bundle], shared: int) -> list[Bundle] | str:
    """Engines on the trainer's GPUs, as many on one machine as their number of GPUs goes into the trainer's there."""
    wanted = cluster.engines
    slots: list[tuple[str, tuple[int, ...]]] = []
    for node in dict.fromkeys(bundle.node for bundle in trainer):
        there = [bundle.number for bundle in trainer if bundle.node == node]
        for start in range(0, len(there) - wanted.gpus + 1, max(1, wanted.gpus)):
            slots.append((node, tuple(there[start : start + wanted.gpus])))  # noqa: PERF401 - three loops in one
    if shared > len(slots):
        return (
            f"the trainer's GPUs have room for {len(slots)} of {shared} engines that share them, at one engine of "
            f"{wanted.gpus} GPUs at a time on each"
        )
    bundles = []
    for number, (node, workers) in enumerate(slots[:shared]):
        room = next(room for room in rooms if room.host.node == node)
        if not room.take(wanted.cpus, 0, 0):
            return f"{room.host.name} has {room.cpus:g} CPUs left, and an engine takes {wanted.cpus:g}"
        bundles.append(Bundle("engine", number, room.host.name, node, wanted.cpus, 0, workers))
    return bundles


def _place_rewards(rooms: Sequence[_Room], cluster: Cluster) -> list[Bundle] | str:
    """Each where the most CPUs are left."""
    wanted = cluster.rewards
    bundles: list[Bundle] = []
    for number in range(wanted.workers):
        room = max(rooms, key=lambda room: room.cpus)
        if not room.take(wanted.cpus, 0, 0):
            return f"there are CPUs for {number} of {wanted.workers} reward workers, {wanted.cpus:g} each"
        bundles.append(Bundle("rewards", number, room.host.name, room.host.node, wanted.cpus))
    return bundles


def _held(room: _Room, cpus: float, gpus: int, memory: int) -> int:
    """How many parts of a kind a room holds."""
    copy, held = _Room(room.host, room.cpus, room.gpus, room.memory), 0
    while held < 64 and copy.take(cpus, gpus, memory):
        held += 1
    return held


def _first(pair: tuple[int, _Room]) -> int:
    return pair[0]
