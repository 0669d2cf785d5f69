"""`shoal bench scheduler`: what scheduling gains on long-tailed rollouts.

The node's own scheduler and rounds (node/scheduler.py, node/scheduling/) drive four simulated engines
(node/bench/simulated.py) on a virtual clock, step after step, each followed by a training phase. Nothing else is
simulated, and nothing is measured in real seconds.

What there is to gain depends on two things, so there are several cases. The fewer answers a step has for each engine,
the emptier the engines of a plain step are. And a dense model's keys and values take as long to read as its weights and
more, so that a half empty engine is nearly half as slow; those of a mixture of experts (MLA) are small, and a step
takes nearly as long with few sequences as with many. Training takes as long for each trained token in every row: so
long that it makes up TRAIN_SHARE of a plain synchronous step.
"""

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from node.bench.scheduler_traces import GROUP_SIZE, SCALE, Workload, lognormal, recorded
from node.bench.simulated import EngineModel, SimulatedEngine, Trace
from node.bench.virtual_time import run_virtual
from node.interfaces import PromptRequest
from node.scheduler import Dispatch, Scheduler
from node.scheduling.rounds import Begun, Plan, Rounds
from protocol.rollout import TaskRef

ENGINES = 4
STEPS = 8
WARM_UP = 2
"""First steps, not counted: over-provisioning begins with nothing in flight."""
SEED = 0
PROMPT = 512
CHUNK = 4096
TRAIN_SHARE = 0.2
"""Of a plain synchronous step; published rollout shares are 63 to 87%."""


@dataclass(frozen=True, slots=True)
class Row:
    """One way to schedule."""

    name: str
    dispatch: Dispatch
    plan: Plan


# An 8B model (36 layers, 8 key heads of 128, bfloat16: 147 KB a token) on two 80 GB GPUs of 3.35 TB/s and 990 TFLOP/s.
# Memory: 90% less 16 GB of weights. A step: 16 GB at 60% of the bandwidth, and as much again for launches and the
# all-reduce. Arithmetic at 40%: it takes over at 400 sequences.
DENSE = EngineModel(
    slots=128,
    kv_tokens=870_000 // SCALE,
    step_seconds=8e-3 * SCALE,
    kv_seconds=37e-9 * SCALE**2,  # SCALE tokens in each of SCALE steps
    token_seconds=20e-6 * SCALE,
    prefill_seconds=20e-6 * SCALE,
)
# A mixture of experts of 1,000B, 32B active, in 8 bits with 70 KB a token (MLA, 61 layers) on 32 such GPUs, as the
# largest workload of Seer; each simulated sequence stands for 16. Memory: 90% less 1 TB of weights. A step: 1 TB at 60%
# of the bandwidth, and 25 ms for the 122 all-to-alls. Arithmetic at 30%.
EXPERTS = EngineModel(
    slots=1024 // 16,
    kv_tokens=18_600_000 // 16 // SCALE,
    step_seconds=40e-3 * SCALE,
    kv_seconds=1.1e-9 * 16 * SCALE**2,
    token_seconds=6.7e-6 * 16 * SCALE,
    prefill_seconds=6.7e-6 * 16 * SCALE,
)


