"""The only place that wires things: parts are put together (node/making.py), services run in one TaskGroup, and errors
end it loudly.

Order of a start: lock the home -> web -> network -> manifest (fetched by digest when joining) -> a vLLM server of
another machine or container -> model, scorer -> recover -> agreement check -> train. Nothing before the training needs
a peer, except a manifest not yet known.
"""

import asyncio
import json
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from node.averaging import CAUTION, make_finding
from node.changing import Change, change
from node.checkpoint import CheckpointStore
from node.device import Device
from node.federation.parts import make_following, make_leading, make_teaching, peer_teacher
from node.holding import Holding
from node.home import Home
from node.interfaces import Trainer
from node.joining import know_manifest
from node.large.cluster_file import Cluster
from node.large.node import LargeNode, plan_large
from node.large.ray_cluster import RayCluster
from node.limits import local_zone
from node.loop import Loop
from node.making import make_parts, start_engines, wait_for_server
from node.models import ModelBundle
from node.oddities import oddities
from node.presence import Presence, Stopped, leave
from node.rounds import Rounds, make_rounds
from node.scorer import Scorer, make_scorer
from node.settings import Settings
from node.trained import TrainedDays
from node.training.sharded import ShardedTrainer
from node.view import DaemonView
from node.view_peers import members_seen
from protocol.manifest import Manifest, check_local_limits
from swarm.exchange import Exchange
from swarm.experience import ExperienceStore
from swarm.serving import serve_manifest

log = logging.getLogger(__name__)


def run(
    home: Home,
    settings: Settings,
    *,
    steps: int | None = None,
    stay: bool = False,
    as_json: bool = False,
    cluster: Cluster | None = None,
) -> NoReturn:
    """Run a node until it is stopped or, without `stay`, has done `steps` updates; ends the process.

    The caller holds the home's lock. `as_json`: print how it ended; `cluster`: have Ray place its parts.
    """
    daemon = Daemon(home, settings, clock=time.time, as_json=as_json, cluster=cluster)
    leave(home, asyncio.run(daemon.main(steps, stay)))


