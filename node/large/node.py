"""A large node from its cluster file: Ray is asked what there is, parts get a place, and room is made for them; the
daemon gets a launcher of workers, servers and scorers that it uses as those of its own machine.
"""

import asyncio
import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast, get_args

import torch

from node.config import Config, LimitsConfig
from node.device import Device
from node.engines.choose import as_sampled, client_of, export_weights, server_plan, unties
from node.engines.vllm import VllmEngine
from node.engines.vllm_transfer import FileTransfer
from node.engines.vllm_upkeep import Upkeep
from node.engines.vllm_weights import WeightFiles
from node.hardware import EngineChoice, Gpu, Machine
from node.home import Home, models_dir
from node.large.cluster_file import Cluster, ClusterFileError, check_settings
from node.large.engine_actors import RayServer, without_devices
from node.large.planner import Placement, place
from node.large.ray_cluster import RayCluster, RayFailed
from node.large.reward_actors import RewardCrew
from node.large.room import Bundle, Host, Needs
from node.large.sizes import needs_of
from node.large.trainer_actors import RayLauncher
from node.memory_plan import LARGEST_SHARE, SPARE
from node.model_shape import model_shape
from node.models import ModelBundle, compute_dtype, model_directory
from node.training.megatron_checks import check_megatron
from node.training.workers import Kind, WorkerPlan
from protocol.manifest import EnvironmentSpec


@dataclasses.dataclass(frozen=True, slots=True)
class Planned:
    """What was found and decided before there is room for anything."""

    cluster: Cluster
    hosts: tuple[Host, ...]
    needs: Needs
    placement: Placement
    dtype: torch.dtype
    """Compute type of trainer and engines."""
    files: Path
    """Directory of this node that every machine with a part sees."""


async def plan_large(ray: RayCluster, config: Config, home: Home) -> Planned:
    """Connect to Ray, look at its machines and give every part a place, without making any.

    Raises RayFailed, ClusterFileError (DoesNotFit among them), ModelError.
    """
    cluster = ray.cluster
    check_settings(config)
    directory = await asyncio.to_thread(model_directory, config.model.path, models_dir())
    gpus = cluster.trainer.gpus * cluster.trainer.workers
    await asyncio.to_thread(check_megatron, config.train, directory, gpus=gpus)
    shape = await asyncio.to_thread(model_shape, directory)
    # files of two nodes with one shared directory are kept apart by their peer ids
    shared = Path(cluster.shared) / home.identity().peer_id[-12:] if cluster.shared else home.path
    try:
        await asyncio.to_thread(shared.mkdir, parents=True, exist_ok=True)
    except OSError as error:
        raise ClusterFileError(
            f"shared = {cluster.shared!r}: {shared} cannot be made ({error.strerror}) ; make it, or name another one"
        ) from error
    dtype = await asyncio.to_thread(_compute_type, config, cluster)
    await ray.connect()
    hosts, trouble = await ray.hosts(shared, directory.absolute())
    needs = needs_of(config, shape, dtype, cluster)
    placement = place(hosts, cluster, needs)
    for bundle in placement.bundles:
        if bundle.kind != "rewards" and (why := trouble.get(bundle.node)):
            raise RayFailed(
                f"machine {bundle.host} is to have a part of kind {bundle.kind}, and {why}; have all machines see the "
                "model, and what `shared` in the cluster file names (now the node's home), at the same paths"
            )
    return Planned(cluster, tuple(hosts), needs, placement, dtype, shared)


def _compute_type(config: Config, cluster: Cluster) -> torch.dtype:
    if cluster.trainer.gpus and config.model.dtype == "auto":
        return torch.bfloat16
    return compute_dtype(torch.device("cpu"), config.model.dtype)


