"""A whole node with a sharded trainer: it goes on when a worker or the node is killed, and leaves no worker behind."""

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

from node.checkpoint import CheckpointStore
from node.client import DaemonUnreachable, RequestRefused, connect
from node.history import History
from node.home import Home
from protocol.manifest import EnvironmentSpec, make_manifest

DEADLINE = 240.0
CONFIG = """
[node]
threads = 1
[model]
path = "{model}"
dtype = "float32"
[rollout]
group_size = 8
[train]
shards = 2
learning_rate = 3e-4
[swarm]
own_groups = 6
foreign_groups = 0
[network]
listen = "/ip4/127.0.0.1/tcp/0"
[web]
port = 0
[eval]
every = 0
tasks = 2
"""


def status(home: Home) -> dict[str, Any]:
    try:
        return dict(connect(home, timeout=5.0).get("status"))
    except (DaemonUnreachable, RequestRefused):
        return {"step": -1}


def until(what: Callable[[], Any], process: "subprocess.Popen[bytes]", log: Path) -> None:
    deadline = time.monotonic() + DEADLINE
    while not what():
        assert process.poll() is None, log.read_text()[-3000:]
        assert time.monotonic() < deadline, log.read_text()[-3000:]
        time.sleep(0.05)


def hangs_in_update(now: dict[str, Any]) -> bool:
    return now.get("stage") == "update" and now["stage_seconds"] > 2


def workers_of(pid: int) -> list[psutil.Process]:
    return [
        child
        for child in psutil.Process(pid).children()
        if any("node.training.worker" in part for part in child.cmdline())
    ]


def started(home: Home, log: Path) -> "subprocess.Popen[bytes]":
    with log.open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "node", "--home", str(home.path), "up"],
            stdout=output,
            stderr=output,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )


@pytest.mark.slow
@pytest.mark.network
def test_a_killed_worker_costs_time_and_a_killed_node_neither_a_worker_nor_an_update(
    tmp_path: Path, tiny_model: Callable[..., Path], evenness: EnvironmentSpec
) -> None:
    home = Home(tmp_path / "home")
    home.init()
    home.found(make_manifest("sharded", time.time() - 60, (evenness,), epoch_seconds=86400))
    home.config_path.write_text(CONFIG.format(model=tiny_model("llama", ascii_only=True)))
    log = home.path / "console.log"
    process = started(home, log)
    try:
        until(lambda: status(home)["step"] >= 2, process, log)
        before = workers_of(process.pid)
        assert len(before) == 2
        before[1].send_signal(signal.SIGKILL)
        killed_at = status(home)["step"]
        until(lambda: not before[0].is_running(), process, log)
        until(lambda: status(home)["step"] >= killed_at + 2, process, log)
        after = workers_of(process.pid)
        assert len(after) == 2
        history = History(home.database, time.time)
        told = [event["message"] for event in history.events(None, 50) if event["kind"] == "trainer"]
        done = history.steps(0, 1000)
        history.close()
        assert any(message.startswith("training on 2 workers: cpu, float32") for message in told)
        assert any(f"worker 2 (process {before[1].pid}) was ended by SIGKILL" in message for message in told)
        assert [step["step"] for step in done] == list(range(1, len(done) + 1))
        # what samples is what was trained, in every version: stale weights would be off by far more
        assert max(step["max_mismatch"] for step in done) < 1e-4
        assert sum(step["grad_norm"] > 0.01 for step in done) == len(done)
        # amid an update, which waits for a worker that has stopped
        after[0].send_signal(signal.SIGSTOP)
        until(lambda: hangs_in_update(status(home)), process, log)
        process.send_signal(signal.SIGKILL)
        process.wait(10)
        psutil.wait_procs(after, timeout=20)
        assert not any(worker.is_running() for worker in after)
        killed_at = CheckpointStore(home.checkpoints, 2).latest().records[-1].step
        process = started(home, log)
        until(lambda: status(home)["step"] >= killed_at + 2, process, log)
        history = History(home.database, time.time)
        told = [event["message"] for event in history.events(None, 50)]
        done = history.steps(0, 1000)
        history.close()
        assert f"continues after step {killed_at}" in told
        assert [step["step"] for step in done] == list(range(1, len(done) + 1))
        assert max(step["max_mismatch"] for step in done) < 1e-4
    finally:
        process.kill()
        process.wait(10)
