"""What every side of ours begins with: the model on its device and the scorer process, as node/daemon.py makes them."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import torch

from node.bench.workload import bench_config, bench_manifest, bench_scorer
from node.config import Config
from node.device import Device
from node.home import models_dir
from node.models import ModelBundle, load_model
from node.scorer import Scorer
from protocol.manifest import Manifest


@dataclass(frozen=True, slots=True)
class Ours:
    """The parts of a node that our sides share."""

    config: Config
    manifest: Manifest
    device: Device
    bundle: ModelBundle
    scorer: Scorer

    @property
    def dtype(self) -> str:
        return str(self.bundle.model.dtype).removeprefix("torch.")


@asynccontextmanager
async def ours(spec: Mapping[str, Any]) -> AsyncIterator[Ours]:
    """The parts for a spec of `node.bench.workload.spec_of`; ends the scorer's process afterwards."""
    config, manifest, device = bench_config(spec["model"]), bench_manifest(), Device()

    def load() -> ModelBundle:
        torch.set_num_threads(spec["threads"])
        return load_model(config.model.path, device="cpu", dtype=config.model.dtype, models=models_dir())

    scorer = bench_scorer(manifest, config)
    try:
        bundle = await device.run(load)
        await scorer.start()
        yield Ours(config, manifest, device, bundle, scorer)
    finally:
        await scorer.close()
        device.close()
