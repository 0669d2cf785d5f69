"""An engine that only takes time: for tests of the scheduler and `shoal bench scheduler`, on a virtual clock.

It batches continuously, first come first served, as vLLM does. A decode step of b sequences with T tokens of keys and
values takes max(step_seconds + T * kv_seconds, b * token_seconds): reading weights and cache, or the arithmetic, which
takes over at the knee. Prompts, and tokens whose keys and values are not here, are computed before the next step.

Keys and values of all running sequences share `kv_tokens`. A sequence joins if what it has fits; when the memory is
full the last one to join is put back to the head of the line without its keys and values. Those of sequences that left
(a chunk that ended, an abort) stay until the room is needed, and until the weights change. A prompt's are shared by
its samples.

Tokens are numbers without meaning, except that the first one is the sample's number in its group.
"""

import asyncio
import math
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from node.engines.partial import EngineFailed, continued
from node.interfaces import FinishReason, PromptRequest, Sample, SampledGroup

QUANTUM = 16
"""Most steps between two looks at a stop and at the weights."""


@dataclass(frozen=True, slots=True)
class EngineModel:
    """What one engine can do."""

    slots: int
    """Sequences that it decodes together at most."""
    kv_tokens: int
    step_seconds: float
    kv_seconds: float
    token_seconds: float
    prefill_seconds: float
    """Per token."""

    def step(self, sequences: float, kv: float) -> float:
        """Seconds of one decode step."""
        return max(self.step_seconds + kv * self.kv_seconds, sequences * self.token_seconds)


class Trace:
    """True lengths of the samples of every group, by request key; shared by all engines of a simulation."""

    def __init__(self, lengths: dict[str, Sequence[int]]) -> None:
        self.lengths = lengths
        self._begun: dict[str, int] = {}

    def begin(self, group: str) -> int:
        """The number of the group's next sample. Begun again from nothing, a group has the same lengths again."""
        number = self._begun.get(group, 0)
        self._begun[group] = number + 1
        return number % len(self.lengths[group])


@dataclass(slots=True)
class Meters:
    """What an engine has done so far."""

    tokens: int = 0
    """Sampled, also for nothing."""
    prefilled: int = 0
    preempted: int = 0
    finishes: list[float] = field(default_factory=list)
    """When samples ended for good."""
    full: float = 0.0
    """Integral over seconds of how full it was: of slots or of memory, whichever was scarcer."""


@dataclass(slots=True, eq=False)
class _Sequence:
    group: "_Group"
    at: int
    """Its place in the request."""
    number: int
    """Its number in the group; -1 until it begins."""
    tokens: int
    """It has, those of its start included."""
    start: Sample | None
    fresh: list[tuple[int, int]] = field(default_factory=list)
    """(version, tokens) sampled here."""
    end: int = 0
    reason: FinishReason = "length"


@dataclass(slots=True, eq=False)
class _Group:
    request: PromptRequest
    name: str
    stop: asyncio.Event | None
    ready: "asyncio.Queue[SampledGroup | EngineFailed]"
    samples: dict[int, Sample] = field(default_factory=dict)


