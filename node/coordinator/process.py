"""Wires a coordinator: transport, discovery, scorer, log, members, web page. Like node/daemon.py, without a model.

Everything that it signs or is handed in is on disk before anybody hears of it (swarm.coordinator), so it may be killed
at any instant and goes on where it was.
"""

import asyncio
import json
import logging
import os
import signal
import time
from collections.abc import Callable, Sequence
from typing import NoReturn

from node.addresses import caution, reachable
from node.config import CoordinatorConfig
from node.coordinator.view import CoordinatorView
from node.history import History
from node.home import DaemonInfo, Home
from node.joining import keep_page_port, keep_port, know_manifest, listen_address, page_port
from node.leaving import STOP_SECONDS, innermost, leave
from node.progress import Progress
from node.scorer import Scorer, ScorerError, make_scorer
from node.settings import Settings
from protocol.board import most_members
from protocol.invite import Invite
from protocol.manifest import Manifest, check_local_limits
from protocol.messages import MAX_ANSWERS
from protocol.rollout import TaskRef
from protocol.rounds import Pace
from swarm.coordinator import Coordinator
from swarm.directory import list_in_directory
from swarm.evaluation import ScoringUnavailable
from swarm.libp2p_transport import Libp2pTransport
from swarm.membership import Membership
from swarm.peers import Discovery
from swarm.reports import Reports
from swarm.round_log import RoundLog
from swarm.rounds import Following
from swarm.serving import serve_manifest
from swarm.throttle import Throttle
from web.server import WebServer

log = logging.getLogger(__name__)

SAY_SECONDS = 1.0


class TooManyAnswers(Exception):
    """A round of these settings asks each member for more answers than it can hand in."""


class NoCoordinator(Exception):
    """The swarm of this home names other coordinators, or none."""


def run(home: Home, settings: Settings, *, as_json: bool = False) -> NoReturn:
    """Coordinate until stopped; ends the process. The caller holds the home's lock."""
    process = CoordinatorProcess(home, settings, clock=time.time)
    leave(home, asyncio.run(process.main(as_json=as_json)))


def check_answers(manifest: Manifest, settings: CoordinatorConfig) -> None:
    """Raises TooManyAnswers."""
    environments, tasks, samples = len(manifest.environments), settings.tasks, settings.samples
    if environments * tasks * samples > MAX_ANSWERS:
        raise TooManyAnswers(
            f"{environments} environments x coordinator.tasks = {tasks} x coordinator.samples = {samples} are"
            f" {environments * tasks * samples} answers of each member, at most {MAX_ANSWERS} ; lower the two settings"
        )


