"""A real node process: its settings change between two steps, and quiet hours hold it over a kill and let it go on."""

import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from node import journal
from node.client import DaemonUnreachable, RequestRefused, connect
from node.history import History
from node.home import Home
from node.limits import local_zone
from protocol.manifest import EnvironmentSpec, make_manifest
from tests.node.test_resume import start

DEADLINE = 400.0
MINUTE = timedelta(minutes=1)


@pytest.fixture
def ours(tmp_path: Path, tiny_model: Callable[..., Path], evenness: EnvironmentSpec) -> Home:
    home = Home(tmp_path / "home")
    home.init()
    home.found(make_manifest("live", time.time() - 60, (evenness,), epoch_seconds=86400))
    home.config_path.write_text(
        f"""[node]
threads = 1
[model]
path = "{tiny_model("llama", ascii_only=True)}"
dtype = "float32"
[rollout]
group_size = 8
[train]
learning_rate = 1e-6
[swarm]
own_groups = 5  # to be changed
foreign_groups = 0
[network]
listen = "/ip4/127.0.0.1/tcp/0"
[web]
port = 0
[eval]
every = 0
tasks = 2
[checkpoint]
every = 1000
"""
    )
    return home


@pytest.fixture
def up(ours: Home) -> Iterator[Callable[[], subprocess.Popen[bytes]]]:
    processes = []

    def start_one() -> subprocess.Popen[bytes]:
        processes.append(start(ours))
        return processes[-1]

    yield start_one
    for process in processes:
        process.kill()
        process.wait(10)


def wait_for(home: Home, seen: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """The first status that is so."""
    deadline, status = time.monotonic() + DEADLINE, {}
    while time.monotonic() < deadline:
        try:
            status = connect(home, timeout=5.0).get("status")
        except (DaemonUnreachable, RequestRefused):
            status = {}
        if status and seen(status):
            return status
        time.sleep(0.05)
    pytest.fail(f"waited in vain; {status}; {(home.path / 'console.log').read_text()[-2000:]}")


def quiet(first: datetime, last: datetime) -> str:
    return f"{first:%H:%M}-{last:%H:%M}"


@pytest.mark.slow
@pytest.mark.network
def test_a_running_node_takes_up_settings_and_keeps_quiet_hours(
    ours: Home, up: Callable[[], subprocess.Popen[bytes]]
) -> None:
    first = up()
    wait_for(ours, lambda status: status["step"] >= 2)
    client = connect(ours)
    changed = client.post("config", body={"swarm.own_groups": 4, "train.learning_rate": 2e-6, "web.port": 1234})
    assert (changed["applied"], changed["restart"]) == (["swarm.own_groups", "train.learning_rate"], ["web.port"])
    at = client.get("status")["step"]
    wait_for(ours, lambda status: status["step"] >= at + 3)
    assert "own_groups = 4  # to be changed" in ours.config_path.read_text()
    client.post("config", body={"web.port": 0})

    zone = local_zone()
    now = datetime.now(zone)
    client.post("config", body={"limits.quiet_hours": quiet(now - MINUTE, now + 60 * MINUTE)})
    held = wait_for(ours, lambda status: status["stage"] == "paused")
    assert (held["state"], held["held_by"], held["next"]) == (
        "PAUSED",
        "quiet_hours",
        ours.command("resume") + " trains now",
    )
    assert held["reason"] == f"quiet hours until {now + 60 * MINUTE:%H:%M %Z}"
    assert 59 * 60 < held["resumes_at"] - now.timestamp() <= 60 * 60
    time.sleep(2)
    assert client.get("status")["step"] == held["step"]
    assert client.ready() == (True, [])
    first.send_signal(signal.SIGKILL)
    first.wait(10)

    up()
    again = wait_for(ours, lambda status: status["stage"] == "paused")
    assert (again["state"], again["held_by"], again["step"]) == ("PAUSED", "quiet_hours", held["step"])
    assert again["trained_today_seconds"] >= held["trained_today_seconds"]
    now = datetime.now(zone)
    connect(ours).post("config", body={"limits.quiet_hours": quiet(now - MINUTE, now + timedelta(seconds=65))})
    assert connect(ours).get("status")["state"] == "PAUSED"
    wait_for(ours, lambda status: status["step"] > held["step"])

    history = History(ours.database, time.time)
    while (history.last_step() or {"step": 0})["step"] <= held["step"]:  # the status knows of a step before its record
        time.sleep(0.05)
    groups = {step["step"]: step["own_groups"] for step in history.steps(0, 10_000)}
    told = [event["message"] for event in history.events(None, 1000)]
    history.close()
    assert (groups[1], groups[at + 2], groups[held["step"] + 1]) == (5, 4, 4)
    assert told.count("training goes on") == 1
    rates = {record.step: record.train for record in journal.read(ours.checkpoints / "journal-0.bin")[0]}
    assert [(rates[step] or {})["learning_rate"] for step in (1, at + 2)] == [1e-6, 2e-6]
