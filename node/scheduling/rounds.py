"""From engine calls to the groups of a step: which tasks are begun, waited for, kept and gone on with.

- `synchronous`: a step begins what it needs and waits for all of it. On-policy.
- `partial`: it begins more than it needs and takes the first to finish; the others keep their tokens and go on under
  the next weights, at most `max_staleness` versions later (APRIL, arXiv 2509.18521).
- `tail`: the same, but the others' tokens are given up. Once there are enough of those tasks, they get a step of their
  own, which waits for all of it (RollPacker, arXiv 2509.21009; prompts only: to over-provision the answers of one
  prompt too would favour short ones). On-policy.
- `asynchronous`: a step takes the first to finish of what is always in flight, also while the trainer works; at most
  `max_staleness` versions behind.

Every token keeps the log-probability and the version it was sampled with. What is begun and not taken is part of the
node's state: a restart goes on with it.
"""

import asyncio
import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import msgspec

from node.engines.partial import spans_of
from node.interfaces import Engine, PromptRequest, Sample, SampledGroup
from node.scheduler import derived_seed
from node.scheduling.window import Candidate, choose
from protocol.rollout import TaskRef

Policy = Literal["synchronous", "partial", "tail", "asynchronous"]


@dataclass(frozen=True, slots=True)
class Plan:
    """How the groups of a step come about."""

    policy: Policy = "synchronous"
    over_provision: float = 1.5
    """Groups in flight for each that a step needs; not used by `synchronous`."""
    max_staleness: int = 1
    """Versions that the oldest token trained on may be behind (`partial`, `asynchronous`)."""
    window: int = 0
    """Groups that may overtake the oldest unfinished one; 0: as many as staleness allows."""

    @property
    def staleness(self) -> int:
        return self.max_staleness if self.policy in {"partial", "asynchronous"} else 0


class Begun(msgspec.Struct, array_like=True, eq=False):
    """One task that was begun, and what there is of its samples."""

    ref: TaskRef
    epoch: int
    """In which the task is this node's to practise."""
    seed: int
    place: int = 0
    """Its number in the order in which tasks were begun."""
    samples: tuple[Sample, ...] = ()
    """All of them, finished or not; empty while no token is known."""
    finished: int | None = None
    """Its number in the order in which groups were finished."""
    long: bool = False
    """Left over from a short round (`tail`)."""
    prompt_ids: tuple[int, ...] = ()
    """Empty until it was sent to an engine."""
    budget: int = 0
    """Tokens that a sample may have; 0 until then."""
    since: int | None = None
    """Version that it was sent to the engine with, while it is in flight (`asynchronous`)."""

    @property
    def open(self) -> list[int]:
        """Samples that are not finished; those with tokens first, as an engine wants its starts."""
        unfinished = [i for i, sample in enumerate(self.samples) if sample.finish == "aborted"]
        return sorted(unfinished, key=lambda i: not self.samples[i].token_ids)

    @property
    def tokens(self) -> int:
        return sum(len(sample.token_ids) for sample in self.samples)

    @property
    def oldest(self) -> int | None:
        """Version of its oldest token, also of those in flight."""
        known = [version for sample in self.samples for version, _ in spans_of(sample)]
        return min(known if self.since is None else [*known, self.since], default=None)

    def forget(self) -> int:
        """Begin anew; returns the tokens given up."""
        given_up = self.tokens
        self.samples, self.finished = (), None
        return given_up


