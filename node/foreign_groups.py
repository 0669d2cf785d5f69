"""The foreign groups of a step: how many there are, and which of them are mixed in."""

import logging
from typing import TYPE_CHECKING

from node.rollouts import Rollout, from_group
from node.scorer import ScorerError
from node.selection import ForeignShare
from swarm.experience import StoreError, UnknownGroup

if TYPE_CHECKING:
    from node.loop import Parts

log = logging.getLogger(__name__)


class ForeignGroups:
    """Peers' groups for this node's updates. Used from the loop's task."""

    def __init__(self, parts: "Parts") -> None:
        self.parts = parts
        self.share = ForeignShare(parts.config.swarm.foreign_groups)

    def missing(self) -> int:
        """How many of J there are no groups for."""
        p = self.parts
        available = p.sampler.available(
            p.store.pool(p.clock()),
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
                p.store.pool(p.clock()),
                self._wanted(),
                max_uses=swarm.max_group_uses,
                max_producer_share=self._producer_share(),
                weight=p.exchange.weight,
            )
            rollouts = []
            for entry in chosen:
                use_behaviour = swarm.foreign_ratio == "behaviour"
                try:
                    group = p.store.group_body(entry.digest)
                    rollout = await from_group(group, entry.rewards, p.bundle, p.scorer, use_behaviour=use_behaviour)
                except (UnknownGroup, ScorerError) as problem:  # evicted since it was chosen, or no task to be had
                    p.history.event("warning", "mix", f"foreign group left out: {problem}")
                else:
                    rollouts.append(rollout)
                    if p.rounds is not None:
                        p.rounds.trained[entry.producer] += 1
            try:
                p.store.mark_used([entry.digest for entry in chosen])
            except StoreError as error:  # a full disk: the sampler counts the uses too
                log.error("uses of foreign groups are not counted: %s", error)
            return rollouts

    def _wanted(self) -> int:
        """J as it is now."""
        swarm = self.parts.config.swarm
        return self.share.now if swarm.foreign_adaptive else swarm.foreign_groups

    def _producer_share(self) -> float:
        """Admission rule 12: the manifest's cap holds on every node; a node may set less, not more."""
        p = self.parts
        return min(p.config.swarm.max_producer_share, p.manifest.caps.max_producer_share)
