"""The leader's side of groups in: which foreign groups were sampled with its policy, and whether they may be used."""

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from node.federation.publishing import Publisher, UnknownVersion
from node.federation.spot_check import SpotCheck
from node.interfaces import TrainGroup
from node.memory import out_of_memory
from node.rollouts import Rollout, train_group
from protocol.policy import claimed_version
from protocol.rejection import Reason, Rejected
from swarm.experience import StoreError
from swarm.newest import remember
from swarm.records import PoolEntry

if TYPE_CHECKING:
    from node.parts import Parts

log = logging.getLogger(__name__)

MAX_PASSED, MAX_CAUGHT = 4096, 256

NO_MEMORY = (
    "there is no memory to check followers' groups, which takes a second copy of the weights: those of this step are "
    "left out ; lower train.tokens_per_micro_batch, or set federation.spot_check to 0 where you believe them"
)


class Followers:
    """Judges groups that claim this node's policy. Used from the loop's task."""

    def __init__(self, parts: "Parts", publisher: Publisher, spot_check: SpotCheck) -> None:
        self.parts, self._publisher, self._spot_check = parts, publisher, spot_check
        self._passed: dict[bytes, None] = {}
        """Checked and found right."""
        self._caught: dict[str, None] = {}
        """Producers of a group that was not: all of theirs are checked from then on."""

    def version_of(self, entry: PoolEntry) -> int | None:
        """Which version of this node's policy the group claims; None: none."""
        return claimed_version(entry.model, self._publisher.leader, self._publisher.versions)

    def ages(self, pool: Sequence[PoolEntry]) -> dict[bytes, int]:
        """By digest, of the groups that this node's policy sampled: how many versions were published since."""
        versions, leader = self._publisher.versions, self._publisher.leader
        claimed = ((entry.digest, claimed_version(entry.model, leader, versions)) for entry in pool)
        return {digest: _behind(version, versions) for digest, version in claimed if version is not None}

    def fresh(self, pool: Sequence[PoolEntry]) -> list[PoolEntry]:
        """The pool without groups of followers that are too far behind, which are withdrawn."""
        step, most = self.parts.trainer.step, self.parts.config.federation.staleness
        versions, kept = self._publisher.versions, []
        for entry in pool:
            version = claimed_version(entry.model, self._publisher.leader, versions)
            if version is None or (0 <= version <= step and _behind(version, versions) <= most):
                kept.append(entry)
                continue
            newest = f"the newest is {self._publisher.version}; at most {most} published ones behind"
            said = f"of version {version}" if version >= 0 else "of a version that is no longer kept"
            self._withdraw(entry, Rejected(Reason.stale_policy, f"{said}, {newest}"))
        return kept

    async def checked(self, chosen: Sequence[tuple[PoolEntry, Rollout]]) -> list[tuple[PoolEntry, Rollout]]:
        """Those of the chosen groups that are what they claim, as far as they are drawn to be checked."""
        p = self.parts
        drawn: dict[int, dict[bytes, TrainGroup]] = {}
        for entry, rollout in chosen:
            version = self.version_of(entry)
            if version is None or version < 0 or entry.digest in self._passed:
                continue
            if not rollout.behaviour_known:  # without usable log-probs its claim gains it nothing: as any other group
                continue
            share = 1.0 if entry.producer in self._caught else p.config.federation.spot_check
            if self._spot_check.drawn(entry.digest, share):
                drawn.setdefault(version, {})[entry.digest] = train_group(rollout, p.config.train)
        bad: dict[bytes, Rejected] = {}
        for version, groups in drawn.items():
            budget = p.config.train.tokens_per_micro_batch
            try:
                async with p.progress.during("spot check"):
                    bad |= await p.device.run(self._spot_check.check, version, groups, budget)
            except UnknownVersion as problem:  # it went on meanwhile: what cannot be checked is not used now
                log.warning("groups of followers are left out: %s", problem)
                chosen = [(entry, rollout) for entry, rollout in chosen if entry.digest not in groups]
            except (MemoryError, RuntimeError) as error:
                if not out_of_memory(error):
                    raise
                p.history.event("error", "policy", NO_MEMORY)
                chosen = [(entry, rollout) for entry, rollout in chosen if entry.digest not in groups]
            else:
                for digest in groups.keys() - bad.keys():
                    remember(self._passed, digest, None, MAX_PASSED)
        for entry, _ in chosen:
            if entry.digest in bad:
                remember(self._caught, entry.producer, None, MAX_CAUGHT)
                self._withdraw(entry, bad[entry.digest])
        return [(entry, rollout) for entry, rollout in chosen if entry.digest not in bad]

    def _withdraw(self, entry: PoolEntry, rejected: Rejected) -> None:
        try:
            self.parts.exchange.withdraw(entry.digest, entry.producer, rejected)
        except StoreError as error:
            log.error("group %s could not be withdrawn: %s", entry.digest.hex()[:12], error)


def _behind(version: int, versions: Mapping[str, int]) -> int:
    return sum(later > version for later in versions.values())
