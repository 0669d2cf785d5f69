"""`docker/gpu.yml` as far as it can be read: what the server is started with, and who can reach it."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from node.config import Config
from node.settings import variable

ROOT = Path(__file__).parents[2]


@pytest.fixture
def gpu() -> Any:
    return yaml.safe_load((ROOT / "docker" / "gpu.yml").read_text())


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
    settings = {variable(f"{section}.{key}"): (section, key) for section, key in _keys()}
    chosen: dict[str, dict[str, str]] = {}
    for name, value in node["environment"].items():
        section, key = settings[name]
        chosen.setdefault(section, {})[key] = value
    config = Config.model_validate(chosen)
    assert config.engine.url == "http://vllm:8000"
    assert config.engine.sleep == "on"
    assert f"--dtype={config.model.dtype}" in server["command"]


def test_both_see_the_weights_at_the_same_path(gpu: Any) -> None:
    node, model, server = (gpu["services"][name] for name in ("node", "model", "vllm"))
    assert node["environment"]["SHOAL_ENGINE_WEIGHTS_DIR"] == "/weights"
    assert node["volumes"] == ["weights:/weights"]
    assert model["volumes"] == ["home:/data:ro", "weights:/weights"]
    assert server["volumes"] == ["weights:/weights:ro"]
    assert f"--model={model['command'][-1]}" in server["command"]
    assert server["depends_on"]["model"]["condition"] == "service_completed_successfully"
    assert node["depends_on"]["vllm"]["condition"] == "service_healthy"


def _keys() -> list[tuple[str, str]]:
    return [
        (section, key)
        for section, field in Config.model_fields.items()
        for key in field.annotation.model_fields  # type: ignore[union-attr]
    ]
