"""Our side of `shoal bench step`: the loop of a node that has no peers, step after step.

The parts are those that node/daemon.py makes, except that the transport is the in-memory one, with nobody on it.
"""

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from node.bench.floor import matrix_weights, work_of
from node.bench.ours import Ours, ours
from node.bench.side import Say, Stopwatch, peak_rss, serve
from node.bench.workload import bench_clock, bench_identity
from node.checkpoint import CheckpointStore
from node.engines.transformers import TransformersEngine
from node.history import History
from node.interfaces import Score, StepSkipped
from node.loop import Loop
from node.parts import Parts
from node.progress import Progress
from node.rescore import Rescorer
from node.scorer import Scorer
from node.training.local import LocalTrainer
from protocol.rollout import TaskRef
from swarm.exchange import Exchange
from swarm.experience import ExperienceStore
from swarm.memory import MemoryHub
from swarm.sampler import Sampler

STAGE_SECONDS = 3600.0


class Alternating:
    """In the place of a scorer's `score`, which it asks: while `on` it says 0, 1, 0, 1, ... instead of what that says,
    so that every group is informative."""

    def __init__(self, scorer: Scorer) -> None:
        self._score, self.on = scorer.score, False

    async def __call__(self, items: Sequence[tuple[TaskRef, str]], *, foreign: bool = False) -> list[Score]:
        scores = await self._score(items, foreign=foreign)
        return [Score(float(i % 2), parsed=True) for i in range(len(scores))] if self.on else scores


async def work(spec: Mapping[str, Any], say: Say, directory: Path) -> None:
    say(await measure(spec, directory))


async def measure(spec: Mapping[str, Any], directory: Path) -> dict[str, Any]:
    """One warm-up step, `steps` steps with real rewards, `steps` with alternating ones."""
    async with ours(spec) as parts:
        return await _measured(parts, spec["steps"], directory)


async def _measured(ours: Ours, steps: int, directory: Path) -> dict[str, Any]:
    config, scorer, identity, clock = ours.config, ours.scorer, bench_identity(), bench_clock()
    alternating = Alternating(scorer)
    scorer.score = alternating  # type: ignore[method-assign]
    trainer = await ours.device.run(
        functools.partial(LocalTrainer, ours.bundle, config.train, dumps=directory / "dumps")
    )
    store = ExperienceStore(directory / "node.db", config.limits.store_mb << 20, clock)
    history = History(directory / "node.db", clock)
    exchange = Exchange(
        MemoryHub(seed=0).transport(identity),
        store,
        identity,
        ours.manifest,
        Rescorer(ours.bundle, scorer),
        clock,
    )
    (directory / "checkpoints").mkdir()
    checkpoints = CheckpointStore(directory / "checkpoints", config.checkpoint.keep)
    parts = Parts(
        config=config,
        manifest=ours.manifest,
        peer_id=identity.peer_id,
        bundle=ours.bundle,
        device=ours.device,
        engine=TransformersEngine(ours.bundle, ours.device),
        trainer=trainer,
        scorer=scorer,
        exchange=exchange,
        store=store,
        sampler=Sampler(config.node.seed),
        checkpoints=checkpoints,
        history=history,
        progress=Progress(clock, STAGE_SECONDS, since=clock()),
        clock=clock,
    )
    loop = Loop(parts)
    watch = Stopwatch()
    alternating.on = True  # for the update to be warm too, whatever the first rewards are
    await loop.step()
    alternating.on = False
    real = [await _timed(loop, watch) for _ in range(steps)]
    alternating.on = True
    synthetic = [await _timed(loop, watch) for _ in range(steps)]
    store.close()
    history.close()
    return {
        "dtype": ours.dtype,
        "peak_rss": peak_rss(),
        "steps": real,
        "all_informative": synthetic,
    }


async def _timed(loop: Loop, watch: Stopwatch) -> dict[str, Any]:
    """One step, and what it did. A step of which all groups are uniform makes no update, as in a node."""
    parts = loop.parts
    scorer_before = parts.scorer.busy_seconds
    watch.lap()
    try:
        await loop.step()
    except StepSkipped:
        parts.trainer.step += 1  # so that the next one is journalled under a number of its own
    passed = watch.lap()
    record = parts.checkpoints.latest().records[-1]
    groups = record.batch.groups
    counted = work_of(groups)
    return {
        **passed,
        "scorer_seconds": parts.scorer.busy_seconds - scorer_before,
        "stages": {name: round(seconds, 4) for name, seconds in parts.progress.stages.items()},
        "tokens_generated": sum(len(sequence.token_ids) for group in groups for sequence in group.sequences),
        "prompt_tokens": [len(group.prompt_ids) for group in groups],
        "groups_skipped": sum(group.uniform for group in groups),
        "tokens_prefilled": counted.prefill_tokens,
        "tokens_decoded": counted.decode_tokens,
        "tokens_forwarded": counted.trained_tokens,
        "flops": counted.flops(*matrix_weights(parts.bundle.model)),
    }


if __name__ == "__main__":
    serve(work)
