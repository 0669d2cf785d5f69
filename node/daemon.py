"""The only place that wires things: parts are made here, services run in one TaskGroup, and errors end it loudly.

Order of a start: lock the home -> web -> network -> manifest (fetched by digest when joining) -> model, scorer ->
recover -> agreement check -> train. Nothing before the training needs a peer, except a manifest not yet known.
"""

import asyncio
import functools
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, NoReturn

from node.addresses import caution, reachable
from node.averaging import CAUTION, make_averaging
from node.changing import Change, change
from node.checkpoint import CheckpointStore
from node.device import Device, use_threads
from node.engines.agreement import check_agreement
from node.engines.choose import make_engines
from node.engines.transformers import TransformersEngine
from node.engines.vllm import VllmEngine
from node.hardware import Setup, prepare
from node.history import History
from node.holding import Holding
from node.home import DaemonInfo, Home, models_dir
from node.interfaces import Trainer
from node.limits import local_zone
from node.loop import Loop, Parts, model_mark
from node.memory import share_gpu
from node.models import ModelBundle, ModelError, device_of, load_model
from node.oddities import oddities
from node.progress import Progress
from node.rescore import Rescorer
from node.rollouts import prompts
from node.scheduling.own import schedule
from node.scorer import Scorer, make_scorer
from node.settings import Settings
from node.trained import TrainedDays
from node.training.choose import make_trainer, place_of_model
from node.training.distill import load_teacher
from node.training.sharded import ShardedTrainer
from node.view import DaemonView
from node.view_peers import members_seen
from node.watchdog import watch
from protocol.assignment import held_out_task
from protocol.invite import Invite
from protocol.manifest import Manifest, check_local_limits
from swarm.directory import list_in_directory
from swarm.exchange import Exchange, FetchFailed, fetch_manifest
from swarm.experience import ExperienceStore
from swarm.libp2p_transport import Libp2pTransport
from swarm.peers import Discovery
from swarm.sampler import Sampler
from swarm.serving import serve_manifest
from swarm.throttle import Throttle
from swarm.transport import TransportError
from web.server import WebServer

log = logging.getLogger(__name__)

STOP_SECONDS = 4.0
"""How long a stop may take before the process exits anyway; the journal is on disk at any instant."""


class Stopped(Exception):
    """A stop was asked for, or the step goal is reached."""


def run(
    home: Home, settings: Settings, *, steps: int | None = None, stay: bool = False, as_json: bool = False
) -> NoReturn:
    """Run a node until it is stopped or, without `stay`, has done `steps` updates; ends the process.

    The caller holds the home's lock. `as_json`: print how it ended.
    """
    leave(home, asyncio.run(Daemon(home, settings, clock=time.time, as_json=as_json).main(steps, stay)))


def leave(home: Home, code: int) -> NoReturn:
    """End the process at once: taking torch apart takes seconds, and a matrix product cannot be interrupted.

    Everything is on disk: files are fsynced as they are written, and what the model thread computes is journalled.
    """
    home.remove_daemon()  # `shoal down` takes this for the end of the process
    home.clear_holder()
    logging.shutdown()
    sys.stdout.flush()
    os._exit(code)


