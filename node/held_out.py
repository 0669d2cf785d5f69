"""Held-out scores of the policy as it trains, made up for where one failed, and the weights that had the best one."""

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from node.checkpoint import CheckpointError
from node.evaluate import held_out
from node.interfaces import TrainerLost
from node.scorer import ScorerError
from node.selection import DECLINES, is_below
from swarm.experience import StoreError

if TYPE_CHECKING:
    from node.parts import Parts

log = logging.getLogger(__name__)

RETRIES = 3
"""Step boundaries at which a failed evaluation is tried again before it waits for its next turn."""


class Evaluations:
    """Takes held-out scores between steps. `judge` is told every mean."""

    def __init__(self, parts: "Parts", judge: Callable[[float], None]) -> None:
        self.parts, self._judge = parts, judge
        self._failed = 0
        """How often in a row."""
        self._below = 0
        """Scores in a row that are far below that of the best weights."""

    @property
    def declined(self) -> bool:
        """Whether the policy has become so much worse that it is to go back to its best weights."""
        return self._below >= DECLINES and self.parts.config.eval.roll_back

    async def take_anew(self) -> None:
        """Score the policy after it went back, whatever came before."""
        self._below = 0
        await self.take()
        self._below = 0  # best scores are lucky ones: this one may be far below that, and is what can be had

    @property
    def owed(self) -> bool:
        """Whether the last one failed and is to be made up for before the next step."""
        return 0 < self._failed <= RETRIES

    async def take(self) -> None:
        """Score the policy, and keep its weights if they are the best yet. Failure costs the score, not the node."""
        p = self.parts
        async with p.progress.during("evaluate"):
            try:
                scores = await held_out(p.engine, p.bundle, p.scorer, p.config, p.manifest, self._count)
                mean = sum(scores.values()) / len(scores)
                await self._keep_best(mean)
                p.history.record_evaluation(p.trainer.step, scores)
                self._judge(mean)
                await self._see_decline(mean, len(scores))
                log.info("step %d has a held-out score of %.3f", p.trainer.step, mean)
            except (ScorerError, StoreError) as error:
                self._failed += 1
                p.history.event("error", "evaluate", f"step {p.trainer.step} has no held-out score: {error}")
            else:
                self._failed = 0

    async def _see_decline(self, mean: float, environments: int) -> None:
        p = self.parts
        best = await p.device.run(p.checkpoints.best_score)
        answers = p.config.eval.tasks * p.config.eval.samples * environments
        if best is None or not is_below(best, mean, answers):
            self._below = 0
            return
        self._below += 1
        if self._below == 1:
            then = "if the next one is as well, it goes back to those weights (eval.roll_back)"
            if not p.config.eval.roll_back:
                then = "`shoal checkpoint rollback best`, with the node down, goes back to those weights"
            p.history.event(
                "warning",
                "evaluate",
                f"the held-out score of step {p.trainer.step}, {mean:.3f}, is far below the best, {best:.3f} ; {then}",
            )

    def _count(self, tasks: int, sampled: int) -> None:
        self.parts.progress.count = sampled, tasks

    async def _keep_best(self, mean: float) -> None:
        """Export the weights if they beat those exported and the score that training started from."""
        p = self.parts
        before = [await p.device.run(p.checkpoints.best_score), p.history.held_out_start()]
        if p.trainer.step == 0 or any(score is not None and score >= mean for score in before):
            return
        try:
            await p.device.run(p.checkpoints.save_best, p.trainer.step, mean, p.trainer.export)
        except (CheckpointError, TrainerLost) as error:  # the next step has a lost trainer again
            p.history.event("error", "checkpoint", str(error))
