"""`shoal train offline`: a node without network and rollouts. Newest weights, examples, TRL, held-out score, result.

Nothing of the node changes before the result is whole: it is written aside and renamed, either as a model directory or
as the node's next checkpoint. A kill at any instant leaves the node as it was.
"""

import asyncio
import logging
import math
import random
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from node.checkpoint import CheckpointStore
from node.config import Config
from node.device import Device, use_threads
from node.engines.transformers import TransformersEngine
from node.evaluate import held_out
from node.history import History
from node.home import Home, NoSwarm, models_dir
from node.loop import Loop
from node.memory_plan import check_fit
from node.model_shape import model_shape
from node.models import ModelBundle, load_model, make_once, model_directory
from node.offline.examples import Labelled, OfflineError, Pair, labelled, preference_pairs, to_imitate
from node.offline.sources import Source, from_environments, from_experience
from node.offline.trainers import Course, Method, Outcome, plain_copy, require_trl, train
from node.parts import Parts
from node.preflight import prepare
from node.progress import Progress
from node.rescore import Rescorer
from node.scorer import make_scorer
from node.settings import Settings
from node.training.local import LocalTrainer
from protocol.manifest import Manifest
from swarm.exchange import Exchange
from swarm.experience import ExperienceStore
from swarm.memory import MemoryHub
from swarm.sampler import Sampler

log = logging.getLogger(__name__)

SCRATCH = "offline"
"""Directory in the home that TRL may use; nothing in it is kept."""
TAKEN = "{} is there already ; give a new directory"
LEARNING_RATES: Mapping[Method, float] = {"dpo": 5e-6, "kto": 5e-6, "sft": 1e-5}
THRESHOLDS: Mapping[Method, float] = {"dpo": 0.0, "kto": 0.5, "sft": 1.0}


class BadOrder(OfflineError):
    """The options of the command do not go together."""


@dataclass(frozen=True, slots=True)
class Order:
    """What was asked for on the command line. None: the default of the method."""

    method: Method
    source: Literal["experience", "environments"] = "experience"
    output: Path | None = None
    """A new directory for the model."""
    apply: bool = False
    """Make the result the node's next checkpoint."""
    force: bool = False
    """Apply it even if the held-out score fell."""
    steps: int | None = None
    minutes: float | None = None
    batch: int = 8
    learning_rate: float | None = None
    beta: float = 0.1
    threshold: float | None = None
    pairs_per_task: int = 1
    groups: int = 2000
    tasks: int = 512
    max_length: int = 2048
    seed: int | None = None


def run(home: Home, settings: Settings, order: Order) -> dict[str, Any]:
    """Train as ordered and report. Raises OfflineError, HomeLocked while the node is up, NoSwarm, and as its parts."""
    check(order)
    home.swarm()
    if settings.config.train.lora_rank:
        raise BadOrder(
            f"train.lora_rank = {settings.config.train.lora_rank} trains adapters, and offline training whole weights ;"
            " set it to 0 in a home of its own"
        )
    manifest = home.manifest()
    if manifest is None:
        raise NoSwarm(f"the manifest of the swarm is not in {home.path} yet ; run `shoal up` until it has come")
    with home.lock():
        return asyncio.run(_Offline(home, settings.config, manifest, order, clock=time.time).run())


def check(order: Order) -> None:
    """Raises BadOrder, and OfflineError without trl: what can be told before anything is loaded."""
    require_trl()
    if order.output is None and not order.apply:
        raise BadOrder(
            "nothing says where the result goes ; give --output DIR for a model directory, or --apply to make it this"
            " node's next checkpoint"
        )
    if order.source == "environments" and order.method != "sft":
        raise BadOrder(
            f"gold answers have no worse ones beside them, which {order.method} needs ; use --method sft, or"
            " --from-experience"
        )
    if order.output is not None and order.output.exists():
        raise BadOrder(TAKEN.format(order.output))
    if order.output is not None and not order.output.absolute().parent.is_dir():
        raise BadOrder(f"{order.output.absolute().parent} is no directory ; make it first")


