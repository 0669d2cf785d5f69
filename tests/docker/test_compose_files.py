"""The compose files as far as they can be read: what each service is given, who can reach it, what a CPU leaves out."""

import json
import subprocess
from typing import Any

import pytest
import yaml

from node.config import Config
from node.settings import ALIASES, variable
from tests.docker.project import ROOT


@pytest.fixture
def gpu() -> Any:
    return yaml.safe_load((ROOT / "docker-compose.yml").read_text())


def test_only_the_node_reaches_the_server(gpu: Any) -> None:
    server = gpu["services"]["vllm"]
    assert "ports" not in server
    assert "expose" not in server
    assert server["networks"] == ["engine"]
    assert gpu["networks"]["engine"] == {"internal": True}
    assert [name for name, service in gpu["services"].items() if "engine" in service.get("networks", ())] == [
        "node",
        "vllm",
    ]


def test_the_server_has_what_the_node_asks_for(gpu: Any) -> None:
    node, server = gpu["services"]["node"], gpu["services"]["vllm"]
    for flag in ("--enable-scale-out", "--enable-sleep-mode", "--logprobs-mode=raw_logprobs"):
        assert flag in server["command"]
    assert server["environment"]["VLLM_SERVER_DEV_MODE"] == "1"
    config = settings(node["environment"])
    assert config.engine.url == "http://vllm:8000"
    assert config.engine.sleep == "on"
    assert f"--dtype={config.model.dtype}" in server["command"]
    assert config.model.device == "cuda"
    assert node["deploy"] == server["deploy"]
    assert node["build"]["target"] == "cuda"


def test_both_see_the_weights_at_the_same_path(gpu: Any) -> None:
    node, model, server = (gpu["services"][name] for name in ("node", "model", "vllm"))
    assert node["environment"]["SHOAL_ENGINE_WEIGHTS_DIR"] == "/weights"
    assert node["volumes"] == ["home:/data", "cache:/cache", "weights:/weights"]
    # the settings of the home may name another model
    assert model["volumes"] == ["home:/data:ro", "cache:/cache", "weights:/weights"]
    assert server["volumes"] == ["weights:/weights:ro"]
    assert f"--model={model['command'][-1]}" in server["command"]
    assert server["depends_on"]["model"]["condition"] == "service_completed_successfully"
    assert node["depends_on"]["vllm"]["condition"] == "service_started"  # the node waits, and its page says so


def test_every_service_is_confined_and_its_log_rotated(gpu: Any) -> None:
    for name, service in gpu["services"].items():
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert service["logging"] == {"driver": "local"}, name
        # vLLM's image writes caches where it likes
        assert service.get("read_only", False) == (name != "vllm"), name


def test_ports_are_for_this_machine_but_the_swarms(gpu: Any) -> None:
    published = [port for service in gpu["services"].values() for port in service.get("ports", ())]
    assert published == [
        "127.0.0.1:8420:8420", "7946:7946", "127.0.0.1:8421:8420", "7947:7947", "127.0.0.1:3000:3000",
    ]  # fmt: skip


def test_a_coordinator_needs_no_gpu_and_has_a_home_of_its_own(gpu: Any) -> None:
    service = gpu["services"]["coordinator"]
    assert service["profiles"] == ["coordinator"]
    assert (service["build"]["target"], service["image"]) == ("cpu", "shoal:cpu")
    assert "deploy" not in service
    assert service["volumes"] == ["coordinator:/data"]
    assert service["command"][:3] == ["coordinator", "up", "--begin"]
    config = settings(service["environment"])
    assert config.network.listen.endswith("/tcp/7947")


@pytest.mark.docker
def test_the_default_resolves_without_a_variable(engine: None) -> None:
    services = resolved("docker-compose.yml")
    assert set(services) == {"node", "model", "vllm"}
    for name in ("node", "vllm"):
        (device,) = services[name]["deploy"]["resources"]["reservations"]["devices"]
        assert (device["driver"], device["capabilities"]) == ("nvidia", ["gpu"])


@pytest.mark.docker
def test_on_a_cpu_there_is_the_node_alone(engine: None) -> None:
    services = resolved("docker-compose.yml", "docker/cpu.yml")
    assert set(services) == {"node"}
    node = services["node"]
    assert node["build"]["target"] == "cpu"
    assert "deploy" not in node
    assert "depends_on" not in node
    assert set(node["networks"]) == {"swarm", "metrics"}
    config = settings(node["environment"])
    assert config.engine == Config().engine
    assert config.model.device == "cpu"
    with_observability = resolved("docker-compose.yml", "docker/cpu.yml", profile="observability")
    assert set(with_observability) == {"node", "token", "prometheus", "grafana"}
    assert with_observability["token"]["image"] == node["image"]


def resolved(*files: str, profile: str = "") -> Any:
    """The services as Compose understands them."""
    words = [word for file in files for word in ("-f", file)] + (["--profile", profile] if profile else [])
    done = subprocess.run(
        ["docker", "compose", *words, "config", "--format", "json"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["services"]


def settings(environment: dict[str, str]) -> Config:
    """What the node makes of a service's variables; without defaults given to Compose (`${NAME:-default}`)."""
    known = {variable(f"{section}.{key}"): (section, key) for section, key in _keys()}
    chosen: dict[str, dict[str, str]] = {}
    for name, value in environment.items():
        if name in ALIASES or not value or value.startswith("${"):
            continue
        section, key = known[name]
        chosen.setdefault(section, {})[key] = value
    return Config.model_validate(chosen)


def _keys() -> list[tuple[str, str]]:
    return [
        (section, key)
        for section, field in Config.model_fields.items()
        for key in field.annotation.model_fields  # type: ignore[union-attr]
    ]
