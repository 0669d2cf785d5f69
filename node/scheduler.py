"""Which engine works on what, and in what order: the Engine seam over one engine or several.

`whole`: every group goes to one engine, all at once; the engine's own queue does the rest. With one engine the requests
pass through as they are.

`longest-first`: every sample is a request of its own, sent as soon as an engine has room. One sample of each group goes
ahead; once it tells how long the group's answers are, the longest go first, so that none of them is begun late.

`divided`: the same, and a sample runs `chunk_tokens` at a time. After a chunk it waits in line again and goes on
wherever there is room, so engines stay evenly loaded and none runs out of memory for keys and values (Seer, arXiv
2511.14617).

An engine that fails (EngineFailed) rests, and its samples go on elsewhere with the tokens they have.
"""

import asyncio
import hashlib
import heapq
import logging
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from node.engines.partial import EngineFailed
from node.interfaces import Engine, PromptRequest, Sample, SampledGroup
from node.scheduling.lengths import Lengths, of_group
from node.scheduling.units import Group, Lane, Run, Unit
from swarm.backing_off import pause_after

log = logging.getLogger(__name__)

FIRST_REST, LONGEST_REST = 1.0, 60.0
"""Seconds that an engine rests after a failure: doubled with each failure in a row."""
FAILURES = 8
"""Failures in a row of every engine after which the scheduler gives up."""


@dataclass(frozen=True, slots=True)
class Dispatch:
    """How requests go to engines."""

    by: Literal["whole", "longest-first", "divided"] = "whole"
    concurrency: int = 0
    """Samples in flight per engine; 0: no bound of ours."""
    chunk_tokens: int = 2048
    """Tokens that a sample runs at a time (divided)."""
    kv_tokens: int = 0
    """Keys and values that one engine can hold, in tokens (divided); 0: no bound of ours."""


