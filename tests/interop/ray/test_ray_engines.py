"""Engines that Ray places: one is killed amid a batch, nothing is lost, and the new one has the present weights."""

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from node.config import EngineConfig
from node.device import Device
from node.engines.choose import export_weights
from node.engines.vllm import VllmEngine
from node.engines.vllm_client import VllmClient
from node.engines.vllm_server import ServerPlan
from node.engines.vllm_transfer import FileTransfer
from node.engines.vllm_upkeep import Upkeep
from node.engines.vllm_weights import WeightFiles
from node.interfaces import PromptRequest, SampledGroup
from node.large.engine_actors import RayServer
from node.large.ray_cluster import RayCluster
from node.models import ModelBundle, load_model
from node.scheduler import Dispatch, Scheduler

pytestmark = [pytest.mark.interop, pytest.mark.slow, pytest.mark.network]

PROMPT = tuple(range(10, 30))
TOKENS = 40


@pytest.fixture
def bundle(tiny_model: Callable[..., Path], tmp_path: Path) -> ModelBundle:
    torch.set_num_threads(1)
    return load_model(str(tiny_model("llama", ascii_only=True)), device="cpu", dtype="float32", models=tmp_path)


def check(bundle: ModelBundle, groups: list[SampledGroup]) -> None:
    """Every answer is whole, and each token has the log-probability that the present weights give it."""
    for sample in (sample for group in groups for sample in group.samples):
        assert sample.finish == "stop" or len(sample.token_ids) == TOKENS
        ids = torch.tensor([[*PROMPT, *sample.token_ids]])
        with torch.no_grad():
            spread = torch.log_softmax(bundle.model(ids).logits[0, len(PROMPT) - 1 : -1], -1)
        told = torch.tensor(sample.logprobs)
        torch.testing.assert_close(told, spread.gather(1, ids[0, len(PROMPT) :, None])[:, 0], atol=1e-4, rtol=0)


def test_a_killed_engine_actor_loses_nothing_and_comes_back_with_the_present_weights(
    cluster: RayCluster, room: Callable[..., Any], run: Callable[..., Any], bundle: ModelBundle, tmp_path: Path
) -> None:
    script = tmp_path / "vllm"
    small = Path(__file__).with_name("small_vllm.py")
    script.write_text(f'#!/bin/sh\nexec {sys.executable} {small} "$@" --token-seconds=0.05\n')
    script.chmod(0o755)
    rooms = [room("engine", 1) for _ in range(2)]
    run(engines(cluster, rooms, str(script), bundle, tmp_path))


async def engines(cluster: RayCluster, rooms: Any, script: str, bundle: ModelBundle, tmp_path: Path) -> None:
    device = Device()
    exported = WeightFiles(tmp_path / "weights", lambda directory: export_weights(bundle, directory, untied=True))
    config = EngineConfig(start_seconds=400, update_seconds=120, stall_seconds=120)
    servers, made = [], []
    for number, (group, (bundle_of_room,)) in enumerate(rooms):
        plan = ServerPlan(script, (), (), tmp_path / "logs" / f"vllm-{number}.log")
        server = RayServer(cluster, group, bundle_of_room, plan, seconds=400)
        servers.append(server)
        client, transfer = VllmClient(server.address), FileTransfer(exported, device)
        made.append(VllmEngine(Upkeep(client, bundle, device, transfer, config, server=server, alone=False)))
    scheduler = Scheduler(made, Dispatch("divided", concurrency=4, chunk_tokens=16))
    try:
        await asyncio.gather(*(engine.start() for engine in made))
        with torch.no_grad():
            for parameter in bundle.model.parameters():
                parameter.mul_(1.05)
        await scheduler.update_weights(1)
        assert len(list((tmp_path / "weights").iterdir())) <= 2, "both engines got the same files"

        def requests(version: int) -> list[PromptRequest]:
            return [PromptRequest(f"{version}/{i}", PROMPT, 2, TOKENS, 1.0, seed=10 * version + i) for i in range(6)]

        async def kill_amid() -> None:
            await asyncio.sleep(1.0)
            victim = psutil.Process(servers[0].pid)
            os.kill(victim.parent().pid, signal.SIGKILL)

        first = servers[0].pid
        killing = asyncio.create_task(kill_amid())
        groups = [group async for group in scheduler.generate(requests(1))]
        await killing
        assert {group.key for group in groups} == {request.key for request in requests(1)}
        check(bundle, groups)

        # new weights while it is down: the next actor has them before it is given anything
        with torch.no_grad():
            for parameter in bundle.model.parameters():
                parameter.mul_(0.97)
        await scheduler.update_weights(2)
        async with asyncio.timeout(400):
            while servers[0].pid == first or made[0]._upkeep.loaded != 2:  # noqa: ASYNC110 - it watches another process
                await asyncio.sleep(0.5)
        groups = [group async for group in scheduler.generate(requests(2))]
        check(bundle, groups)
        assert all(sample.version == 2 for group in groups for sample in group.samples)
        children = [psutil.Process(server.pid) for server in servers]
    finally:
        await scheduler.close()
        device.close()
    _, alive = await asyncio.to_thread(psutil.wait_procs, children, 20)
    assert not [one for one in alive if one.status() != psutil.STATUS_ZOMBIE]
