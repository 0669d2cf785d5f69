"""The training loop: one step as a straight line.

    assignment -> rollouts -> rewards -> share -> peers' groups -> mix -> journal -> advantages -> update -> history

The network never blocks it: sharing and pulling run beside it (swarm.exchange), and a node with no peers mixes own
groups only. The update's input is journalled before it is applied (node.checkpoint), so kill -9 costs at most the
rollouts of the step in progress.
"""

import asyncio
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from node.assign import DataPosition
from node.checkpoint import CheckpointError, CheckpointStore
from node.config import Config
from node.device import Device
from node.engines.requests import RequestTooLong
from node.held_out import Evaluations
from node.history import History
from node.interfaces import (
    Batch,
    Engine,
    Interrupted,
    StepSkipped,
    Teacher,
    TeacherError,
    Trainer,
    TrainGroup,
    UpdateStats,
)
from node.journal import JournalRecord
from node.memory import give_back
from node.models import ModelBundle
from node.progress import Progress
from node.replay import replay
from node.rollouts import Rollout, from_group, sampling_seed, to_group, train_group
from node.routing import bounded
from node.scheduling.own import OwnRollouts
from node.scheduling.rounds import Begun
from node.scorer import Scorer, ScorerError
from node.selection import Curriculum, ForeignShare, InformativeShare, SameRewards
from node.summary import summarise
from node.training import lora
from node.training.distill import taught
from protocol.manifest import Manifest
from protocol.rollout import TaskRef
from protocol.rules import Rejected
from swarm.exchange import Exchange
from swarm.experience import ExperienceStore, StoreError, UnknownGroup
from swarm.sampler import Sampler

log = logging.getLogger(__name__)

JOURNAL_RETRY_SECONDS = 10.0
SKIPS_BEFORE_ALARM = 5
LONGEST_REST = 30.0
"""Seconds between two of many steps that are skipped."""


@dataclass(slots=True)
class Parts:
    """What the loop works with; the daemon makes them."""

    config: Config
    manifest: Manifest
    peer_id: str
    bundle: ModelBundle
    device: Device
    engine: Engine
    trainer: Trainer
    scorer: Scorer
    exchange: Exchange
    store: ExperienceStore
    sampler: Sampler
    checkpoints: CheckpointStore
    history: History
    progress: Progress
    clock: Callable[[], float]
    teacher: Teacher | None = None


