"""The profile `coordinator` with two nodes that it lets in and evaluates. Needs an engine (`make test-docker`)."""

import subprocess
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.docker.project import BUILD_SECONDS, Project

FILES = ("docker-compose.yml", "docker/cpu.yml", "docker/compose.test.yml")
UP_SECONDS = 300.0
ROUND_SECONDS = 1800.0

pytestmark = pytest.mark.docker


@pytest.fixture
def coordinator(engine: None) -> Iterator[Project]:
    project = Project("shoal-test", *FILES, profile="coordinator")
    project.compose("build", "coordinator", "node", timeout=BUILD_SECONDS)
    try:
        project.compose("up", "-d", "coordinator")
        yield project
    finally:
        project.down()


def until(project: Project, what: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, f"not in {seconds:.0f} s\n{project.logs()}"
        time.sleep(3)


def test_two_nodes_are_let_in_and_evaluated(coordinator: Project) -> None:
    def ask(*words: str) -> Any:
        return coordinator.shoal("coordinator", *words, service="coordinator")

    def leads() -> bool:
        try:
            return bool(ask("epoch")["leader"])
        except AssertionError:  # it is not up yet
            return False

    until(coordinator, leads, UP_SECONDS)
    invite = str(ask("invite", "--uses", "2")["invite"])
    node = Project("shoal-test", *FILES, join=invite)
    peer = Project("shoal-test-peer", *FILES, "docker/compose.peer.yml", join=invite)
    try:
        node.compose("up", "-d", "node")
        peer.compose("up", "-d", "node")
        ids = {str(one.until_step(1, ROUND_SECONDS)["peer_id"]) for one in (node, peer)}
        assert ids <= {member["peer"] for member in ask("members")["members"]}

        # a kill amid a round loses neither the round nor the members
        before = ask("epoch")["round"]
        subprocess.run(
            ["docker", "kill", coordinator.inspect("coordinator")["Id"]], check=True, timeout=60, capture_output=True
        )
        coordinator.compose("up", "-d", "--no-deps", "coordinator")
        until(coordinator, leads, UP_SECONDS)
        assert ask("epoch")["round"]["number"] >= before["number"]

        def evaluated() -> bool:
            board = ask("board") or {"standings": []}  # there is none before the first round's end
            return ids <= {one["peer"] for one in board["standings"] if one["mean"] is not None}

        until(coordinator, evaluated, ROUND_SECONDS)
    finally:
        peer.down()