class Daemon:
    """One node's life in one process."""

    def __init__(
        self,
        home: Home,
        settings: Settings,
        *,
        clock: Callable[[], float],
        as_json: bool = False,
        cluster: Cluster | None = None,
    ) -> None:
        self.home, self.settings, self.config, self.clock = home, settings, settings.config, clock
        self.wanted = settings.config
        """What the next start would have: `shoal config set` may have changed what this process cannot."""
        CheckpointStore(home.checkpoints, self.config.checkpoint.keep).tidy()  # a database may be short of its room
        presence = self.presence = Presence(home, self.config, clock, "node")
        self.identity, self.started_at, self.progress = presence.identity, presence.started_at, presence.progress
        self.history, self.transport, self.discovery = presence.history, presence.transport, presence.discovery
        self.store = ExperienceStore(home.database, self.config.limits.store_mb << 20, clock)
        self.trained = TrainedDays(home.database)
        self.holding = Holding(
            home.path,
            self.config.limits,
            progress=self.progress,
            history=self.history,
            store=self.store,
            trained=self.trained,
            clock=clock,
            zone=local_zone(),
        )
        self.device = Device()
        self.manifest: Manifest | None = None
        self.bundle: ModelBundle | None = None
        self.engine = ""
        """Which engine samples, and why."""
        self.cluster = cluster
        self.large: LargeNode | None = None
        """Once Ray has room for its parts, where `cluster` says that it places them."""
        self.scorer: Scorer | None = None
        self.trainer: Trainer | None = None
        self.exchange: Exchange | None = None
        self.loop: Loop | None = None
        self.rounds: Rounds | None = None
        self.as_json = as_json

    async def main(self, steps: int | None, stay: bool) -> int:
        """Run everything; 0 after a stop, 1 after a failure that is written to the log, the history and stderr."""
        return await self.presence.run(self._services(steps, stay), self.request_stop, self._goodbye)

    async def _services(self, steps: int | None, stay: bool) -> None:
        """One line a service. Ends by Stopped when the step goal is reached, or by what broke."""
        async with self.presence.services(DaemonView(self), self._close) as services:
            for name, service in (
                ("holding", self.holding.run()),
                ("disk", self.holding.watch_disk()),
                ("training", self._live(services, steps, stay)),
            ):
                services.create_task(self.presence.told(service), name=name)

    async def _close(self) -> None:
        if self.loop is not None:
            await self.loop.own.rollouts.rounds.close()
            await self.loop.parts.engine.close()
        if self.scorer is not None:
            await self.scorer.close()
        if isinstance(self.trainer, ShardedTrainer):
            self.trainer.close()
        if self.large is not None:
            await self.large.close()

    async def _live(self, services: asyncio.TaskGroup, steps: int | None, stay: bool) -> None:
        """Know the swarm, make the parts, continue where the last process stopped, train."""
        told = self.presence.told
        for odd in oddities(self.config):
            self.history.event("warning", "config", odd)
        timeout = self.config.network.request_timeout
        manifest = self.manifest = await know_manifest(self.home, self.transport, self.progress, timeout)
        check_local_limits(manifest, self.clock(), max_group_mb=self.config.limits.group_mb)
        serve_manifest(self.transport, manifest, self.clock)
        if self.home.is_listed():
            listing = self.presence.list_publicly(manifest, lambda: members_seen(self))
            services.create_task(told(listing), name="directory")
        self.rounds = make_rounds(manifest, self.home, self.transport, self.clock, self.history, self.config)
        if self.rounds is not None:  # before what takes minutes: members part from whoever is not on the list
            services.create_task(told(self.rounds.run()), name="rounds")
        if self.cluster is not None:
            async with self.progress.during("ray"):
                await self._place(self.cluster)
        await wait_for_server(self)
        self.progress.say("STARTING", "starting the scorer and loading the model")
        limits, large = self.config.limits, self.large
        crew = large.crew(manifest.environments, limits) if large is not None else None
        self.scorer = make_scorer(manifest.environments, limits, crew=crew)
        async with self.progress.during("load"):
            engines, parts = await make_parts(self, manifest, self.scorer)
        leading = make_leading(parts, self.identity, self.home)
        following = make_following(parts, self.home, self.holding.unpaused, self.holding.no_room)
        teaching = make_teaching(parts)
        parts.teacher = parts.teacher or peer_teacher(parts)
        self.loop = Loop(parts, leading, following, self.holding.unpaused)
        self.loop.change(self.config)  # it may have changed since the parts were made
        self.holding.steer(self.loop)
        self.exchange = parts.exchange
        services.create_task(told(parts.exchange.run()), name="exchange")
        if parts.averaging is not None:
            self.history.event("warning", "averaging", CAUTION)
            services.create_task(told(parts.averaging.averager.run()), name="averaging")
            if finding := make_finding(parts, closed=self.home.is_closed()):
                services.create_task(told(finding.run()), name="averagers")
        await self.loop.recover()
        if leading is not None:
            services.create_task(told(leading.publisher.run()), name="policy")
        if following is not None:
            services.create_task(told(following.run()), name="policy")
        if teaching is not None:
            services.create_task(told(teaching.run()), name="teaching")
        await start_engines(self, engines, parts, self.loop)
        await self.loop.run(steps)
        if following is None:  # what is followed is on disk as it came
            await self.loop.saving.checkpoint()
        if stay:
            self.progress.say("IDLE", f"all {steps} steps are done; serving peers", "stop it: shoal down")
            await asyncio.Event().wait()
        raise Stopped

    async def _place(self, cluster: Cluster) -> None:
        """Have Ray make room for all parts of a large node."""
        self.starting("asking Ray what machines there are")
        ray = RayCluster(cluster)
        planned = await plan_large(ray, self.config, self.home)
        self.history.event("info", "ray", " ".join(planned.placement.why))
        self.large = LargeNode(ray, planned)
        self.starting(f"waiting for Ray to make room: {planned.placement.layout}")
        await self.large.reserve()

    def starting(self, told: str) -> None:
        """Say what a start waits for."""
        self.progress.say("STARTING", told)

    def _goodbye(self, code: int) -> None:
        """Say what is saved, and close the files."""
        if self.loop is not None and self.loop.following is not None:
            said = f"stopped at version {self.loop.parts.trainer.step} of the policy that it follows, which is kept"
        elif self.loop is None or self.loop.saving.saved is None:
            said = "stopped before training began; what was saved before is untouched"
        else:
            saved, base = self.loop.saving.saved, self.loop.parts.checkpoints.base
            said = f"step {saved} is saved (checkpoint of step {base} and {saved - base} journalled updates)"
            if saved == 0:
                said = "stopped before the first step was done: there is nothing to save yet"
        self.history.event("info", "stop", said)  # the last words of the process, in its log too
        if self.as_json:
            ended = {"state": "STOPPED", "reason": said, "peer_id": self.identity.peer_id}
            if code:
                ended |= {"state": "FAILED", "reason": self.progress.reason}
            print(json.dumps(ended), flush=True)  # noqa: T201 - the one value on stdout
        self.device.close()
        if self.rounds is not None:
            self.rounds.chain.log.close()
        self.trained.close()
        self.history.close()
        self.store.close()

    def change(self, values: Mapping[str, Any]) -> Change:
        """Change settings, in config.toml and as far as can be in this process. Raises ConfigError, Overridden."""
        changed = change(self.home, self.settings, values)
        store_mb = self.config.limits.store_mb
        self.settings, self.wanted = changed.settings, changed.wanted
        config = self.config = changed.settings.config
        limits = config.limits
        self.presence.throttle.limit(limits.upload_kbps, limits.download_kbps)
        self.progress.deadline = limits.stage_seconds
        self.holding.change(limits)
        if limits.store_mb != store_mb:
            self.holding.resize_store(limits.store_mb << 20)
        if self.loop is not None:
            self.loop.change(config)
        if changed.said:
            self.history.event("info", "config", changed.said)
        return changed

    # -- what the web layer asks for -------------------------------------------------------------------------

    def request_stop(self) -> None:
        if self.loop is not None:
            self.loop.stop.set()
        self.presence.stopped.set()
