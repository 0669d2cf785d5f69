"""How long an answer will be, judged by answers to the same task and to the same environment.

Siblings are alike in length (Seer, arXiv 2511.14617): the first to finish tells which groups will be the long ones.
"""

from collections import OrderedDict
from collections.abc import Sequence

FAMILIES = 256
"""Environments remembered; the one not seen for longest is forgotten."""
MEMORY = 0.98
"""What one more answer leaves of an environment's running mean."""


def family_of(key: str) -> str:
    """What a request's key says before its last '/': the environment of its task, or nothing."""
    return key.rpartition("/")[0]


class Lengths:
    """Running mean length of the answers of each environment."""

    def __init__(self) -> None:
        self._means: OrderedDict[str, float] = OrderedDict()

    def finished(self, key: str, tokens: int) -> None:
        family = family_of(key)
        mean = self._means.pop(family, None)
        self._means[family] = tokens if mean is None else MEMORY * mean + (1 - MEMORY) * tokens
        if len(self._means) > FAMILIES:
            self._means.popitem(last=False)

    def of_family(self, key: str, budget: int) -> float:
        """Expected tokens of an answer to a task of this environment; the budget where none has finished yet."""
        return min(budget, self._means.get(family_of(key), budget))


def of_group(siblings: Sequence[int], budget: int) -> int:
    """Tokens to reckon with for an answer whose finished siblings had these lengths: the longest of them.

    The budget where none has finished: a group is taken for long until it is known to be short, so that a long one is
    never begun late.
    """
    return max(siblings, default=budget)