class Rounds:
    """The begun groups of a node. Used from one asyncio loop; `engine` is normally a Scheduler."""

    def __init__(
        self, engine: Engine, plan: Plan, prepare: Callable[[Sequence[Begun]], Awaitable[Sequence[PromptRequest]]]
    ) -> None:
        """`prepare` makes the request for all samples of each group, in order, with `place` in its key."""
        self.engine, self.plan, self.prepare = engine, plan, prepare
        self.begun: list[Begun] = []
        self.given_up = 0
        """Tokens sampled for nothing so far: too stale, or left over from a short round."""
        self._places = 0
        self._finished = 0
        self._flights: set[asyncio.Task[None]] = set()
        self._landed = asyncio.Event()
        self._trouble: Exception | None = None

    # -- beginning ---------------------------------------------------------------------------------------------

    def missing(self, count: int, *, ahead: bool = False, long: bool = True) -> int:
        """How many new tasks to begin for a step of `count` groups; `ahead`: to be sampled while it is trained.

        `long`: as in `take`.
        """
        plan = self.plan
        if plan.policy == "synchronous":
            return max(0, count - len(self.begun))
        provision = math.ceil(count * plan.over_provision)
        if plan.policy == "tail":
            if long and self._enough_long(count):
                return 0
            return max(0, provision - sum(not one.long for one in self.begun))
        # never more than can all be taken before they are too stale: what is sent ahead misses this version's step
        return max(0, min(provision, count * (plan.staleness + (not ahead))) - len(self.begun))

    def begin(self, tasks: Sequence[Begun]) -> None:
        for task in tasks:
            task.place = self._places
            self._places += 1
            self.begun.append(task)

    def _enough_long(self, count: int) -> bool:
        return sum(one.long for one in self.begun) >= count

    # -- taking ------------------------------------------------------------------------------------------------

    async def take(self, count: int, *, long: bool = True) -> list[Begun]:
        """The finished groups of a step, in the order they were begun; they are begun no longer.

        `long`: they may be the long ones (`tail`). A step's further rounds, which ask for few, leave these alone.

        The policy about to be trained is the engine's version. Raises what `prepare` and the engine raise; whatever
        fails or is cancelled leaves what was begun in place.
        """
        self._give_up_stale()
        if self.plan.policy == "asynchronous":
            chosen = await self._land(count)
        else:
            chosen = await self._work(self._working(count, long), count)
        self.begun = [one for one in self.begun if one not in chosen]
        return chosen

    def put_back(self, taken: Sequence[Begun]) -> None:
        """Of no use yet after all: they are the first for the next step."""
        self.begun = [*taken, *self.begun]

    def forget_unsent(self) -> None:
        """Leave the tasks that no engine works on or has sampled for."""
        self.begun = [one for one in self.begun if one.samples or one.since is not None]

    async def ahead(self) -> None:
        """Send off what is begun, so that it is sampled while the trainer works (`asynchronous`, else nothing)."""
        if self.plan.policy == "asynchronous":
            await self._launch()

    def _working(self, count: int, long: bool) -> list[Begun]:
        """What this step works on."""
        if self.plan.policy == "synchronous":
            return self.begun[:count]
        if self.plan.policy == "tail":
            long_round = long and self._enough_long(count)
            working = [one for one in self.begun if one.long == long_round]
            return working[:count] if long_round else working
        return list(self.begun)

    async def _work(self, working: Sequence[Begun], count: int) -> list[Begun]:
        """Have the engine work until the groups of a step are finished; keep what it has of the others."""
        chosen = self._choose(working, count)
        unfinished = [one for one in working if one.finished is None]
        if chosen is None:
            stop = asyncio.Event()
            async with aclosing(self._sampled(unfinished, await self.prepare(unfinished), stop)) as groups:
                async for _ in groups:
                    if len(working) > count and self._choose(working, count) is not None:
                        stop.set()
            chosen = self._choose(working, count)
        if chosen is None:
            raise RuntimeError(f"{len(working)} groups were begun, but {count} of them did not finish")
        if self.plan.policy == "tail":
            for one in working:
                if one not in chosen:
                    one.long = one.finished is None
                    self.given_up += one.forget()
        return chosen

    async def _land(self, count: int) -> list[Begun]:
        """Wait for enough of what is in flight."""
        while True:
            self._landed.clear()
            self._give_up_stale()
            await self._launch()
            if (chosen := self._choose(self.begun, count)) is not None:
                return chosen
            if self._trouble is not None:
                trouble, self._trouble = self._trouble, None
                raise trouble
            if not self._flights:
                raise RuntimeError(f"{len(self.begun)} groups were begun, but {count} of them did not finish")
            await self._landed.wait()

    async def _launch(self) -> None:
        ready = [one for one in self.begun if one.finished is None and one.since is None]
        if not ready or self._trouble is not None:
            return
        requests = await self.prepare(ready)
        for one in ready:
            one.since = self.engine.version
        flight = asyncio.ensure_future(self._fly(ready, requests))
        self._flights.add(flight)
        flight.add_done_callback(self._flights.discard)

    async def _fly(self, tasks: Sequence[Begun], requests: Sequence[PromptRequest]) -> None:
        left = list(tasks)  # those that landed may be in another flight by now
        try:
            async with aclosing(self._sampled(tasks, requests, None)) as groups:
                async for one in groups:
                    left.remove(one)
                    self._landed.set()
        except Exception as trouble:  # noqa: BLE001 - raised to whoever waits for the groups
            self._trouble = trouble
        finally:
            for one in left:
                one.since = None
            self._landed.set()

    async def close(self) -> None:
        """Leave what is in flight."""
        for flight in self._flights:
            flight.cancel()
        await asyncio.gather(*self._flights, return_exceptions=True)

    # -- samples -----------------------------------------------------------------------------------------------

    async def _sampled(
        self, tasks: Sequence[Begun], whole: Sequence[PromptRequest], stop: asyncio.Event | None
    ) -> AsyncGenerator[Begun, None]:
        """Tasks as the engine is done with them; those with tokens go on, the others begin."""
        keyed: dict[str, tuple[Begun, list[int]]] = {}
        requests = []
        for one, request in zip(tasks, whole, strict=True):
            one.prompt_ids, one.budget = request.prompt_ids, request.max_new_tokens
            keyed[request.key] = one, one.open
            requests.append(_rest_of(request, one) if one.samples else request)
        groups = cast(AsyncGenerator[SampledGroup, None], self.engine.generate(requests, stop))
        async with aclosing(groups):
            async for group in groups:
                one, members = keyed[group.key]
                samples = dict(enumerate(one.samples))
                samples.update(zip(members or range(len(group.samples)), group.samples, strict=True))
                one.samples = tuple(samples[i] for i in range(len(samples)))
                one.since = None
                if not one.tokens:
                    one.samples = ()
                elif not one.open:
                    one.finished = self._finished
                    self._finished += 1
                yield one

    def _choose(self, working: Sequence[Begun], count: int) -> list[Begun] | None:
        candidates = [Candidate(one.place, one.finished, one.oldest) for one in working]
        bounds = {"max_staleness": self.plan.staleness, "window": self.plan.window}
        places = choose(candidates, count, version=self.engine.version, **bounds)
        return None if places is None else [one for one in working if one.place in places]

    def _give_up_stale(self) -> None:
        """Begin anew what could only be trained on too late: after a change of settings, or of a step's size."""
        for one in self.begun:
            if one.since is None and one.samples and self.engine.version - (one.oldest or 0) > self.plan.staleness:
                self.given_up += one.forget()

    # -- restarts ----------------------------------------------------------------------------------------------

    def state(self) -> list[Any]:
        """What is begun and not taken, as JSON values, with every token that is known of it."""
        saved = [msgspec.structs.replace(one, since=None) for one in self.begun]
        return cast(list[Any], msgspec.to_builtins(saved))

    def restore(self, state: Sequence[Any]) -> None:
        """Inverse of `state`; nothing may be in flight."""
        self.begun = msgspec.convert(state, list[Begun])
        self._places = 1 + max((one.place for one in self.begun), default=-1)
        self._finished = 1 + max((one.finished or 0 for one in self.begun), default=-1)


def _rest_of(request: PromptRequest, one: Begun) -> PromptRequest:
    """A request for a group's unfinished samples only, with other draws than it was begun with."""
    starts = tuple(one.samples[i] for i in one.open if one.samples[i].token_ids)
    seed = derived_seed(request.seed, *one.open, *(len(start.token_ids) for start in starts))
    return replace(request, n=len(one.open), starts=starts, seed=seed)
