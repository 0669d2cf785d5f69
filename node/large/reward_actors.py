"""Scorers that Ray places: actors on CPUs, each with an isolated scorer process of its own (node/scorer.py).

They keep nothing between two chunks, so a chunk whose actor ends goes to another one, and scores the same there. Each
has at most `in_flight` chunks at a time; the rest waits here, own work before peers'.
"""

import asyncio
import functools
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from node.config import LimitsConfig
from node.large import ray_cluster
from node.large.ray_cluster import ActorGone, RayCluster
from node.large.room import Bundle
from node.scorer import CHUNK_JOBS, GRACE_SECONDS, START_SECONDS, Scorer, ScorerError, next_chunk
from node.scorer_wire import Done, Job, Ready, Refused
from protocol.manifest import EnvironmentSpec
from swarm.backing_off import pause_after

log = logging.getLogger(__name__)

SMALLEST_CHUNK = 4
"""Jobs; a chunk of answers that may be evaluated costs a fork."""
TRIES = 3
"""Actors that a chunk may end, or be late at, before its answers are given up."""
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0
"""Seconds before an actor is started again: doubled with each failure in a row."""


class RewardActor:
    """In a process of Ray's, in a bundle."""

    def __init__(self, environments: Sequence[EnvironmentSpec], deadline: float, memory_mb: int) -> None:
        self._scorer = Scorer(environments, deadline=deadline, memory_mb=memory_mb, clock=time.monotonic)
        self._turn = asyncio.Lock()
        """Chunks in the order that they came: the scorer lets others in wherever an answer ended its process."""

    async def start(self) -> Ready | Refused:
        try:
            await self._scorer.start()
        except ScorerError as error:
            return Refused(str(error))
        return Ready(self._scorer.isolation)

    async def work(self, jobs: Sequence[Job]) -> tuple[list[Done], int] | Refused:
        """What came of the jobs, and how often the scorer process was started anew so far."""
        try:
            async with self._turn:
                return await self._scorer.work(jobs, foreign=False), self._scorer.restarts
        except ScorerError as error:
            return Refused(str(error))


@dataclass(slots=True, eq=False)
class _Lane:
    """One actor's."""

    bundle: Bundle
    actor: Any = None
    """None: it is being started, or rests."""
    busy: int = 0
    """Chunks that it has."""
    failures: int = 0
    restarts: int = 0
    """Of its scorer process, in this life of the actor."""


