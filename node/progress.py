"""Where the node is right now, in words a person can act on: state, reason, next action, stage and since when."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Literal

from node.limits import Hold

log = logging.getLogger(__name__)

State = Literal["STARTING", "RESUMING", "TRAINING", "WAITING", "PAUSED", "IDLE", "STOPPING", "FAILED"]


class StageTimeout(Exception):
    """A stage of the step ran past its deadline; the message names the stage and the seconds."""


def innermost(error: BaseException) -> BaseException:
    """What broke first, out of the groups that tasks wrap it in."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


@dataclass(slots=True)
class Progress:
    """Mutable on the asyncio thread only. `stages` holds the seconds of each stage of the current step."""

    clock: Callable[[], float]
    deadline: float
    """Seconds one stage may take."""
    state: State = "STARTING"
    reason: str = ""
    next: str = ""
    stage: str = "start"
    since: float = 0.0
    count: tuple[int, int] | None = None
    """How many parts of the stage are done, and of how many, where it is made of parts."""
    hold: Hold | None = None
    """Why, while the node is paused or about to be."""
    last_step_at: float | None = None
    resumed_at: float | None = None
    """When the last pause ended."""
    memory: Mapping[str, int] = field(default_factory=dict)
    """Bytes of the trainer by kind, as of the last update."""
    stages: dict[str, float] = field(default_factory=dict)
    _anew: Callable[[], tuple[str, str]] | None = None

    def say(
        self, state: State, reason: str = "", next: str = "", *, anew: Callable[[], tuple[str, str]] | None = None
    ) -> None:
        """`anew`: says reason and next action as they are when somebody asks, where they change meanwhile."""
        if (state, reason) != (
            self.state,
            self.reason,
        ) and state != "FAILED":  # the daemon logs that with its traceback
            log.info("%s  %s", state, "; ".join(filter(None, (reason, next))))
        self.state, self.reason, self.next, self._anew = state, reason, next, anew

    def fail(self, error: BaseException) -> str:
        """Say what ended the node, with what to do as the next action; returns all of it as one text."""
        error = innermost(error)
        words = f"{type(error).__name__}: {error}"
        what, _, fix = words.partition(" ; ")
        self.say("FAILED", what, fix or "read the log: shoal logs")
        return words

    def told(self) -> tuple[State, str, str]:
        """State, reason and next action for a person: a pause covers the words of what it holds up."""
        if self.hold is None or self.state in {"IDLE", "STOPPING", "FAILED"}:
            return self.state, *(self._anew() if self._anew else (self.reason, self.next))
        begun = "after the step in progress" if self.state not in {"STARTING", "RESUMING"} else "once it has started"
        yet = "" if self.stage == "paused" else f" ({begun})"
        return "PAUSED", f"{self.hold.reason}{yet}", self.hold.next

    def step_age(self, now: float) -> float | None:
        """Seconds since the last step, not counting a pause that ended after it; None before the first one."""
        moments = [moment for moment in (self.last_step_at, self.resumed_at) if moment is not None]
        return now - max(moments) if moments else None

    def enter(self, stage: str) -> None:
        """What is going on outside the timed stages, such as waiting to be resumed."""
        self.stage, self.since = stage, self.clock()

    @asynccontextmanager
    async def during(self, stage: str) -> AsyncIterator[None]:
        """Name the stage, time it, and raise StageTimeout when it outlives its deadline."""
        outer, outer_since, outer_count = self.stage, self.since, self.count
        self.stage, self.since, self.count = stage, self.clock(), None
        try:
            async with asyncio.timeout(self.deadline) as limit:
                yield
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise StageTimeout(
                f"stage '{stage}' took longer than {self.deadline:.0f} s (limits.stage_seconds); "
                "raise the limit or lower rollout.max_new_tokens"
            ) from error
        finally:
            self.stages[stage] = self.stages.get(stage, 0.0) + self.clock() - self.since
            self.stage, self.since, self.count = outer, outer_since, outer_count
