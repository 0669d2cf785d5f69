"""`shoal local --coordinator --large 1`: a coordinator, a divided trainer, two followers, a node of another model."""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from node.home import Home
from protocol.manifest import Coordination, EnvironmentSpec, make_manifest

DEADLINE = 400.0
QUICK = (
    "rollout.group_size=8", "train.learning_rate=1e-4", "swarm.own_groups=3", "swarm.foreign_groups=2",
    "train.dynamic_rounds=0", "swarm.max_group_uses=4", "eval.every=0", "eval.tasks=2", "network.heal_seconds=5",
    "federation.poll_seconds=1", "federation.staleness=16", "federation.spot_check=1",
    "coordinator.groups=4", "coordinator.round_seconds=20", "coordinator.tasks=2",
)  # fmt: skip

pytestmark = [pytest.mark.interop, pytest.mark.slow, pytest.mark.network]  # eight processes


def test_weights_flow_out_groups_flow_in_and_the_board_fills(
    tmp_path: Path, tiny_model: Callable[..., Path], evenness: EnvironmentSpec
) -> None:
    model, other = tiny_model("llama", ascii_only=True), tiny_model("qwen2", ascii_only=True)
    lead = Home(tmp_path / "coordinator")
    lead.init()
    named = Coordination((lead.identity().peer_id,), listed_only=True)
    lead.found(
        make_manifest("local", time.time() - 60, (evenness,), epoch_seconds=86400, coordination=named), b"k" * 32
    )
    command = [sys.executable, "-m", "node", "--home", str(tmp_path), "local", "--coordinator", "--large", "1"]
    command += ["--nodes", "3", "--other-model", str(other), "--steps", "40", "--json"]
    command += [word for setting in (f"model.path={model}", *QUICK) for word in ("--set", setting)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    large, *followers, different = report["nodes"]
    assert [node["role"] for node in report["nodes"]] == ["large", "follower", "follower", "node"]
    assert all(node["restarts"] == 0 for node in report["nodes"])

    assert (large["steps"], different["steps"]) == (40, 40)
    assert large["model"] == followers[0]["model"] != different["model"]
    policy = large["policy"]
    assert policy["versions"] >= 5
    assert policy["change_bytes"]["median"] < policy["whole_bytes"]["median"]
    assert policy["groups_trained"] == sum(policy["groups_by_versions_behind"].values()) > 0
    assert max(map(int, policy["groups_by_versions_behind"])) <= 16
    for follower in followers:
        assert follower["policy"]["versions"] >= 1
        assert 0 <= follower["policy"]["after_seconds"]["least"] < 60
        assert follower["groups"]["published"] > 0
    assert different["groups"]["trained_foreign"] > 0

    led = report["coordinator"]
    assert (led["members"], led["restarts"]) == (4, 0)
    assert led["board_of_round"] >= 1
    assert {row["name"] for row in led["board"]} <= {"large-1", "node-1", "node-2", "node-3"}
    assert len(led["board"]) >= 3
