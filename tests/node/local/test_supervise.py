"""`shoal local`: real node processes that join over libp2p, share, learn from each other, die and come back."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from node.client import DaemonUnreachable, RequestRefused, connect
from node.home import Home, HomeError, HomeLocked
from node.local.prepare import Swarm, prepare
from protocol.manifest import EnvironmentSpec, embedded_manifest, make_manifest

DEADLINE = 240.0
QUICK = (
    "rollout.group_size=4",
    "train.learning_rate=1e-4",
    "swarm.own_groups=2",
    "swarm.foreign_groups=2",
    "swarm.max_group_uses=10",
    "eval.every=0",
    "eval.tasks=2",
    "network.heal_seconds=1",
)

pytestmark = [pytest.mark.slow, pytest.mark.network]


@pytest.fixture
def swarm(tmp_path: Path, tiny_model: Callable[..., Path], evenness: EnvironmentSpec) -> Path:
    first = Home(tmp_path / "swarm" / "node-1")
    first.init()
    first.found(make_manifest("local", time.time() - 60, (evenness,), epoch_seconds=86400))
    return tmp_path / "swarm"


@contextmanager
def local(root: Path, model: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    flags = [f for setting in (f"model.path={model}", *QUICK) for f in ("--set", setting)]
    command = [sys.executable, "-m", "node", "--home", str(root), "local", "--nodes", "2", *arguments, *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()


def status(root: Path, number: int) -> dict[str, Any]:
    try:
        return dict(connect(Home(root / f"node-{number}"), timeout=2.0).get("status"))
    except (DaemonUnreachable, RequestRefused, HomeError):
        return {"step": -1, "peers": 0}


def until(what: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + DEADLINE
    while not what():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_two_nodes_learn_from_each_other_and_report(swarm: Path, tiny_model: Callable[..., Path]) -> None:
    with local(swarm, tiny_model("llama", ascii_only=True), "--steps", "40", "--json") as process:
        output, errors = process.communicate(timeout=DEADLINE)
    assert process.returncode == 0, errors
    report = json.loads(output)
    assert len({node["peer_id"] for node in report["nodes"]}) == 2
    for node in report["nodes"]:
        assert node["steps"] == 40
        assert len(node["reward"]) == 40
        groups = node["groups"]
        assert groups["published"] >= 80
        assert groups["fetched"] >= groups["admitted"] > 0
        assert groups["rejected"] == {}
        assert groups["trained_foreign"] == sum(foreign for _, foreign in node["mixed"]) > 0
        assert [2, 2] in node["mixed"]
        assert node["tokens_per_second"] > 0
        assert 0 < node["peak_rss_mb"] < 4096
        assert (node["restarts"], node["ended_by"]) == (0, [])
        assert (Path(node["checkpoint"]) / "model.safetensors").exists()


def test_a_killed_node_comes_back_and_ctrl_c_loses_nothing(swarm: Path, tiny_model: Callable[..., Path]) -> None:
    with local(swarm, tiny_model("llama", ascii_only=True)) as process:
        until(lambda: min(status(swarm, n)["step"] for n in (1, 2)) >= 2, process)
        victim = Home(swarm / "node-2").daemon()
        assert victim is not None
        at_death = status(swarm, 2)["step"]
        os.kill(victim.pid, signal.SIGKILL)
        until(lambda: status(swarm, 1)["peers"] == 0, process)
        alone = status(swarm, 1)["step"]
        until(lambda: status(swarm, 1)["step"] > alone, process)  # the other one trains on
        until(lambda: status(swarm, 2)["step"] >= at_death and status(swarm, 1)["peers"] == 1, process)

        steps = [status(swarm, n)["step"] for n in (1, 2)]
        started = time.monotonic()
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=15)
        assert time.monotonic() - started < 6
        assert "saved" in output
        assert [Home(swarm / f"node-{n}").lock_path.read_bytes() for n in (1, 2)] == [b"", b""]  # nobody holds them
    with local(swarm, tiny_model("llama", ascii_only=True)) as process:
        until(lambda: all(status(swarm, n)["step"] >= steps[n - 1] for n in (1, 2)), process)


def test_a_swarm_that_runs_already_is_left_alone(swarm: Path) -> None:
    first = Home(swarm / "node-1")
    first.keep_listen_port(9)
    with first.lock(), pytest.raises(HomeLocked, match=r"node-1 is in use by process \d+ ; stop it"):
        prepare(swarm, Swarm(2), {})
    assert first.listen_port() == 9


def test_a_node_of_another_swarm_is_named_with_the_way_out(swarm: Path) -> None:
    other = Home(swarm / "node-2")
    other.init()
    other.found(embedded_manifest("other", 1.0))
    with pytest.raises(HomeError, match=r"node-2 is in swarm 'other' already ; .*shoal --home \S+node-2 leave"):
        prepare(swarm, Swarm(2), {})
