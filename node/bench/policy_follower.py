"""The following side of `shoal bench policy`: pulls every version, makes its weights and takes them over."""

import asyncio
import functools
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from node.bench.node import bench_node
from node.bench.policy_leader import DTYPE, SWARM, accounts_of
from node.bench.side import Say, serve
from node.config_train import TrainConfig
from node.device import Device
from node.federation.followed import FollowedPolicy
from node.federation.following import Following
from node.home import models_dir
from node.models import load_model
from node.parts import model_mark
from swarm.policies import PolicyStore
from swarm.policy_pulling import Arrived, PolicyPuller, Pulled

CONNECT_SECONDS = 20.0
POLL_SECONDS = 0.1
"""Small beside what is measured."""


async def follow(spec: Mapping[str, Any], say: Say, directory: Path) -> None:
    """Say that it is there; then what each version took, until the input ends. The first one is pulled as a whole."""
    torch.set_num_threads(spec["threads"])
    device = Device()
    await device.run(torch.set_num_threads, spec["threads"])
    bundle = load_model(spec["model"], device="cpu", dtype="auto", models=models_dir())
    trainer, store = FollowedPolicy(bundle, TrainConfig()), PolicyStore(directory / "policy")

    def timed(take: Arrived) -> Arrived:
        async def arrived(pulled: Pulled) -> None:
            watch, cpu = time.perf_counter(), time.process_time()
            await take(pulled)
            staged, applied = following.staged, time.perf_counter()
            assert staged is not None
            await device.run(trainer.adopt, staged.number, staged.file.path)
            say(
                {
                    "at": time.time(),
                    "cpu_seconds": time.process_time() - cpu,
                    "state": staged.state.hex()[:16],
                    "bytes_in": pulled.bytes_in,
                    "pull_seconds": pulled.seconds,
                    "apply_seconds": applied - watch,
                    "adopt_seconds": time.perf_counter() - applied,
                }
            )

        return arrived

    async def room_for_all(size: int) -> str:
        return ""

    async with bench_node("follower", directory) as node:
        await node.transport.connect(spec["address"], timeout=CONNECT_SECONDS)
        make_puller = functools.partial(
            PolicyPuller,
            node.transport,
            store,
            accounts_of(node),
            time.time,
            leader=spec["leader"],
            swarm=SWARM,
            model=model_mark(bundle),
            dtype=DTYPE,
            max_bytes=1 << 30,
            request_timeout=20.0,
            poll_seconds=POLL_SECONDS,
        )
        unpaused = asyncio.Event()
        unpaused.set()
        # what arrives is timed on its way to the one that takes it
        following = Following(
            store,
            trainer,
            DTYPE,
            directory / "following.json",
            lambda take, may_take: make_puller(arrived=timed(take), may_take=may_take),
            unpaused,
            room_for_all,
        )
        running = asyncio.create_task(following.run())
        say({"ready": True})
        await asyncio.to_thread(sys.stdin.readline)
        running.cancel()
        await asyncio.wait({running})
    device.close()


if __name__ == "__main__":
    serve(follow)
