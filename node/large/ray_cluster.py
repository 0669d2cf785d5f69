"""The node's connection to Ray: the only file that imports it.

Ray carries orders and answers between the node and its actors by pickle, inside a cluster that is the node's owner's
alone; what peers send reaches actors as text only. Ray's token authentication is on for a cluster that the node starts.
"""

import asyncio
import concurrent.futures
import logging
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from node.large.room import Bundle, Host
from node.large.survey import PROBE, Survey, shoal_version, survey

if TYPE_CHECKING:
    from node.large.cluster_file import Cluster  # actors need none of its imports

log = logging.getLogger(__name__)

T = TypeVar("T")

NODE_LABEL = "ray.io/node-id"
SURVEY_SECONDS = 120.0
"""For a machine to say what it is: Ray starts a Python process for it."""
CLOSE_SECONDS = 60.0
NOT_THERE = (
    "see `ray status`; if that machine is gone, or Ray was started again on it, which makes it another one to Ray, "
    "start the node again: it plans anew with what is there"
)
"""What to do about a part that does not come up: each is pinned to a machine by Ray's id of it."""
VARIABLES = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_agent_register_timeout_ms": "180000"}
"""No reports to Ray's makers; and a machine that is busy may take longer than 15 s to start one."""


class RayFailed(Exception):
    """Ray cannot be had, has lost a machine, or has no room; the message says which and the fix."""


class RayCluster:
    """The connection, one in a process. Calls that wait may come from any thread."""

    def __init__(self, cluster: "Cluster") -> None:
        self.cluster, self.section = cluster, cluster.ray
        # what `ray.init` starts ends with the thread that started it, so that one lives as long as this
        self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="ray")
        self._groups: list[Any] = []
        self._connected = False

    async def connect(self) -> None:
        """Raises RayFailed."""
        await self._within(self.section.start_seconds, self._connect, "Ray does not answer")

    def _connect(self) -> None:
        section = self.section
        for name, value in VARIABLES.items():
            os.environ.setdefault(name, value)
        options: dict[str, Any] = {"address": section.address}
        if section.address == "local":
            os.environ.setdefault("RAY_AUTH_MODE", "token")
            if os.environ["RAY_AUTH_MODE"] == "token" and "RAY_AUTH_TOKEN_PATH" not in os.environ:
                os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
            options |= {"include_dashboard": False, "object_store_memory": 100 << 20}
        try:
            import ray
        except ImportError as error:
            raise RayFailed(f"--large needs Ray ({error}); .venv/bin/pip install -e '.[ray]'") from error
        try:
            ray.init(**options, log_to_driver=False, configure_logging=False, namespace=secrets.token_hex(8))
        except Exception as error:
            raise RayFailed(
                f"there is no Ray at {section.address} ({_short(error)}); start it with ray start --head, or correct "
                "ray.address in the cluster file (local starts one for this node)"
            ) from error
        self._connected = True

    async def _within(self, seconds: float, job: Callable[[], T], what: str) -> T:
        """Run a job on Ray's thread, with a deadline of ours: Ray's own calls have none, or their own."""
        try:
            async with asyncio.timeout(seconds):
                return await asyncio.get_running_loop().run_in_executor(self._thread, job)
        except TimeoutError as error:
            raise RayFailed(f"{what} within {seconds:.0f} s; see `ray status`, or raise ray.start_seconds") from error

    # -- machines ----------------------------------------------------------------------------------------------

    async def hosts(self, shared: Path, model: Path) -> tuple[list[Host], dict[str, str]]:
        """All machines, and by what Ray calls them what those lack that do not see the two directories.

        Raises RayFailed.
        """
        seconds = SURVEY_SECONDS + self.section.start_seconds
        return await self._within(seconds, lambda: self._hosts(shared, model), "the machines do not say what they are")

    def _hosts(self, shared: Path, model: Path) -> tuple[list[Host], dict[str, str]]:
        import ray

        hosts, trouble = [], {}
        for node in ray.nodes():
            if not node["Alive"]:
                continue
            name, resources = node["NodeManagerAddress"], node["Resources"]
            found = self._survey(node["NodeID"], name, shared, model)
            if found.trouble:
                trouble[node["NodeID"]] = found.trouble
            count = int(resources.get("GPU", 0))
            hosts.append(
                Host(
                    name=name,
                    node=node["NodeID"],
                    cpus=resources.get("CPU", 0.0),
                    gpus=count,
                    gpu_bytes=min((size for _, size in found.gpus), default=0) if count else 0,
                    gpu_name=found.gpus[0][0] if found.gpus and count else "",
                    memory=min(found.memory, int(resources.get("memory", found.memory))),
                )
            )
        return hosts, trouble

    def _survey(self, node: str, name: str, shared: Path, model: Path) -> Survey:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        token = secrets.token_hex(8)
        probe, answer = shared / f"{PROBE}{token}", shared / f"{PROBE}{token}-answer"
        probe.write_text(token)
        try:
            task = ray.remote(survey).options(
                num_cpus=0, max_retries=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)
            )
            found: Survey = ray.get(task.remote(str(shared), token, str(model)), timeout=SURVEY_SECONDS)
            if not found.trouble and not (answer.exists() and answer.read_text() == token):
                found = Survey(found.shoal, found.memory, found.gpus, f"what it writes to {shared} is not seen here")
        except ray.exceptions.RayError as error:
            raise RayFailed(
                f"machine {name} does not say what it is ({_short(error)}); install the same Shoal, Python and Ray "
                "there as here, and start Ray on it"
            ) from error
        finally:
            probe.unlink(missing_ok=True)
            answer.unlink(missing_ok=True)
        if found.shoal != shoal_version():
            raise RayFailed(f"machine {name} has Shoal {found.shoal}, and this one {shoal_version()}; install the same")
        return found

    # -- room --------------------------------------------------------------------------------------------------

    async def reserve(self, bundles: Sequence[Bundle], strategy: str) -> Any:
        """A placement group with these bundles, each on its machine, once there is room. Raises RayFailed."""
        what = f"Ray makes no room for {len(bundles)} of kind {bundles[0].kind}"
        group = await self._within(self.section.start_seconds, lambda: self._reserve(bundles, strategy), what)
        if group is None:
            raise RayFailed(
                f"{what} within {self.section.start_seconds:.0f} s: something else holds its GPUs or CPUs; see "
                "`ray status`, end it, or raise ray.start_seconds"
            )
        return group

    def _reserve(self, bundles: Sequence[Bundle], strategy: str) -> Any:
        from ray.util import placement_group

        group = placement_group(
            [_resources(bundle) for bundle in bundles],
            strategy=strategy,
            bundle_label_selector=[{NODE_LABEL: bundle.node} for bundle in bundles],
        )
        self._groups.append(group)
        ready = group.wait(max(1.0, self.section.start_seconds - 5.0))
        return group if ready else None

    def actor(self, kind: type, group: Any, index: int, bundle: Bundle, *arguments: Any, **options: Any) -> Any:
        """A new actor in a bundle; Ray never starts it again by itself."""
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        resources = _resources(bundle)
        placed = PlacementGroupSchedulingStrategy(group, index)
        made = ray.remote(kind).options(
            num_cpus=resources["CPU"],
            num_gpus=resources.get("GPU", 0),
            max_restarts=0,
            scheduling_strategy=placed,
            **options,
        )
        return made.remote(*arguments)

    async def close(self) -> None:
        """Give back all room, and end Ray where it is the node's own."""
        if self._connected:
            try:
                await self._within(CLOSE_SECONDS, self._close, "Ray does not end")
            except Exception as error:  # noqa: BLE001 - why the node ends is told, and what comes after this is closed
                log.warning("Ray is left as it is: %s", _short(error))
        self._thread.shutdown(wait=False)

    def _close(self) -> None:
        import ray
        from ray.util import remove_placement_group

        for group in self._groups:
            remove_placement_group(group)
        ray.shutdown()