class RewardCrew:
    """Reward workers in the bundles of a placement group. Used from one asyncio loop."""

    def __init__(
        self,
        cluster: RayCluster,
        group: Any,
        bundles: Sequence[Bundle],
        environments: Sequence[EnvironmentSpec],
        limits: LimitsConfig,
        in_flight: int,
    ) -> None:
        self._cluster, self._group, self._environments, self._limits = cluster, group, tuple(environments), limits
        self._in_flight = in_flight
        self._lanes = [_Lane(bundle) for bundle in bundles]
        self._changed = asyncio.Event()
        """Somebody who waits may have room now."""
        self._own_waiting = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False
        self._past_restarts = 0

    @property
    def restarts(self) -> int:
        """Of actors and of their scorer processes."""
        return self._past_restarts + sum(lane.restarts for lane in self._lanes)

    async def start(self) -> tuple[str, ...]:
        """Start all of them; the measures in force in each. Raises ScorerError."""
        measures = await asyncio.gather(*(self._start(lane) for lane in self._lanes))
        return tuple(measure for measure in measures[0] if all(measure in others for others in measures))

    async def _start(self, lane: _Lane) -> tuple[str, ...]:
        limits = self._limits
        arguments = self._environments, limits.scorer_seconds, limits.scorer_memory_mb
        actor = self._cluster.actor(
            RewardActor,
            self._group,
            lane.bundle.number,
            lane.bundle,
            *arguments,
            max_concurrency=self._in_flight + 1,
        )
        try:
            answer = await ray_cluster.awaited(actor.start.remote(), self._cluster.section.start_seconds)
        except (ActorGone, TimeoutError) as error:
            ray_cluster.kill(actor)
            raise ScorerError(
                f"Ray did not start reward worker {lane.bundle.number + 1} on {lane.bundle.host}: "
                f"{str(error) or 'no answer in time'}; {ray_cluster.NOT_THERE}"
            ) from error
        if isinstance(answer, Refused):
            ray_cluster.kill(actor)
            raise ScorerError(answer.why)
        lane.actor = actor
        self._changed.set()
        measures: tuple[str, ...] = answer.isolation
        return measures

    # -- work --------------------------------------------------------------------------------------------------

    async def work(self, jobs: Sequence[Job], *, foreign: bool) -> list[Done]:
        """What came of each job, in order: the same as one scorer process says of it. Raises ScorerError."""
        each = max(SMALLEST_CHUNK, -(-len(jobs) // len(self._lanes)))
        chunks: list[asyncio.Task[list[Done]]] = []
        first = 0
        try:
            while first < len(jobs):
                chunk = next_chunk(jobs, first)[: min(each, CHUNK_JOBS)]
                held = [await self._take(foreign)]  # before there is a task: what waits, waits here
                chunks.append(asyncio.create_task(self._run(held, chunk, foreign)))
                chunks[-1].add_done_callback(functools.partial(self._leave, held))
                first += len(chunk)
            return [done for chunk in await asyncio.gather(*chunks) for done in chunk]
        finally:
            for task in chunks:
                task.cancel()
            await asyncio.gather(*chunks, return_exceptions=True)

    async def _run(self, held: "list[tuple[_Lane, Any]]", jobs: Sequence[Job], foreign: bool) -> list[Done]:
        """One chunk, by the actor at which room is held, or by the next one that is free where it fails."""
        for attempt in range(1, TRIES + 1):
            lane, actor = held[0]
            try:
                answer = await ray_cluster.awaited(actor.work.remote(jobs), self._seconds(len(jobs)))
            except (ActorGone, TimeoutError) as error:
                log.warning("reward worker %d failed: %s", lane.bundle.number + 1, str(error) or "no answer in time")
                self._replace(lane, actor)
            else:
                if isinstance(answer, Refused):
                    raise ScorerError(answer.why)
                done, lane.restarts = answer
                lane.failures = 0
                return list(done)
            finally:
                held.clear()
                self._give(lane)
            if attempt < TRIES:
                held.append(await self._take(foreign))
        raise ScorerError(f"{TRIES} reward workers failed over the same {len(jobs)} answers; see `ray status`")

    def _seconds(self, jobs: int) -> float:
        """Deadline of a chunk, of which each answer may take its own: with others of any size before it and a start."""
        each, others = self._limits.scorer_seconds, self._in_flight - 1
        every = jobs + others * CHUNK_JOBS
        return START_SECONDS + every * (each + GRACE_SECONDS) + (1 + others) * each

    async def _take(self, foreign: bool) -> tuple[_Lane, Any]:
        """Room at the least busy actor. Raises ScorerError when none comes in the time that a start may take."""
        self._own_waiting += not foreign
        try:
            async with asyncio.timeout(self._cluster.section.start_seconds + self._seconds(CHUNK_JOBS)):
                while (lane := self._free()) is None or (foreign and self._own_waiting):
                    self._changed.clear()
                    await self._changed.wait()
                lane.busy += 1
                return lane, lane.actor
        except TimeoutError as error:
            raise ScorerError("no reward worker has room or can be started; see `ray status`") from error
        finally:
            self._own_waiting -= not foreign
            self._changed.set()

    def _free(self) -> _Lane | None:
        free = [lane for lane in self._lanes if lane.actor is not None and lane.busy < self._in_flight]
        return min(free, key=lambda lane: lane.busy) if free else None

    def _leave(self, held: "list[tuple[_Lane, Any]]", _: "asyncio.Task[list[Done]]") -> None:
        """Give back what a task holds that was cancelled before its first instruction."""
        for lane, _actor in held:
            self._give(lane)

    def _give(self, lane: _Lane) -> None:
        lane.busy -= 1
        self._changed.set()

    # -- trouble -----------------------------------------------------------------------------------------------

    def _replace(self, lane: _Lane, actor: Any) -> None:
        """End an actor that failed, and start another one after a pause; once, whoever of its chunks comes first."""
        if lane.actor is not actor or self._closed:
            return
        lane.actor = None
        lane.failures += 1
        self._past_restarts += lane.restarts + 1
        lane.restarts = 0
        ray_cluster.kill(actor)
        task = asyncio.create_task(self._again(lane))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _again(self, lane: _Lane) -> None:
        while not self._closed:
            await asyncio.sleep(pause_after(lane.failures, FIRST_PAUSE, LONGEST_PAUSE))
            try:
                await self._start(lane)
            except ScorerError as error:
                lane.failures += 1
                log.warning("%s", error)
            else:
                return

    async def close(self) -> None:
        self._closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for lane in self._lanes:
            if lane.actor is not None:
                ray_cluster.kill(lane.actor)
                lane.actor = None
