"""The training loop: one step as a straight line.

    assignment -> rollouts -> rewards -> share -> peers' groups -> mix -> journal -> advantages -> update -> history

and every so many steps, where that is asked for, weights are averaged with nodes of the same model (node/averaging.py).

The network never blocks it: sharing and pulling run beside it (swarm.exchange), and a node with no peers mixes own
groups only. The update's input is journalled before it is applied (node.saving), so kill -9 costs at most the
rollouts of the step in progress.
"""

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict

from node.averaging import Averaging
from node.checkpoint import CheckpointError
from node.config import Config
from node.federation.following import Following
from node.federation.leading import Leading
from node.foreign_groups import ForeignGroups
from node.held_out import Evaluations
from node.interfaces import (
    Batch,
    Interrupted,
    StepSkipped,
    TeacherError,
    TrainerLost,
    TrainGroup,
    UpdateStats,
)
from node.journal import JournalRecord
from node.memory import give_back
from node.own_groups import OwnGroups, chosen
from node.parts import Parts
from node.replay import replay
from node.rollouts import Rollout, to_group, train_group
from node.routing import bounded
from node.saving import Saving
from node.summary import in_words, summarise
from node.training.distill import taught
from protocol.rules import Rejected
from swarm.backing_off import pause_after
from swarm.experience import StoreError

log = logging.getLogger(__name__)

SKIPS_BEFORE_ALARM = 5
LONGEST_REST = 30.0
"""Seconds between two of many steps that are skipped."""


