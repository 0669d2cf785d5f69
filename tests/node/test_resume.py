"""N steps in one go = k steps, kill -9, N-k steps: the same weights bit for bit, with real node processes.

Both runs start from copies of one home: same identity, manifest, foreign groups (frozen: put into the store
beforehand), seed. The model is a tiny random one, the environment one in which a random model's answers differ.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from safetensors.torch import load_file

from node.client import DaemonUnreachable, RequestRefused, connect
from node.history import History
from node.home import Home
from protocol.assignment import own_task
from protocol.envelope import Domain, digest_of, seal
from protocol.identity import Identity
from protocol.manifest import EnvironmentSpec, Manifest, make_manifest
from protocol.rollout import Completion, RolloutGroup, Turn
from swarm.experience import ADMITTED, ExperienceStore, GroupRecord

STEPS = 6
DEADLINE = 180.0
SEVERAL = """advantage = "gae"
gae_lambda = 0.9
passes = 2
mini_batches = 2
kl_coefficient = 0.05
kl_in = "reward"
dynamic_rounds = 2
curriculum_low = 0.05
"""
"""Everything that an update and the choice of tasks remember: a critic, old log-probabilities, pass rates."""
ADAPTERS = """lora_rank = 4
kl_coefficient = 0.05
gradient_checkpointing = "on"
"""
"""No weight of the model is trained: the first journal begins at adapters that every start makes anew."""
PARTIAL = """policy = "partial"
over_provision = 2.0
max_staleness = 2
"""
"""Unfinished answers that go on under the next weights."""


def foreign_groups(home: Home, manifest: Manifest, count: int) -> None:
    """Admitted groups of another node, in the store as the exchange would have left them."""
    producer = Identity.from_seed(b"\7" * 32)
    now = time.time()
    epoch = manifest.epoch_at(now)
    store = ExperienceStore(home.database, 1 << 24, time.time)
    for slot in range(count):
        task = own_task(manifest, epoch, producer.peer_id, slot)
        texts = ("even", "odd", "four", f"answer {slot}")
        rewards = tuple(float(len(text) % 2 == 0) for text in texts)
        group = RolloutGroup(
            epoch=epoch,
            task=task,
            model="another",
            tokenizer=b"",
            policy_version=slot,
            completions=tuple(
                Completion((Turn("assistant", text),), "stop", len(text) + 1, reward)
                for text, reward in zip(texts, rewards, strict=True)
            ),
        )
        body = seal(producer, Domain.group, msgspec.msgpack.encode(group), issued=now, expires=now + 1800)
        record = GroupRecord(
            digest=digest_of(body),
            origin="foreign",
            producer=producer.peer_id,
            epoch=epoch,
            task=task,
            model="another",
            claimed=rewards,
            local=rewards,
            verdict=ADMITTED,
            detail="",
            received_at=now,
            expires_at=now + 1800,
        )
        assert store.add(record, body)
    store.close()


@pytest.fixture(
    params=[("", ""), ("", SEVERAL), ("", ADAPTERS), (PARTIAL, "")], ids=["plain", "several", "adapters", "partial"]
)
def prepared(
    request: pytest.FixtureRequest, tmp_path: Path, tiny_model: Callable[..., Path], evenness: EnvironmentSpec
) -> Home:
    rollout, train = request.param
    if rollout:  # budgets that differ, so that some answers are unfinished when others are done
        environment = tmp_path / "site" / "evenness.py"
        environment.write_text(environment.read_text().replace(", 8)", ", 4 + 3 * (index % 5))"))
    home = Home(tmp_path / "first")
    home.init()
    manifest = make_manifest("resume", time.time() - 60, (evenness,), epoch_seconds=86400)
    home.found(manifest)
    foreign_groups(home, manifest, 20)
    home.config_path.write_text(
        f"""
[node]
threads = 1
[model]
path = "{tiny_model("llama", ascii_only=True)}"
dtype = "float32"
[rollout]
group_size = 4
{rollout}[train]
learning_rate = 1e-3
{train}[swarm]
own_groups = 3
foreign_groups = 3
[network]
listen = "/ip4/127.0.0.1/tcp/0"
[web]
port = 0
[eval]
every = 0
tasks = 2
[checkpoint]
every = 4
"""
    )
    return home


def start(home: Home, *arguments: str) -> subprocess.Popen[bytes]:
    log = (home.path / "console.log").open("ab")
    command = [sys.executable, "-m", "node", "--home", str(home.path), "up", *arguments]
    return subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"})


def finish(home: Home, steps: int) -> None:
    process = start(home, "--steps", str(steps))
    try:
        assert process.wait(DEADLINE) == 0, (home.path / "console.log").read_text()[-3000:]
    finally:
        process.kill()


def kill_at(home: Home, step: int) -> None:
    """Run until `step` updates are done, then kill -9."""
    process = start(home, "--steps", str(STEPS))
    deadline = time.monotonic() + DEADLINE
    try:
        while time.monotonic() < deadline and process.poll() is None:
            try:
                if connect(home, timeout=2.0).get("status")["step"] >= step:
                    break
            except (DaemonUnreachable, RequestRefused):
                pass
            time.sleep(0.02)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait(10)


def weights(home: Home) -> dict[str, bytes]:
    kept = home.checkpoints / f"step-{STEPS}"
    possible = ("model", "adapter_model", "exp_avg", "critic")
    names = [name for name in possible if (kept / f"{name}.safetensors").exists()]
    tensors = {(file, name): t for file in names for name, t in load_file(kept / f"{file}.safetensors").items()}
    return {f"{file}/{name}": t.numpy().tobytes() for (file, name), t in tensors.items()}


def records(home: Home) -> list[dict[str, object]]:
    history = History(home.database, time.time)
    kept = ("step", "reward", "own_groups", "foreign_groups", "loss", "grad_norm", "staleness")
    found = [{name: step[name] for name in kept} for step in history.steps(0, 100)]
    history.close()
    return found


@pytest.mark.slow
@pytest.mark.network
def test_killed_runs_end_with_the_same_weights(prepared: Home, tmp_path: Path) -> None:
    killed = Home(tmp_path / "second")
    shutil.copytree(prepared.path, killed.path)

    finish(prepared, STEPS)
    kill_at(killed, 2)
    kill_at(killed, 5)  # past the full checkpoint of step 4
    finish(killed, STEPS)

    assert [record["step"] for record in records(prepared)] == list(range(1, STEPS + 1))
    assert any(record["foreign_groups"] for record in records(prepared))
    partial = "policy" in prepared.config_path.read_text()
    assert any(record["staleness"] for record in records(prepared)) == partial
    assert records(killed) == records(prepared)
    assert weights(killed) == weights(prepared)
