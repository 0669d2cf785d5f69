"""Adapters on their way to a vLLM server: loaded beside the older ones, under a name that is never used twice.

vLLM can also replace adapters in place (`load_inplace`, 0.32), but then reads them from disk again with every pass:
`LRUCacheWorkerLoRAManager.add_adapter` does so for a request whose adapters came that way. Under new names a request in
flight ends with the adapters that it began with, and the server is not paused for it.
"""

import functools
import logging
import time
from pathlib import Path

from node.config import Config
from node.device import Device
from node.engines.vllm_client import VllmClient
from node.engines.vllm_probe import lora_slot
from node.engines.vllm_server import OwnServer
from node.engines.vllm_transfer import FileTransfer
from node.engines.vllm_weights import WeightFiles
from node.models import ModelBundle
from node.training import lora

log = logging.getLogger(__name__)

NAMED = 2
"""Adapters that requests may name: the newest, and those before it for requests that are just on their way."""


def slots(config: Config) -> int:
    """Versions that a server samples with at a time: the newest, the one before it, and as many more as may be late."""
    late = config.rollout.max_staleness if config.rollout.policy == "asynchronous" else 0
    return 2 + late


def lora_arguments(config: Config) -> tuple[str, ...]:
    """What a server is started with to take adapters. Besides, it wants the variables of `LORA_VARIABLES`."""
    return (
        "--enable-lora",
        f"--max-lora-rank={lora_slot(config.train.lora_rank)}",
        f"--max-loras={slots(config)}",
        f"--max-cpu-loras={slots(config) + 1}",
    )


LORA_VARIABLES = (("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "True"),)


class AdapterTransfer:
    """Writes the adapters of a version; the base model never leaves the server, nor its memory while it sleeps."""

    in_place = False
    sleep_level = "1"
    model = ""

    def __init__(self, root: Path, device: Device, bundle: ModelBundle, config: Config) -> None:
        # a request that had to wait may have its adapters read from disk once more
        self.files = WeightFiles(root, functools.partial(_export, bundle), keep=slots(config) + 1)
        self._written = FileTransfer(self.files, device)
        self.bundle, self.lora_rank = bundle, config.train.lora_rank
        self._given: list[str] = []

    async def prepare(self, version: int) -> None:
        await self._written.prepare(version)

    async def load(self, client: VllmClient, seconds: float) -> None:
        published = self.files.latest
        assert published is not None
        started, name = time.perf_counter(), published.directory.name
        there = {card["id"] for card in (await client.get("/v1/models", seconds))["data"]}
        if name not in there:  # it is there after a sleep
            body = {"lora_name": name, "lora_path": str(published.directory)}
            await client.post("/v1/load_lora_adapter", body, seconds)
        self._given = [old for old in self._given if old in there and old != name]
        for old in self._given[: 1 - NAMED]:
            await client.post("/v1/unload_lora_adapter", {"lora_name": old}, seconds)
        self._given = [*self._given[1 - NAMED :], name]
        self.model = name
        took = time.perf_counter() - started
        log.info("vLLM loaded adapters %s: %.1f MB in %.2f s", name, published.bytes / 1e6, took)

    async def start(self, server: OwnServer) -> None:
        """Start a server with the base model."""
        await server.start(self.bundle.directory)

    def forget(self) -> None:
        self._given = []

    async def close(self) -> None:
        await self._written.close()


def _export(bundle: ModelBundle, directory: Path) -> None:
    lora.save_adapters(bundle.model, lora.adapters(bundle.model), directory)