class Scheduler:
    """An engine made of engines. Used from one asyncio loop; calls of `generate` may overlap."""

    def __init__(self, engines: Sequence[Engine], dispatch: Dispatch | None = None) -> None:
        if not engines:
            raise ValueError("a scheduler needs at least one engine; none was given")
        self.dispatch = dispatch or Dispatch()
        self.version = engines[0].version
        self.name = engines[0].name if len(engines) == 1 else f"{len(engines)} x {engines[0].name}"
        self._lanes = [Lane(engine) for engine in engines]
        self._runs: list[Run] = []
        self._lengths = Lengths()
        self._rests: set[asyncio.Task[None]] = set()

    # -- the Engine seam ---------------------------------------------------------------------------------------

    async def generate(
        self, requests: Sequence[PromptRequest], stop: asyncio.Event | None = None
    ) -> AsyncIterator[SampledGroup]:
        """Yield groups as they finish. Raises what an engine raises, and EngineFailed once every engine has given up.

        A sample that is its own request draws from a seed made of its group's, its place and the tokens it has.
        """
        run = Run(stop, self.version)
        for request in requests:
            starts = (*request.starts, *(None,) * (request.n - len(request.starts)))
            group = Group(run, request, list(starts), set(range(request.n)))
            run.groups.append(group)
            whole = [tuple(range(request.n))] if self.dispatch.by == "whole" else [(i,) for i in range(request.n)]
            group.units = [Unit(group, members) for members in whole]
            for unit in group.units:
                self._wait(run, unit)
        self._runs.append(run)
        watcher = asyncio.ensure_future(self._watch(run)) if stop is not None else None
        try:
            self._pump()
            for _ in requests:
                outcome = await run.ready.get()
                if isinstance(outcome, Exception):
                    raise outcome
                yield outcome
                run.ready.task_done()
        finally:
            self._runs.remove(run)
            if watcher is not None:
                watcher.cancel()
            for call in run.calls:
                call.cancel()
            await asyncio.gather(*run.calls, return_exceptions=True)  # their engines are closed when this returns
            self._pump()

    async def update_weights(self, version: int) -> None:
        """Have every engine sample from this version. One that fails rests, and gets it before it is used again."""
        self.version = version
        awake = [lane for lane in self._lanes if not lane.resting]
        outcomes = await asyncio.gather(
            *(lane.engine.update_weights(version) for lane in awake), return_exceptions=True
        )
        for lane, outcome in zip(awake, outcomes, strict=True):
            if isinstance(outcome, EngineFailed):
                self._rest(lane, outcome)
            elif isinstance(outcome, BaseException):
                raise outcome

    async def close(self) -> None:
        for rest in self._rests:
            rest.cancel()
        await asyncio.gather(*(lane.engine.close() for lane in self._lanes))

    # -- choosing ----------------------------------------------------------------------------------------------

    def _pump(self) -> None:
        """Send whatever there is room for; one call per run and engine."""
        sending: dict[tuple[int, int], tuple[Run, Lane, list[Unit]]] = {}
        while (choice := self._next()) is not None:
            run, unit, lane = choice
            unit.turn = None
            run.flying += 1
            unit.lane = lane
            lane.samples += len(unit.members)
            lane.tokens += self._reserve(unit)
            sending.setdefault((id(run), id(lane)), (run, lane, []))[2].append(unit)
        for run, lane, units in sending.values():
            call = asyncio.ensure_future(self._call(run, lane, units))
            run.calls.add(call)
            call.add_done_callback(run.calls.discard)
        for run in self._runs:
            if run.stopped and not run.flying and run.groups:
                for group in run.groups:
                    run.ready.put_nowait(group.outcome())
                run.groups, run.line = [], []

    def _next(self) -> tuple[Run, Unit, Lane] | None:
        if not any(map(self._has_room, self._lanes)):
            return None
        for run in self._runs:  # the older run first
            unit = None if run.stopped else run.first()
            lane = self._roomiest(unit) if unit is not None else None
            if unit is not None and lane is not None:
                return run, unit, lane
        return None

    def _wait(self, run: Run, unit: Unit) -> None:
        """Put a unit in line, or elsewhere in it."""
        unit.turn = run.turns
        run.turns += 1
        first = (False, 0.0, 0) if self.dispatch.by == "whole" else self._order(unit)
        heapq.heappush(run.line, (first, unit.turn, unit))

    def _order(self, unit: Unit) -> tuple[bool, float, int]:
        """The smaller the sooner: one sample of each group until it tells, then the longest by expectation.

        Among equals those under way go on, and finish: their keys and values may still be there, and siblings that
        finish are what the expectation is made of.
        """
        group, tokens = unit.group, unit.tokens
        budget = group.request.max_new_tokens
        if unit.members == (0,) and not group.finished:
            return False, -(tokens or self._lengths.of_family(group.request.key, budget)), -tokens
        return True, -max(of_group(group.finished, budget), tokens + 1), -tokens

    def _has_room(self, lane: Lane) -> bool:
        return not lane.resting and (not self.dispatch.concurrency or lane.samples < self.dispatch.concurrency)

    def _roomiest(self, unit: Unit) -> Lane | None:
        """The least loaded engine that has room; to leave the one it was on costs the unit its tokens."""
        most, memory = self.dispatch.concurrency, self.dispatch.kv_tokens
        need = self._reserve(unit)
        lanes = [
            lane
            for lane in self._lanes
            if self._has_room(lane)
            and (not most or not lane.samples or lane.samples + len(unit.members) <= most)
            and (not memory or not lane.samples or lane.tokens + need <= memory)
        ]
        return min(
            lanes,
            key=lambda lane: lane.tokens + (0 if lane is unit.lane else unit.tokens),
            default=None,
        )

    def _reserve(self, unit: Unit) -> int:
        """Tokens of keys and values that a unit will hold at most by the end of its chunk."""
        request = unit.group.request
        ends = (self._until(unit, i) for i in unit.members)
        return len(request.prompt_ids) + sum(ends)

    def _until(self, unit: Unit, member: int) -> int:
        """Answer tokens at which a sample comes back."""
        sample = unit.group.samples[member]
        budget = unit.group.request.max_new_tokens
        if self.dispatch.by != "divided":
            return budget
        return min(budget, (len(sample.token_ids) if sample else 0) + self.dispatch.chunk_tokens)

    # -- working -----------------------------------------------------------------------------------------------

    async def _call(self, run: Run, lane: Lane, units: list[Unit]) -> None:
        """Have an engine work on units, and put down what comes back."""
        flying = {self._key(unit): unit for unit in units}
        reserved = {key: self._reserve(unit) for key, unit in flying.items()}

        def landed(key: str) -> Unit:
            unit = flying.pop(key)
            run.flying -= 1
            lane.samples -= len(unit.members)
            lane.tokens -= reserved[key]
            return unit

        stop = run.stop
        try:
            async for group in lane.engine.generate([self._request(unit) for unit in units], stop):
                unit = landed(group.key)
                if self._put_down(unit, group.samples) or run.stopped:
                    lane.failures = 0
                else:
                    self._rest(lane, EngineFailed(f"it gave {group.key} back as it was; see its log"))
                self._pump()
                await run.ready.join()  # whoever stops because of this group does so before the engine goes on
            if flying:
                raise RuntimeError(f"engine {lane.engine.name} left {len(flying)} requests unanswered")
        except EngineFailed as failure:
            kept = {group.key: group.samples for group in failure.groups}
            for key in list(flying):
                self._put_down(landed(key), kept.get(key))
            self._rest(lane, failure)
            self._pump()
        except asyncio.CancelledError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever it is, it is raised to who asked for the samples
            run.ready.put_nowait(error)
        finally:
            for key in list(flying):
                landed(key)

    def _key(self, unit: Unit) -> str:
        key = unit.group.request.key
        return key if self.dispatch.by == "whole" else f"{key}#{unit.members[0]}"

    def _request(self, unit: Unit) -> PromptRequest:
        """What an engine is asked for. Samples with tokens come first, as their places are those of the starts."""
        request, samples = unit.group.request, unit.group.samples
        members = sorted(unit.members, key=lambda i: (samples[i] is None, i))
        unit.members = tuple(members)
        starts = tuple(sample for i in members if (sample := samples[i]) is not None)
        seed = request.seed
        if self.dispatch.by != "whole" or starts != request.starts:
            seed = derived_seed(seed, *members, *(len(start.token_ids) for start in starts))
        return replace(
            request,
            key=self._key(unit),
            n=len(members),
            max_new_tokens=max(self._until(unit, i) for i in members),
            seed=seed,
            starts=starts,
        )

    def _put_down(self, unit: Unit, samples: Sequence[Sample] | None) -> bool:
        """Keep what came back of a unit; what is unfinished waits again. Returns whether there was anything new."""
        group, run, before = unit.group, unit.group.run, unit.tokens
        budget = group.request.max_new_tokens
        for i, sample in zip(unit.members, samples, strict=True) if samples is not None else ():
            if sample.token_ids:
                group.samples[i] = sample
            if sample.finish == "stop" or len(sample.token_ids) >= budget:
                group.open.discard(i)
                group.finished.append(len(sample.token_ids))
                self._lengths.finished(group.request.key, len(sample.token_ids))
        gained = unit.tokens > before
        unit.members = tuple(i for i in unit.members if i in group.open)
        if unit.members:
            self._wait(run, unit)
        else:
            for sibling in group.units:  # their expectation has changed
                if sibling.turn is not None:
                    self._wait(run, sibling)
        if not group.open:
            run.groups.remove(group)
            run.ready.put_nowait(group.outcome())
        return gained

    # -- trouble -----------------------------------------------------------------------------------------------

    def _rest(self, lane: Lane, failure: EngineFailed) -> None:
        """Leave a failing engine alone for a while; give up once no engine is left that has not failed too often."""
        if lane.resting:
            return
        lane.failures += 1
        lane.resting = True
        if all(lane.failures >= FAILURES for lane in self._lanes):
            for run in self._runs:
                run.ready.put_nowait(failure)
        seconds = pause_after(lane.failures, FIRST_REST, LONGEST_REST)
        log.warning("engine %s failed and rests for %.0f s: %s", lane.engine.name, seconds, failure)
        rest = asyncio.ensure_future(self._wake(lane, seconds))
        self._rests.add(rest)
        rest.add_done_callback(self._rests.discard)
        self._pump()

    async def _wake(self, lane: Lane, seconds: float) -> None:
        """After a rest, have an engine well and with the weights it missed, and give it work; others work meanwhile."""
        await asyncio.sleep(seconds)
        known = None
        try:
            while known != self.version:
                known = self.version
                await lane.engine.update_weights(known)
        except EngineFailed as failure:
            lane.resting = False
            self._rest(lane, failure)
        except Exception as error:  # noqa: BLE001 - as in a call: it is raised to who waits for samples
            lane.resting = False
            for run in self._runs:
                run.ready.put_nowait(error)
        else:
            lane.resting = False
        self._pump()

    async def _watch(self, run: Run) -> None:
        """See to it that a stop reaches what is waiting; what is in flight sees it by itself."""
        assert run.stop is not None
        await run.stop.wait()
        self._pump()


def derived_seed(seed: int, *parts: int) -> int:
    """63-bit seed from another one and numbers that tell apart what is drawn with it."""
    digest = hashlib.sha256("/".join(map(str, (seed, *parts))).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
