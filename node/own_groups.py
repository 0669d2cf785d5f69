"""The own groups of a step: which tasks, how many, and which of them the update is made of."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from node.assign import DataPosition
from node.config import Config
from node.engines.requests import RequestTooLong
from node.interfaces import StepSkipped
from node.rollouts import Rollout, sampling_seed
from node.scheduling.own import OwnRollouts
from node.scheduling.rounds import Begun
from node.scorer import ScorerError
from node.selection import Curriculum, InformativeShare, SameRewards
from protocol.rollout import TaskRef

if TYPE_CHECKING:
    from node.parts import Parts


class OwnGroups:
    """Tasks in the order they are assigned, sampled and scored. Used from the loop's task."""

    def __init__(self, parts: "Parts") -> None:
        self.parts = parts
        self.position = DataPosition()
        self.curriculum = Curriculum(parts.config.train.curriculum_low, parts.config.train.curriculum_high)
        self.informative = InformativeShare()
        self.rollouts = OwnRollouts(parts.engine, parts.bundle, parts.scorer, parts.config)
        self._same_rewards = SameRewards()
        self._begun_before: Mapping[str, Any] = {}
        """The saved state that a start goes on from."""

    def configure(self, config: Config) -> None:
        """Settings from the next step on."""
        self.curriculum.low, self.curriculum.high = config.train.curriculum_low, config.train.curriculum_high
        self.rollouts.config = config

    async def roll_out(self, step: int, count: int) -> list[Rollout]:
        """`count` groups; with dynamic sampling, other tasks' besides while some of them are uniform.

        Raises StepSkipped when there are none to be had.
        """
        p = self.parts
        rollouts: list[Rollout] = []
        begun = 0
        now = p.clock()  # one for all rounds: groups begun in one step are of one epoch

        def tasks(missing: int) -> list[Begun]:
            nonlocal begun
            refs = self._next_tasks(missing, now)
            seeds = [sampling_seed(p.config.node.seed, step, begun + i) for i in range(missing)]
            begun += missing
            return [Begun(ref, self.position.epoch, seed) for ref, seed in zip(refs, seeds, strict=True)]

        # to a teacher there is something to learn from uniform groups too
        rounds = p.config.train.dynamic_rounds if p.teacher is None else 0
        async with p.progress.during("rollout"):
            for further in range(1 + rounds):
                missing, most = count - sum(rollout.informative for rollout in rollouts), count * (1 + rounds)
                if missing <= 0 or len(rollouts) >= most:
                    break
                wanted = self.informative.groups_for(missing, most - len(rollouts)) if rounds else missing
                try:
                    rollouts += await self._sample(wanted, tasks, long=not further)
                except StepSkipped as failed:
                    if not rollouts:
                        raise
                    p.history.event("warning", "rollout", f"{failed}; going on with {len(rollouts)} groups")
                    break
        self.informative.see(sum(rollout.informative for rollout in rollouts), len(rollouts))
        if said := self._same_rewards.see([reward for rollout in rollouts for reward in rollout.rewards]):
            p.history.event("warning", "rewards", said)
        return rollouts

    def _next_tasks(self, count: int, now: float) -> tuple[TaskRef, ...]:
        """The next tasks that the curriculum lets through, and the round's mix where there is a coordinator."""
        p = self.parts
        passed_over = self.curriculum.outside([spec.name for spec in p.manifest.environments])
        takes = p.rounds.takes if p.rounds else lambda ref: True
        slots, had = p.manifest.slots_per_epoch, self.position.taken
        refs = self.position.take(p.manifest, p.peer_id, count, now, passed_over, takes)
        if had < slots <= self.position.taken:
            p.history.event(
                "warning",
                "tasks",
                f"all {slots} tasks that this node has in an epoch are done; they come again, and are not published "
                f"twice, until the next one, in {p.manifest.epoch_ends(self.position.epoch) - now:.0f} s",
            )
        return refs

    async def _sample(self, count: int, tasks: Callable[[int], Sequence[Begun]], *, long: bool) -> list[Rollout]:
        """`count` groups, of tasks begun before and of `tasks`."""
        try:
            rollouts = await self.rollouts.take(count, tasks, long=long)
        except ScorerError as error:  # a machine out of breath, or of processes: the next step may go well
            raise StepSkipped(f"the scorer failed: {error}") from error
        except RequestTooLong as error:
            advice = "lower rollout.max_new_tokens, or take a model of a longer context"
            raise StepSkipped(str(error), advice) from error
        for rollout in rollouts:
            self.curriculum.observe(rollout.ref.environment, rollout.rewards)
        return rollouts

    # -- restarts ----------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        return {
            "epoch": self.position.epoch,
            "taken": self.position.taken,
            "pass_rates": self.curriculum.state(),
            "informative": self.informative.now,
            "begun": self.rollouts.rounds.state(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Of all but what is begun, which waits for `go_on`."""
        self.position = DataPosition(state["epoch"], state["taken"])
        # a checkpoint of Shoal 0.1 may lack these
        self.curriculum.restore(state.get("pass_rates", {}))
        self.informative.now = state.get("informative", 1.0)
        self._begun_before = state

    def go_on(self) -> str:
        """Take up what the last restored state had begun; says in words what that is, empty when it is nothing."""
        return self.rollouts.restore(self._begun_before)


def chosen(sampled: list[Rollout], count: int) -> list[Rollout]:
    """What the update is made of. Uniform groups fill up what dynamic sampling did not find (DAPO, 2503.14476)."""
    if len(sampled) <= count:
        return sampled
    return sorted(sampled, key=lambda rollout: not rollout.informative)[:count]
