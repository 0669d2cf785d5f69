"""`shoal bench memory`: what a trainer holds and peaks at, with all weights trained or adapters, recomputing or not.

Each case is a process of its own that loads the embedded model and makes two updates on the same 8 groups of 8 answers
(prompts of 140 tokens, answers of 16, every group informative). Nothing else of a node runs in it.
"""

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from node.bench.side import BenchError, Say, Stopwatch, peak_rss, run_side, serve
from node.bench.train import grouped
from node.bench.workload import GROUP_SIZE, NEW_TOKENS, spec_of
from node.config_train import TrainConfig
from node.home import models_dir
from node.interfaces import Batch
from node.models import load_model
from node.training.local import LocalTrainer

CASES: Mapping[str, Mapping[str, Any]] = {
    "all weights": {"gradient_checkpointing": "off"},
    "all weights, recomputing": {"gradient_checkpointing": "on"},
    "adapters of rank 16": {"lora_rank": 16, "gradient_checkpointing": "off"},
    "adapters of rank 16, recomputing": {"lora_rank": 16, "gradient_checkpointing": "on"},
}
PROMPT = 140
UPDATES = 2
DEADLINE = 1800.0


async def compare(threads: int, machine: dict[str, Any]) -> dict[str, Any]:
    """A row a case; `ratio` is the peak with all weights over that of the case."""
    if importlib.util.find_spec("peft") is None:
        raise BenchError("bench memory trains adapters, and peft is not installed ; .venv/bin/pip install -e '.[lora]'")
    rows = [
        {"case": case, **await run_side("node.bench.memory", spec_of(threads, train=dict(train)), DEADLINE)}
        for case, train in CASES.items()
    ]
    return {"rows": [{**row, "ratio": rows[0]["peak_mb"] / row["peak_mb"]} for row in rows]}


def work(spec: Mapping[str, Any], say: Say, directory: Path) -> None:
    torch.set_num_threads(spec["threads"])
    say(measure(spec, directory))


def measure(spec: Mapping[str, Any], directory: Path) -> dict[str, Any]:
    """Megabytes by kind after the last update, at most so far, and CPU seconds of the last update."""
    bundle = load_model(spec["model"], device="cpu", dtype="auto", models=models_dir())
    trainer = LocalTrainer(bundle, TrainConfig.model_validate(spec["train"]), dumps=directory)
    groups = grouped(PROMPT, NEW_TOKENS, GROUP_SIZE, vocabulary=bundle.vocabulary_size).groups
    watch = Stopwatch()
    for step in range(1, UPDATES + 1):
        watch.lap()
        trainer.update(Batch(step, groups))
    spent = watch.lap()["cpu_seconds"]
    held = {f"{kind}_mb": size / 2**20 for kind, size in trainer.memory().items()}
    return {**held, "peak_mb": peak_rss() / 2**20, "cpu_seconds": spent}


if __name__ == "__main__":
    serve(work)
