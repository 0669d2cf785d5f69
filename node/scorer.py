"""The daemon's side of scoring: keeps one isolated scorer process (`node.scorer_worker`) warm and feeds it in chunks.

An answer that kills the scorer or misses the deadline scores 0 with a `scorer_failed` reason; the answers after it
are scored by the next process. Own work goes before foreign work, chunk by chunk: answers of peers that hang can hold
own scoring up by one deadline at most.
"""

import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from typing import Final, Protocol

import msgspec

from node.config import LimitsConfig
from node.interfaces import Score, Task
from node.isolation import CONFINING
from node.scorer_wire import (
    LENGTH,
    Chunk,
    Died,
    Done,
    Job,
    Overlong,
    Ready,
    Refused,
    Reply,
    Setup,
    Wanted,
    can_travel,
    end_of_frame,
    frame,
    score_of,
)
from protocol.manifest import EnvironmentSpec
from protocol.rollout import TaskRef

log = logging.getLogger(__name__)

CHUNK_JOBS: Final = 64
CHUNK_BYTES: Final = 512 * 1024
READ_BYTES: Final = 64 * 1024
MAX_WAITING: Final = 256
"""Calls waiting for their turn; the next foreign one is turned away."""
START_SECONDS: Final = 150.0
"""On a busy machine; what loading the environments may take of the processor is bounded there."""
GRACE_SECONDS: Final = 5.0
"""The process kills what misses its deadline; this much later it is killed itself."""

_PASSED_ON = ("PATH", "HOME", "LANG", "PYTHONPATH", "LD_LIBRARY_PATH", "TMPDIR", "SYSTEMROOT")


class ScorerError(Exception):
    """The scorer process cannot be had, is overloaded, or cannot regenerate a task."""


class Crew(Protocol):
    """Scorer processes elsewhere, which do the work in place of one here (node/large/reward_actors.py)."""

    @property
    def restarts(self) -> int: ...

    async def start(self) -> tuple[str, ...]:
        """Have them; the measures in force where answers are seen. Raises ScorerError."""

    async def work(self, jobs: Sequence[Job], *, foreign: bool) -> list[Done]:
        """What came of each job, in order; foreign ones wait while own work is there. Raises ScorerError."""

    async def close(self) -> None: ...


class _Gone(Exception):
    """The scorer process ended, hangs or talks nonsense; what was in the works is lost."""


