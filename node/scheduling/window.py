"""Which of the begun groups make up a step: bounded staleness, a window over the order they were begun in."""

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Candidate:
    """A begun group as the choice sees it."""

    place: int
    """Its number in the order in which groups were begun."""
    finished: int | None
    """Its number in the order in which groups were finished, None while it is not."""
    oldest: int | None
    """Version that sampled its oldest token, None where there is no token yet."""


def choose(
    candidates: Sequence[Candidate], count: int, *, version: int, max_staleness: int, window: int
) -> list[int] | None:
    """Places of the `count` groups to train on now, in the order they were begun; None: wait for more to finish.

    `version` is the policy about to be trained. Taken are the first to finish, so that nothing waits for a long answer,
    as far as two bounds allow it:

    - No group is left over that would be too stale later: of those that may wait at most j more steps, no more than
      `count * j` are left (earliest deadline first: what is left can then all be taken in time).
    - Windowed FIFO: only groups fewer than `window` places after the oldest unfinished one (0: any), so that short
      answers cannot overtake long ones for ever, which would shift what is trained on towards them.

    Groups that are too stale already must have been restarted by the caller.
    """
    ordered = sorted(candidates, key=lambda one: one.place)
    oldest = next((one.place for one in ordered if one.finished is None), math.inf)
    eligible = [one for one in ordered if one.finished is not None and (not window or one.place < oldest + window)]
    finished = sorted(eligible, key=lambda one: one.finished or 0)
    chosen: set[int] = set()
    for steps in range(max_staleness + 1):
        due = {one.place for one in ordered if one.oldest is not None and one.oldest + max_staleness <= version + steps}
        lacking = min(len(due) - count * steps - len(due & chosen), count - len(chosen))
        ready = [one.place for one in finished if one.place in due - chosen]
        if lacking > len(ready):
            return None
        chosen.update(ready[: max(0, lacking)])
    chosen.update([one.place for one in finished if one.place not in chosen][: count - len(chosen)])
    return sorted(chosen) if len(chosen) == count else None
