"""Which part of a large node goes to which machine, and why in plain sentences. No Ray here: a function of numbers.

A trainer worker takes one GPU, so that engines, which take several of one machine, are placed first: then the trainer
fits wherever GPUs are left, if it fits at all. It is put on as few machines as possible, as its workers exchange every
layer of every pass; the order is the other way round where that keeps it on one machine. Where CPUs are so short that
neither way has room for all, parts are placed one by one, by what machines have left, in several ways.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from node.large.cluster_file import Cluster, ClusterFileError
from node.large.room import Bundle, Host

GB = 1 << 30

Layout = Literal["disjoint", "mixed", "colocated"]


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
                _said_of(hosts, needs),
                _said_of_trainer(trainer, cluster, needs, layout),
                _said_of_engines(engines, cluster, needs),
                *_said_of_rewards(rewards),
                _said_of_layout(layout, cluster, refused),
            )
            return Placement(layout, trainer, engines, rewards, why)
        refused.append(f"{layout}: {why_not}")
    raise DoesNotFit(
        f"{_said_of(hosts, needs)} {cluster.trainer.workers} trainer workers and {cluster.engines.number} engines do "
        f"not fit ({'; '.join(refused)}) ; {_fix(hosts, cluster, needs)}"
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
            f"there is room for {len(bundles)} of {wanted.workers} trainer workers, each with {_words(wanted.gpus)}"
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
                f"there is room for {len(bundles)} of {len(numbers)} engines with {_words(wanted.gpus)}"
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


# -- in words --------------------------------------------------------------------------------------------------


def _words(gpus: int) -> str:
    return "" if not gpus else "1 GPU, " if gpus == 1 else f"{gpus} GPUs, "


def _said_of(hosts: Sequence[Host], needs: Needs) -> str:
    machines = f"{len(hosts)} machine{'s' if len(hosts) != 1 else ''}"
    if not needs.on_gpu:
        cpus = sum(host.cpus for host in hosts)
        memory = sum(host.memory for host in hosts)
        return f"Ray offers {cpus:g} CPUs and {memory / GB:.1f} GB of memory on {machines}."
    kinds = sorted({f"{host.gpu_name or 'GPU'} of {_gb(host.gpu_bytes)}" for host in hosts if host.gpus})
    gpus = sum(host.gpus for host in hosts)
    return f"Ray offers {gpus} GPUs ({' and '.join(kinds) or 'none'}) on {machines}."


def _gb(size: int) -> str:
    return f"{size / GB:.1f} GB" if size else "unknown memory"


def _said_of_trainer(trainer: Sequence[Bundle], cluster: Cluster, needs: Needs, layout: Layout) -> str:
    need = needs.trainer if layout == "disjoint" else needs.shared
    place = "its GPU" if needs.on_gpu else "its machine"
    return (
        f"{needs.model} is trained by {cluster.trainer.workers} workers on {_where(trainer)}, each with "
        f"{need.bytes / GB:.1f} GB of {place} ({need.said})."
    )


def _said_of_engines(engines: Sequence[Bundle], cluster: Cluster, needs: Needs) -> str:
    own = [bundle for bundle in engines if not bundle.shares]
    shared = [bundle for bundle in engines if bundle.shares]
    said = []
    if own:
        said.append(
            f"{len(own)} with {_words(cluster.engines.gpus) or 'CPUs '}of {'its' if len(own) == 1 else 'their'} own "
            f"on {_where(own)}"
        )
    if shared:
        said.append(f"{len(shared)} on the trainer's GPUs on {_where(shared)}, asleep while it trains")
    return (
        f"{cluster.engines.number} vLLM engine{'s' if cluster.engines.number != 1 else ''}: {' and '.join(said)}; each "
        f"device holds {needs.engine.bytes / GB:.1f} GB at least ({needs.engine.said})."
    )


def _said_of_rewards(rewards: Sequence[Bundle]) -> Iterator[str]:
    if rewards:
        yield f"{len(rewards)} reward workers on {_where(rewards)}."


def _said_of_layout(layout: Layout, cluster: Cluster, refused: Sequence[str]) -> str:
    if cluster.layout != "auto":
        return f"{layout}, as layout says."
    if cluster.trainer.gpus == 0:
        return "disjoint, because nothing shares a GPU."
    reason = {
        "disjoint": "everything has devices of its own, so that engines sample while the trainer works",
        "mixed": "there are GPUs for some of the engines, which sample while the trainer works",
        "colocated": "there are no GPUs besides the trainer's",
    }[layout]
    return f"{layout}, because {reason}" + (f" (not {'; not '.join(refused)})." if refused else ".")


def _where(bundles: Sequence[Bundle]) -> str:
    hosts = list(dict.fromkeys(bundle.host for bundle in bundles))
    counts = [sum(bundle.host == host for bundle in bundles) for host in hosts]
    if len(hosts) == 1:
        return hosts[0]
    return ", ".join(f"{host} ({count})" for host, count in zip(hosts, counts, strict=True))


def _fix(hosts: Sequence[Host], cluster: Cluster, needs: Needs) -> str:
    """What to change, with the number that would do where one number does it."""
    if not hosts:
        return "start Ray on some machine: ray start --head"
    of_cpus = _fix_of_cpus(hosts, cluster)
    if not needs.on_gpu:
        fewer = "lower trainer.workers, engines.number or the cpus of parts, or use a smaller model"
        return f"{of_cpus or fewer}; or add machines to Ray"
    largest = max((host.gpu_bytes for host in hosts if host.gpus), default=0)
    if largest and needs.trainer.bytes > largest:
        return (
            f"raise trainer.workers, as each holds less the more there are: a worker's "
            f"{needs.trainer.bytes / GB:.1f} GB are more than the {largest / GB:.1f} GB of a GPU; or use another model"
        )
    if largest and needs.engine.bytes > largest:
        return f"raise engines.gpus: {needs.engine.bytes / GB:.1f} GB on each GPU are more than {largest / GB:.1f} GB"
    short = [of_cpus] if of_cpus else []
    gpus = sum(host.gpus for host in hosts)
    wanted = cluster.trainer.workers + cluster.engines.number * cluster.engines.gpus
    auto = "" if cluster.layout == "auto" else ", set layout to auto"
    if wanted > gpus:
        short.append(
            f"lower trainer.workers or engines.number{auto}: disjoint takes {wanted} GPUs, and there are {gpus}"
        )
    if not short:
        short.append(
            f"lower engines.gpus, or the numbers or cpus of parts{auto}: no machine has enough GPUs and CPUs left"
        )
    return f"{'; '.join(short)}; or add machines to Ray"


def _fix_of_cpus(hosts: Sequence[Host], cluster: Cluster) -> str:
    """What to change where all machines together have too few CPUs; empty: they have enough."""
    trainer, engines, rewards = cluster.trainer, cluster.engines, cluster.rewards
    there = sum(host.cpus for host in hosts)
    wanted = trainer.workers * trainer.cpus + engines.number * engines.cpus + rewards.workers * rewards.cpus
    if wanted <= there:
        return ""
    keys = "rewards.workers, rewards.cpus, trainer.cpus" if rewards.workers else "trainer.cpus"
    return f"lower {keys} or engines.cpus: all parts take {wanted:g} CPUs, and there are {there:g}"
