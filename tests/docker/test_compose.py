"""`docker compose up` as a user without a GPU runs it: no terminal, no variable. Needs an engine (`make test-docker`).

The tests follow one node from its first step to its stop; each can be run alone.
"""

import json
import subprocess
import time
import urllib.request
from collections.abc import Iterator

import pytest

from tests.docker.project import BUILD_SECONDS, Project

FILES = ("docker-compose.yml", "docker/cpu.yml", "docker/compose.test.yml")
STEP_SECONDS = 900.0
HEALTH_SECONDS = 300.0
TO_THE_NODE = "import json, os, signal; os.kill(json.load(open('/data/daemon.json'))['pid'], signal.{})"

pytestmark = pytest.mark.docker


@pytest.fixture(scope="module")
def node(engine: None) -> Iterator[Project]:
    project = Project("shoal-test", *FILES)
    project.compose("build", timeout=BUILD_SECONDS)
    try:
        project.compose("up", "-d")
        yield project
    finally:
        project.down()


def test_a_node_trains_and_is_healthy(node: Project) -> None:
    status = node.until_step(1, STEP_SECONDS)
    assert status["model"] == "SmolLM2-135M-Instruct"
    with urllib.request.urlopen(f"http://127.0.0.1:{node.port}/readyz", timeout=10) as answer:
        assert json.load(answer)["ready"] is True
    node.until_health("healthy", HEALTH_SECONDS)


def test_a_container_has_no_more_than_it_needs(node: Project) -> None:
    details = node.inspect()
    host = details["HostConfig"]
    assert host["ReadonlyRootfs"]
    assert host["CapDrop"] == ["ALL"]
    assert host["Init"]
    assert host["RestartPolicy"]["Name"] == "unless-stopped"
    assert details["Config"]["User"] == "1000:1000"
    assert not details["Config"]["Tty"]
    assert [binding["HostIp"] for binding in details["NetworkSettings"]["Ports"]["8420/tcp"]] == ["127.0.0.1"]
    assert {mount["Destination"]: mount["Name"] for mount in details["Mounts"]} == {
        "/data": "shoal-test_home",
        "/cache": "shoal-test_cache",
    }


def test_two_nodes_train_on_what_each_other_tried(node: Project) -> None:
    node.until(lambda status: True, STEP_SECONDS)  # it is up: its invite has its addresses
    invite = node.shoal("swarm", "invite")["invite"]
    peer = Project("shoal-test-peer", *FILES, "docker/compose.peer.yml", join=invite)
    try:
        peer.compose("up", "-d")
        theirs = peer.until(lambda status: status["groups"]["trained_foreign"] > 0, 2 * STEP_SECONDS)
        own = node.until(lambda status: status["groups"]["trained_foreign"] > 0, STEP_SECONDS)
    finally:
        peer.down()
    assert theirs["swarm"] == own["swarm"]
    assert theirs["peer_id"] != own["peer_id"]


def test_health_turns_bad_when_the_node_hangs(node: Project) -> None:
    node.until_health("healthy", STEP_SECONDS)
    node.python(TO_THE_NODE.format("SIGSTOP"))
    try:
        node.until_health("unhealthy", HEALTH_SECONDS)
    finally:
        node.python(TO_THE_NODE.format("SIGCONT"))
    node.until_health("healthy", HEALTH_SECONDS)


def test_a_kill_costs_no_step(node: Project) -> None:
    status = node.until_step(1, STEP_SECONDS)
    subprocess.run(["docker", "kill", node.inspect()["Id"]], check=True, timeout=60, capture_output=True)
    node.compose("up", "-d")
    resumed = node.until_step(status["step"] + 1, STEP_SECONDS)
    assert resumed["peer_id"] == status["peer_id"]
    done = [step["step"] for step in node.shoal("steps")]
    assert done == list(range(1, done[-1] + 1))


def test_a_stop_is_quick_and_says_what_is_saved(node: Project) -> None:
    node.until_step(1, STEP_SECONDS)
    started = time.monotonic()
    node.compose("stop")
    assert time.monotonic() - started < 15
    assert node.inspect()["State"]["ExitCode"] == 0
    assert "is saved" in node.logs()
