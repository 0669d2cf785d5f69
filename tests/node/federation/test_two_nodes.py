"""A leader and a follower as real processes over libp2p: weights out, groups in, and both killed in between."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from node.client import DaemonUnreachable, RequestRefused, connect
from node.home import Home, HomeError
from protocol.manifest import EnvironmentSpec, make_manifest
from protocol.policy import Claim, claim_of

DEADLINE = 300.0
COMMON = (
    "node.threads=1",
    "model.dtype=float32",
    "train.learning_rate=1e-4",
    "train.dynamic_rounds=0",
    "eval.every=0",
    "eval.tasks=2",
    "network.heal_seconds=1",
    "network.listen=/ip4/127.0.0.1/tcp/0",
    "web.port=0",
)
LEADS = (
    "federation.publish=true",
    "federation.staleness=16",
    "federation.spot_check=1",
    "rollout.group_size=8",
    "swarm.own_groups=12",
    "swarm.max_group_uses=2",
)
FOLLOWS = ("federation.poll_seconds=0.2", "rollout.group_size=4", "swarm.own_groups=2", "swarm.foreign_groups=0")

pytestmark = [pytest.mark.slow, pytest.mark.network]


@contextmanager
def node(home: Home, model: Path, *settings: str, join: str = "") -> Iterator[subprocess.Popen[str]]:
    flags = [f for setting in (f"model.path={model}", *COMMON, *settings) for f in ("--set", setting)]
    command = [
        sys.executable,
        "-m",
        "node",
        "--home",
        str(home.path),
        "up",
        *flags,
        *(["--join", join] if join else []),
    ]
    with (home.path.parent / f"{home.path.name}.log").open("a") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, text=True)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(15)


def ask(home: Home, what: str, **query: Any) -> Any:
    try:
        return connect(home, timeout=5.0).get(what, **query)
    except (DaemonUnreachable, RequestRefused, HomeError):
        return {}


def until(what: Callable[[], Any], *processes: subprocess.Popen[str]) -> Any:
    deadline = time.monotonic() + DEADLINE
    while not (found := what()):
        assert all(process.poll() is None for process in processes)
        assert time.monotonic() < deadline
        time.sleep(0.2)
    return found


def test_a_follower_samples_with_the_leaders_policy_and_the_leader_learns_from_it(
    tmp_path: Path, tiny_model: Callable[..., Path], evenness: EnvironmentSpec
) -> None:
    model = tiny_model("llama", ascii_only=True)
    leader, follower = Home(tmp_path / "leader"), Home(tmp_path / "follower")
    for home in (leader, follower):
        home.init()
    # a model this small has answered 4,160 tasks within a minute, and then there is nothing new to publish
    slots = {"epoch_seconds": 86400, "slots_per_epoch": 1 << 17}
    leader.found(make_manifest("federation", time.time() - 60, (evenness,), **slots))
    me, other = leader.identity().peer_id, follower.identity().peer_id
    with node(leader, model, *LEADS) as leads:
        invite = until(lambda: ask(leader, "swarm").get("invite"), leads)
        follow = (*FOLLOWS, f"federation.follow={me}")
        with node(follower, model, *follow, join=invite) as follows:
            until(lambda: ask(leader, "status").get("groups", {}).get("trained_followers", 0) >= 6, leads, follows)

            def claims() -> list[Claim]:
                groups = ask(leader, "groups", limit=200, producer=other)
                found = [claim_of(group["model"]) for group in groups if group["verdict"] == "admitted"]
                return [claim for claim in found if claim]

            until(lambda: len({claim.state for claim in claims()}) > 1, leads, follows)
            assert {claim.leader for claim in claims()} == {me[-8:]}
            status = ask(follower, "status")
            assert status["state"] == "TRAINING"
            assert status["reason"].startswith("practises with version")
            assert ask(leader, "status")["groups"]["rejected"].get("logprob_mismatch", 0) == 0
            (peer,) = (row for row in ask(leader, "peers")["peers"] if row["peer_id"] == other)
            assert peer["followed"] == peer["trained"] >= 6
            before = status["policy_version"]
            os.kill(follows.pid, signal.SIGKILL)
            follows.wait(15)
        with node(follower, model, *follow) as follows:
            # under the version that it had, and on from there
            until(lambda: (ask(follower, "status").get("policy_version") or 0) > before, follows, leads)
            os.kill(leads.pid, signal.SIGKILL)
            leads.wait(15)
            gone = "does not answer; practising with version"
            said = until(lambda: gone in (now := ask(follower, "status")).get("reason", "") and now, follows)
            assert said["state"] == "WAITING"
            published = said["groups"]["published"]
            until(lambda: ask(follower, "status")["groups"]["published"] > published, follows)
            with node(leader, model, *LEADS) as leads:
                now = ask(follower, "status")["policy_version"]
                until(lambda: (ask(follower, "status").get("policy_version") or 0) > now, follows, leads)
                assert "logprob_mismatch" not in ask(leader, "status")["groups"]["rejected"]
    positions = (follower.path / "following.json").read_text()
    assert '"rounds"' in positions
