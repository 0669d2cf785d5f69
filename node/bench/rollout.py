"""`shoal bench rollout`: sampling with the in-process engine against Hugging Face `generate`.

Twice: the step's workload (8 prompts x G = 8, at most 16 new tokens, stopping as the model stops), and ragged lengths:
each prompt has its own budget of 8 to 256 new tokens and nothing stops before it. `generate` runs its batch until the
longest row is done, as it does for its users; only the tokens within the budgets count, on both sides.
"""

from importlib.metadata import version
from typing import Any

from node.bench.side import SideTimeout, run_side
from node.bench.workload import GROUP_SIZE, NEW_TOKENS, RAGGED, median, spec_of

OURS, PEER = "node.bench.rollout_ours", "node.bench.rollout_hf"
REPEATS = 3
"""Of the step's workload; the ragged one takes long enough for once."""
DEADLINE = 3600.0
HOPELESS = 2.0
"""A type that needs this many times the other's time for a few tokens is given up."""


async def compare(threads: int, machine: dict[str, Any]) -> dict[str, Any]:
    """Measure both sides. `ratio` and `ratio_ragged` are `generate`'s seconds a token over ours."""
    ours = await run_side(OURS, spec_of(threads, repeats=REPEATS, ragged=RAGGED), DEADLINE)
    dtype, probes = await _faster_type(threads)
    peer = await run_side(PEER, spec_of(threads, repeats=REPEATS, ragged=RAGGED, dtype=dtype), DEADLINE)
    again = await run_side(OURS, spec_of(threads, repeats=REPEATS, ragged=RAGGED), DEADLINE)
    ours = {
        "dtype": ours["dtype"],
        "peak_rss": max(ours["peak_rss"], again["peak_rss"]),
        "uniform": _rate(ours["uniform"] + again["uniform"]),
        "ragged": _rate(ours["ragged"] + again["ragged"]),
    }
    theirs = {"uniform": _rate(peer["uniform"]), "ragged": _rate(peer["ragged"])}
    rate = machine["gemm_gflops_f32" if ours["dtype"] == "float32" else "gemm_gflops_bf16"] * 1e9
    return {
        "workload": {
            "prompts": len(RAGGED),
            "group_size": GROUP_SIZE,
            "new_tokens": NEW_TOKENS,
            "ragged_new_tokens": list(RAGGED),
        },
        "ours": ours,
        "peer": {
            "name": "transformers generate",
            "version": version("transformers"),
            "dtype": dtype,
            "probe_seconds": probes,
            "peak_rss": peer["peak_rss"],
            **theirs,
        },
        "ratio": ours["uniform"]["tokens_per_second"] / theirs["uniform"]["tokens_per_second"],
        "ratio_ragged": ours["ragged"]["tokens_per_second"] / theirs["ragged"]["tokens_per_second"],
        "ratio_cpu": theirs["uniform"]["cpu_per_token"] / ours["uniform"]["cpu_per_token"],
        "ratio_ragged_cpu": theirs["ragged"]["cpu_per_token"] / ours["ragged"]["cpu_per_token"],
        "floor_ratio": ours["uniform"]["seconds"] / (ours["uniform"]["flops"] / rate),
        "floor_ratio_ragged": ours["ragged"]["seconds"] / (ours["ragged"]["flops"] / rate),
    }


async def _faster_type(threads: int) -> tuple[str, dict[str, float | None]]:
    """The type in which `generate` does a few tokens sooner, and the seconds of both (None: given up)."""
    float32 = await run_side(PEER, spec_of(threads, repeats=0, ragged=(), dtype="float32"), DEADLINE)
    seconds: dict[str, float | None] = {"float32": float32["probe"]["seconds"]}
    deadline = HOPELESS * float32["probe"]["seconds"] + 2 * float32["start_seconds"]
    try:
        bfloat16 = await run_side(PEER, spec_of(threads, repeats=0, ragged=(), dtype="bfloat16"), deadline)
        seconds["bfloat16"] = bfloat16["probe"]["seconds"]
    except SideTimeout:
        return "float32", {**seconds, "bfloat16": None}
    return min(seconds, key=lambda dtype: seconds[dtype] or 0.0), seconds


def _rate(laps: list[dict[str, Any]]) -> dict[str, Any]:
    """Median lap, and its tokens a second."""
    lap = next(lap for lap in laps if lap["seconds"] == median([one["seconds"] for one in laps]))
    return {
        **lap,
        "tokens_per_second": lap["tokens"] / lap["seconds"],
        "cpu_per_token": lap["cpu_seconds"] / lap["tokens"],
        "laps": [one["seconds"] for one in laps],
    }
