"""Data rules: which rollouts an update is made of, and what their rewards and masks become on the way.

Own tasks stay those that (manifest, epoch, peer) assign: a rule may pass a task over, never pick another.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

PASS_RATE_MOVES = 0.2
"""How far the running pass rate of an environment goes towards that of its next group."""
INFORMATIVE_MOVES = 0.2
"""How far the running share of informative groups goes towards that of a step."""
REVISIT_EVERY = 8
"""One task in so many is taken whatever its environment's pass rate, or a rate that has left the window stays there."""
SCORE_FALLS = 0.02
"""A held-out score this much below the best one has fallen; less is chance."""
DECLINE_ERRORS, DECLINES = 3.0, 2
"""A model has declined when so many held-out scores in a row are so many standard errors below the best one."""
SAME_REWARDS_ALARM = 20
"""Steps in a row in which all own rewards were one and the same number, after which a person should look."""


def overlong_penalty(length: int, limit: int, buffer: int, factor: float) -> float:
    """min(-(L - (Lmax - B)) / B f, 0): what is taken off for the last B of Lmax tokens (DAPO, arXiv 2503.14476).

    0 without a buffer; a buffer longer than the limit counts as the limit.
    """
    buffer = min(buffer, limit)
    return min(-(length - (limit - buffer)) / buffer * factor, 0.0) if buffer else 0.0


class Curriculum:
    """Passes over tasks of environments that are too easy or too hard now, by their running pass rates.

    The pass rate of an environment is the mean reward of its own groups, moved by PASS_RATE_MOVES a group. It is in
    the window when low <= rate <= high; not yet known counts as in, and so does everything when nothing else is.
    """

    def __init__(self, low: float, high: float) -> None:
        self.low, self.high = low, high
        self.rates: dict[str, float] = {}

    def observe(self, environment: str, rewards: Sequence[float]) -> None:
        rate = sum(rewards) / len(rewards)
        before = self.rates.setdefault(environment, rate)
        self.rates[environment] = before + PASS_RATE_MOVES * (rate - before)

    def outside(self, environments: Sequence[str]) -> frozenset[str]:
        """Those whose tasks are to be passed over; empty when that would be all."""
        out = frozenset(name for name in environments if not self.low <= self.rates.get(name, self.low) <= self.high)
        return frozenset() if out == frozenset(environments) else out

    def state(self) -> dict[str, float]:
        return dict(self.rates)

    def restore(self, state: Mapping[str, float]) -> None:
        self.rates = dict(state)


class InformativeShare:
    """How many of the own groups teach something, lately: for a round of dynamic sampling that mostly finds enough."""

    def __init__(self) -> None:
        self.now = 1.0

    def see(self, informative: int, sampled: int) -> None:
        """A step sampled so many groups, so many of which have different rewards."""
        if sampled:
            self.now += INFORMATIVE_MOVES * (informative / sampled - self.now)

    def groups_for(self, missing: int, most: int) -> int:
        """How many groups to sample for `missing` informative ones; at most `most`."""
        return min(most, math.ceil(missing / max(self.now, missing / most)))


class ForeignShare:
    """J, foreign groups an update: halved, down to 0, when the held-out score has fallen, and one more when it has not.

    The SAPO paper's larger shares oscillate, because weak nodes' answers pull strong ones down (arXiv 2509.08721).
    """

    def __init__(self, most: int) -> None:
        self.most = self.now = most
        self._best: float | None = None

    def limit(self, most: int) -> None:
        """J is at most another number from now on."""
        self.most, self.now = most, min(most, self.now)

    def judge(self, score: float) -> None:
        """A held-out score was taken."""
        fallen = self._best is not None and score < self._best - SCORE_FALLS
        self.now = self.now // 2 if fallen else min(self.most, self.now + 1)
        self._best = score if self._best is None else max(self._best, score)

    def state(self) -> dict[str, Any]:
        return {"now": self.now, "best": self._best}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.now, self._best = min(self.most, state["now"]), state["best"]


def is_below(best: float, score: float, answers: int) -> bool:
    """Whether a mean of so many rewards in [0, 1] is below the best one by more than chance: DECLINE_ERRORS standard
    errors of the difference, as if rewards were 0 or 1, which is the most that they can vary."""
    error = math.sqrt((best * (1 - best) + score * (1 - score)) / answers)
    return best - score > DECLINE_ERRORS * error


class SameRewards:
    """Counts steps in a row whose own rewards were all one number: nothing is learned, and something may be broken."""

    def __init__(self) -> None:
        self.steps = 0
        self._reward: float | None = None

    def see(self, rewards: Sequence[float]) -> str | None:
        """What to tell a person now, if anything: at the SAME_REWARDS_ALARM-th such step, and each as many after."""
        found = set(rewards)
        only = found.pop() if len(found) == 1 else None
        self.steps = 0 if only is None else self.steps + 1 if only == self._reward else 1
        self._reward = only
        if only is None or self.steps % SAME_REWARDS_ALARM:
            return None
        return (
            f"every own answer of the last {self.steps} steps got the reward {only:g}; if that is 0, the tasks are too "
            "hard or the answers cannot be read (see `unparsed` in shoal steps), if it is 1, they are too easy: "
            "choose other environments"
        )