class Daemon:
    """One node's life in one process."""

    def __init__(self, home: Home, settings: Settings, *, clock: Callable[[], float], as_json: bool = False) -> None:
        self.home, self.settings, self.config, self.clock = home, settings, settings.config, clock
        self.wanted = settings.config
        """What the next start would have: `shoal config set` may have changed what this process cannot."""
        self.identity = home.identity()
        self.started_at = clock()
        self.progress = Progress(clock, self.config.limits.stage_seconds, since=clock())
        self.history = History(home.database, clock)
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
        self.throttle = Throttle()
        self.throttle.limit(self.config.limits.upload_kbps, self.config.limits.download_kbps)
        self.device = Device()
        self.stopped = asyncio.Event()
        self.manifest: Manifest | None = None
        self.bundle: ModelBundle | None = None
        self.engine = ""
        """Which engine samples, and why."""
        self.scorer: Scorer | None = None
        self.trainer: Trainer | None = None
        self.exchange: Exchange | None = None
        self.loop: Loop | None = None
        self.as_json = as_json
        swarm = home.swarm()
        self.transport = Libp2pTransport(
            self.identity,
            [self._listen()],
            announce=self.config.network.announce,
            psk=swarm.psk,
            throttle=self.throttle,
        )
        self.discovery = Discovery(
            self.transport,
            (*swarm.bootstrap, *self.config.network.bootstrap),
            swarm.manifest_digest,
            clock=clock,
        )

    def _listen(self) -> str:
        """The configured address; a free port (tcp/0) is kept once chosen, so that invites stay good."""
        listen, kept = self.config.network.listen, self.home.listen_port()
        return f"{listen.removesuffix('/0')}/{kept}" if listen.endswith("/tcp/0") and kept else listen

    def _keep_port(self) -> None:
        """Remember the port that tcp/0 became."""
        for address in self.transport.addresses():
            parts = address.split("/")
            if "tcp" in parts and self.config.network.listen.endswith("/tcp/0"):
                self.home.keep_listen_port(int(parts[parts.index("tcp") + 1]))

    async def main(self, steps: int | None, stay: bool) -> int:
        """Run everything; 0 after a stop, 1 after a failure that is written to the log, the history and stderr."""
        asyncio_loop = asyncio.get_running_loop()
        for signum in (signal.SIGINT, signal.SIGTERM):
            asyncio_loop.add_signal_handler(signum, self.request_stop)
        services = asyncio.create_task(self._services(steps, stay))
        stop = asyncio.create_task(self.stopped.wait())
        await asyncio.wait({services, stop}, return_when=asyncio.FIRST_COMPLETED)
        code = 0
        if services.done():
            code = self._outcome(services)
        else:
            self.progress.say("STOPPING", "a stop was asked for")
        services.cancel()
        _, pending = await asyncio.wait({services}, timeout=STOP_SECONDS)
        if pending:
            log.warning("the services did not stop within %.0f s; leaving them", STOP_SECONDS)
        stop.cancel()
        self._goodbye(code)
        if pending:
            leave(self.home, code)  # asyncio would wait for them without end
        return code

    async def _services(self, steps: int | None, stay: bool) -> None:
        """One line a service. Ends by Stopped when the step goal is reached, or by what broke."""
        web = WebServer(
            DaemonView(self),
            host=self.config.web.host,
            port=self.config.web.port,
            token=self.home.token(),
            allowed_hosts=self.config.web.allowed_hosts,
            clock=self.clock,
        )
        await self.transport.start()
        try:
            await web.start()
            self.home.write_daemon(DaemonInfo(os.getpid(), web.url, self.started_at, self.transport.addresses()))
            self._keep_port()
            log.info("the dashboard is at %s ; sign in with: %s", web.url, self.home.command("open"))
            log.info("node %s listens at %s", self.identity.peer_id, ", ".join(self.transport.addresses()))
            async with asyncio.TaskGroup() as services:
                for name, service in (
                    ("transport", self._watch_transport()),
                    ("discovery", self.discovery.run()),
                    ("holding", self.holding.run()),
                    ("disk", self.holding.watch_disk()),
                    ("watchdog", watch(self.progress, self.home.logs / "stacks.log")),
                    ("training", self._live(services, steps, stay)),
                ):
                    services.create_task(self._told(service), name=name)
        finally:
            await web.stop()
            if self.loop is not None:
                await self.loop.own.rollouts.rounds.close()
                await self.loop.parts.engine.close()
            if self.scorer is not None:
                await self.scorer.close()
            if isinstance(self.trainer, ShardedTrainer):
                self.trainer.close()
            await self.transport.stop()

    async def _told(self, service: Coroutine[Any, Any, None]) -> None:
        """Run a service; what breaks it is said while the API still answers, not only once all have stopped."""
        try:
            await service
        except Stopped:
            raise
        except Exception as error:
            self._say_failed(error)
            raise

    async def _watch_transport(self) -> None:
        raise await self.transport.failed()

    async def _live(self, services: asyncio.TaskGroup, steps: int | None, stay: bool) -> None:
        """Know the swarm, make the parts, continue where the last process stopped, train."""
        for odd in oddities(self.config):
            self.history.event("warning", "config", odd)
        manifest = self.manifest = await self._know_manifest()
        check_local_limits(manifest, self.clock(), max_group_mb=self.config.limits.group_mb)
        serve_manifest(self.transport, manifest, self.clock)
        if self.home.is_listed():
            services.create_task(self._told(self._list(manifest)), name="directory")
        self.progress.say("STARTING", "starting the scorer and loading the model")
        self.scorer = make_scorer(manifest.environments, self.config.limits)
        async with self.progress.during("load"):
            engines, parts = await self._make_parts(manifest, self.scorer)
        self.loop = Loop(parts)
        self.loop.change(self.config)  # it may have changed since the parts were made
        self.holding.steer(self.loop)
        self.exchange = parts.exchange
        services.create_task(self._told(parts.exchange.run()), name="exchange")
        if parts.averaging is not None:
            self.history.event("warning", "averaging", CAUTION)
            services.create_task(self._told(parts.averaging.averager.run()), name="averaging")
        await self.loop.recover()
        for engine in engines:
            await self._start_engine(engine, parts)
        await self.loop.run(steps)
        await self.loop.checkpoint()
        if stay:
            self.progress.say("IDLE", f"all {steps} steps are done; serving peers", "stop it: shoal down")
            await asyncio.Event().wait()
        raise Stopped

    async def _start_engine(self, engine: TransformersEngine | VllmEngine, parts: Parts) -> None:
        """Have it serve these weights, and see that it computes what the trainer does."""
        computes_in = []
        if isinstance(engine, VllmEngine):
            async with self.progress.during("engine"):
                computes_in = [*(await engine.start()).computes_in]
        self.progress.say("STARTING", "checking that engine and trainer give the same log-probabilities")
        async with self.progress.during("agreement check"):
            await check_agreement(
                engine,
                parts.trainer,
                self.device,
                await self._check_prompts(parts),
                dtypes=[str(parts.bundle.model.dtype).removeprefix("torch."), *computes_in],
                routing=parts.bundle.routing,
            )

    async def _know_manifest(self) -> Manifest:
        """The swarm's manifest: from the home, or from a peer by the invite's digest; waits for one."""
        manifest = self.home.manifest()
        if manifest is not None:
            return manifest
        digest = self.home.swarm().manifest_digest
        while True:
            peers = self.transport.peers()
            missing = "no peer of the invite is reachable yet"
            if peers:
                missing = f"{len(peers)} connected, but none has sent the swarm's manifest yet"
            self.progress.say("WAITING", missing, "check that the inviting node is up and its port reachable")
            if peers:
                try:
                    raw = await fetch_manifest(
                        self.transport, digest, peers, timeout=self.config.network.request_timeout
                    )
                except (TransportError, FetchFailed) as error:
                    log.info("manifest not fetched yet: %s", error)
                else:
                    manifest = Manifest.from_bytes(raw)
                    self.home.keep_manifest(manifest)
                    return manifest
            await asyncio.sleep(0.5)

    async def _list(self, manifest: Manifest) -> None:
        """Tell the public directory of this swarm."""
        await list_in_directory(
            self.transport,
            self.identity,
            manifest,
            clock=self.clock,
            addresses=lambda: reachable(self.transport.addresses()),
            members=lambda: members_seen(self),
        )

    def _load(self) -> tuple[Setup, ModelBundle]:
        use_threads(self.config.node.threads)
        model = self.config.model
        share_gpu(device_of(model.device), self.config.limits.gpu_memory_share)
        setup = prepare(self.config, models_dir())
        device, dtype = place_of_model(self.config, setup)
        return setup, load_model(model.path, device=device, dtype=dtype, models=models_dir())

    async def _make_parts(
        self, manifest: Manifest, scorer: Scorer
    ) -> tuple[Sequence[TransformersEngine | VllmEngine], Parts]:
        config = self.config
        starting = asyncio.create_task(scorer.start())  # its imports take as long as loading a model does
        try:
            setup, bundle = await self.device.run(self._load)
            await starting
        finally:
            starting.cancel()
        self.bundle, self.engine = bundle, setup.choice.why
        self.history.event("info", "engine", self.engine)
        self.trainer = trainer = await self.device.run(
            functools.partial(make_trainer, bundle, config, self.home, seconds=lambda: self.progress.deadline)
        )
        if isinstance(trainer, ShardedTrainer):
            self.history.event("info", "trainer", f"training on {config.train.shards} workers: {trainer.workers}")
        if config.averaging.method != "none" and setup.choice.name != "transformers":
            raise ModelError(
                f"averaging.method = {config.averaging.method} changes weights between two steps, which a vLLM server "
                "would not get; set rollout.engine to transformers, or averaging.method to none"
            )
        averaging = await self.device.run(
            functools.partial(
                make_averaging,
                trainer,
                config,
                self.home,
                self.history,
                mark=model_mark(bundle),
                manifest=manifest.digest,
                psk=self.home.swarm().psk,
            )
        )
        engines = make_engines(
            setup,
            config,
            bundle,
            self.device,
            home=self.home.path,
            peer_id=self.identity.peer_id,
            say=lambda told: self.progress.say("STARTING", told),
        )
        exchange = Exchange(
            self.transport,
            self.store,
            self.identity,
            manifest,
            Rescorer(bundle, scorer),
            self.clock,
            heal_seconds=config.network.heal_seconds,
            request_timeout=config.network.request_timeout,
            seed=config.node.seed,
            on_event=lambda kind, message: self.history.event("info", kind, message),
        )
        return engines, Parts(
            config=config,
            manifest=manifest,
            peer_id=self.identity.peer_id,
            bundle=bundle,
            device=self.device,
            engine=schedule(config.rollout, engines),
            trainer=trainer,
            scorer=scorer,
            exchange=exchange,
            store=self.store,
            sampler=Sampler(config.node.seed),
            checkpoints=CheckpointStore(self.home.checkpoints, config.checkpoint.keep),
            history=self.history,
            progress=self.progress,
            clock=self.clock,
            teacher=await load_teacher(config, bundle, self.device),
            averaging=averaging,
        )

    async def _check_prompts(self, parts: Parts) -> list[tuple[int, ...]]:
        """One held-out prompt of each environment, for the agreement check."""
        refs = [held_out_task(parts.manifest, spec.name, 0) for spec in parts.manifest.environments]
        return (await prompts(parts.bundle, parts.scorer, refs))[1]

    def _outcome(self, services: asyncio.Task[None]) -> int:
        """Exit code of the services that ended by themselves."""
        error = services.exception()
        if error is None or (isinstance(error, BaseExceptionGroup) and error.subgroup(Stopped)):
            return 0
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        self._say_failed(error)
        log.error("the node failed", exc_info=error)
        self.history.event("error", "failed", _in_words(error))  # `shoal status` reads it from then on
        return 1

    def _say_failed(self, error: BaseException) -> None:
        what, _, fix = _in_words(error).partition(" ; ")
        self.progress.say("FAILED", what, fix or "read the log: shoal logs")

    def _goodbye(self, code: int) -> None:
        """Say what is saved, and close the files."""
        if self.loop is None or self.loop.saved is None:
            said = "stopped before training began; what was saved before is untouched"
        else:
            saved, base = self.loop.saved, self.loop.parts.checkpoints.base
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
        self.throttle.limit(limits.upload_kbps, limits.download_kbps)
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
        self.stopped.set()

    def invite_uri(self) -> str:
        """An invite to this node's swarm, with this node as the way in."""
        swarm = self.home.swarm()
        return Invite(swarm.manifest_digest, reachable(self.transport.addresses()), swarm.psk, swarm.name).to_uri()

    def invite_caution(self) -> str:
        return caution(reachable(self.transport.addresses()), self.config.network.announce)


def _in_words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