def rows_of(model: EngineModel) -> tuple[Row, ...]:
    whole = Dispatch()
    longest_first = Dispatch("longest-first", concurrency=model.slots)
    divided = Dispatch("divided", model.slots, CHUNK // SCALE, model.kv_tokens)
    return (
        Row("synchronous", whole, Plan()),
        Row("+ longest first", longest_first, Plan()),
        Row("+ divided", divided, Plan()),
        Row("+ over-provision, resumed", divided, Plan("partial", over_provision=2.0, max_staleness=2)),
        Row("+ tail batching", divided, Plan("tail", over_provision=1.25)),
        Row("asynchronous", divided, Plan("asynchronous", over_provision=2.0, max_staleness=2)),
    )


async def compare(threads: int, machine: dict[str, Any]) -> dict[str, Any]:
    """The policies on every case. On a thread, as the clock of the simulation is an event loop of its own."""
    return await asyncio.to_thread(_compare)


@dataclass(frozen=True, slots=True)
class Case:
    """What the rows are compared on."""

    system: str
    model: EngineModel
    groups: int
    """A step's, each of GROUP_SIZE answers."""
    lengths: Callable[[int], Workload]
    """From the number of groups."""


CASES = (
    Case("experts", EXPERTS, 16, lambda n: lognormal("lognormal to 96k", n, median=20_000, cap=98_304, seed=SEED)),
    Case("experts", EXPERTS, 32, lambda n: lognormal("lognormal to 96k", n, median=20_000, cap=98_304, seed=SEED)),
    Case("experts", EXPERTS, 64, lambda n: lognormal("lognormal to 96k", n, median=20_000, cap=98_304, seed=SEED)),
    Case("experts", EXPERTS, 32, lambda n: recorded("recorded, stretched to 64k", n, cap=65_536, seed=SEED)),
    Case("dense", DENSE, 32, lambda n: lognormal("lognormal to 64k", n, median=12_000, cap=65_536, seed=SEED)),
)


def _compare() -> dict[str, Any]:
    return {
        "engines": ENGINES,
        "group_size": GROUP_SIZE,
        "steps": STEPS - WARM_UP,
        "chunk_tokens": CHUNK,
        "train_share": TRAIN_SHARE,
        "rows": [row for case in CASES for row in table(case)],
    }


def table(case: Case, steps: int = STEPS) -> list[dict[str, Any]]:
    """A row per policy; ratios are to the plain synchronous row."""
    rows = rows_of(case.model)
    workload = case.lengths(case.groups * (steps + 4))
    plain = simulate(case, workload, rows[0], train_seconds=0.0, steps=steps)
    per_token = plain["rollout_seconds"] * (steps - WARM_UP) / plain["trained_tokens"]
    train_seconds = per_token * TRAIN_SHARE / (1 - TRAIN_SHARE)
    figures = [simulate(case, workload, row, train_seconds=train_seconds, steps=steps) for row in rows]
    return [
        {
            "system": case.system,
            "lengths": workload.name,
            "groups": case.groups,
            "policy": row.name,
            **{ratio: figure[of] / figures[0][of] if figure[of] is not None else None for ratio, of in RATIOS},
            **figure,
        }
        for row, figure in zip(rows, figures, strict=True)
    ]


RATIOS = (
    ("throughput_ratio", "tokens_per_second"),
    ("rollout_throughput_ratio", "rollout_tokens_per_second"),
    ("tail_ratio", "tail_seconds"),
)


def simulate(case: Case, workload: Workload, row: Row, *, train_seconds: float, steps: int = STEPS) -> dict[str, Any]:
    """Train on a virtual clock; `train_seconds` is the trainer's time per trained token."""
    return run_virtual(_Simulation(case, workload, row, train_seconds).run(steps))


class _Simulation:
    """One node's steps."""

    def __init__(self, case: Case, workload: Workload, row: Row, train_seconds: float) -> None:
        self.case, self.workload, self.row, self.train_seconds = case, workload, row, train_seconds
        trace = Trace({f"task/{i}": lengths for i, lengths in enumerate(workload.groups)})
        self.engines = [SimulatedEngine(f"engine {i}", case.model, trace) for i in range(ENGINES)]
        self.scheduler = Scheduler(self.engines, row.dispatch)
        self.rounds = Rounds(self.scheduler, row.plan, self._prepare)
        self.next = 0

    async def run(self, steps: int) -> dict[str, Any]:
        loop = asyncio.get_running_loop()
        asynchronous = self.row.plan.policy == "asynchronous"
        began = full = full_rollout = rollout_seconds = tail = 0.0
        tokens = sampled = given_up = staleness = 0
        for step in range(steps):
            if step == WARM_UP:
                began, full, sampled, given_up = loop.time(), self._full(), self._sampled(), self.rounds.given_up
                full_rollout = rollout_seconds = tail = 0.0
                tokens = 0
            started, full_before = loop.time(), self._full()
            self._begin()
            taken = await self.rounds.take(self.case.groups)
            rollout_seconds += loop.time() - started
            full_rollout += self._full() - full_before
            tail += tail_of(
                [at for engine in self.engines for at in engine.meters.finishes if at > started], loop.time()
            )
            if asynchronous:
                self._begin(ahead=True)
                await self.rounds.ahead()
            trained = SCALE * sum(one.tokens for one in taken)
            tokens += trained
            staleness = max(staleness, *(self.scheduler.version - (one.oldest or 0) for one in taken))
            await asyncio.sleep(trained * self.train_seconds)
            await self.scheduler.update_weights(step + 1)
        elapsed = loop.time() - began
        figures = {
            "tokens_per_second": tokens / elapsed,
            # asynchronous rollouts have no time of their own
            "rollout_tokens_per_second": None if asynchronous else tokens / rollout_seconds,
            "step_seconds": elapsed / (steps - WARM_UP),
            "rollout_seconds": rollout_seconds / (steps - WARM_UP),
            "tail_seconds": tail / (steps - WARM_UP),
            "idle_share": 1 - (self._full() - full) / elapsed,
            "idle_share_rollout": 1 - full_rollout / rollout_seconds,
            "given_up_share": (self.rounds.given_up - given_up) / (self._sampled() - sampled),
            "preemptions": sum(engine.meters.preempted for engine in self.engines),
            "oldest_token_versions_behind": staleness,
            "trained_tokens": tokens,
        }
        await self.rounds.close()
        await self.scheduler.close()
        return figures

    def _begin(self, *, ahead: bool = False) -> None:
        """The next tasks of the trace, as many as the policy wants."""
        count = self.rounds.missing(self.case.groups, ahead=ahead)
        self.rounds.begin(
            [Begun(TaskRef("task", "1", 0, self.next + i), 0, self.next + i) for i in range(count)],
        )
        self.next += count

    async def _prepare(self, tasks: Sequence[Begun]) -> list[PromptRequest]:
        prompt = (1,) * (PROMPT // SCALE)
        return [
            PromptRequest(f"task/{one.ref.index}", prompt, GROUP_SIZE, self.workload.budget, 1.0, one.seed)
            for one in tasks
        ]

    def _full(self) -> float:
        return sum(engine.meters.full for engine in self.engines) / ENGINES

    def _sampled(self) -> int:
        return sum(engine.meters.tokens for engine in self.engines)


def tail_of(finishes: Sequence[float], end: float) -> float:
    """Seconds to the end of a rollout after nine tenths of its samples were finished (Seer's tail latency)."""
    return end - sorted(finishes)[math.ceil(0.9 * len(finishes)) - 1] if finishes else 0.0