class Loop:
    """Steps of one node. `run` returns when the step goal is reached or a stop was asked for."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self.position = DataPosition()
        self.curriculum = Curriculum(parts.config.train.curriculum_low, parts.config.train.curriculum_high)
        self.informative = InformativeShare()
        self.foreign_share = ForeignShare(parts.config.swarm.foreign_groups)
        self._same_rewards = SameRewards()
        self.evaluations = Evaluations(parts, self.foreign_share.judge)
        self.own = OwnRollouts(parts.engine, parts.bundle, parts.scorer, parts.config)
        self._begun_before: Mapping[str, Any] = {}
        """The saved state that a start goes on from."""
        self.saved: int | None = None
        """The step that the next start will reach; None until that is known."""
        self._checkpointed_at = parts.clock()
        self._skips = 0
        """Steps skipped since the last one that was not."""
        self.stop = threading.Event()
        self.unpaused = asyncio.Event()
        self.unpaused.set()

    # -- life ------------------------------------------------------------------------------------------------

    async def recover(self) -> None:
        """Continue where the last process stopped: newest good checkpoint, then the journalled updates after it."""
        p = self.parts
        async with p.progress.during("recover"):
            recovery = await p.device.run(p.checkpoints.latest)
            records = recovery.records
            self._check_model(records[0].state if records else recovery.state or {})
            self.saved = records[-1].step if records else recovery.step
            for problem in recovery.problems:
                p.history.event("warning", "checkpoint", problem)
            if recovery.directory is not None:
                await p.device.run(p.trainer.load, recovery.directory)
            if recovery.state:
                self._restore(recovery.state)
        if recovery.directory is not None:  # by its age: what the last process trained since must not grow for ever
            self._checkpointed_at = min(p.clock(), recovery.directory.stat().st_mtime)
        await replay(p, records, apply=self._apply, restore=self._restore)
        self.saved = p.trainer.step
        await p.engine.update_weights(p.trainer.step)
        kept = self.own.restore(self._begun_before)
        if recovery.directory is not None or records:
            said = f"continues after step {p.trainer.step}"
            p.history.event("info", "resume", f"{said}, {kept}" if kept else said)

    async def run(self, steps: int | None) -> None:
        """Train until `steps` updates are done in all (None: for ever). Raises what is nobody's to catch here."""
        p = self.parts
        if p.history.held_out_start() is None:
            p.progress.say("STARTING", "taking the first held-out score")
            await self.evaluations.take()
        if steps and p.trainer.step >= steps:
            p.history.event("warning", "steps", f"{p.trainer.step} steps are done already: --steps {steps} trains none")
        while steps is None or p.trainer.step < steps:
            while not self.unpaused.is_set():
                p.progress.enter("paused")
                await self.unpaused.wait()
                p.progress.resumed_at = p.clock()
            if self.evaluations.owed:
                await self.evaluations.take()
            p.progress.enter("step")
            try:
                await self.step()
                self._skips = 0
            except StepSkipped as skipped:
                self._skips += 1
                p.history.event("warning", "step", f"step {p.trainer.step + 1} skipped: {skipped}")
                if self._skips >= SKIPS_BEFORE_ALARM:
                    p.progress.say("WAITING", f"{self._skips} steps in a row skipped: {skipped}", skipped.advice)
                    p.progress.enter("rest")  # what fails at once must not fail all the time
                    await asyncio.sleep(min(LONGEST_REST, 2.0 ** min(self._skips - SKIPS_BEFORE_ALARM, 8)))

    # -- one step --------------------------------------------------------------------------------------------

    async def step(self) -> None:
        p = self.parts
        p.progress.stages.clear()
        started, step = p.clock(), p.trainer.step + 1
        self._say_state()

        available = self._pool_size()
        count = self._own_count(available)
        sampled = await self._roll_out(step, count)
        self._share(sampled)
        own = self._own(sampled, count)
        foreign = await self._choose_foreign()
        groups = [train_group(r, p.config.train, p.bundle.routing) for r in own + foreign]
        batch = Batch(step, await self._taught(bounded(groups)))
        summary = summarise(
            sampled,
            own,
            foreign,
            version=p.trainer.step,
            rollout_seconds=p.progress.stages.get("rollout", 0.0),
            seconds=p.clock() - started,
        )
        record = JournalRecord(step, batch, self._state(), summary, p.config.train.model_dump(mode="json"))
        await self._journal(record)
        await self._apply(record)

        if p.config.eval.every and step % p.config.eval.every == 0:
            await self.evaluations.take()
        if self._checkpoint_is_due():
            await self.checkpoint()

    def _own_count(self, available: int) -> int:
        """I own groups, and one more for each foreign group there is none of."""
        swarm = self.parts.config.swarm
        return swarm.own_groups + max(0, swarm.foreign_groups - min(available, self._foreign_count()))

    def _foreign_count(self) -> int:
        """J as it is now."""
        swarm = self.parts.config.swarm
        return self.foreign_share.now if swarm.foreign_adaptive else swarm.foreign_groups

    async def _roll_out(self, step: int, count: int) -> list[Rollout]:
        """`count` own groups; with dynamic sampling, other tasks' besides while some of them are uniform."""
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
            for _ in range(1 + rounds):
                missing, most = count - sum(rollout.informative for rollout in rollouts), count * (1 + rounds)
                if missing <= 0 or len(rollouts) >= most:
                    break
                wanted = self.informative.groups_for(missing, most - len(rollouts)) if rounds else missing
                try:
                    rollouts += await self._sample(wanted, tasks)
                except StepSkipped as failed:
                    if not rollouts:
                        raise
                    p.history.event("warning", "rollout", f"{failed}; going on with {len(rollouts)} groups")
                    break
        self.informative.see(sum(rollout.informative for rollout in rollouts), len(rollouts))
        if said := self._same_rewards.see([reward for rollout in rollouts for reward in rollout.rewards]):
            p.history.event("warning", "rewards", said)
        return rollouts

    def _own(self, sampled: list[Rollout], count: int) -> list[Rollout]:
        """What the update is made of. Uniform groups fill up what dynamic sampling did not find (DAPO, 2503.14476)."""
        if len(sampled) <= count:
            return sampled
        return sorted(sampled, key=lambda rollout: not rollout.informative)[:count]

    def _next_tasks(self, count: int, now: float) -> tuple[TaskRef, ...]:
        """The next tasks that the curriculum lets through."""
        p = self.parts
        passed_over = self.curriculum.outside([spec.name for spec in p.manifest.environments])
        return self.position.take(p.manifest, p.peer_id, count, now, passed_over)

    async def _sample(self, count: int, tasks: Callable[[int], Sequence[Begun]]) -> list[Rollout]:
        """`count` own groups, of tasks begun before and of `tasks`."""
        try:
            rollouts = await self.own.take(count, tasks)
        except ScorerError as error:  # a machine out of breath, or of processes: the next step may go well
            raise StepSkipped(f"the scorer failed: {error}") from error
        except RequestTooLong as error:
            raise StepSkipped(
                str(error), "lower rollout.max_new_tokens, or take a model of a longer context"
            ) from error
        for rollout in rollouts:
            self.curriculum.observe(rollout.ref.environment, rollout.rewards)
        return rollouts

    def _share(self, own: Sequence[Rollout]) -> None:
        """Hand own groups to the exchange, which never waits for the network."""
        p = self.parts
        for rollout in own:
            group = to_group(rollout, epoch=rollout.epoch, bundle=p.bundle)
            try:
                p.exchange.publish(group)
            except (Rejected, StoreError) as refused:
                p.history.event("warning", "share", f"own group not shared: {refused}")

    def _pool_size(self) -> int:
        p = self.parts
        swarm = p.config.swarm
        return p.sampler.available(
            p.store.pool(p.clock()),
            self._foreign_count(),
            max_uses=swarm.max_group_uses,
            max_producer_share=self._producer_share(),
        )

    def _producer_share(self) -> float:
        """Admission rule 12: the manifest's cap holds on every node; a node may set less, not more."""
        p = self.parts
        return min(p.config.swarm.max_producer_share, p.manifest.caps.max_producer_share)

    async def _choose_foreign(self) -> list[Rollout]:
        """J groups drawn from the admitted, informative ones (SAPO), re-encoded for this model."""
        p = self.parts
        swarm = p.config.swarm
        async with p.progress.during("mix"):
            chosen = p.sampler.choose(
                p.store.pool(p.clock()),
                self._foreign_count(),
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
            try:
                p.store.mark_used([entry.digest for entry in chosen])
            except StoreError as error:  # a full disk: the sampler counts the uses too
                log.error("uses of foreign groups are not counted: %s", error)
            return rollouts

    async def _taught(self, groups: Sequence[TrainGroup]) -> tuple[TrainGroup, ...]:
        """The groups with what the teacher thinks of own tokens, where there is a teacher."""
        p = self.parts
        if p.teacher is None:
            return tuple(groups)
        try:
            async with p.progress.during("teacher"):
                return await taught(groups, p.teacher)
        except TeacherError as error:
            raise StepSkipped(f"the teacher {p.teacher.name} failed: {error}") from error

    async def _journal(self, record: JournalRecord) -> None:
        """Have the update's input on disk. A full disk holds the step up until there is room: nothing is lost."""
        p = self.parts
        while True:
            try:
                async with p.progress.during("journal"):
                    return await p.device.run(p.checkpoints.append, record)
            except CheckpointError as error:
                p.progress.say("WAITING", str(error), "free some disk")
                p.history.event("error", "journal", str(error))
                await asyncio.sleep(JOURNAL_RETRY_SECONDS)

    async def _apply(self, record: JournalRecord) -> None:
        """Do the journalled update, whether for the first time or after a restart, and write it down."""
        p = self.parts
        started = p.clock()
        self._restore(record.state)
        try:
            async with p.progress.during("update"):
                await p.device.run(give_back)  # of the rollouts: the update is where a step needs the most memory
                stats: UpdateStats = await p.device.run(p.trainer.update, record.batch, self.stop.is_set)
                await p.device.run(give_back)
        except Interrupted:
            raise asyncio.CancelledError from None
        self.saved = max(self.saved or 0, p.trainer.step)
        async with p.progress.during("weights"):
            await p.engine.update_weights(p.trainer.step)
        p.progress.memory = await p.device.run(p.trainer.memory)
        now = p.clock()
        p.progress.last_step_at = now
        update = {**asdict(stats), "update_seconds": now - started, "stages": dict(p.progress.stages)}
        try:
            p.history.record_step(record.step, {**record.summary, **update})
        except StoreError as error:  # the journal has the step; only its line in the history is missing
            log.error("step %d is not in the history: %s", record.step, error)

    # -- beside the line -------------------------------------------------------------------------------------

    def _checkpoint_is_due(self) -> bool:
        """By steps or by age, whichever comes first: a start repeats what was trained since, and must not take long."""
        p = self.parts
        age = p.clock() - self._checkpointed_at
        return p.trainer.step % p.config.checkpoint.every == 0 or age >= p.config.checkpoint.seconds

    async def checkpoint(self) -> None:
        """Write a full checkpoint. A full disk costs the checkpoint, not the training: the journal goes on."""
        p = self.parts
        async with p.progress.during("checkpoint"):
            try:
                await p.device.run(p.checkpoints.save, p.trainer.step, p.trainer.save, self._state())
            except CheckpointError as error:
                p.history.event("error", "checkpoint", str(error))
        self._checkpointed_at = p.clock()

    def _say_state(self) -> None:
        """What a new step is about; the alarm of skipped ones stands until one is not skipped."""
        p = self.parts
        if self._skips >= SKIPS_BEFORE_ALARM:
            return
        peers = len(p.exchange.transport.peers())
        if peers:
            p.progress.say("TRAINING", f"with {peers} peer{'s' if peers > 1 else ''}")
        else:
            p.progress.say("TRAINING", "alone: no peer connected", "invite somebody: shoal swarm invite")

    def _check_model(self, state: Mapping[str, Any]) -> None:
        """Raises CheckpointError when what was saved is another model's: nothing of it fits this one."""
        p = self.parts
        if "model" in state and state["model"] != model_mark(p.bundle):
            raise CheckpointError(
                f"{p.checkpoints.directory} has the steps of another model than {p.bundle.name} ; "
                "set model.path back to it, or give another --home"
            )

    def _state(self) -> dict[str, Any]:
        return {
            "model": model_mark(self.parts.bundle),
            "epoch": self.position.epoch,
            "taken": self.position.taken,
            "sampler": self.parts.sampler.state(),
            "pass_rates": self.curriculum.state(),
            "informative": self.informative.now,
            "foreign_share": self.foreign_share.state(),
            "begun": self.own.rounds.state(),
        }

    def _restore(self, state: Mapping[str, Any]) -> None:
        self.position = DataPosition(state["epoch"], state["taken"])
        self.parts.sampler.restore(state["sampler"])
        # a checkpoint of Shoal 0.1 may lack these
        self.curriculum.restore(state.get("pass_rates", {}))
        self.informative.now = state.get("informative", 1.0)
        if "foreign_share" in state:
            self.foreign_share.restore(state["foreign_share"])
        self._begun_before = state


def model_mark(bundle: ModelBundle) -> str:
    """Tells models apart by tokenizer and size, wherever their files lie, with adapters or without."""
    size = sum(weight.numel() for name, weight in bundle.model.named_parameters() if lora.MARK not in name)
    return f"{bundle.fingerprint.hex()[:16]}-{size}"
