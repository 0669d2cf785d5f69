"""A node and a vLLM server in containers: the wiring of docker/gpu.yml, with vLLM's CPU build in the engine's place."""

import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent.parent
FILES = ("docker-compose.yml", "docker/gpu.yml", "docker/compose.test.yml", "docker/compose.vllm-cpu.yml")
COMPOSE = ("docker", "compose", "-p", "shoal-vllm-test", *(word for file in FILES for word in ("-f", file)))
BUILD_SECONDS = 3600.0
START_SECONDS = 1800.0

pytestmark = pytest.mark.docker


def compose(*arguments: str, timeout: float = 120.0) -> str:
    done = subprocess.run(
        [*COMPOSE, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=timeout, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 0, f"{arguments}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def node() -> Iterator[None]:
    if shutil.which("docker") is None or subprocess.run(["docker", "version"], capture_output=True).returncode:
        pytest.skip("no container engine answers; see `make test-docker`")
    compose("build", timeout=BUILD_SECONDS)
    compose("down", "--volumes")
    compose("up", "-d", timeout=START_SECONDS)  # returns once the server is healthy and the node is started
    yield
    compose("down", "--volumes")


def shoal(*arguments: str) -> Any:
    return json.loads(compose("exec", "-T", "node", "shoal", *arguments, "--json"))


def test_a_node_trains_on_what_the_server_samples(node: None) -> None:
    deadline = time.monotonic() + START_SECONDS
    status: dict[str, Any] = {"step": 0}
    while status["step"] < 2:
        assert time.monotonic() < deadline, f"{status}\n{compose('logs')[-3000:]}"
        time.sleep(2)
        try:
            status = shoal("status")
        except AssertionError:  # the daemon is not up yet
            continue
        assert status["state"] != "FAILED", status
    assert "the vLLM server at http://vllm:8000" in status["engine"]
    # sampled with the weights the trainer had at each step: they did get through the volume
    assert all(step["max_mismatch"] < 1e-3 for step in shoal("steps"))

    containers = [json.loads(line) for line in compose("ps", "--format", "json").splitlines()]
    (server,) = [each for each in containers if each["Service"] == "vllm"]
    details = json.loads(subprocess.check_output(["docker", "inspect", server["ID"]], timeout=30))[0]
    assert not details["HostConfig"]["PortBindings"]
    assert list(details["NetworkSettings"]["Networks"]) == ["shoal-vllm-test_engine"]
    assert [mount["RW"] for mount in details["Mounts"] if mount["Destination"] == "/weights"] == [False]
