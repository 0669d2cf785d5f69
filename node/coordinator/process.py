"""Wires a coordinator: transport, discovery, scorer, log, members, web page. Like node/daemon.py, without a model.

Everything that it signs or is handed in is on disk before anybody hears of it (swarm/coordination), so it may be killed
at any instant and goes on where it was.
"""

import asyncio
import json
import logging
import time
from collections.abc import Callable, Sequence
from typing import NoReturn

from node.config import CoordinatorConfig
from node.coordinator.view import CoordinatorView
from node.home import Home
from node.joining import know_manifest
from node.presence import Presence, leave
from node.scorer import Scorer, ScorerError, make_scorer
from node.settings import Settings
from protocol.board import most_members
from protocol.manifest import Manifest, check_local_limits
from protocol.messages import MAX_ANSWERS
from protocol.rollout import TaskRef
from protocol.rounds import Pace
from swarm.coordination.chain import Chain
from swarm.coordination.coordinator import Coordinator
from swarm.coordination.evaluation import ScoringUnavailable
from swarm.coordination.log_sync import LogSync
from swarm.coordination.membership import Membership
from swarm.coordination.reports import Reports
from swarm.coordination.round_log import RoundLog
from swarm.serving import serve_manifest

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
        presence = self.presence = Presence(home, self.config, clock, "coordinator")
        self.identity, self.started_at, self.progress = presence.identity, presence.started_at, presence.progress
        self.history, self.transport = presence.history, presence.transport
        self.manifest: Manifest | None = None
        self.scorer: Scorer | None = None
        self.coordinator: Coordinator | None = None

    async def main(self, *, as_json: bool = False) -> int:
        """Run everything; 0 after a stop, 1 after a failure that is written to the log and the history."""

        def goodbye(code: int) -> None:
            self.history.event("info", "stop", "the coordinator stopped; its log goes on from here at the next start")
            self.history.close()
            if as_json:
                print(json.dumps({"state": self.progress.state, "reason": self.progress.reason}), flush=True)  # noqa: T201

        return await self.presence.run(self._services(), self.presence.stopped.set, goodbye)

    async def _services(self) -> None:
        async with self.presence.services(CoordinatorView(self), self._close) as services:
            services.create_task(self.presence.told(self._coordinate()), name="coordinator")

    async def _close(self) -> None:
        if self.scorer is not None:
            await self.scorer.close()

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
                members = self.coordinator.membership.members
                listing = self.presence.list_publicly(manifest, lambda: len(members()))
                tasks.create_task(listing, name="directory")

    def _make(self, manifest: Manifest) -> Coordinator:
        config, database = self.config.coordinator, self.home.database
        chain = Chain(
            RoundLog(database, manifest.digest, durable=True),
            manifest,
            self.clock,
            me=self.identity.peer_id,
            on_event=self._tell,
        )
        sync = LogSync(
            self.transport,
            chain,
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
            sync,
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
            record, leader = coordinator.chain.round, coordinator.chain.leader
            present = len(coordinator.present())
            if self.identity.peer_id in coordinator.chain.faults:
                self.progress.say("WAITING", "members do not follow this coordinator any more: it signed two versions")
            elif not coordinator.leading:
                self.progress.say("IDLE", f"stands by for {leader}")
            elif record is None:
                self.progress.say("IDLE", "about to begin the first round")
            else:
                self.progress.say("IDLE", f"round {record.number} is {record.state.name}, {present} members present")
            await asyncio.sleep(SAY_SECONDS)
