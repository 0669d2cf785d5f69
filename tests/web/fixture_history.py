"""Step records of a long run, made by a formula with seeded noise, and their series."""

import math
from typing import Any

import numpy

NOISE = numpy.random.default_rng(11)
SHAPES: dict[str, tuple[float, float, float]] = {
    # name -> where it begins, where it ends, noise
    "loss": (0.02, 0.01, 0.02),
    "kl_behaviour": (0.001, 0.004, 0.001),
    "entropy": (2.1, 0.9, 0.06),
    "clip_fraction": (0.01, 0.04, 0.008),
    "ess": (0.98, 0.9, 0.02),
    "grad_norm": (0.9, 0.45, 0.12),
    "max_mismatch": (0.02, 0.03, 0.008),
    "completion_tokens": (21.0, 34.0, 2.0),
    "unparsed": (0.32, 0.04, 0.02),
    "tokens_per_second": (295.0, 320.0, 14.0),
    "seconds": (13.0, 12.5, 0.8),
}
TASKS = ("chain_sum", "letter_counting", "spell_backward", "word_sorting")


class History:
    """One array a column, a value a step."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        rise = 1 - numpy.exp(-numpy.arange(1, steps + 1) / max(1.0, steps / 4))
        self.columns = {
            name: start + (end - start) * rise + NOISE.normal(0, noise, steps)
            for name, (start, end, noise) in SHAPES.items()
        }
        self.reward = numpy.clip(0.19 + 0.36 * rise + NOISE.normal(0, 0.06, steps), 0, 1)
        self.columns["own_reward"] = self.reward - 0.01
        self.columns["foreign_reward"] = self.reward + 0.03 + NOISE.normal(0, 0.04, steps)
        self.columns["own_groups"] = numpy.full(steps, 4.0)
        self.columns["foreign_groups"] = numpy.minimum(4, numpy.floor(8 * rise + NOISE.random(steps)))
        self.columns["own_informative"] = self.columns["own_groups"] - NOISE.integers(0, 2, steps)
        self.columns["foreign_informative"] = self.columns["foreign_groups"]
        self.environments = {
            name: numpy.clip(0.1 + 0.1 * i + (0.5 - 0.08 * i) * rise + NOISE.normal(0, 0.08, steps), 0, 1)
            for i, name in enumerate(TASKS)
        }

    def add(self) -> None:
        """One step more, like the last."""
        self.steps += 1
        self.reward = numpy.append(self.reward, self.reward[-1])
        for table in (self.columns, self.environments):
            for name in table:
                table[name] = numpy.append(table[name], table[name][-1])

    def latest(self) -> dict[str, Any]:
        if not self.steps:
            return {"step": 0, "reward": None, "reward_start": None, "held_out": None, "held_out_start": None,
                    "held_out_best": None, "held_out_steps": None, "own_groups": 0, "foreign_groups": 0,
                    "tokens_per_second": 0.0}  # fmt: skip
        return {
            "step": self.steps, "reward": float(self.reward[-1]), "reward_start": float(self.reward[0]),
            "held_out": 0.52, "held_out_start": 0.17, "held_out_best": 0.53, "held_out_steps": [0, self.steps],
            "own_groups": 4, "foreign_groups": int(self.columns["foreign_groups"][-1]), "tokens_per_second": 312.4,
        }  # fmt: skip

    def rows(self, after: int, limit: int) -> list[dict[str, Any]]:
        """Records of steps > `after`, oldest first."""
        return [
            {
                "step": i + 1,
                "reward": float(self.reward[i]),
                **{name: float(column[i]) for name, column in self.columns.items()},
                "rewards": {name: float(rewards[i]) for name, rewards in self.environments.items()},
            }
            for i in range(after, min(after + limit, self.steps))
        ]

    def evaluations(self, first: int, last: int) -> list[tuple[int, float]]:
        """Held-out means of the steps from `first` to `last`: of the initial model, and some 25 more."""
        every = max(10, self.steps // 25)
        return [
            (step, round(0.17 + 0.35 * (1 - math.exp(-4 * step / self.steps)), 4))
            for step in range(0, self.steps + 1, every)
            if self.steps and first <= step <= last
        ]

    def series(self, points: int, first: int | None, last: int | None) -> dict[str, Any]:
        """As `web.view.NodeView.series` says."""
        begin, end = max(1, first or 1), min(self.steps, self.steps if last is None else last)
        width = max(1, -(-(end - begin + 1) // points))
        edges = numpy.arange(begin - 1, end, width)

        def reduced(column: Any, function: Any = numpy.add, mean: bool = True) -> list[float]:
            if begin > end:
                return []
            values = function.reduceat(column[:end], edges)
            counts = numpy.diff(numpy.append(edges, end))
            return [round(float(value), 5) for value in (values / counts if mean else values)]

        scored = self.evaluations(first or 0, end)
        means = [mean for _, mean in scored]
        return {
            "first": 1 if self.steps else None, "last": self.steps or None, "width": width,
            "step": [int(min(edge + width, end)) for edge in edges],
            "reward": reduced(self.reward),
            "reward_low": reduced(self.reward, numpy.minimum, mean=False),
            "reward_high": reduced(self.reward, numpy.maximum, mean=False),
            **{name: reduced(column) for name, column in self.columns.items()},
            "environments": {name: reduced(column) for name, column in self.environments.items()},
            "evaluations": {"step": [step for step, _ in scored], "mean": means, "scores": {"chain_sum": means}},
        }  # fmt: skip
