"""What the scheduler keeps book of: groups, the units they are sent in, engines, and calls of `generate`."""

import asyncio
import heapq
from dataclasses import dataclass, field, replace

from node.interfaces import Engine, PromptRequest, Sample, SampledGroup


@dataclass(slots=True, eq=False)
class Group:
    """A request and what there is of its samples."""

    run: "Run"
    request: PromptRequest
    samples: list[Sample | None]
    open: set[int]
    """Samples that are not finished."""
    finished: list[int] = field(default_factory=list)
    """Lengths of the others."""
    units: "list[Unit]" = field(default_factory=list)

    def outcome(self) -> SampledGroup:
        """All samples as they are now; unfinished ones are aborted."""
        empty = Sample((), (), "aborted", self.run.version)
        samples = (sample or empty for sample in self.samples)
        return SampledGroup(
            self.request.key,
            tuple(replace(s, finish="aborted") if i in self.open else s for i, s in enumerate(samples)),
        )


@dataclass(slots=True, eq=False)
class Unit:
    """Samples of one group that are sent together."""

    group: Group
    members: tuple[int, ...]
    lane: "Lane | None" = None
    """Where it was last: the keys and values of its tokens may be there still."""
    turn: int | None = None
    """While it waits: which of its entries in the line counts."""

    @property
    def tokens(self) -> int:
        """Tokens it has already, of all its samples."""
        return sum(len(sample.token_ids) for i in self.members if (sample := self.group.samples[i]) is not None)


@dataclass(slots=True, eq=False)
class Lane:
    """One engine."""

    engine: Engine
    samples: int = 0
    """In flight."""
    tokens: int = 0
    """Keys and values reserved for what is in flight."""
    failures: int = 0
    """In a row."""
    resting: bool = False


@dataclass(slots=True, eq=False)
class Run:
    """One call of `generate`."""

    stop: asyncio.Event | None
    version: int
    groups: list[Group] = field(default_factory=list)
    line: list[tuple[tuple[bool, float, int], int, Unit]] = field(default_factory=list)
    """Heap of (what goes first, turn, unit); entries of units that wait no longer, or otherwise, stay until met."""
    turns: int = 0
    flying: int = 0
    """Units in flight."""
    ready: "asyncio.Queue[SampledGroup | Exception]" = field(default_factory=asyncio.Queue)
    """Holds at most one entry a group and one exception."""
    calls: set["asyncio.Task[None]"] = field(default_factory=set)

    @property
    def stopped(self) -> bool:
        return self.stop is not None and self.stop.is_set()

    def first(self) -> Unit | None:
        """Who is next in line."""
        while self.line and self.line[0][2].turn != self.line[0][1]:
            heapq.heappop(self.line)
        return self.line[0][2] if self.line else None
