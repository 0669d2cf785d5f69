"""Judges one pulled group: the admission chain of protocol.rules with this node's own scores in it."""

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence

from protocol.manifest import Manifest
from protocol.messages import Announcement
from protocol.rollout import RolloutGroup
from protocol.rules import (
    Reason,
    Rejected,
    check_budget,
    check_group,
    check_informative,
    check_rewards,
)
from swarm.experience import ExperienceStore
from swarm.records import ADMITTED, GroupRecord, Scored

SCORE_SECONDS = 30.0
"""Deadline for re-scoring one group; the scorer has shorter ones of its own for each answer."""
SCORE_ATTEMPTS = 3
SCORE_RETRY_SECONDS = 1.0

Rescore = Callable[[RolloutGroup], Awaitable[Sequence[Scored]]]
"""One score per completion, computed here. May raise ScoringUnavailable, or Rejected itself."""


class ScoringUnavailable(Exception):
    """The scorer does not answer now; the group is not to blame."""


class Admission:
    """Judges groups. What it admits is for training, what it rejects is remembered with why."""

    def __init__(
        self,
        store: ExperienceStore,
        manifest: Manifest,
        rescore: Rescore,
        clock: Callable[[], float],
        *,
        banned: Callable[[str], bool],
    ) -> None:
        self._store, self._manifest, self._rescore, self._clock = store, manifest, rescore, clock
        self._banned = banned

    async def judge(self, body: bytes, announced: Announcement, producer: str, expires: float) -> GroupRecord:
        """The verdict on a body that was pulled by `producer`'s announcement, which expires at `expires`.

        Raises ScoringUnavailable when the scorer did not answer in any attempt.
        """
        now = self._clock()
        claimed: tuple[float, ...] = ()
        scores: tuple[Scored, ...] = ()
        local: tuple[float, ...] = ()
        verdict, detail = ADMITTED, ""
        try:
            opened, group = check_group(
                body,
                self._manifest,
                now,
                producer=producer,
                announced=announced,
                seen=self._store.has_group,
                banned=self._banned,
            )
            expires, claimed = opened.expires, group.rewards
            if self._store.group_of(producer, group.epoch, group.task) is not None:
                raise Rejected(Reason.equivocation, "another group of this producer for this task was judged before")
            scores = await self._score(group)
            local = tuple(score.reward for score in scores)
            check_rewards(group, local, self._manifest.caps.reward_tolerance)
            spec = self._manifest.environment(group.task.environment)
            if spec is not None and spec.max_tokens is not None:
                check_budget(group, spec.max_tokens)
            check_informative(local)
        except Rejected as rejected:
            verdict, detail = str(rejected.reason), rejected.detail
        return GroupRecord(
            digest=announced.group,
            origin="foreign",
            producer=producer,
            epoch=announced.epoch,
            task=announced.task,
            model=announced.model,
            claimed=claimed,
            local=local,
            verdict=verdict,
            detail=detail,
            received_at=now,
            expires_at=expires,
            parts=tuple(score.parts for score in scores),
        )

    async def _score(self, group: RolloutGroup) -> tuple[Scored, ...]:
        for attempt in range(1, SCORE_ATTEMPTS + 1):
            try:
                async with asyncio.timeout(SCORE_SECONDS):
                    scores = tuple(await self._rescore(group))
                break
            except (ScoringUnavailable, TimeoutError) as error:
                if attempt == SCORE_ATTEMPTS:
                    raise ScoringUnavailable(str(error) or f"no answer within {SCORE_SECONDS:.0f} s") from error
                await asyncio.sleep(SCORE_RETRY_SECONDS * attempt)
        rewards = tuple(score.reward for score in scores)
        if len(rewards) != len(group.completions) or not all(map(math.isfinite, rewards)):
            raise Rejected(Reason.scorer_failed, f"{len(group.completions)} completions were scored as {rewards}")
        return scores
