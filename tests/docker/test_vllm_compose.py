"""A node and a vLLM server in containers, wired as in docker-compose.yml; in the engine's place vLLM's CPU build."""

from collections.abc import Iterator

import pytest

from tests.docker.project import BUILD_SECONDS, Project

FILES = ("docker-compose.yml", "docker/compose.test.yml", "docker/compose.vllm-cpu.yml")
START_SECONDS = 1800.0

pytestmark = pytest.mark.docker


@pytest.fixture(scope="module")
def node(engine: None) -> Iterator[Project]:
    project = Project("shoal-test-vllm", *FILES)
    project.compose("build", timeout=BUILD_SECONDS)
    try:
        project.compose("up", "-d", timeout=START_SECONDS)  # returns once the server is healthy
        yield project
    finally:
        project.down()


def test_a_node_trains_on_what_the_server_samples(node: Project) -> None:
    status = node.until_step(2, START_SECONDS)
    assert "the vLLM server at http://vllm:8000" in status["engine"]
    # sampled with the weights the trainer had at each step: they did get through the volume
    assert all(step["max_mismatch"] < 1e-3 for step in node.shoal("steps"))

    details = node.inspect("vllm")
    assert not details["HostConfig"]["PortBindings"]
    assert list(details["NetworkSettings"]["Networks"]) == ["shoal-test-vllm_engine"]
    assert [mount["RW"] for mount in details["Mounts"] if mount["Destination"] == "/weights"] == [False]
