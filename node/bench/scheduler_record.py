"""Records lengths of the embedded model's own answers: `python -m node.bench.scheduler_record` writes lengths.json.

Tasks of the embedded curriculum as a node would get them, at temperature 1, far beyond the budget that the tasks have:
most answers stop after a few tokens, and some do not.
"""

import asyncio
import json

import torch

from node.bench.scheduler_traces import GROUP_SIZE, RECORDED
from node.bench.workload import bench_config, bench_manifest, bench_scorer, own_refs
from node.device import Device
from node.engines.transformers import TransformersEngine
from node.home import models_dir
from node.interfaces import PromptRequest
from node.models import load_model
from node.rollouts import prompts, sampling_seed

GROUPS, NEW_TOKENS = 64, 256


async def record() -> dict[str, object]:
    """Lengths of every group's answers."""
    torch.set_num_threads(1)
    config, manifest, device = bench_config("embedded"), bench_manifest(), Device()
    bundle = load_model("embedded", device="cpu", dtype="auto", models=models_dir())
    scorer = bench_scorer(manifest, config)
    await scorer.start()
    _, prompt_ids = await prompts(bundle, scorer, own_refs(manifest, GROUPS))
    await scorer.close()
    requests = [
        PromptRequest(str(i), ids, GROUP_SIZE, NEW_TOKENS, 1.0, sampling_seed(0, i)) for i, ids in enumerate(prompt_ids)
    ]
    lengths = {}
    async for group in TransformersEngine(bundle, device).generate(requests):
        lengths[int(group.key)] = [len(sample.token_ids) for sample in group.samples]
    device.close()
    return {"model": bundle.name, "max_new_tokens": NEW_TOKENS, "lengths": [lengths[i] for i in range(GROUPS)]}


if __name__ == "__main__":
    RECORDED.write_text(json.dumps(asyncio.run(record())))
