"""A whole large node: trainer, engines and scorers are Ray's; some of each are killed, and it goes on."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from node.client import DaemonUnreachable, RequestRefused, connect
from node.history import History
from node.home import Home
from protocol.manifest import EnvironmentSpec, make_manifest

pytestmark = [pytest.mark.interop, pytest.mark.slow, pytest.mark.network]

DEADLINE = 480.0
CONFIG = """
[node]
threads = 1
[model]
path = "{model}"
dtype = "float32"
[rollout]
group_size = 16
dispatch = "longest-first"
[train]
learning_rate = 1e-5
[swarm]
own_groups = 2
foreign_groups = 0
[network]
listen = "/ip4/127.0.0.1/tcp/0"
[web]
port = 0
[eval]
every = 0
tasks = 2
"""
CLUSTER = """
shared = "{shared}"
[ray]
address = "{address}"
start_seconds = 400
[trainer]
workers = 2
gpus = 0
cpus = 0.5
[engines]
number = 2
gpus = 0
cpus = 0.5
command = "{vllm}"
[rewards]
workers = 2
cpus = 0.5
"""


def status(home: Home) -> dict[str, Any]:
    try:
        return dict(connect(home, timeout=10.0).get("status"))
    except (DaemonUnreachable, RequestRefused):
        return {"step": -1}


def until(what: Callable[[], Any], process: "subprocess.Popen[bytes]", log: Path) -> None:
    deadline = time.monotonic() + DEADLINE
    while not what():
        assert process.poll() is None, log.read_text()[-5000:]
        assert time.monotonic() < deadline, log.read_text()[-5000:]
        time.sleep(0.5)


def actors(kind: str) -> list[psutil.Process]:
    return [one for one in psutil.process_iter(["cmdline"]) if f"ray::{kind}" in " ".join(one.info["cmdline"] or ())]


def parts() -> list[psutil.Process]:
    """What actors started: workers, servers and scorers."""
    kinds = ("TrainerActor", "EngineActor", "RewardActor")
    return [child for kind in kinds for actor in actors(kind) for child in actor.children(recursive=True)]


@pytest.fixture
def files(
    ray_address: str, tmp_path: Path, tiny_model: Callable[..., Path], evenness: EnvironmentSpec
) -> tuple[Home, Path, dict[str, str]]:
    """A home, a cluster file, and the variables of a node."""
    vllm = tmp_path / "vllm"
    vllm.write_text(f'#!/bin/sh\nexec {sys.executable} {Path(__file__).with_name("small_vllm.py")} "$@"\n')
    vllm.chmod(0o755)
    home = Home(tmp_path / "home")
    home.init()
    home.found(make_manifest("large", time.time() - 60, (evenness,), epoch_seconds=86400))
    home.config_path.write_text(CONFIG.format(model=tiny_model("llama", ascii_only=True)))
    cluster = tmp_path / "cluster.toml"
    shared = tmp_path / "shared"
    cluster.write_text(CLUSTER.format(address=ray_address, shared=shared, vllm=vllm))
    path = os.pathsep.join([*filter(None, sys.path), os.environ["PYTHONPATH"]])
    return home, cluster, {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}


def test_a_large_node_steps_and_nothing_is_lost_when_parts_of_it_are_killed(
    files: tuple[Home, Path, dict[str, str]],
) -> None:
    home, cluster, variables = files
    log = home.path / "console.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "node", "--home", str(home.path), "up", "--large", str(cluster)],
            stdout=output,
            stderr=output,
            env=variables,
        )
    try:
        until(lambda: status(home)["step"] >= 2, process, log)
        assert [len(actors(kind)) for kind in ("TrainerActor", "EngineActor", "RewardActor")] == [2, 2, 2]
        actors("EngineActor")[0].kill()
        actors("RewardActor")[0].kill()
        step = status(home)["step"]
        until(lambda: status(home)["step"] >= step + 2, process, log)
        actors("TrainerActor")[1].kill()
        step = status(home)["step"]
        until(lambda: status(home)["step"] >= step + 2, process, log)
        until(lambda: len(actors("EngineActor")) == 2, process, log)
        history = History(home.database, time.time)
        told = {event["kind"]: event["message"] for event in history.events(None, 50)}
        lost = [event["message"] for event in history.events(None, 50) if "was ended by SIGKILL" in event["message"]]
        done = history.steps(0, 1000)
        history.close()
        assert "is trained by 2 workers" in told["ray"]
        assert told["ray"].endswith("disjoint, because nothing shares a GPU.")
        assert told["engine"] == "rollouts by 2 vLLM engines placed by Ray (disjoint); trainer on 2 workers"
        assert lost, told
        assert [step["step"] for step in done] == list(range(1, len(done) + 1))
        # what samples is what was trained, in every version: stale weights would be off by far more
        assert max(step["max_mismatch"] for step in done) < 1e-4
        assert all(step["grad_norm"] > 0.01 for step in done)
        left = parts()
        process.send_signal(signal.SIGKILL)
        process.wait(20)
        gone, alive = psutil.wait_procs(left, timeout=120)
        assert len(gone) + len(alive) >= 6
        assert not [one.cmdline() for one in alive if one.status() != psutil.STATUS_ZOMBIE]
    finally:
        process.kill()
        process.wait(20)


def test_a_plan_is_told_without_starting_anything(files: tuple[Home, Path, dict[str, str]]) -> None:
    home, cluster, variables = files
    command = [sys.executable, "-m", "node", "--home", str(home.path), "up", "--large", str(cluster), "--plan"]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=DEADLINE)
    assert done.returncode == 0, done.stderr
    assert "Ray offers 16 CPUs and " in done.stdout
    assert done.stdout.count("  engine ") == 2
    assert not actors("EngineActor")
    cluster.write_text(cluster.read_text().replace("workers = 2\ngpus = 0", "workers = 60\ngpus = 0"))
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=DEADLINE)
    assert done.returncode == 2
    assert "there is room for 32 of 60 trainer workers" in done.stderr.replace("\n", " ")
