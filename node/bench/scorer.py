"""`shoal bench scorer`: what it costs that answers are scored in an isolated process.

Ours is `node.scorer.Scorer`, all its processes counted; the peer calls the same environment's `score` directly. Times
are CPU seconds, of one batch of answers: the right one and wrong ones, to tasks that both sides know already.
"""

import asyncio
import importlib.metadata
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from node.bench.side import BenchError, Say, Stopwatch, run_side, serve
from node.bench.workload import median, spec_of
from node.config import LimitsConfig
from node.environments.known import build, reasoning_gym_version
from node.scorer import Scorer
from protocol.manifest import EnvironmentSpec, embedded_manifest
from protocol.rollout import TaskRef

GROUPS, GROUP_SIZE = 64, 8
LAPS = 5
DEADLINE = 600.0


async def compare(threads: int, machine: dict[str, Any]) -> dict[str, Any]:
    return await run_side("node.bench.scorer", spec_of(threads), DEADLINE)


async def work(spec: Mapping[str, Any], say: Say, directory: Path) -> None:
    say(
        {
            "workload": {"answers": GROUPS * GROUP_SIZE, "times": f"CPU milliseconds an answer, median of {LAPS} laps"},
            "peer": {
                "name": "score() of the same environment, in the same process",
                "version": f"reasoning_gym {importlib.metadata.version('reasoning_gym')}",
            },
            "rows": await measure(),
        }
    )


async def measure(groups: int = GROUPS, laps: int = LAPS) -> list[dict[str, Any]]:
    """A row for the embedded environments, and one for environments whose scorers evaluate: there every chunk forks."""
    embedded = embedded_manifest("bench", 0).environments
    evaluating = [EnvironmentSpec(name, reasoning_gym_version() or "", 1, {}) for name in ("countdown", "puzzle24")]
    return [
        await _row("a child for all chunks (embedded)", embedded, groups, laps),
        await _row("a child for every chunk (formulas)", evaluating, groups, laps),
    ]


async def _row(name: str, specs: Sequence[EnvironmentSpec], groups: int, laps: int) -> dict[str, Any]:
    # no answer here takes long, and a busy machine must not make one fail
    scorer = Scorer(specs, deadline=DEADLINE, memory_mb=LimitsConfig().scorer_memory_mb, clock=time.monotonic)
    await scorer.start()
    try:
        refs = [TaskRef(spec.name, spec.version, 1, i) for spec in specs for i in range(groups // len(specs))]
        items = [
            (ref, gold if n == 0 and gold is not None else str(n))
            for ref, gold in zip(refs, await scorer.golds(refs), strict=True)
            for n in range(GROUP_SIZE)
        ]
        known = {(spec.name, spec.version): build(spec.name, spec.version, spec.settings) for spec in specs}
        direct, isolated = list[float](), list[float]()
        for lap in range(laps + 1):
            watch = Stopwatch()
            expected = [
                known[ref.environment, ref.version].score(ref.seed, ref.index, text).reward for ref, text in items
            ]
            spent = watch.lap()["cpu_seconds"]
            began = await processor_seconds(scorer)
            scores = await scorer.score(items)
            ours = await processor_seconds(scorer) - began
            for (ref, text), score, reward in zip(items, scores, expected, strict=True):
                if score.reward != reward:
                    said = score.failure or score.reward
                    raise BenchError(f"{name}: {text!r} to {ref} is {said} in isolation and {reward} without")
            if lap:  # the first one makes the tasks
                direct.append(1e3 * spent / len(items))
                isolated.append(1e3 * ours / len(items))
    finally:
        await scorer.close()
    return {
        "environments": name,
        "isolated_ms": median(isolated),
        "direct_ms": median(direct),
        "added_ms": median(isolated) - median(direct),
        "ratio": median(direct) / median(isolated),
    }


async def processor_seconds(scorer: Scorer) -> float:
    """Of this process, the scorer's and its children, those that have ended too."""
    worker = psutil.Process(scorer.pid)
    while len(children := worker.children()) > 1:  # noqa: ASYNC110 - a child ends just after its last answer
        await asyncio.sleep(0.005)
    own = worker.cpu_times()
    living = sum(times.user + times.system for times in (child.cpu_times() for child in children))
    return time.process_time() + own.user + own.system + own.children_user + own.children_system + living


if __name__ == "__main__":
    serve(work)
