"""Real processes: a coordinator, a standby and two training members; kill -9 in mid round, take-over, a kick."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from node.client import DaemonUnreachable, RequestRefused, connect
from node.home import Home, HomeError
from protocol.manifest import Coordination, EnvironmentSpec, make_manifest
from protocol.rounds import Round, State
from swarm.coordination.round_log import RoundLog
from swarm.database import StoreError

DEADLINE = 600.0
"""For each thing that is waited for; the machines that run this may be very busy."""
COORDINATES = (
    "coordinator.round_seconds=8", "coordinator.answer_seconds=60", "coordinator.groups=0", "coordinator.tasks=2",
    "coordinator.patience=15",
)  # fmt: skip
TRAINS = (
    "rollout.group_size=4", "train.learning_rate=1e-4", "swarm.own_groups=2", "swarm.foreign_groups=2", "eval.every=0",
    "swarm.max_group_uses=10", "eval.tasks=2", "network.heal_seconds=1", "node.threads=1",
)  # fmt: skip
BOTH = ("network.listen=/ip4/127.0.0.1/tcp/0", "web.port=0")

pytestmark = [pytest.mark.slow, pytest.mark.network]


class Stage:
    """Processes by the name of their home."""

    def __init__(self, path: Path, model: Path) -> None:
        self.path, self.model = path, model
        self.running: dict[str, subprocess.Popen[bytes]] = {}

    def home(self, name: str) -> Home:
        return Home(self.path / name)

    def command(self, name: str, *words: str, settings: tuple[str, ...] = ()) -> list[str]:
        flags = [word for setting in settings for word in ("--set", setting)]
        return [sys.executable, "-m", "node", "--home", str(self.path / name), *words, *flags]

    def start(self, name: str, *words: str, settings: tuple[str, ...]) -> None:
        with (self.path / f"{name}.out").open("ab") as log:
            self.running[name] = subprocess.Popen(
                self.command(name, *words, settings=(*settings, *BOTH)), stdout=log, stderr=log
            )

    def coordinate(self, name: str, *words: str) -> None:
        self.start(name, "coordinator", "up", *words, settings=COORDINATES)

    def train(self, name: str, *words: str) -> None:
        self.start(name, "up", *words, settings=(f"model.path={self.model}", *TRAINS))

    def kill(self, name: str) -> None:
        process = self.running.pop(name)
        os.kill(process.pid, signal.SIGKILL)
        process.wait(10)

    def ask(self, name: str, *words: str) -> Any:
        done = subprocess.run(self.command(name, *words, "--json"), capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def record(self, name: str) -> Round | None:
        try:
            home = self.home(name)
            log = RoundLog(home.database, home.swarm().manifest_digest)
            last = log.last()
            assert log.faults() == []
            log.close()
        except StoreError:
            return None
        return last.record if last else None

    def status(self, name: str, what: str = "status") -> dict[str, Any]:
        try:
            return dict(connect(self.home(name), timeout=5.0).get(what))
        except (DaemonUnreachable, RequestRefused, HomeError):
            return {}

    def until(self, what: Callable[[], object]) -> None:
        deadline = time.monotonic() + DEADLINE
        while not what():
            for name, process in self.running.items():
                assert process.poll() is None, (name, (self.path / f"{name}.out").read_text()[-3000:])
            assert time.monotonic() < deadline, [
                (self.path / f"{name}.out").read_text()[-800:] for name in self.running
            ]
            time.sleep(0.2)


@pytest.fixture
def stage(tmp_path: Path, tiny_model: Callable[..., Path], evenness: EnvironmentSpec) -> Iterator[Stage]:
    stage = Stage(tmp_path, tiny_model("llama", ascii_only=True))
    for name in ("lead", "spare", "anna", "bert"):
        stage.home(name).init()
    coordinators = Coordination(
        tuple(stage.home(name).identity().peer_id for name in ("lead", "spare")), listed_only=True
    )
    manifest = make_manifest("lab", time.time() - 60, (evenness,), epoch_seconds=86400, coordination=coordinators)
    stage.home("lead").found(manifest, b"k" * 32)
    yield stage
    for process in stage.running.values():
        process.terminate()
    for process in stage.running.values():
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()


def test_a_coordinated_swarm_outlives_its_coordinators(stage: Stage) -> None:
    stage.coordinate("lead")
    stage.until(lambda: stage.record("lead"))
    invite = stage.ask("lead", "coordinator", "invite", "--uses", "2")["invite"]
    peers = {name: stage.home(name).identity().peer_id for name in ("lead", "spare", "anna", "bert")}
    stage.coordinate("spare", "--join", invite)
    for name in ("anna", "bert"):
        stage.train(name, "--join", invite)

    def board(name: str) -> dict[str, Any]:
        return (stage.status(name, "swarm").get("coordinator") or {}).get("board") or {}

    def scored(name: str) -> set[str]:
        return {one["peer"] for one in board(name).get("standings", []) if one["mean"] is not None}

    # both are let in, train, answer held-out tasks and are scored by the coordinator
    stage.until(lambda: scored("anna") == scored("lead") == {peers["anna"], peers["bert"]})
    assert {one["role"] for one in stage.ask("lead", "coordinator", "members")["members"]} == {"member"}
    for one in board("anna")["standings"]:
        assert 0 <= one["mean"] <= one["best"] <= 1
        assert one["mean"] * 2 == int(one["mean"] * 2)  # 2 tasks, one answer each
    assert stage.status("anna")["groups"]["admitted"] > 0

    # killed in the middle of a round, the coordinator goes on with the same one
    def is_open() -> bool:
        record = stage.record("lead")
        return record is not None and record.state is State.open

    stage.until(is_open)
    before = stage.record("lead")
    assert before is not None
    stage.kill("lead")
    stage.coordinate("lead")
    stage.until(lambda: (stage.record("lead") or before).position > before.position)
    after = stage.record("lead")
    assert after is not None
    if after.term == 0:  # else the standby was faster than this machine starts a process
        assert after.number >= before.number

    # killed for good: the standby goes on with the round, and members train meanwhile
    stage.until(lambda: stage.record("spare") == stage.record("anna"))
    leader = next(
        name for name, peer in peers.items() if peer == stage.status("anna", "swarm")["coordinator"]["leader"]
    )
    other = {"lead": "spare", "spare": "lead"}[leader]
    steps, at = stage.status("anna")["step"], stage.record("anna")
    assert at is not None
    stage.kill(leader)
    stage.until(lambda: stage.status("anna", "swarm")["coordinator"]["leader"] == peers[other])
    taken = stage.record("anna")
    assert taken is not None
    assert taken.term > at.term
    assert taken.number >= at.number
    stage.until(lambda: board("bert")["number"] >= taken.number and len(scored("bert")) == 2)
    assert stage.status("anna")["step"] > steps

    # a kick is enforced by the other member
    stage.until(lambda: peers["bert"] in json.dumps(stage.status("anna", "peers")))
    assert stage.ask(other, "coordinator", "kick", peers["bert"])["kicked"]

    def connected() -> set[str]:
        return {one["peer_id"] for one in stage.status("anna", "peers")["peers"] if one["connected"]}

    stage.until(lambda: peers["bert"] not in connected())
    time.sleep(3)
    assert connected() <= {peers[other]}
