"""What parts of a large node take of a device, in bytes and in words: the sums of node/memory_plan.py for one part."""

from collections.abc import Sequence

import torch

from node.config import Config
from node.hardware import EngineChoice, Gpu, Machine
from node.large.cluster_file import Cluster
from node.large.room import Need, Needs
from node.memory_plan import GB, KV_TOKENS, LARGEST_SHARE, SMALLEST_CACHE, plan_shards
from node.model_shape import ModelShape


def needs_of(config: Config, shape: ModelShape, dtype: torch.dtype, cluster: Cluster) -> Needs:
    """What `cluster`'s parts need for a model in a compute type; `config` has its `train.shards` already."""
    # of a device of no size: what matters is the sum for one worker, which is about the same on a CPU
    anywhere = config.model_copy(update={"model": config.model.model_copy(update={"device": "auto"})})
    worker = plan_shards(anywhere, shape, Machine(0, (Gpu("", 0),), ""), EngineChoice("vllm", ""), dtype)
    kept, working = (sum(size for _, size in parts) for parts in (worker.always, worker.update))
    trainer = Need(kept + working, _said((*worker.always, *worker.update)))

    devices = max(1, cluster.engines.gpus)
    weights = shape.parameters * (1 if config.engine.quantization == "fp8" else dtype.itemsize) // devices
    cache = max(SMALLEST_CACHE, shape.kv_bytes * KV_TOKENS) // devices
    holds = _said((("vLLM's weights", weights), ("keys and values", cache)))
    engine = Need(int((weights + cache) / LARGEST_SHARE), f"{holds}, in {LARGEST_SHARE:.0%} of the memory")

    always, update = _said(worker.always), _said(worker.update)
    if config.engine.sleep == "off":
        shared = Need(kept + working + engine.bytes, f"{always} + {update} + {holds}")
    else:
        shared = Need(kept + max(working, engine.bytes), f"{always} + the larger of ({update}) and ({holds})")
    named = f"{shape.name} with {shape.parameters / 1e9:.2f} billion parameters"
    return Needs(cluster.trainer.gpus > 0, trainer, engine, shared, kept, named)


def _said(parts: Sequence[tuple[str, int]]) -> str:
    return " + ".join(f"{what} {size / GB:.1f}" for what, size in parts)
