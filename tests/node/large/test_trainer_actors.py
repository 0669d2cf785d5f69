"""Workers that actors start: they are met by name and secret, strangers are not, and all end together."""

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from node.config_train import TrainConfig
from node.large import trainer_actors
from node.large.room import Bundle
from node.large.trainer_actors import RayLauncher, TrainerActor
from node.training import launching
from node.training.launching import LaunchFailed
from node.training.worker_wire import Done, Memory
from node.training.workers import WorkerPlan, Workers, WorkersLost

pytestmark = pytest.mark.network

STAND_IN = """
import os, socket, sys
import msgspec
from node.training.worker_wire import *

connection = socket.socket(fileno=int(sys.argv[1]))
frames = Frames(msgspec.msgpack.Decoder(Setup).decode)
while not (found := frames.read(connection)):
    pass
setup = found[0]
connection.sendall(frame(Done(0)))
frames = Frames(msgspec.msgpack.Decoder(Command).decode)
while True:
    for command in frames.read(connection):
        interface = int(os.environ.get("GLOO_SOCKET_IFNAME") == "lo")
        told = {"rank": setup.rank, "lo": interface, setup.store.partition(":")[0]: 1}
        connection.sendall(frame(Done(1, memory=told)))
"""


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WorkerPlan:
    script = tmp_path / "stand_in.py"
    script.write_text(STAND_IN)
    monkeypatch.setattr(launching, "COMMAND", (sys.executable, str(script)))
    return WorkerPlan(2, "cpu", "float32", "m", tmp_path, 1, 0.0, tmp_path, tmp_path / "logs" / "trainer.log")


def launcher(ray: Any, bundles: Sequence[Bundle], plan: WorkerPlan) -> RayLauncher:
    return RayLauncher(ray, "group", bundles, log=plan.log, threads=1, meet=plan.models / "meet")


@pytest.mark.parametrize(("nodes", "met"), [(("node1", "node1"), "file"), (("node1", "node2"), "tcp")])
def test_they_are_started_asked_and_ended(
    ray: Any, bundles: list[Bundle], plan: WorkerPlan, nodes: tuple[str, str], met: str
) -> None:
    places = [replace(bundle, node=node) for bundle, node in zip(bundles, nodes, strict=True)]
    made = launcher(ray, places, plan)
    workers = Workers(plan, made)
    workers.start(TrainConfig(), 60.0)
    lo = int(met == "file" and sys.platform == "linux")
    assert workers.ask(Memory(), 60.0) == [Done(1, memory={"rank": rank, "lo": lo, met: 1}) for rank in (0, 1)]
    assert made.gpus == {0: ["3"], 1: ["3"]}
    assert all(actor.held.poll() is None for actor in ray.actors)
    workers.kill()
    assert all(actor.dead for actor in ray.actors)
    assert not list((plan.models / "meet").glob("*")), "where they met is gone"
    for actor in ray.actors:  # their connections are closed, so they end
        assert actor.held._process.wait(20) == 1


def test_an_actor_that_dies_ends_all_and_they_start_again(ray: Any, bundles: list[Bundle], plan: WorkerPlan) -> None:
    workers = Workers(plan, launcher(ray, bundles, plan))
    workers.start(TrainConfig(), 60.0)
    ray.actors[1].held._process.kill()
    ray.actors[1].die()
    with pytest.raises(WorkersLost, match=r"worker 2 \(process \d+ on 10.0.0.1\) was ended by SIGKILL"):
        workers.ask(Memory(), 60.0)
    workers.start(TrainConfig(), 60.0)
    assert len(ray.actors) == 4
    assert [done.step for done in workers.ask(Memory(), 60.0) if isinstance(done, Done)] == [1, 1]
    workers.kill()


class Broken(TrainerActor):
    def start(self, *arguments: Any) -> tuple[int, list[str]]:
        raise RuntimeError("no such file: trainer.log")


class Silent(TrainerActor):
    def start(self, *arguments: Any) -> tuple[int, list[str]]:
        time.sleep(60)
        return 0, []


class Twice(TrainerActor):
    """Gives itself out for the first worker."""

    def start(self, host: str, port: int, secret: bytes, name: str, *arguments: Any) -> tuple[int, list[str]]:
        return super().start(host, port, secret, "0", *arguments)


@pytest.mark.parametrize(
    ("second", "seconds", "why"),
    [
        (Broken, 60.0, "did not start .* on 10.0.0.1, 10.0.0.2: no such file: trainer.log"),
        (Silent, 1.0, "worker 2 on 10.0.0.2 did not connect in time .* start the node again: it plans anew"),
        (Twice, 3.0, "worker [12] on 10.0.0.[12] did not connect in time"),
    ],
)
def test_those_that_do_not_come(
    ray: Any, bundles: list[Bundle], plan: WorkerPlan, second: type, seconds: float, why: str
) -> None:
    ray.replaced = lambda number: second if number == 1 else None
    bundles[1] = replace(bundles[1], host="10.0.0.2")
    with pytest.raises(LaunchFailed, match=why):
        launcher(ray, bundles, plan).launch(2, seconds)
    assert all(actor.dead for actor in ray.actors)


def test_strangers_at_the_door_do_not_matter(
    ray: Any, bundles: list[Bundle], plan: WorkerPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer_actors, "ANSWER_SECONDS", 0.3)
    came: list[bytes] = []

    class Besieged(TrainerActor):
        def start(self, host: str, port: int, *arguments: Any) -> tuple[int, list[str]]:
            silent = socket.create_connection((host, port))
            with socket.create_connection((host, port)) as stranger:
                stranger.sendall(bytes(32) + b"\x010" + bytes(32))
                came.append(stranger.recv(100, socket.MSG_WAITALL))
            started = super().start(host, port, *arguments)
            silent.close()
            return started

    ray.replaced = lambda number: Besieged
    workers = Workers(plan, launcher(ray, bundles, plan))
    workers.start(TrainConfig(), 60.0)
    assert [len(said) for said in came] == [32, 32], "a nonce and no more"
    assert len(workers.ask(Memory(), 60.0)) == 2
    workers.kill()


def test_a_process_of_an_actor(ray: Any, bundles: list[Bundle]) -> None:
    actor = ray.actor(TrainerActor, "group", 0, bundles[0])
    process = trainer_actors.RayProcess(actor, 7)
    assert process.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.3)
    ending = threading.Timer(0.3, process.kill)
    ending.start()
    assert process.wait(10.0) == -9
    free: Callable[[], str] = actor.held.meeting
    assert free().startswith("tcp://127.0.0.1:")
