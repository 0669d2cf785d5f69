"""`docker compose up` as a user runs it: one node, no terminal, no variable. Needs an engine (`make test-docker`)."""

import json
import os
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent.parent
COMPOSE = ("docker", "compose", "-p", "shoal-test", "-f", "docker-compose.yml", "-f", "docker/compose.test.yml")
BUILD_SECONDS = 1800.0
STEP_SECONDS = 600.0

pytestmark = pytest.mark.docker


def compose(*arguments: str, timeout: float = 120.0) -> str:
    done = subprocess.run(
        [*COMPOSE, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=timeout, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 0, f"{arguments}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
    return done.stdout


def shoal(*arguments: str) -> Any:
    return json.loads(compose("exec", "-T", "node", "shoal", *arguments, "--json"))


def until_step(step: int) -> dict[str, Any]:
    deadline = time.monotonic() + STEP_SECONDS
    status: dict[str, Any] = {}
    while time.monotonic() < deadline:
        try:
            status = shoal("status")
        except AssertionError:  # the daemon is not up yet
            time.sleep(2)
            continue
        if status["step"] >= step:
            return status
        assert status["state"] != "FAILED", status
        time.sleep(2)
    raise AssertionError(f"step {step} not reached in {STEP_SECONDS:.0f} s: {status}\n{compose('logs')[-3000:]}")


@pytest.fixture(scope="module")
def node() -> Iterator[None]:
    if shutil.which("docker") is None or subprocess.run(["docker", "version"], capture_output=True).returncode:
        pytest.skip("no container engine answers; see `make test-docker`")
    compose("build", timeout=BUILD_SECONDS)
    compose("down", "--volumes")
    compose("up", "-d")
    yield
    compose("down", "--volumes")


def test_a_node_trains_is_healthy_and_resumes_after_a_kill(node: None) -> None:
    status = until_step(1)
    assert status["model"] == "SmolLM2-135M-Instruct"
    with urllib.request.urlopen("http://127.0.0.1:18420/readyz", timeout=10) as answer:
        assert json.load(answer)["ready"] is True
    (container,) = json.loads(f"[{compose('ps', '--format', 'json').strip().replace(os.linesep, ',')}]")
    details = json.loads(subprocess.check_output(["docker", "inspect", container["ID"]], timeout=30))[0]
    assert details["HostConfig"]["ReadonlyRootfs"]
    assert details["Config"]["User"] == "shoal"
    ports = details["NetworkSettings"]["Ports"]
    assert [binding["HostIp"] for binding in ports["8420/tcp"]] == ["127.0.0.1"]

    subprocess.run(["docker", "kill", container["ID"]], check=True, timeout=30, capture_output=True)
    compose("up", "-d")
    resumed = until_step(status["step"] + 1)
    assert resumed["peer_id"] == status["peer_id"]

    started = time.monotonic()
    compose("stop")
    assert time.monotonic() - started < 15
    code = subprocess.check_output(
        ["docker", "inspect", "-f", "{{.State.ExitCode}}", container["ID"]], text=True, timeout=30
    )
    assert code.strip() == "0"
    assert "is saved" in compose("logs")
