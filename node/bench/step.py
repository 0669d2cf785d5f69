"""`shoal bench step`: one full GRPO step of this node against one of TRL's GRPOTrainer.

Same model, prompts, group size, token budget, learning rate, clip and scorer; 64 completions an optimizer step on both
sides. This node runs before and after TRL (A/B/A), so that a machine that gets busier or quieter shows.
"""

from importlib.metadata import PackageNotFoundError, version
from typing import Any

from node.bench.side import BenchError, SideTimeout, run_side
from node.bench.workload import GROUP_SIZE, NEW_TOKENS, PROMPTS, median, spec_of

OURS, PEER = "node.bench.step_ours", "node.bench.step_trl"
STEPS, PEER_STEPS = 3, 1
"""Timed; each side warms up first: this node with a whole step, TRL with a step of one prompt."""
DEADLINE = 3600.0
HOPELESS = 2.0
"""A type that needs this many times the other's time for one prompt is given up."""


async def compare(threads: int, machine: dict[str, Any]) -> dict[str, Any]:
    """Measure both sides. `ratio` is TRL's seconds over ours; `floor_ratio` is our seconds over the floor's.

    `ratio_cpu` is of CPU seconds: what counts where other programs run beside the benchmark.
    """
    try:
        trl = version("trl")
    except PackageNotFoundError:
        raise BenchError("bench step compares with trl, which is missing ; .venv/bin/pip install -e '.[trl]'") from None
    spec = spec_of(threads, steps=STEPS)
    first = await run_side(OURS, spec, DEADLINE)
    dtype, probes = await _faster_type(threads)
    peer = await run_side(PEER, spec_of(threads, steps=PEER_STEPS, prompts=PROMPTS, dtype=dtype), DEADLINE)
    second = await run_side(OURS, spec, DEADLINE)

    ours = _merge([first, second])
    rate = machine["gemm_gflops_f32" if ours["dtype"] == "float32" else "gemm_gflops_bf16"] * 1e9
    floors = {kind: flops / rate for kind, flops in ours.pop("flops").items()}
    peer_seconds = median([step["seconds"] for step in peer["steps"]])
    peer_cpu = median([step["cpu_seconds"] for step in peer["steps"]])
    return {
        "workload": {"prompts": PROMPTS, "group_size": GROUP_SIZE, "new_tokens": NEW_TOKENS},
        "ours": {**ours, "floor_seconds": floors["real"], "floor_all_informative_seconds": floors["all_informative"]},
        "peer": {
            "name": "TRL GRPOTrainer",
            "version": trl,
            "seconds": peer_seconds,
            "cpu_seconds": peer_cpu,
            "dtype": dtype,
            "probe_seconds": probes,
            "tokens_per_second": sum(step["tokens_generated"] for step in peer["steps"])
            / sum(step["seconds"] for step in peer["steps"]),
            **{key: peer[key] for key in ("micro_batch", "peak_rss", "steps")},
        },
        "ratio": peer_seconds / ours["seconds"],
        "ratio_all_informative": peer_seconds / ours["all_informative_seconds"],
        "ratio_cpu": peer_cpu / ours["cpu_seconds"],
        "ratio_all_informative_cpu": peer_cpu / ours["all_informative_cpu_seconds"],
        "floor_ratio": ours["seconds"] / floors["real"],
        "floor_ratio_all_informative": ours["all_informative_seconds"] / floors["all_informative"],
    }


async def _faster_type(threads: int) -> tuple[str, dict[str, float | None]]:
    """The type in which TRL does a step of one prompt sooner, and the seconds of both (None: given up)."""
    probe = spec_of(threads, steps=1, prompts=0)
    seconds: dict[str, float | None] = {}
    float32 = await run_side(PEER, {**probe, "dtype": "float32"}, DEADLINE)
    seconds["float32"] = fastest = float32["probe"]["seconds"]
    chosen = "float32"
    try:
        deadline = HOPELESS * fastest + float32["start_seconds"]
        bfloat16 = await run_side(PEER, {**probe, "dtype": "bfloat16"}, deadline)
        seconds["bfloat16"] = bfloat16["probe"]["seconds"]
        if seconds["bfloat16"] < fastest:
            chosen = "bfloat16"
    except SideTimeout:
        seconds["bfloat16"] = None
    return chosen, seconds


def _merge(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """One result of several runs of our side: medians over the steps of all."""
    real = [step for run in runs for step in run["steps"]]
    synthetic = [step for run in runs for step in run["all_informative"]]
    seconds = median([step["seconds"] for step in real])
    return {
        "seconds": seconds,
        "cpu_seconds": median([step["cpu_seconds"] for step in real]),
        "all_informative_seconds": median([step["seconds"] for step in synthetic]),
        "all_informative_cpu_seconds": median([step["cpu_seconds"] for step in synthetic]),
        "dtype": runs[0]["dtype"],
        "tokens_per_second": sum(step["tokens_generated"] for step in real) / sum(step["seconds"] for step in real),
        "peak_rss": max(run["peak_rss"] for run in runs),
        "flops": {
            "real": median([step["flops"] for step in real]),
            "all_informative": median([step["flops"] for step in synthetic]),
        },
        "steps": real,
        "all_informative": synthetic,
    }