class _Offline:
    """One offline training: the parts of a node, and the way through them."""

    def __init__(
        self, home: Home, config: Config, manifest: Manifest, order: Order, *, clock: Callable[[], float]
    ) -> None:
        self.home, self.config, self.manifest, self.order, self.clock = home, config, manifest, order, clock
        self.seed = config.node.seed if order.seed is None else order.seed
        self.stop = threading.Event()
        self.device = Device()
        self.history = History(home.database, clock)
        self.store = ExperienceStore(home.database, config.limits.store_mb << 20, clock)
        self.scorer = make_scorer(manifest.environments, config.limits)

    async def run(self) -> dict[str, Any]:
        """The report, once the result is on disk."""
        order = self.order
        try:
            await self.scorer.start()
            loop, trainer = await self._newest()
            bundle, began = loop.parts.bundle, trainer.step
            source = await self._source(bundle)
            examples = self._examples(source)
            log.info("%d examples of %d tasks; scoring step %d", len(examples), len(source.tasks), began)
            before = await self._score(loop)
            course = self._course(bundle, len(examples))
            started = self.clock()
            outcome = await self._train(trainer, examples, course)
            seconds = self.clock() - started
            await loop.parts.engine.update_weights(began + 1)
            after = await self._score(loop)
            report = {
                "method": order.method,
                "source": order.source,
                "model": bundle.name,
                "step": began,
                "groups": source.groups,
                "tasks": len(source.tasks),
                "examples": len(examples),
                "left_out": dict(source.left_out),
                "steps": outcome.steps,
                "ended": "done" if outcome.steps >= course.steps else "deadline",
                "seconds": seconds,
                "loss": [outcome.losses[0], outcome.losses[-1]],
                "last": outcome.last,
                "held_out": {"before": before, "after": after},
                "output": None,
                "checkpoint": None,
            }
            if order.output is not None:
                if not await self.device.run(make_once, order.output, trainer.export):
                    raise BadOrder(TAKEN.format(order.output))
                report["output"] = str(order.output.absolute())
            if order.apply:
                report["checkpoint"] = await self._apply(loop, trainer, report)
            return report
        finally:
            self.stop.set()  # the model thread ends with the step it is in
            await self.scorer.close()
            self.device.close()
            self.store.close()
            self.history.close()

    # -- the way ---------------------------------------------------------------------------------------------

    async def _newest(self) -> tuple[Loop, LocalTrainer]:
        """The node as its next start would find it: newest checkpoint, journalled steps repeated."""
        config, clock = self.config, self.clock
        bundle = await self.device.run(self._load)
        trainer = await self.device.run(lambda: LocalTrainer(bundle, config.train, dumps=self.home.path / "dumps"))
        identity = self.home.identity()
        exchange = Exchange(
            MemoryHub().transport(identity),  # nobody is in it
            self.store,
            identity,
            self.manifest,
            Rescorer(bundle, self.scorer),
            clock,
        )
        parts = Parts(
            config=config,
            manifest=self.manifest,
            peer_id=identity.peer_id,
            bundle=bundle,
            device=self.device,
            engine=TransformersEngine(bundle, self.device),
            trainer=trainer,
            scorer=self.scorer,
            exchange=exchange,
            store=self.store,
            sampler=Sampler(config.node.seed),
            checkpoints=CheckpointStore(self.home.checkpoints, config.checkpoint.keep),
            history=self.history,
            progress=Progress(clock, config.limits.stage_seconds, since=clock()),
            clock=clock,
        )
        loop = Loop(parts)
        await loop.recover()
        return loop, trainer

    def _load(self) -> ModelBundle:
        use_threads(self.config.node.threads)
        model = self.config.model
        plan = prepare(self.config, models_dir()).plan
        shape = model_shape(model_directory(model.path, models_dir()))
        check_fit(replace(plan, always=(*plan.always, ("32-bit copy", 4 * shape.parameters))), shape)
        return load_model(model.path, device=model.device, dtype=model.dtype, models=models_dir())

    async def _source(self, bundle: ModelBundle) -> Source:
        order = self.order
        if order.source == "environments":
            return await from_environments(
                bundle,
                self.scorer,
                self.config,
                self.manifest,
                tasks=order.tasks,
                max_length=order.max_length,
                seed=self.seed,
            )
        return await from_experience(
            self.store,
            bundle,
            self.scorer,
            self.config,
            self.manifest,
            groups=order.groups,
            max_length=order.max_length,
        )

    def _examples(self, source: Source) -> list[Pair] | list[Labelled]:
        order, rng = self.order, random.Random(self.seed)
        threshold = THRESHOLDS[order.method] if order.threshold is None else order.threshold
        if order.method == "dpo":
            return preference_pairs(source.tasks, per_task=order.pairs_per_task, threshold=threshold, rng=rng)
        choose = labelled if order.method == "kto" else to_imitate
        return choose(source.tasks, threshold=threshold, rng=rng)

    def _course(self, bundle: ModelBundle, examples: int) -> Course:
        order = self.order
        return Course(
            method=order.method,
            steps=order.steps or math.ceil(examples / order.batch),
            batch=order.batch,
            learning_rate=order.learning_rate or LEARNING_RATES[order.method],
            beta=order.beta,
            seed=self.seed,
            autocast=bundle.model.dtype == torch.bfloat16,
        )

    async def _train(self, trainer: LocalTrainer, examples: list[Pair] | list[Labelled], course: Course) -> Outcome:
        """Train, and have the result in the trainer's weights, its optimizer empty."""
        deadline = math.inf if self.order.minutes is None else self.clock() + 60 * self.order.minutes

        def should_stop() -> bool:
            return self.stop.is_set() or self.clock() >= deadline

        def work() -> Outcome:
            if trainer.model.device.type == "cuda" and torch.cuda.device_count() > 1:
                raise OfflineError("TRL takes one GPU in one process and there are more ; set CUDA_VISIBLE_DEVICES=0")
            trainer.optimizer.state.clear()  # its memory is wanted, and its moments are of another loss
            weights = trainer.weights.masters
            plain = plain_copy(trainer.model, weights)
            tokenizer, scratch = trainer.bundle.tokenizer, self.home.path / SCRATCH
            shutil.rmtree(scratch, ignore_errors=True)  # of a training that was killed
            scratch.mkdir()
            try:
                outcome = train(
                    plain, tokenizer, examples, course, self.config.train, work=scratch, should_stop=should_stop
                )
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
            with torch.no_grad():
                for name, parameter in plain.named_parameters():
                    weights[name].copy_(parameter)
            trainer.weights.publish()
            return outcome

        outcome = await self.device.run(work)
        if not outcome.losses:
            raise OfflineError("the deadline came before the first step was done ; raise --minutes")
        return outcome

    async def _score(self, loop: Loop) -> dict[str, float]:
        """Held-out score by environment, and their mean."""
        p = loop.parts
        scores = await held_out(p.engine, p.bundle, p.scorer, p.config, p.manifest)
        return {**scores, "mean": sum(scores.values()) / len(scores)}

    async def _apply(self, loop: Loop, trainer: LocalTrainer, report: Mapping[str, Any]) -> int:
        """Make the weights the node's next step. Raises OfflineError when they are worse, CheckpointError."""
        held = report["held_out"]
        before, after = held["before"], held["after"]
        if after["mean"] < before["mean"] and not self.order.force:
            where = f", the model is in {report['output']}" if report["output"] else ""
            raise OfflineError(
                f"the held-out score fell from {before['mean']:.3f} to {after['mean']:.3f}, so the node stays at step"
                f" {trainer.step}{where} ; try fewer --steps or a lower --learning-rate, or add --force"
            )
        trainer.step += 1
        await self.device.run(loop.parts.checkpoints.save, trainer.step, trainer.save, loop.saving.state())
        self.history.record_evaluation(trainer.step, {k: v for k, v in after.items() if k != "mean"})
        self.history.event(
            "info",
            "offline",
            f"{self.order.method} on {report['examples']} examples is step {trainer.step}; held-out"
            f" {before['mean']:.3f} -> {after['mean']:.3f}; the optimizer starts anew",
        )
        return trainer.step