class LargeNode:
    """Room for all parts, and who makes them. Used from one asyncio loop, but `launcher` and what it makes."""

    def __init__(self, ray: RayCluster, planned: Planned) -> None:
        self.ray, self.planned = ray, planned
        self.launcher: RayLauncher | None = None
        self._trainer: Any = None
        self._engines: list[Any] = []
        self._rewards: Any = None

    async def reserve(self) -> None:
        """Make placement groups: one for the trainer, one for each engine, one for reward workers. Raises RayFailed."""
        placement = self.planned.placement
        one_machine = len({bundle.node for bundle in placement.trainer}) == 1
        self._trainer = await self.ray.reserve(placement.trainer, "STRICT_PACK" if one_machine else "PACK")
        self._engines = [await self.ray.reserve([bundle], "PACK") for bundle in placement.engines]
        if placement.rewards:
            self._rewards = await self.ray.reserve(placement.rewards, "SPREAD")

    @property
    def choice(self) -> EngineChoice:
        cluster, layout = self.planned.cluster, self.planned.placement.layout
        return EngineChoice(
            "vllm",
            f"rollouts by {cluster.engines.number} vLLM engines placed by Ray ({layout}); trainer on "
            f"{cluster.trainer.workers} workers",
            shared_gpu=layout != "disjoint",
        )

    # -- trainer -----------------------------------------------------------------------------------------------

    def worker_plan(self, bundle: ModelBundle, config: Config) -> WorkerPlan:
        kind = str(bundle.model.dtype).removeprefix("torch.")
        assert kind in get_args(Kind)
        wanted, files = self.planned.cluster.trainer, self.planned.files
        return WorkerPlan(
            count=wanted.workers,
            device="cuda" if wanted.gpus else "cpu",
            dtype=cast(Kind, kind),
            model=str(bundle.directory.absolute()),
            models=models_dir(),
            threads=config.node.threads or max(1, int(wanted.cpus)),
            gpu_memory_share=config.limits.gpu_memory_share,
            dumps=files / "dumps",
            log=files / "logs" / "trainer.log",
        )

    def make_launcher(self, plan: WorkerPlan) -> RayLauncher:
        self.launcher = RayLauncher(
            self.ray,
            self._trainer,
            self.planned.placement.trainer,
            log=plan.log,
            threads=plan.threads,
            meet=self.planned.files / "weights",
        )
        return self.launcher

    # -- engines -----------------------------------------------------------------------------------------------

    def engines(
        self, config: Config, bundle: ModelBundle, device: Device, say: Callable[[str], None]
    ) -> list[VllmEngine]:
        """One for each bundle, not started yet; all get the same files of weights."""
        bundle = as_sampled(bundle, config)
        placement, hosts = self.planned.placement, {host.node: host for host in self.planned.hosts}
        machine = self._machine(hosts[placement.engines[0].node])
        export = functools.partial(export_weights, bundle, untied=unties(bundle, machine))
        weights = WeightFiles(self.planned.files / "weights" / "engines", export)
        logs = self.planned.files / "logs" / "vllm-*.log"

        def wait(told: str) -> None:  # the same of all engines, which wait at the same time
            say(f"waiting for {len(placement.engines)} vLLM engines that Ray placed (logs: {logs})")

        return [
            self._engine(config, bundle, device, wait, room, self._machine(hosts[room.node]), weights, group)
            for room, group in zip(placement.engines, self._engines, strict=True)
        ]

    def _machine(self, host: Host) -> Machine:
        """A host, as what an engine's arguments are made for."""
        engines = self.planned.cluster.engines
        return Machine(host.memory, (Gpu(host.gpu_name, host.gpu_bytes),) * engines.gpus, engines.command)

    def _engine(
        self,
        config: Config,
        bundle: ModelBundle,
        device: Device,
        say: Callable[[str], None],
        room: Bundle,
        machine: Machine,
        weights: WeightFiles,
        group: Any,
    ) -> VllmEngine:
        wanted, files = self.planned.cluster.engines, self.planned.files
        sleep = bool(room.shares) if config.engine.sleep == "auto" else config.engine.sleep == "on" and wanted.gpus > 0
        engine = config.engine.model_copy(
            update={"gpus": ",".join(map(str, range(wanted.gpus))), "args": (*config.engine.args, *wanted.args)}
        )
        machine = dataclasses.replace(machine, vllm=wanted.command or engine.command)
        share = engine.gpu_share or (self._left(machine) if room.shares else LARGEST_SHARE)
        theirs = config.model_copy(update={"engine": engine})
        plan = server_plan(theirs, bundle, machine, share=share, sleep=sleep, home=files)
        launcher = self.launcher
        server = RayServer(
            self.ray,
            group,
            room,
            without_devices(plan, files / "logs" / f"vllm-{room.number + 1}.log"),
            seconds=self.planned.cluster.ray.start_seconds,
            devices=(lambda: _gpus_of(launcher, room.shares)) if room.shares else None,
        )
        client, transfer = client_of(server.address, bundle), FileTransfer(weights, device)
        alone = len(self.planned.placement.engines) == 1
        return VllmEngine(
            Upkeep(client, bundle, device, transfer, config.engine, server=server, sleep=sleep, say=say, alone=alone)
        )

    def _left(self, machine: Machine) -> float:
        """Share of a GPU's memory that the trainer's worker leaves to an engine that sleeps while it works."""
        if not machine.gpus[0].bytes:
            raise RayFailed(
                "how much memory a GPU has that trainer and engine share is not known (no nvidia-smi on that machine); "
                "set engine.gpu_share"
            )
        return max(SPARE, round(1 - SPARE - self.planned.needs.kept / machine.gpus[0].bytes, 3))

    # -- rewards -----------------------------------------------------------------------------------------------

    def crew(self, environments: Sequence[EnvironmentSpec], limits: LimitsConfig) -> RewardCrew | None:
        """Reward workers, not started yet; None where the cluster file asks for none."""
        rooms = self.planned.placement.rewards
        if not rooms:
            return None
        in_flight = self.planned.cluster.rewards.in_flight
        return RewardCrew(self.ray, self._rewards, rooms, environments, limits, in_flight)

    async def close(self) -> None:
        await self.ray.close()


def _gpus_of(launcher: RayLauncher | None, workers: Sequence[int]) -> list[str]:
    """The GPUs that these trainer workers were given."""
    assert launcher is not None
    return [gpu for worker in workers for gpu in launcher.gpus[worker]]
