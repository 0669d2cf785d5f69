"""A node of `shoal bench exchange`: what node/daemon.py makes for the exchange, without a trainer."""

import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from node.bench.node import bench_node
from node.bench.workload import bench_config, bench_scorer
from node.home import models_dir
from node.models import ModelBundle, load_model
from node.rescore import Rescorer
from node.scorer import Scorer
from protocol.identity import Identity
from protocol.manifest import Manifest, embedded_manifest
from swarm.exchange import Exchange
from swarm.experience import ExperienceStore
from swarm.libp2p_transport import Libp2pTransport


@dataclass(frozen=True, slots=True)
class ExchangeNode:
    identity: Identity
    manifest: Manifest
    bundle: ModelBundle
    scorer: Scorer
    store: ExperienceStore
    transport: Libp2pTransport
    exchange: Exchange


@asynccontextmanager
async def exchange_node(
    spec: Mapping[str, Any], role: str, genesis: float, directory: Path
) -> AsyncIterator[ExchangeNode]:
    """A started node of the embedded swarm of `genesis`; its exchange is not running yet.

    The pool is as large as the benchmark has groups: a node that trains pulls only what it will use.
    """
    torch.set_num_threads(spec["threads"])
    config = bench_config(spec["model"])
    manifest = embedded_manifest("bench", genesis)
    bundle = load_model(config.model.path, device="cpu", dtype=config.model.dtype, models=models_dir())
    scorer = bench_scorer(manifest, config)
    await scorer.start()
    try:
        async with bench_node(role, directory) as node:
            exchange = Exchange(
                node.transport,
                node.store,
                node.identity,
                manifest,
                Rescorer(bundle, scorer),
                time.time,
                heal_seconds=config.network.heal_seconds,
                request_timeout=config.network.request_timeout,
                pool_target=spec["groups"],
            )
            yield ExchangeNode(node.identity, manifest, bundle, scorer, node.store, node.transport, exchange)
    finally:
        await scorer.close()


def children_cpu() -> float:
    """CPU seconds of the processes that this one started, theirs included."""
    times = [child.cpu_times() for child in psutil.Process().children(recursive=True)]
    return sum(one.user + one.system for one in times)
