"""A server that an actor starts: reached through its tunnel, gone with its actor, started anew after a pause."""

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

from node.engines import vllm_server
from node.engines.vllm_client import ServerGone, VllmClient
from node.engines.vllm_server import Pauses, ServerPlan
from node.large.engine_actors import EngineActor, RayServer, without_devices
from node.large.room import Bundle

pytestmark = pytest.mark.network

PROGRAM = '''#!{python}
"""Stands for `vllm`: tells what it was started with."""
import os, sys
from aiohttp import web


async def told(request):
    return web.json_response([sys.argv[2], os.environ.get("CUDA_VISIBLE_DEVICES", ""), sys.argv[5:]])


app = web.Application()
app.router.add_get("/health", told)
web.run_app(app, path=sys.argv[4], print=None)
'''


@pytest.fixture
def plan(tmp_path: Path) -> ServerPlan:
    program = tmp_path / "vllm"
    program.write_text(PROGRAM.format(python=sys.executable))
    program.chmod(0o755)
    return ServerPlan(str(program), ("--dtype=float32",), (), tmp_path / "logs" / "vllm.log")


def make(ray: Any, plan: ServerPlan, **options: Any) -> RayServer:
    return RayServer(ray, "group", Bundle("engine", 0, "10.0.0.1", "node1", 1.0), plan, seconds=20.0, **options)


async def health(server: RayServer) -> Any:
    client = VllmClient(server.address)
    try:
        async with asyncio.timeout(30):
            while True:
                try:
                    return await client.get("/health")
                except ServerGone:
                    await asyncio.sleep(0.05)
    finally:
        await client.close()


async def test_it_is_reached_dies_with_its_actor_and_is_started_anew(
    ray: Any, plan: ServerPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_server, "FIRST_PAUSE", 0.2)
    server = make(ray, plan, devices=lambda: ["4", "6"])
    address = server.address
    assert not server.alive
    await server.start(tmp_path / "v1")
    assert await health(server) == [str(tmp_path / "v1"), "4,6", ["--dtype=float32"]]
    died = asyncio.create_task(server.died())
    ray.actors[0].die()
    assert await died == "the actor of engine 1 on 10.0.0.1 has ended: it was killed"
    assert not server.alive
    await ray.actors[0].held.stop()  # with a real actor it is gone, too
    await server.start(tmp_path / "v2")
    assert (await health(server))[0] == str(tmp_path / "v2")
    assert (len(ray.actors), server.address) == (2, address)

    # the server itself ends, its actor does not
    died = asyncio.create_task(server.died())
    await ray.actors[1].held._server._reap()
    assert "on 10.0.0.1: " in await died
    assert "vllm serve ended with code 0; its log " in died.result()
    began = asyncio.get_running_loop().time()
    await server.start(tmp_path / "v3")
    assert asyncio.get_running_loop().time() - began > 0.2, "it failed twice in a row"
    assert ray.actors[1].dead
    await server.stop()
    assert not server.alive
    client = VllmClient(server.address)
    with pytest.raises(ServerGone):
        await client.get("/health")
    await client.close()
    assert await server.died(), "whoever still asks is told"
    await server.close()
    assert not server._directory.exists()


async def test_an_actor_that_cannot_be_had_is_a_server_that_is_gone(ray: Any, plan: ServerPlan, tmp_path: Path) -> None:
    class Broken(EngineActor):
        async def start(self, model: str) -> tuple[str, int, int]:
            raise OSError("no such program: vllm")

    ray.replaced = lambda number: Broken
    server = make(ray, plan)
    with pytest.raises(ServerGone, match=r"engine 1 on 10.0.0.1: no such program: vllm; .* start the node again"):
        await server.start(tmp_path)
    assert ray.actors[0].dead
    assert not server.alive
    await server.close()


def test_pauses_grow_with_failures_in_a_row_and_only_with_those() -> None:
    pauses = Pauses()
    waited = []
    now = 100.0
    for _ in range(9):
        waited.append(pauses.before(now))
        now += waited[-1]
        pauses.began(now)
        now += 1.0
    assert waited == [0.0, 0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0]
    assert pauses.before(now + 1000.0) == 0.0


def test_devices_are_not_those_of_the_nodes_machine(plan: ServerPlan, tmp_path: Path) -> None:
    given = ServerPlan("vllm", (), (("CUDA_VISIBLE_DEVICES", "0"), ("OMP_NUM_THREADS", "4")), tmp_path)
    assert without_devices(given, tmp_path / "log").environment == (("OMP_NUM_THREADS", "4"),)