class SimulatedEngine:
    """One engine of a simulation."""

    def __init__(self, name: str, model: EngineModel, trace: Trace) -> None:
        self.name, self.model, self.trace, self.version = name, model, trace, 0
        self.meters = Meters()
        self.broken: str | None = None
        """While set, it fails what it works on and what it is asked for; the message of the failure."""
        self._waiting: deque[_Sequence] = deque()
        self._running: list[_Sequence] = []
        self._prompts: Counter[str] = Counter()
        """Running samples of each group."""
        self._held = 0
        """Tokens of keys and values of all that runs, a prompt's once."""
        self._kept: OrderedDict[tuple[str, int], int] = OrderedDict()
        """Tokens whose keys and values are still here, of sequences that left; prompts as number -1."""
        self._arrived = asyncio.Event()
        self._work: asyncio.Task[None] | None = None

    async def generate(
        self, requests: Sequence[PromptRequest], stop: asyncio.Event | None = None
    ) -> AsyncIterator[SampledGroup]:
        ready: asyncio.Queue[SampledGroup | EngineFailed] = asyncio.Queue()
        groups = [_Group(request, request.key.partition("#")[0], stop, ready) for request in requests]
        for group in groups:
            starts = group.request.starts
            for at in range(group.request.n):
                start = starts[at] if at < len(starts) and starts[at].token_ids else None
                number = start.token_ids[0] if start else -1
                tokens = len(start.token_ids) if start else 0
                self._waiting.append(_Sequence(group, at, number, tokens, start))
        self._arrived.set()
        if self._work is None or self._work.done():
            self._work = asyncio.ensure_future(self._run())
        try:
            for _ in requests:
                outcome = await ready.get()
                if isinstance(outcome, EngineFailed):
                    raise outcome
                yield outcome
        finally:
            self._drop(groups)

    async def update_weights(self, version: int) -> None:
        if self.broken:
            raise EngineFailed(self.broken)
        self.version = version
        self._kept.clear()

    async def close(self) -> None:
        if self._work is not None:
            self._work.cancel()

    # -- time --------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        while self._waiting or self._running:
            if self.broken:
                self._fail(self.broken)
                return
            for sequence in [*self._running, *self._waiting]:
                if sequence.group.stop is not None and sequence.group.stop.is_set():
                    self._leave(sequence, "aborted")
            prefill = self._admit()
            if not self._running:
                continue
            # the last to join goes back until the others can make a step
            while len(self._running) > 1 and self._held + len(self._running) > self.model.kv_tokens:
                self._preempt()
            kv, count = self._held, len(self._running)
            steps = min(QUANTUM, min(sequence.end - sequence.tokens for sequence in self._running))
            if count > 1:
                steps = max(1, min(steps, (self.model.kv_tokens - kv) // count))
            seconds = prefill + steps * self.model.step(count, kv + count * (steps - 1) / 2)
            full = min(1.0, max(count / self.model.slots, kv / self.model.kv_tokens))
            version = self.version
            steps, seconds = await self._pass(steps, prefill, seconds)
            self.meters.full += full * seconds
            for sequence in list(self._running):
                sequence.tokens += steps
                self._held += steps
                if sequence.fresh and sequence.fresh[-1][0] == version:
                    sequence.fresh[-1] = (version, sequence.fresh[-1][1] + steps)
                else:
                    sequence.fresh.append((version, steps))
                self.meters.tokens += steps
                if sequence.tokens >= sequence.end:
                    self._leave(sequence, sequence.reason)

    async def _pass(self, steps: int, prefill: float, seconds: float) -> tuple[int, float]:
        """Let these seconds pass, or those until the end of the step in which something arrives that has a place here.

        Returns the steps made, and their seconds.
        """
        loop = asyncio.get_running_loop()
        began = loop.time()
        self._arrived.clear()
        try:
            async with asyncio.timeout(seconds):
                await self._arrived.wait()
                while len(self._running) >= self.model.slots:
                    self._arrived.clear()
                    await self._arrived.wait()
        except TimeoutError:
            return steps, seconds
        one = (seconds - prefill) / steps
        made = min(steps, max(1, math.ceil((loop.time() - began - prefill) / one)))
        await asyncio.sleep(max(0.0, began + prefill + made * one - loop.time()))
        return made, prefill + made * one

    def _admit(self) -> float:
        """Let sequences join while there is room; returns the seconds that computing what they have takes."""
        fresh = 0
        while self._waiting and len(self._running) < self.model.slots:
            sequence = self._waiting[0]
            group = sequence.group
            prompt = 0 if self._prompts[group.name] else len(group.request.prompt_ids)
            here = self._kept.get((group.name, sequence.number), 0) if sequence.number >= 0 else 0
            room = self.model.kv_tokens - len(self._running)
            if self._running and self._held + prompt + sequence.tokens > room:
                break
            self._waiting.popleft()
            if sequence.number < 0:
                sequence.number = self.trace.begin(group.name)
            length = self.trace.lengths[group.name][sequence.number]
            sequence.end = min(length, group.request.max_new_tokens)
            sequence.reason = "stop" if length <= group.request.max_new_tokens else "length"
            self._kept.pop((group.name, sequence.number), None)
            if prompt and self._kept.pop((group.name, -1), None) is None:
                fresh += prompt
            fresh += sequence.tokens - here
            self._join(sequence)
        kept = sum(self._kept.values())
        while self._kept and self._held + kept > self.model.kv_tokens:
            kept -= self._kept.popitem(last=False)[1]
        self.meters.prefilled += fresh
        return fresh * self.model.prefill_seconds

    def _join(self, sequence: _Sequence) -> None:
        name = sequence.group.name
        self._held += sequence.tokens + (0 if self._prompts[name] else len(sequence.group.request.prompt_ids))
        self._prompts[name] += 1
        self._running.append(sequence)

    def _part(self, sequence: _Sequence) -> None:
        """Take a sequence out of what runs, and its keys and values."""
        name = sequence.group.name
        self._running.remove(sequence)
        self._prompts[name] -= 1
        self._held -= sequence.tokens
        if not self._prompts[name]:
            del self._prompts[name]
            self._held -= len(sequence.group.request.prompt_ids)

    def _preempt(self) -> None:
        """Put the last to join back to the head of the line."""
        sequence = self._running[-1]
        self._part(sequence)
        self._waiting.appendleft(sequence)
        self.meters.preempted += 1

    # -- ends --------------------------------------------------------------------------------------------------

    def _leave(self, sequence: _Sequence, reason: FinishReason) -> None:
        """A sequence is done here; the last one of its request completes the group."""
        group = sequence.group
        if sequence in self._running:
            self._part(sequence)
            if reason == "stop":
                self.meters.finishes.append(asyncio.get_running_loop().time())
            else:
                self._kept[group.name, sequence.number] = sequence.tokens
            self._kept[group.name, -1] = len(group.request.prompt_ids)
        else:
            self._waiting.remove(sequence)
        group.samples[sequence.at] = self._sample(sequence, reason)
        if len(group.samples) == group.request.n:
            samples = tuple(group.samples[at] for at in range(group.request.n))
            group.ready.put_nowait(SampledGroup(group.request.key, samples))

    def _sample(self, sequence: _Sequence, reason: FinishReason) -> Sample:
        had = len(sequence.start.token_ids) if sequence.start else 0
        fresh = sequence.tokens - had
        ids = (0,) * fresh if had else (sequence.number, *(0,) * (fresh - 1))[:fresh]
        return continued(sequence.start, ids, (-1.0,) * fresh, reason, self.version, spans=sequence.fresh)

    def _drop(self, groups: Sequence[_Group]) -> None:
        """Forget what is left of a call."""
        for sequence in [sequence for sequence in self._running if sequence.group in groups]:
            self._part(sequence)
        self._waiting = deque(sequence for sequence in self._waiting if sequence.group not in groups)

    def _fail(self, message: str) -> None:
        """Lose everything; what it has sampled is told, as a server does that streams."""
        calls: dict[int, list[_Group]] = {}
        for sequence in [*self._running, *self._waiting]:
            group = sequence.group
            group.samples[sequence.at] = self._sample(sequence, "aborted")
            of_call = calls.setdefault(id(group.ready), [])
            if group not in of_call:
                of_call.append(group)
        self._running, self._waiting = [], deque()
        self._prompts.clear()
        self._held = 0
        self._kept.clear()
        for groups in calls.values():
            told = [
                SampledGroup(group.request.key, tuple(group.samples[at] for at in range(group.request.n)))
                for group in groups
            ]
            groups[0].ready.put_nowait(EngineFailed(message, told))
