"""The leading side of `shoal bench policy`: trains, publishes, serves."""

import asyncio
import hashlib
import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from node.bench.node import BenchNode, bench_node
from node.bench.side import Say, serve
from node.bench.train import grouped
from node.config_train import TrainConfig
from node.device import Device
from node.federation.publishing import Publisher
from node.home import models_dir
from node.interfaces import Batch
from node.models import load_model
from node.parts import model_mark
from node.training.local import LocalTrainer
from protocol.policy import Weights
from swarm.accounts import Accounts
from swarm.policies import PolicyServing, PolicyStore
from swarm.reputation import Reputation

PROMPT_TOKENS, NEW_TOKENS, GROUP_SIZE = 32, 8, 4
"""Of the one group of an update: how much AdamW changes hardly depends on it, so it may be quick."""
DTYPE: Weights = "bfloat16"
WAIT_SECONDS = 0.01
SWARM = hashlib.sha256(b"shoal bench policy").digest()


def accounts_of(node: BenchNode) -> Accounts:
    """For what the node's peers do wrong."""
    return Accounts(node.transport, Reputation(node.store, time.time), time.time, lambda kind, message: None)


async def lead(spec: Mapping[str, Any], say: Say, directory: Path) -> None:
    """Say where to dial; for each line of input train so many steps, publish, and say what that took."""
    torch.set_num_threads(spec["threads"])
    device = Device()
    await device.run(torch.set_num_threads, spec["threads"])
    bundle = load_model(spec["model"], device="cpu", dtype="auto", models=models_dir())
    config = TrainConfig(warmup_steps=0)
    trainer = LocalTrainer(bundle, config, dumps=directory)
    size = sum(weight.numel() for weight in bundle.model.parameters())
    async with bench_node("leader", directory) as node:
        store = PolicyStore(directory / "policy")
        publisher = Publisher(
            store,
            node.identity,
            swarm=SWARM,
            model=model_mark(bundle),
            dtype=DTYPE,
            every=1,
            whole_every=20,
            staleness=lambda: 4,
            clock=time.time,
            tell=lambda level, message: print(message, file=sys.stderr),  # noqa: T201
        )
        PolicyServing(store, node.identity.peer_id, accounts_of(node), time.time).serve_on(node.transport)
        running = asyncio.create_task(publisher.run())
        say(
            {
                "address": node.transport.addresses()[0],
                "leader": node.identity.peer_id,
                "parameters": size,
                "learning_rate": config.learning_rate,
                "dtype": DTYPE,
            }
        )
        before = trainer.snapshot(DTYPE)
        while line := await asyncio.to_thread(sys.stdin.readline):
            for _ in range(json.loads(line)["steps"]):
                # the seed is the shape: one token more makes other groups
                case = grouped(PROMPT_TOKENS + trainer.step, NEW_TOKENS, GROUP_SIZE, vocabulary=bundle.vocabulary_size)
                await device.run(trainer.update, Batch(trainer.step + 1, case.groups[:1]))
            began_at, cpu = time.time(), time.process_time()
            await publisher.offer(trainer, device)
            while publisher.last is None or publisher.last.version != trainer.step:  # noqa: ASYNC110 - it has no event
                await asyncio.sleep(WAIT_SECONDS)
            cpu = time.process_time() - cpu
            now = trainer.snapshot(DTYPE)
            changed = sum(int((now[name] != weight).sum()) for name, weight in before.items())
            before, made = now, publisher.last
            say(
                {
                    "began_at": began_at,
                    "bytes": made.change_bytes or made.whole_bytes,
                    "changed_share": changed / size,
                    "copy_seconds": made.copy_seconds,
                    "encode_seconds": made.encode_seconds,
                    "cpu_seconds": cpu,
                    "state": next(s for s, version in publisher.versions.items() if version == made.version),
                }
            )
        running.cancel()
        await asyncio.wait({running})
    device.close()


if __name__ == "__main__":
    serve(lead)