class Scorer:
    """Tasks and rewards from a process of its own. Safe to use from many tasks of one event loop.

    `environments`: what the manifest names; `deadline`: seconds for one answer; `memory_mb`: address space of the
    process that scores; `clock`: monotonic seconds, for `busy_seconds`.
    """

    def __init__(
        self,
        environments: Sequence[EnvironmentSpec],
        *,
        deadline: float,
        memory_mb: int,
        clock: Callable[[], float],
        crew: Crew | None = None,
    ) -> None:
        """`crew`: who does the work; None: a process of this node."""
        self._crew = crew
        wanted = tuple(Wanted(spec.name, spec.version, spec.settings) for spec in environments)
        self._setup = Setup(environments=wanted, deadline=deadline, memory_mb=memory_mb)
        self._known = {(one.name, one.version) for one in wanted}
        self._clock = clock
        self._process: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Condition()
        self._busy = False
        self._own_waiting = 0
        self._foreign_waiting = 0
        self._unread = bytearray()
        """What the process has said and nobody has asked for yet."""
        self._prepare = True
        """Whether tasks are made before the fork; no longer once the process ended over it."""
        self._decoder = msgspec.msgpack.Decoder(Reply)
        self.isolation: tuple[str, ...] = ()
        """Measures in force in the process that sees answers, as it reported them."""
        self.answers = 0
        self.failures = 0
        """Answers that got `scorer_failed`."""
        self.restarts = 0
        self.turned_away = 0
        self.busy_seconds = 0.0

    async def start(self) -> None:
        """Start the process and load the environments. Raises ScorerError saying which one cannot be had and why."""
        if self._crew is not None:
            self.isolation = await self._crew.start()
        else:
            await self._take_turn(foreign=False)
            try:
                await self._launch()
            finally:
                await self._end_turn()
        log.info("scorer process is up, isolation: %s", ", ".join(self.isolation))
        if not any(measure.startswith(CONFINING) for measure in self.isolation):
            log.warning(
                "this system offers neither seccomp nor Landlock: the scorer process is held by resource limits only, "
                "and environments that evaluate answers are refused"
            )

    def knows(self, ref: TaskRef) -> bool:
        """Whether the task is of one of this swarm's environments."""
        return (ref.environment, ref.version) in self._known

    async def tasks(self, refs: Sequence[TaskRef], *, foreign: bool = False) -> list[Task]:
        """Regenerate tasks, in order. Raises ScorerError naming the first one that cannot be."""
        tasks = []
        for ref, done in zip(refs, await self.work([Job(ref, None) for ref in refs], foreign), strict=True):
            if done.task is None:
                raise ScorerError(
                    f"task {ref.environment}/{ref.seed}/{ref.index} cannot be regenerated: {done.failure}"
                )
            tasks.append(done.task)
        return tasks

    async def golds(self, refs: Sequence[TaskRef]) -> list[str | None]:
        """An answer that scores 1 to each task, in order; None where the environment knows none, or failed to say."""
        return [done.gold for done in await self.work([Job(ref, None, gold=True) for ref in refs], foreign=False)]

    async def score(self, items: Sequence[tuple[TaskRef, str]], *, foreign: bool = False) -> list[Score]:
        """Score answers, in order. `foreign` ones wait while own work is there. Raises ScorerError."""
        scores: list[Score | None] = [None if can_travel(text) else Score(0.0, parsed=False) for _, text in items]
        places = [place for place, score in enumerate(scores) if score is None]
        done = await self.work([Job(*items[place]) for place in places], foreign)
        for place, result in zip(places, done, strict=True):
            scores[place] = score_of(result)
        self.answers += len(items)
        every = [score for score in scores if score is not None]
        self.failures += sum(score.failure is not None for score in every)
        return every

    @property
    def pid(self) -> int | None:
        """Of the process, while there is one."""
        return None if self._process is None else self._process.pid

    async def close(self) -> None:
        """End the process. Calls still waiting for it start a new one."""
        if self._crew is not None:
            await self._crew.close()
        await self._kill()

    async def work(self, jobs: Sequence[Job], foreign: bool) -> list[Done]:
        """What came of each job, in order. Raises ScorerError."""
        for job in jobs:
            if not self.knows(job.ref):
                raise ScorerError(f"environment {job.ref.environment} {job.ref.version} is not one of this swarm's")
        if self._crew is not None:
            return await self._by_crew(self._crew, jobs, foreign)
        results: list[Done] = []
        while len(results) < len(jobs):
            await self._take_turn(foreign)
            began = self._clock()
            try:
                results += await self._chunk(next_chunk(jobs, len(results)))
            finally:
                self.busy_seconds += self._clock() - began
                await self._end_turn()
        return results

    async def _by_crew(self, crew: Crew, jobs: Sequence[Job], foreign: bool) -> list[Done]:
        self._turn_away(foreign)
        self._foreign_waiting += foreign
        began = self._clock()
        try:
            return await crew.work(jobs, foreign=foreign)
        finally:
            self._foreign_waiting -= foreign
            self.busy_seconds += self._clock() - began
            self.restarts = crew.restarts

    async def _chunk(self, jobs: Sequence[Job]) -> list[Done]:
        """Results of a prefix of `jobs`: all of them, or up to and including the first that ended the process.

        None, once, when the process ended before it came to an answer.
        """
        if self._process is None or self._process.returncode is not None:
            await self._kill()
            await self._launch()
            self.restarts += 1
        results: list[Done] = []
        try:
            await self._send(Chunk(tuple(jobs), self._prepare))
            preparing = self._setup.deadline if self._prepare else 0.0  # before the first answer
            while len(results) < len(jobs):
                wait = self._setup.deadline + GRACE_SECONDS + (0.0 if results else preparing)
                match await self._receive(wait):
                    case Done(index=index) as done if index == len(results):
                        results.append(done)
                    case Died(why=why):
                        results.append(Done(len(results), failure=why))
                        self.restarts += 1
                        break
                    case reply:
                        raise _Gone(f"unexpected {type(reply).__name__}")
        except _Gone as gone:
            await self._kill()
            if self._prepare and not results and any(job.answer is not None for job in jobs):
                log.warning(
                    "the scorer process failed before an answer (%s): children make their tasks from now on", gone
                )
                self._prepare = False
                return results  # the same chunk again: its answers are not to blame
            if not results or results[-1].failure is None:
                results.append(Done(len(results), failure=str(gone)))
        except BaseException:  # cancelled in the middle: what the process still says would answer nobody's question
            await self._kill()
            raise
        return results

    async def _launch(self) -> None:
        environment = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
        # the same set order, hence the same tasks, in every process; no thread pools that a fork would lose
        environment |= {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",
            "-m",
            "node.scorer_worker",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=environment,
            start_new_session=True,
        )
        try:
            await self._send(self._setup)
            await self._expect_ready(START_SECONDS)
        except _Gone as gone:
            said, process = await self._last_words(), self._process
            await self._kill()
            if process.returncode == -signal.SIGXCPU:
                raise ScorerError(
                    "the environments take too much processor time to start: their settings in the manifest are too big"
                ) from gone
            raise ScorerError(f"the scorer process did not start: {gone}{said}") from gone
        except BaseException:
            await self._kill()
            raise

    async def _expect_ready(self, seconds: float) -> None:
        match await self._receive(seconds):
            case Ready(isolation=isolation):
                self.isolation = isolation
            case Refused(why=why):
                await self._kill()
                raise ScorerError(why)
            case reply:
                raise _Gone(f"unexpected {type(reply).__name__}")

    async def _send(self, message: msgspec.Struct) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(frame(message))
            async with asyncio.timeout(START_SECONDS):
                await self._process.stdin.drain()
        except (OSError, TimeoutError) as error:
            raise _Gone(f"it takes no more work ({type(error).__name__})") from error

    async def _receive(self, seconds: float) -> Reply:
        assert self._process is not None
        assert self._process.stdout is not None
        unread = self._unread
        try:
            if (end := end_of_frame(unread)) is None:
                async with asyncio.timeout(seconds):
                    while (end := end_of_frame(unread)) is None:
                        part = await self._process.stdout.read(READ_BYTES)
                        if not part:
                            raise _Gone("it ended")
                        unread += part
            reply = self._decoder.decode(unread[LENGTH.size : end])
        except TimeoutError as error:
            raise _Gone(f"no answer within {seconds:g} s") from error
        except (msgspec.DecodeError, RecursionError, Overlong) as error:
            raise _Gone(f"it talks nonsense ({error})") from error
        del unread[:end]
        return reply

    async def _last_words(self) -> str:
        """The end of what a process that did not start wrote to stderr."""
        assert self._process is not None
        assert self._process.stderr is not None
        try:
            async with asyncio.timeout(GRACE_SECONDS):
                said = await self._process.stderr.read(64 * 1024)
        except TimeoutError:
            return ""
        return f"; it said: {said[-2000:].decode(errors='replace').strip()}" if said else ""

    async def _kill(self) -> None:
        process, self._process = self._process, None
        self._unread.clear()
        if process is None:
            return
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):  # it has just ended by itself
                os.killpg(process.pid, signal.SIGKILL)
        try:
            async with asyncio.timeout(GRACE_SECONDS):
                await process.wait()
        except TimeoutError:  # the kernel ends it when it can: it holds nothing that the next one needs
            log.error("the scorer process %d was killed and is not gone yet", process.pid)

    def _turn_away(self, foreign: bool) -> None:
        """Raises ScorerError when too many of peers' calls wait."""
        if foreign and self._foreign_waiting >= MAX_WAITING:
            self.turned_away += 1
            raise ScorerError(f"{MAX_WAITING} groups of peers wait for the scorer already")

    async def _take_turn(self, foreign: bool) -> None:
        self._turn_away(foreign)
        async with self._turn:
            if foreign:
                self._foreign_waiting += 1
            else:
                self._own_waiting += 1
            try:
                await self._turn.wait_for(lambda: not self._busy and not (foreign and self._own_waiting))
            finally:
                if foreign:
                    self._foreign_waiting -= 1
                else:
                    self._own_waiting -= 1
            self._busy = True

    async def _end_turn(self) -> None:
        self._busy = False  # at once: who is cancelled while it waits for the lock must not keep the turn for ever
        async with self._turn:
            self._turn.notify_all()


def make_scorer(
    environments: Sequence[EnvironmentSpec],
    limits: LimitsConfig,
    crew: Crew | None = None,
) -> Scorer:
    """The scorer of a node with these limits."""
    return Scorer(
        environments,
        deadline=limits.scorer_seconds,
        memory_mb=limits.scorer_memory_mb,
        clock=time.monotonic,
        crew=crew,
    )


def next_chunk(jobs: Sequence[Job], first: int) -> Sequence[Job]:
    """The next few jobs, by number and by bytes."""
    size = 0
    for last in range(first, min(first + CHUNK_JOBS, len(jobs))):
        size += 4 * len(jobs[last].answer or "")
        if size > CHUNK_BYTES and last > first:
            return jobs[first:last]
    return jobs[first : first + CHUNK_JOBS]
