"""The foreign groups of a step: how many there are, and which of them are mixed in."""

import logging
from collections.abc import Sequence
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
            chosen = p.sampler.choose(
                self._pool(),
                self._wanted(),
                max_uses=swarm.max_group_uses,
                max_producer_share=self._producer_share(),
                weight=self._weight,
            )
            rollouts = []
            for entry in chosen:
                followed = self._followed(entry)
                use_behaviour = followed or swarm.foreign_ratio == "behaviour"
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
        followers = [entry.digest for entry, _ in rollouts if self._followed(entry)]
        self.behind = []
        if self.followers is not None:
            versions = [self.followers.version_of(entry) for entry, _ in rollouts]
            self.behind = [self.followers.behind(v) for v in versions if v is not None and v >= 0]
        try:
            p.store.mark_used([entry.digest for entry in chosen], followers)
        except StoreError as error:  # a full disk: the sampler counts the uses too
            log.error("uses of foreign groups are not counted: %s", error)
        return [rollout for _, rollout in rollouts]

    def _pool(self) -> Sequence[PoolEntry]:
        pool = self.parts.store.pool(self.parts.clock())
        return pool if self.followers is None else self.followers.fresh(pool)

    def _followed(self, entry: PoolEntry) -> bool:
        """Whether a version of this node's own policy sampled it."""
        return self.followers is not None and self.followers.version_of(entry) is not None

    def _weight(self, entry: PoolEntry) -> float:
        """By the producer's reputation; a follower's group counts half for each version published since."""
        weight = self.parts.exchange.weight(entry.producer)
        version = None if self.followers is None else self.followers.version_of(entry)
        return weight if self.followers is None or version is None else weight * 0.5 ** self.followers.behind(version)

    def _wanted(self) -> int:
        """J as it is now."""
        swarm = self.parts.config.swarm
        return self.share.now if swarm.foreign_adaptive else swarm.foreign_groups

    def _producer_share(self) -> float:
        """Admission rule 12: the manifest's cap holds on every node; a node may set less, not more."""
        p = self.parts
        return min(p.config.swarm.max_producer_share, p.manifest.caps.max_producer_share)
