"""The training loop: one step as a straight line.

    assignment -> rollouts -> rewards -> share -> peers' groups -> mix -> journal -> advantages -> update -> history

and every so many steps, where that is asked for, weights are averaged with nodes of the same model (node/averaging.py).

The network never blocks it: sharing and pulling run beside it (swarm.exchange), and a node with no peers mixes own
groups only. The update's input is journalled before it is applied (node.checkpoint), so kill -9 costs at most the
rollouts of the step in progress.
"""

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

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
from node.parts import Parts, dtype_of, model_mark
from node.replay import replay
from node.rollouts import Rollout, to_group, train_group
from node.routing import bounded
from node.summary import in_words, summarise
from node.training.distill import taught
from protocol.rules import Rejected
from swarm.backing_off import pause_after
from swarm.experience import StoreError

log = logging.getLogger(__name__)

JOURNAL_RETRY_SECONDS = 10.0
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
        self.saved: int | None = None
        """The step that the next start will reach; None until that is known."""
        self._checkpointed_at = parts.clock()
        self._attempted = 0
        """Step of the last checkpoint that this process tried to write: on a full disk not every step tries again."""
        self._unkept = ""
        """Why the last checkpoint could not be written, and what to do; empty: it was."""
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
            recovery = await p.device.run(p.checkpoints.latest)
            records = recovery.records
            self._check_model(records[0].state if records else recovery.state or {})
            self.saved = records[-1].step if records else recovery.step
            for problem in recovery.problems:
                p.history.event("warning", "checkpoint", problem)
            if recovery.directory is not None:
                await p.device.run(p.trainer.load, recovery.directory)
            if p.averaging is not None:
                await p.device.run(p.averaging.begin, recovery.directory)
            if recovery.state:
                self._restore(recovery.state)
        if recovery.directory is not None:  # by its age: what the last process trained since must not grow for ever
            self._checkpointed_at = min(p.clock(), recovery.directory.stat().st_mtime)
        await self._while_held()  # repeating steps is work too
        await replay(p, records, apply=self._apply, restore=self._restore)
        self.saved = p.trainer.step
        p.history.forget_after(p.trainer.step)
        await p.engine.update_weights(p.trainer.step)
        kept = self.own.go_on()
        if recovery.directory is not None or records:
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
        record = JournalRecord(step, batch, self.state(), summary, p.config.train.model_dump(mode="json"))
        await self._journal(record)
        await self._apply(record)
        await self._offer()
        log.info("%s", in_words(step, summary, p.progress.stages["update"]))

        if p.config.eval.every and step % p.config.eval.every == 0:
            await self.evaluations.take()
        if p.averaging is not None and p.averaging.due(step, p.config.averaging.every):
            await self._average(p.averaging)
        if self._checkpoint_is_due():
            await self.checkpoint()

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

    async def _journal(self, record: JournalRecord) -> None:
        """Have the update's input on disk. A full disk holds the step up until there is room: nothing is lost."""
        p, waited = self.parts, False
        while True:
            try:
                async with p.progress.during("journal"):
                    await p.device.run(p.checkpoints.append, record)
            except CheckpointError as error:
                trouble, _, fix = str(error).partition("; ")
                p.progress.say("WAITING", trouble, fix)
                p.history.event("error", "journal", str(error))
                waited = True
                await asyncio.sleep(JOURNAL_RETRY_SECONDS)
            else:
                break
        if waited:  # the update is to come, and it may take minutes
            self._say_state()

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
        except (Interrupted, asyncio.CancelledError):
            self.saved = max(self.saved or 0, record.step)  # it is in the journal: the next start repeats it
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

    async def _offer(self) -> None:
        """Give the present weights out, where they are published. What takes time happens beside the loop."""
        p = self.parts
        if self.leading is not None:
            async with p.progress.during("publish"):
                await self.leading.publisher.offer(p.trainer, p.device)

    async def _average(self, averaging: Averaging) -> None:
        """A round with the nodes that are there; an outer step is in a checkpoint when this returns, or not taken."""
        if await averaging.round(self.parts, self._keep):
            self._checkpointed_at = self.parts.clock()

    # -- beside the line -------------------------------------------------------------------------------------

    def _checkpoint_is_due(self) -> bool:
        """By steps or by age, whichever comes first: a start repeats what was trained since, and must not take long."""
        p = self.parts
        age = p.clock() - self._checkpointed_at
        steps = p.trainer.step - max(p.checkpoints.base, self._attempted)
        return steps >= p.config.checkpoint.every or age >= p.config.checkpoint.seconds

    async def checkpoint(self) -> None:
        """Write a full checkpoint. A full disk costs the checkpoint, not the training: the journal goes on."""
        p = self.parts
        if self.following is not None:  # its weights are on disk as they came
            return
        async with p.progress.during("checkpoint"):
            try:
                await p.device.run(self._keep)
            except (CheckpointError, TrainerLost) as error:  # the next step has a lost trainer again
                p.history.event("error", "checkpoint", str(error))
        self._checkpointed_at, self._attempted = p.clock(), p.trainer.step

    def _keep(self) -> None:
        """On the model thread. Raises CheckpointError, which the state tells until one is written, and TrainerLost."""
        p = self.parts

        def write(directory: Path) -> None:
            p.trainer.save(directory)
            if p.averaging is not None:
                p.averaging.save(directory)

        try:
            p.checkpoints.save(p.trainer.step, write, self.state())
        except CheckpointError as error:
            self._unkept = str(error)
            raise
        self._unkept = ""

    def _say_state(self) -> None:
        """What a new step is about; the alarm of skipped ones stands until one is not skipped."""
        if self._skips < SKIPS_BEFORE_ALARM:
            self.parts.progress.say("TRAINING", *self._words(), anew=self._words)

    def _words(self) -> tuple[str, str]:
        """With whom it trains and what is in the way, as of now; what to do about that."""
        company, advice = self._company()
        if not self._unkept:
            return company, advice
        trouble, _, fix = self._unkept.partition("; ")
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

    def _check_model(self, state: Mapping[str, Any]) -> None:
        """Raises CheckpointError when what was saved is another model's: nothing of it fits this one."""
        p = self.parts
        if "model" in state and state["model"] != model_mark(p.bundle):
            raise CheckpointError(
                f"{p.checkpoints.directory} has the steps of another model than {p.bundle.name} ; "
                "set model.path back to it, or give another --home"
            )
        if "dtype" in state and state["dtype"] != dtype_of(p.bundle):
            p.history.event(
                "warning",
                "resume",
                f"the steps so far were computed in {state['dtype']}, and now it is {dtype_of(p.bundle)}: what is "
                f"repeated comes out a little different; to have it as it was, set model.dtype to {state['dtype']}",
            )

    def state(self) -> dict[str, Any]:
        """What a checkpoint and a journalled update say of the node besides its weights."""
        return {
            "model": model_mark(self.parts.bundle),
            "dtype": dtype_of(self.parts.bundle),
            "sampler": self.parts.sampler.state(),
            "foreign_share": self.foreign.share.state(),
            **self.own.state(),
        }

    def _restore(self, state: Mapping[str, Any]) -> None:
        self.parts.sampler.restore(state["sampler"])
        self.own.restore(state)
        if "foreign_share" in state:  # a checkpoint of Shoal 0.1 may lack it
            self.foreign.share.restore(state["foreign_share"])
