"""The foreign groups of a step: how many there are, and which of them are mixed in."""

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from node.rollouts import Rollout, from_group
from node.scorer import ScorerError
from node.selection import ForeignShare
from swarm.experience import StoreError, UnknownGroup
from swarm.records import PoolEntry

if TYPE_CHECKING:
    from node.federation.followers import Followers
    from node.parts import Parts

log = logging.getLogger(__name__)


class ForeignGroups:
    """Peers' groups for this node's updates. Used from the loop's task.

    `followers`, where this node's policy is published, judges those that were sampled with it.
    """

    def __init__(self, parts: "Parts", followers: "Followers | None" = None) -> None:
        self.parts, self.followers = parts, followers
        self.share = ForeignShare(parts.config.swarm.foreign_groups)
        self.behind: list[int] = []
        """Of the groups chosen last that a version of this node's own policy sampled: versions published since."""

    def missing(self) -> int:
        """How many of J there are no groups for."""
        p = self.parts
        available = p.sampler.available(
            self._pool(),
            self._wanted(),
            max_uses=p.config.swarm.max_group_uses,
            max_producer_share=self._producer_share(),
        )
        return max(0, p.config.swarm.foreign_groups - min(available, self._wanted()))

    async def choose(self) -> list[Rollout]:
        """J groups drawn from the admitted, informative ones (SAPO), re-encoded for this model."""
        p = self.parts
        swarm = p.config.swarm
        async with p.progress.during("mix"):
            pool = self._pool()
            ages = {} if self.followers is None else self.followers.ages(pool)
            chosen = p.sampler.choose(
                pool,
                self._wanted(),
                max_uses=swarm.max_group_uses,
                max_producer_share=self._producer_share(),
                weight=lambda entry: self._weight(entry, ages),
            )
            rollouts = []
            for entry in chosen:
                use_behaviour = entry.digest in ages or swarm.foreign_ratio == "behaviour"
                try:
                    group = p.store.group_body(entry.digest)
                    rollout = await from_group(group, entry.rewards, p.bundle, p.scorer, use_behaviour=use_behaviour)
                except (UnknownGroup, ScorerError) as problem:  # evicted since it was chosen, or no task to be had
                    p.history.event("warning", "mix", f"foreign group left out: {problem}")
                else:
                    rollouts.append((entry, rollout))
        if self.followers is not None:
            rollouts = await self.followers.checked(rollouts)
        if p.rounds is not None:
            p.rounds.trained.update(entry.producer for entry, _ in rollouts)
        followers = [entry.digest for entry, _ in rollouts if entry.digest in ages]
        self.behind = [ages[digest] for digest in followers]
        try:
            p.store.mark_used([entry.digest for entry in chosen], followers)
        except StoreError as error:  # a full disk: the sampler counts the uses too
            log.error("uses of foreign groups are not counted: %s", error)
        return [rollout for _, rollout in rollouts]

    def _pool(self) -> Sequence[PoolEntry]:
        pool = self.parts.store.pool(self.parts.clock())
        return pool if self.followers is None else self.followers.fresh(pool)

    def _weight(self, entry: PoolEntry, ages: Mapping[bytes, int]) -> float:
        """By the producer's reputation; a follower's group counts half for each version published since."""
        return float(self.parts.exchange.weight(entry.producer) * 0.5 ** ages.get(entry.digest, 0))

    def _wanted(self) -> int:
        """J as it is now."""
        swarm = self.parts.config.swarm
        return self.share.now if swarm.foreign_adaptive else swarm.foreign_groups

    def _producer_share(self) -> float:
        """Admission rule 12: the manifest's cap holds on every node; a node may set less, not more."""
        p = self.parts
        return min(p.config.swarm.max_producer_share, p.manifest.caps.max_producer_share)
