"""`shoal bench drafting`: the transformers engine with guesses at next tokens (node/engines/drafting.py) and without.

The embedded model at temperature 1, G = 8: its own tasks as a step has them, and long answers, where nothing stops
before LONG tokens. What is sampled is the same on both sides, so CPU seconds of the model thread compare directly; laps
alternate.
"""

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import torch

from node.bench.workload import GROUP_SIZE, NEW_TOKENS, PROMPTS, bench_config, bench_manifest, bench_scorer, own_refs
from node.device import Device
from node.engines.transformers import TransformersEngine
from node.home import models_dir
from node.interfaces import PromptRequest
from node.models import ModelBundle, load_model
from node.rollouts import prompts, sampling_seed

LONG, LONG_PROMPTS = 96, 2
LAPS = 2


async def compare(threads: int, machine: dict[str, Any]) -> dict[str, Any]:
    """`ratio` is seconds without guesses over seconds with them."""
    config, manifest, device = bench_config("embedded"), bench_manifest(), Device()

    def load() -> ModelBundle:
        torch.set_num_threads(threads)
        return load_model("embedded", device="cpu", dtype=config.model.dtype, models=models_dir())

    bundle = await device.run(load)
    scorer = bench_scorer(manifest, config)
    await scorer.start()
    _, prompt_ids = await prompts(bundle, scorer, own_refs(manifest, PROMPTS))
    await scorer.close()
    endless = dataclasses.replace(bundle, stop_ids=frozenset())
    rows = []
    for name, model, asked, budget in (
        ("tasks of a step", bundle, prompt_ids, NEW_TOKENS),
        ("long answers", endless, prompt_ids[:LONG_PROMPTS], LONG),
    ):
        without, drafting = (TransformersEngine(model, device, drafting=on) for on in (False, True))
        await _lap(drafting, asked[:1], 4)
        laps = [(await _lap(without, asked, budget), await _lap(drafting, asked, budget)) for _ in range(LAPS)]
        seconds = [min(lap[side][0] for lap in laps) for side in (0, 1)]
        same = sum(a == b for a, b in zip(laps[0][0][1], laps[0][1][1], strict=True))
        rows.append(
            {
                "answers": name,
                "seconds_without": seconds[0],
                "seconds_with": seconds[1],
                "ratio": seconds[0] / seconds[1],
                "tokens": sum(map(len, laps[0][0][1])),
                "same_answers": f"{same} of {len(asked) * GROUP_SIZE}",
            }
        )
    device.close()
    return {"dtype": str(bundle.model.dtype).removeprefix("torch."), "group_size": GROUP_SIZE, "rows": rows}


async def _lap(
    engine: TransformersEngine, prompt_ids: Sequence[tuple[int, ...]], budget: int
) -> tuple[float, list[tuple[int, ...]]]:
    """CPU seconds of the model thread, and what was sampled."""
    requests = [
        PromptRequest(str(i), ids, GROUP_SIZE, budget, 1.0, sampling_seed(0, i)) for i, ids in enumerate(prompt_ids)
    ]
    began = await engine.device.run(time.thread_time)
    groups = {int(group.key): group.samples async for group in engine.generate(requests)}
    seconds = await engine.device.run(time.thread_time) - began
    return seconds, [sample.token_ids for i in range(len(requests)) for sample in groups[i]]