class CoordinatorProcess:
    """One coordinator's life in one process."""

    def __init__(self, home: Home, settings: Settings, *, clock: Callable[[], float]) -> None:
        self.home, self.settings, self.config, self.clock = home, settings, settings.config, clock
        self.identity = home.identity()
        self.started_at = clock()
        self.progress = Progress(clock, self.config.limits.stage_seconds, since=clock())
        self.history = History(home.database, clock)
        self.stopped = asyncio.Event()
        self.manifest: Manifest | None = None
        self.scorer: Scorer | None = None
        self.coordinator: Coordinator | None = None
        swarm, network = home.swarm(), self.config.network
        throttle = Throttle()
        throttle.limit(self.config.limits.upload_kbps, self.config.limits.download_kbps)
        self.transport = Libp2pTransport(
            self.identity,
            [listen_address(home, network)],
            announce=network.announce,
            psk=swarm.psk,
            throttle=throttle,
        )
        self.discovery = Discovery(
            self.transport,
            (*swarm.bootstrap, *network.bootstrap),
            swarm.manifest_digest,
            clock=time.monotonic,
        )

    async def main(self, *, as_json: bool = False) -> int:
        """Run everything; 0 after a stop, 1 after a failure that is written to the log and the history."""
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(signum, self.stopped.set)
        services, stop = asyncio.create_task(self._services()), asyncio.create_task(self.stopped.wait())
        await asyncio.wait({services, stop}, return_when=asyncio.FIRST_COMPLETED)
        code = 0
        if services.done():
            error = services.exception()
            assert error is not None  # they end by nothing else
            error = innermost(error)
            said = self.progress.fail(error)
            log.error("the coordinator failed", exc_info=error)
            self.history.event("error", "failed", said)
            code = 1
        else:
            self.progress.say("STOPPING", "a stop was asked for")
        services.cancel()
        stop.cancel()
        _, pending = await asyncio.wait({services}, timeout=STOP_SECONDS)
        self.history.event("info", "stop", "the coordinator stopped; its log goes on from here at the next start")
        self.history.close()
        if as_json:
            print(json.dumps({"state": self.progress.state, "reason": self.progress.reason}), flush=True)  # noqa: T201
        if pending:
            log.warning("the services did not stop within %.0f s; leaving them", STOP_SECONDS)
            leave(self.home, code)  # asyncio would wait for them without end
        return code

    async def _services(self) -> None:
        web = WebServer(
            CoordinatorView(self),
            host=self.config.web.host,
            port=page_port(self.home, self.config.web),
            token=self.home.token(),
            allowed_hosts=self.config.web.allowed_hosts,
            clock=self.clock,
        )
        await self.transport.start()
        try:
            await web.start()
            self.home.write_daemon(DaemonInfo(os.getpid(), web.url, self.started_at, self.transport.addresses()))
            keep_port(self.home, self.config.network, self.transport)
            keep_page_port(self.home, self.config.web, web.url)
            log.info("the dashboard is at %s (sign in with: %s)", web.url, self.home.command("open"))
            log.info("coordinator %s listens at %s", self.identity.peer_id, ", ".join(self.transport.addresses()))
            async with asyncio.TaskGroup() as services:
                services.create_task(self._watch_transport(), name="transport")
                services.create_task(self.discovery.run(), name="discovery")
                services.create_task(self._coordinate(), name="coordinator")
        finally:
            await web.stop()
            if self.scorer is not None:
                await self.scorer.close()
            await self.transport.stop()

    async def _watch_transport(self) -> None:
        raise await self.transport.failed()

    async def _coordinate(self) -> None:
        manifest = await know_manifest(self.home, self.transport, self.progress, self.config.network.request_timeout)
        if self.identity.peer_id not in manifest.coordinators:
            named = ", ".join(manifest.coordinators) or "none"
            raise NoCoordinator(
                f"swarm {manifest.name!r} has other coordinators ({named}) than this home's {self.identity.peer_id} ; "
                "make a swarm with `shoal coordinator init`, or run `shoal up` to take part"
            )
        check_local_limits(manifest, self.clock(), max_group_mb=self.config.limits.group_mb)
        check_answers(manifest, self.config.coordinator)
        self.manifest = manifest
        serve_manifest(self.transport, manifest, self.clock)
        self.progress.say("STARTING", "starting the scorer")
        self.scorer = make_scorer(manifest.environments, self.config.limits)
        await self.scorer.start()
        self.coordinator = self._make(manifest)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.coordinator.run(), name="rounds")
            tasks.create_task(self._say(self.coordinator), name="state")
            if self.home.is_listed():
                tasks.create_task(self._list(self.coordinator, manifest), name="directory")

    async def _list(self, coordinator: Coordinator, manifest: Manifest) -> None:
        """Tell the public directory of this swarm."""
        await list_in_directory(
            self.transport,
            self.identity,
            manifest,
            clock=self.clock,
            addresses=lambda: reachable(self.transport.addresses()),
            members=lambda: len(coordinator.membership.members()),
        )

    def _make(self, manifest: Manifest) -> Coordinator:
        config, database = self.config.coordinator, self.home.database
        following = Following(
            self.transport,
            RoundLog(database, manifest.digest, durable=True),
            manifest,
            self.clock,
            request_timeout=self.config.network.request_timeout,
            # a standby asks the leader this often whether it is there
            sync_seconds=min(10.0, config.patience / 3),
            on_event=self._tell,
        )
        pace = Pace(
            round_seconds=config.round_seconds,
            answer_seconds=config.answer_seconds,
            least_members=config.least_members,
            quorum=config.quorum,
            groups=config.groups,
            tasks=config.tasks,
            samples=config.samples,
        )
        return Coordinator(
            self.transport,
            self.identity,
            manifest,
            following,
            Membership(
                database,
                manifest.digest,
                self.clock,
                listed_only=manifest.listed_only,
                most=most_members(len(manifest.environments)),
            ),
            Reports(database, manifest.digest),
            self._score,
            self.clock,
            pace,
            patience=config.patience,
            from_network=config.from_network,
            measured=config.mix == "measured",
            on_event=self._tell,
        )

    def _tell(self, kind: str, message: str) -> None:
        self.history.event("error" if kind == "coordinator_fault" else "info", kind, message)

    async def _score(self, items: Sequence[tuple[TaskRef, str]]) -> Sequence[float]:
        """Rewards, from this process's own scorer: answers of others wait for nobody's own here."""
        assert self.scorer is not None
        try:
            return [score.reward for score in await self.scorer.score(items, foreign=True)]
        except ScorerError as error:
            raise ScoringUnavailable(str(error)) from error

    async def _say(self, coordinator: Coordinator) -> None:
        """Keep the state in words."""
        while True:
            record, leader = coordinator.following.round, coordinator.following.leader
            present = len(coordinator.present())
            if self.identity.peer_id in coordinator.following.faults:
                self.progress.say("WAITING", "members do not follow this coordinator any more: it signed two versions")
            elif not coordinator.leading:
                self.progress.say("IDLE", f"stands by for {leader}")
            elif record is None:
                self.progress.say("IDLE", "about to begin the first round")
            else:
                self.progress.say("IDLE", f"round {record.number} is {record.state.name}, {present} members present")
            await asyncio.sleep(SAY_SECONDS)

    def invite_uri(self) -> str:
        """A link without a token: it lets nobody new into a listed swarm (`shoal coordinator invite` does)."""
        swarm = self.home.swarm()
        return Invite(swarm.manifest_digest, reachable(self.transport.addresses()), swarm.psk, swarm.name).to_uri()

    def invite_caution(self) -> str:
        return caution(reachable(self.transport.addresses()), self.config.network.announce)