def _resources(bundle: Bundle) -> Mapping[str, float]:
    return {"CPU": bundle.cpus, "GPU": bundle.gpus} if bundle.gpus else {"CPU": bundle.cpus}


def address_here() -> str:
    """What other machines of the cluster call this one; also inside an actor."""
    import ray

    address: str = ray.util.get_node_ip_address()
    return address


def gpus_here() -> list[str]:
    """GPUs that Ray gave to the actor that asks, as CUDA_VISIBLE_DEVICES names them."""
    import ray

    return list(ray.get_runtime_context().get_accelerator_ids().get("GPU", []))


def kill(actor: Any) -> None:
    """End an actor's process at once, and with it what it started."""
    import ray

    ray.kill(actor)


def result(reference: Any, seconds: float) -> Any:
    """What a call to an actor returned. Raises TimeoutError, and ActorGone where the actor is no more."""
    import ray

    try:
        return ray.get(reference, timeout=seconds)
    except ray.exceptions.GetTimeoutError as error:
        raise TimeoutError(f"no answer within {seconds:.0f} s") from error
    except ray.exceptions.RayError as error:
        raise ActorGone(_short(error)) from error


async def awaited(reference: Any, seconds: float | None = None) -> Any:
    """The same in asyncio; None waits without end."""
    import ray

    try:
        async with asyncio.timeout(seconds):
            return await asyncio.wrap_future(reference.future())
    except ray.exceptions.RayError as error:
        raise ActorGone(_short(error)) from error


class ActorGone(Exception):
    """An actor's process has ended, or could not be started, or failed; the message has Ray's words."""


def _short(error: BaseException) -> str:
    """Ray's words in one line: the last one of a traceback, which has the error."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[-1] if lines else type(error).__name__)[:300]
