"""vLLM servers that Ray places: an actor in a bundle starts one and opens a tunnel to it; the node uses it as its own.

To the engine (node/engines/vllm_upkeep.py) a RayServer is what a child process is: it is started, dies, and is started
again after a pause. When its actor dies, streams break, what they had goes on at other engines, and the next start is a
new actor, which gets the present weights before it takes work.
"""

import asyncio
import logging
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from node.engines.vllm_client import Address, ServerGone
from node.engines.vllm_server import STOP_SECONDS, Pauses, ServerPlan, VllmServer
from node.large import ray_cluster
from node.large.handshake import new_secret
from node.large.ray_cluster import ActorGone, RayCluster, address_here
from node.large.room import Bundle
from node.large.tunnel import FarEnd, NearEnd
from swarm.child import scratch_directory

log = logging.getLogger(__name__)

DEVICES = "CUDA_VISIBLE_DEVICES"


class EngineActor:
    """In a process of Ray's, in a bundle: one server, once."""

    def __init__(self, plan: ServerPlan, secret: bytes) -> None:
        self._server = VllmServer(plan)
        self._tunnel = FarEnd(self._server.address.socket, secret)

    async def start(self, model: str) -> tuple[str, int, int]:
        """Start the server with a model directory: address and port of the tunnel to it, and its process id."""
        await self._server.start(Path(model))
        host = address_here()
        pid = self._server.pid
        assert pid is not None
        return host, await self._tunnel.listen(host), pid

    async def died(self) -> str:
        """Wait until the server ends; why."""
        return await self._server.died()

    async def stop(self) -> None:
        await self._tunnel.close()
        await self._server.close()


class RayServer:
    """A server in a bundle, started anew by a new actor whenever `start` is called. Used from one asyncio loop."""

    def __init__(
        self,
        cluster: RayCluster,
        group: Any,
        bundle: Bundle,
        plan: ServerPlan,
        *,
        seconds: float,
        devices: Callable[[], Sequence[str]] | None = None,
    ) -> None:
        """`seconds`: deadline for Ray to start an actor; `devices`: GPUs that it shares; None: those of its bundle."""
        self._cluster, self._group, self._bundle, self._plan = cluster, group, bundle, plan
        self._seconds, self._devices = seconds, devices
        self._directory = scratch_directory(plan.log_path.with_suffix(".tunnel"))
        self._near = NearEnd(self._directory / "socket")
        self._pauses = Pauses()
        self._actor: Any = None
        self._end: asyncio.Future[str] | None = None
        self.pid: int | None = None
        """Of the server, on its machine."""

    @property
    def address(self) -> Address:
        return Address("http://vllm", str(self._directory / "socket"))

    @property
    def alive(self) -> bool:
        return self._actor is not None and self._end is not None and not self._end.done()

    async def start(self, model: Path) -> None:
        """Raises ServerGone where Ray has no actor for it in time."""
        assert not self.alive
        loop = asyncio.get_running_loop()
        pause = self._pauses.before(loop.time())
        await self._discard()
        await asyncio.sleep(pause)
        self._pauses.began(loop.time())
        plan = self._plan
        if self._devices is not None:
            plan = replace(plan, environment=(*plan.environment, (DEVICES, ",".join(self._devices()))))
        secret = new_secret()
        self._actor = self._cluster.actor(EngineActor, self._group, 0, self._bundle, plan, secret)
        try:
            started = await ray_cluster.awaited(self._actor.start.remote(str(model)), self._seconds)
        except (ActorGone, TimeoutError) as error:
            await self._discard()
            raise ServerGone(
                f"Ray did not start engine {self._bundle.number + 1} on {self._bundle.host}: "
                f"{str(error) or f'no answer within {self._seconds:.0f} s'}; {ray_cluster.NOT_THERE}"
            ) from error
        host, port, self.pid = started
        await self._near.point(host, port, secret)
        self._end = asyncio.ensure_future(self._watch(self._actor))
        log.info("engine %d is process %d on %s (log: %s)", self._bundle.number + 1, self.pid, host, plan.log_path)

    async def _watch(self, actor: Any) -> str:
        try:
            told: str = await ray_cluster.awaited(actor.died.remote())
        except ActorGone as gone:
            return f"the actor of engine {self._bundle.number + 1} on {self._bundle.host} has ended: {gone}"
        return f"on {self._bundle.host}: {told}"

    async def died(self) -> str:
        assert self._end is not None
        return await asyncio.shield(self._end)  # of an actor that was ended, too

    async def stop(self) -> None:
        """Have the actor end the server and its children; then end the actor, whatever it did."""
        if self._actor is not None and self.alive:
            try:
                await ray_cluster.awaited(self._actor.stop.remote(), STOP_SECONDS + 1.0)
            except (ActorGone, TimeoutError) as error:
                log.warning("engine %d did not end by itself: %s", self._bundle.number + 1, error)
        await self._discard()

    async def _discard(self) -> None:
        """End the actor, if there is one."""
        self._near.unpoint()
        actor, self._actor, self.pid = self._actor, None, None
        if actor is not None:
            await asyncio.to_thread(ray_cluster.kill, actor)

    async def close(self) -> None:
        await self.stop()
        await self._near.close()
        shutil.rmtree(self._directory, ignore_errors=True)


def without_devices(plan: ServerPlan, log_path: Path) -> ServerPlan:
    """The plan of a server on another machine: which GPUs it sees, Ray or the node says when it is started."""
    kept = tuple((name, value) for name, value in plan.environment if name != DEVICES)
    return replace(plan, environment=kept, log_path=log_path)