class Loop:
    """Steps of one node. `run` returns when the step goal is reached or a stop was asked for.

    `leading`: its policy is published for followers. `following`: it takes another's policy, and trains nothing.
    `unpaused`: cleared while no step may begin; None: all may.
    """

    def __init__(
        self,
        parts: Parts,
        leading: Leading | None = None,
        following: Following | None = None,
        unpaused: asyncio.Event | None = None,
    ) -> None:
        self.parts, self.leading, self.following = parts, leading, following
        self.own, self.foreign = OwnGroups(parts), ForeignGroups(parts, leading.followers if leading else None)
        self.evaluations = Evaluations(parts, self.foreign.share.judge)
        self.saving = Saving(parts, self.own, self.foreign.share)
        self._skips = 0
        """Steps skipped since the last one that was not."""
        self._losses = 0
        """How often the trainer was lost since the last step that was done."""
        self.stop = threading.Event()
        self._next: Config | None = None
        """Settings from the next step on, where they are others."""
        if unpaused is None:
            unpaused = asyncio.Event()
            unpaused.set()
        self.unpaused = unpaused

    # -- life ------------------------------------------------------------------------------------------------

    async def recover(self) -> None:
        """Continue where the last process stopped, with a trainer that is lost meanwhile as well."""
        try:
            await self._recover()
        except TrainerLost as lost:
            await self._come_back(lost)

    async def _recover(self) -> None:
        """Newest good checkpoint, then the journalled updates after it."""
        p = self.parts
        if self.following is not None:
            async with p.progress.during("recover"):
                p.history.event("info", "resume", await self.following.recover(p, self.own))
            return
        async with p.progress.during("recover"):
            recovery = await self.saving.load()
        await self._while_held()  # repeating steps is work too
        await replay(p, recovery.records, apply=self._apply, restore=self.saving.restore)
        self.saving.saved = p.trainer.step
        p.history.forget_after(p.trainer.step)
        await p.engine.update_weights(p.trainer.step)
        kept = self.own.go_on()
        if recovery.directory is not None or recovery.records:
            said = f"continues after step {p.trainer.step}"
            p.history.event("info", "resume", f"{said}, {kept}" if kept else said)
        await self._offer()

    async def run(self, steps: int | None) -> None:
        """Train until `steps` updates are done in all (None: for ever). Raises what is nobody's to catch here."""
        p = self.parts
        await self._while_held()
        await self.outlast(self._take_up_settings)
        if p.history.held_out_start() is None:
            p.progress.say("STARTING", "taking the first held-out score")
            await self.evaluations.take()
        if steps and p.trainer.step >= steps:
            p.history.event("warning", "steps", f"{p.trainer.step} steps are done already: --steps {steps} trains none")
        while steps is None or p.trainer.step < steps:
            await self._while_held()
            try:
                await self._take_up_settings()
                if self.evaluations.owed:
                    await self.evaluations.take()
                if p.rounds is not None:
                    await p.rounds.answer(p)
                p.progress.enter("step")
                await self.step()
                self._skips = self._losses = 0
            except TrainerLost as lost:
                await self._come_back(lost)
            except StepSkipped as skipped:
                self._skips += 1
                p.history.event("warning", "step", f"step {p.trainer.step + 1} skipped: {skipped}")
                if self._skips >= SKIPS_BEFORE_ALARM:
                    p.progress.say("WAITING", f"{self._skips} steps in a row skipped: {skipped}", skipped.advice)
                    p.progress.enter("rest")  # what fails at once must not fail all the time
                    await asyncio.sleep(pause_after(self._skips - SKIPS_BEFORE_ALARM + 1, 1.0, LONGEST_REST))

    async def outlast(self, ask: Callable[[], Awaitable[None]]) -> None:
        """Ask the trainer something outside a step, again where it is lost meanwhile."""
        while True:
            try:
                return await ask()
            except TrainerLost as lost:
                await self._come_back(lost)

    async def _come_back(self, lost: TrainerLost) -> None:
        """Start a lost trainer anew, after a pause that grows while no step is done, and continue where it stopped.

        The step in progress is in the journal: it is repeated, too. Raises what is for good.
        """
        p = self.parts
        while True:
            self._losses += 1
            pause = pause_after(self._losses, 1.0, LONGEST_REST)
            log.error("the trainer is lost: %s", lost)
            told = f"the trainer is lost: {str(lost).splitlines()[0]}"
            p.history.event("error", "trainer", f"{told}; it is started again in {pause:.0f} s")
            p.progress.say("WAITING", f"{told}; it is started again", "if that goes on, read the log: shoal logs")
            p.progress.enter("rest")
            await asyncio.sleep(pause)
            await self.own.rollouts.rounds.close()
            try:
                async with p.progress.during("trainer"):
                    await p.device.run(lost.again)
                return await self._recover()
            except TrainerLost as again:
                lost = again

    def change(self, config: Config) -> None:
        """Have other settings between two steps: those of `node.config.AT_ONCE` may differ from the present ones."""
        self._next = config

    async def _take_up_settings(self) -> None:
        p, config = self.parts, self._next
        if config is None:
            return
        self._next, p.config = None, config
        self.own.configure(config)
        self.foreign.share.limit(config.swarm.foreign_groups)
        p.checkpoints.keep = config.checkpoint.keep
        await p.device.run(p.trainer.configure, config.train)

    async def _while_held(self) -> None:
        p = self.parts
        before = p.progress.stage
        while not self.unpaused.is_set():
            p.progress.enter("paused")
            await self.unpaused.wait()
            p.progress.resumed_at = p.clock()
            p.progress.enter(before)

    # -- one step --------------------------------------------------------------------------------------------

    async def step(self) -> None:
        p = self.parts
        if self.following is not None:
            await self.following.step(p, self.own, self._share)
            return
        p.progress.stages.clear()
        started, step = p.clock(), p.trainer.step + 1
        self._say_state()

        # one more own group for each foreign one there is none of; peers' may still come during the rollouts
        swarm = p.config.swarm
        sampled = await self.own.roll_out(step, swarm.own_groups + self.foreign.missing())
        self._share(sampled)
        foreign = await self.foreign.choose()
        own = chosen(sampled, swarm.own_groups + max(0, swarm.foreign_groups - len(foreign)))
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
        if self.leading is not None:
            summary["behind"] = self.foreign.behind
            summary["published"] = [asdict(version) for version in self.leading.publisher.published()]
        record = JournalRecord(step, batch, self.saving.state(), summary, p.config.train.model_dump(mode="json"))
        if await self.saving.journal(record):
            self._say_state()  # the update is to come, and it may take minutes
        await self._apply(record)
        await self._offer()
        log.info("%s", in_words(step, summary, p.progress.stages["update"]))

        if p.config.eval.every and step % p.config.eval.every == 0:
            await self.evaluations.take()
            if self.evaluations.declined:
                await self._roll_back()
        if p.averaging is not None and p.averaging.due(step, p.config.averaging.every):
            await self._average(p.averaging)
        if self.saving.is_due():
            await self.saving.checkpoint()

    def _share(self, own: Sequence[Rollout]) -> None:
        """Hand own groups to the exchange, which never waits for the network."""
        p = self.parts
        model = p.bundle.name if self.following is None else self.following.model_name(p.bundle.name)
        for rollout in own:
            group = to_group(rollout, epoch=rollout.epoch, bundle=p.bundle, model=model)
            try:
                p.exchange.publish(group, [score.all_parts for score in rollout.scores])
            except (Rejected, StoreError) as refused:
                p.history.event("warning", "share", f"own group not shared: {refused}")

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

    async def _apply(self, record: JournalRecord) -> None:
        """Do the journalled update, whether for the first time or after a restart, and write it down."""
        p = self.parts
        started = p.clock()
        self.saving.restore(record.state)
        try:
            async with p.progress.during("update"):
                await p.device.run(give_back)  # of the rollouts: the update is where a step needs the most memory
                stats: UpdateStats = await p.device.run(p.trainer.update, record.batch, self.stop.is_set)
                await p.device.run(give_back)
        except (Interrupted, asyncio.CancelledError):
            self.saving.reaches(record.step)  # it is in the journal: the next start repeats it
            raise asyncio.CancelledError from None
        self.saving.reaches(p.trainer.step)
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

    async def _offer(self) -> None:
        """Give the present weights out, where they are published. What takes time happens beside the loop."""
        p = self.parts
        if self.leading is not None:
            async with p.progress.during("publish"):
                await self.leading.publisher.offer(p.trainer, p.device)

    async def _roll_back(self) -> None:
        """Go on from the best weights, which are a step of their own."""
        p, before = self.parts, self.parts.trainer.step
        async with p.progress.during("checkpoint"):
            try:
                await p.device.run(self.saving.roll_back)
            except CheckpointError as error:
                p.history.event("error", "rollback", f"step {before} cannot go back to the best weights: {error}")
                return
        p.history.event(
            "warning",
            "rollback",
            f"step {p.trainer.step} is the best weights again: its held-out score was far below theirs ; if that "
            "goes on, lower train.learning_rate, or give train.kl_coefficient 0.001 or more",
        )
        async with p.progress.during("weights"):
            await p.engine.update_weights(p.trainer.step)
        await self._offer()
        await self.evaluations.take_anew()

    async def _average(self, averaging: Averaging) -> None:
        """A round with the nodes that are there; an outer step is in a checkpoint when this returns, or not taken."""
        if await averaging.round(self.parts, self.saving.keep):
            self.saving.checkpointed_at = self.parts.clock()

    def _say_state(self) -> None:
        """What a new step is about; the alarm of skipped ones stands until one is not skipped."""
        if self._skips < SKIPS_BEFORE_ALARM:
            self.parts.progress.say("TRAINING", *self._words(), anew=self._words)

    def _words(self) -> tuple[str, str]:
        """With whom it trains and what is in the way, as of now; what to do about that."""
        company, advice = self._company()
        if not self.saving.unkept:
            return company, advice
        trouble, _, fix = self.saving.unkept.partition("; ")
        return f"{company}; {trouble}", fix

    def _company(self) -> tuple[str, str]:
        p = self.parts
        peers = len(p.exchange.transport.peers())
        if peers:
            return f"with {peers} peer{'s' if peers > 1 else ''}", ""
        if p.rounds is not None and p.rounds.entering.said:
            said = f"alone: the coordinator does not let this node in: {p.rounds.entering.said}"
            return said, "shoal join with another invite"
        if tried := p.unreached():
            return f"alone: no peer reachable ({tried})", "shoal doctor"
        return "alone: no peer connected", "invite somebody: shoal swarm invite"
