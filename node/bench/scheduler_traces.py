"""Lengths of answers for `shoal bench scheduler`: long-tailed synthetic ones, and recorded ones."""

import json
import math
import random
from dataclasses import dataclass
from pathlib import Path

GROUP_SIZE = 8
SCALE = 64
"""Real tokens that one simulated token stands for."""
RECORDED = Path(__file__).with_name("lengths.json")


@dataclass(frozen=True, slots=True)
class Workload:
    """Lengths of groups, in simulated tokens."""

    name: str
    groups: tuple[tuple[int, ...], ...]
    budget: int


def lognormal(name: str, groups: int, *, median: int, cap: int, seed: int) -> Workload:
    """Lengths in real tokens `median * exp(spread)`, cut at `cap`.

    The spread is normal, most of it the group's (SIGMA_TASK), the rest each sample's (SIGMA_SAMPLE): answers to one
    task are alike in length, as Seer (arXiv 2511.14617) measured.
    """
    draw = random.Random(seed)
    made = []
    for _ in range(groups):
        of_task = median * math.exp(draw.gauss(0.0, SIGMA_TASK))
        lengths = (of_task * math.exp(draw.gauss(0.0, SIGMA_SAMPLE)) for _ in range(GROUP_SIZE))
        made.append(tuple(max(1, round(min(cap, length) / SCALE)) for length in lengths))
    return Workload(name, tuple(made), cap // SCALE)


SIGMA_TASK, SIGMA_SAMPLE = 0.8, 0.4
"""Together a lognormal with sigma 0.9: its longest tenth holds 33% of the tokens."""


def recorded(name: str, groups: int, *, cap: int, seed: int) -> Workload:
    """The recorded groups in random order, over and over, stretched so that the longest possible answer has `cap`."""
    content = json.loads(RECORDED.read_text())
    stretch = cap / content["max_new_tokens"] / SCALE
    whole = [tuple(max(1, round(length * stretch)) for length in lengths) for lengths in content["lengths"]]
    draw = random.Random(seed)
    made: list[tuple[int, ...]] = []
    while len(made) < groups:
        made += draw.sample(whole, len(whole))
    return Workload(name, tuple(made[:groups]), cap // SCALE)
