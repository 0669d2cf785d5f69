"""What a large node makes of its settings for the engines that Ray places. No Ray."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from node.config import Config
from node.device import Device
from node.engines.vllm_client import Address
from node.engines.vllm_server import ServerPlan
from node.home import Home
from node.large import node as large_node
from node.large.cluster_file import Cluster, ClusterFileError
from node.large.node import LargeNode, Planned, plan_large
from node.large.planner import Placement
from node.large.room import Bundle, Host, Need, Needs
from node.models import load_model


async def test_a_shared_directory_that_cannot_be_made_is_named(tmp_path: Path, tiny_model: Callable[..., Path]) -> None:
    home = Home(tmp_path / "home")
    home.init()
    (tmp_path / "file").write_text("")
    parts = {"trainer": {"workers": 1}, "engines": {"number": 1}}
    ray: Any = SimpleNamespace(cluster=Cluster.model_validate({"shared": str(tmp_path / "file"), **parts}))
    config = Config.model_validate({"model": {"path": str(tiny_model("llama"))}})
    with pytest.raises(ClusterFileError, match=r"shared = '.*/file': .* cannot be made \(Not a directory\) ; make it"):
        await plan_large(ray, config, home)


@pytest.mark.parametrize("replay", ["auto", "off"])
def test_engines_note_experts_only_where_they_are_repeated(
    replay: str, tiny_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans = list[ServerPlan]()

    def server(ray: Any, group: Any, room: Any, plan: ServerPlan, **_: Any) -> Any:
        plans.append(plan)
        return SimpleNamespace(address=Address("http://vllm", "/socket"))

    monkeypatch.setattr(large_node, "RayServer", server)
    need = Need(1, "")
    planned = Planned(
        Cluster.model_validate({"trainer": {"workers": 1}, "engines": {"number": 1}}),
        (Host("10.0.0.1", "node1", 8.0, 2, 80 << 30, "H100", 1 << 40),),
        Needs(True, need, need, need, 0, "M"),
        Placement("disjoint", (), (Bundle("engine", 0, "10.0.0.1", "node1", 1.0, 1),), (), ()),
        torch.bfloat16,
        tmp_path,
    )
    ray: Any = None
    large = LargeNode(ray, planned)
    large._engines = [None]
    bundle = load_model(str(tiny_model("olmoe")), device="cpu", dtype="float32", models=tmp_path)
    device = Device()
    (engine,) = large.engines(Config.model_validate({"train": {"routing_replay": replay}}), bundle, device, print)
    device.close()
    noted = replay != "off"
    assert (engine.bundle.routing is not None) == noted
    assert ("--enable-return-routed-experts" in plans[0].arguments) == noted
