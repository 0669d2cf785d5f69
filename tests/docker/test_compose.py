"""`docker compose up` as a user runs it: one node, no terminal, no variable. Needs an engine (`make test-docker`)."""

import json
import subprocess
import time
import urllib.request
from collections.abc import Iterator

import pytest

from tests.docker.project import BUILD_SECONDS, Project

STEP_SECONDS = 900.0

pytestmark = pytest.mark.docker


@pytest.fixture(scope="module")
def node(engine: None) -> Iterator[Project]:
    project = Project("shoal-test", "docker-compose.yml", "docker/compose.test.yml")
    project.compose("build", timeout=BUILD_SECONDS)
    try:
        project.compose("up", "-d")
        yield project
    finally:
        project.down()


def test_a_node_trains_is_healthy_and_resumes_after_a_kill(node: Project) -> None:
    status = node.until_step(1, STEP_SECONDS)
    assert status["model"] == "SmolLM2-135M-Instruct"
    with urllib.request.urlopen("http://127.0.0.1:18420/readyz", timeout=10) as answer:
        assert json.load(answer)["ready"] is True
    details = node.inspect()
    assert details["HostConfig"]["ReadonlyRootfs"]
    assert details["Config"]["User"] == "shoal"
    ports = details["NetworkSettings"]["Ports"]
    assert [binding["HostIp"] for binding in ports["8420/tcp"]] == ["127.0.0.1"]

    subprocess.run(["docker", "kill", details["Id"]], check=True, timeout=60, capture_output=True)
    node.compose("up", "-d")
    resumed = node.until_step(status["step"] + 1, STEP_SECONDS)
    assert resumed["peer_id"] == status["peer_id"]

    started = time.monotonic()
    node.compose("stop")
    assert time.monotonic() - started < 15
    assert node.inspect()["State"]["ExitCode"] == 0
    assert "is saved" in node.logs()
