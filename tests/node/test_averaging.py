"""Rounds in a node's loop: an outer step is in a checkpoint or undone, and restarts go on bit for bit."""

import asyncio
import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import load_file

from node.averaging import CAUTION, Averaging, make_averaging
from node.checkpoint import CheckpointError, CheckpointStore
from node.client import DaemonUnreachable, RequestRefused, connect
from node.config import Config
from node.config_averaging import ROUND_SLACK
from node.config_train import TrainConfig
from node.device import Device
from node.history import History
from node.home import Home
from node.models import ModelError, load_model
from node.progress import Progress
from node.training import outer
from node.training.local import LocalTrainer
from protocol.invite import Invite
from protocol.manifest import EnvironmentSpec, make_manifest
from swarm.averaging import SLACK_SECONDS, Contribution, Contributions, NotAveraged
from tests.node.fsdp.conftest import batch

DEADLINE = 300.0


class Others:
    """An averager that brings whatever weights it was given, besides the own ones."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.brings, self.asked = directory, list[np.ndarray](), 0

    async def round(self, own: Path, digest: bytes, seconds: float) -> Contributions:
        self.asked += 1
        if not self.brings:
            raise NotAveraged("nobody else came within 60 s")
        paths = [self.directory / f"peer-{at}.bin" for at in range(len(self.brings))]
        for path, numbers in zip(paths, self.brings, strict=True):
            path.write_bytes(numbers.astype("<f4").tobytes())
        all_of_them = [Contribution("own", own), *(Contribution(f"peer-{path.stem}", path) for path in paths)]
        return Contributions(tuple(all_of_them), 0, ())


@pytest.fixture
def make(tmp_path: Path, tiny_model: Callable[..., Path]) -> Iterator[Callable[..., Any]]:
    device = Device()
    histories: list[History] = []

    def made(name: str = "node") -> Any:
        place = tmp_path / name
        (place / "averaging").mkdir(parents=True, exist_ok=True)
        bundle = load_model(str(tiny_model("llama")), device="cpu", dtype="float32", models=tmp_path)
        trainer = LocalTrainer(bundle, TrainConfig(learning_rate=1e-3, warmup_steps=0), dumps=place / "dumps")
        history = History(place / "node.db", time.time)
        histories.append(history)
        asked: list[int] = []

        async def no_room(size: int) -> str:
            asked.append(size)
            return node.lacks

        others: Any = Others(place / "averaging")
        averaging = Averaging(trainer, others, place / "averaging", no_room)
        config = Config.model_validate({"averaging": {"method": "diloco", "every": 2}})
        node = SimpleNamespace(
            trainer=trainer, averaging=averaging, history=history, device=device, config=config, place=place,
            checkpoints=SimpleNamespace(base=0), progress=Progress(time.time, 60.0), asked_room=asked, lacks="",
        )  # fmt: skip
        return node

    yield made
    device.close()
    for history in histories:
        history.close()


def told(node: Any) -> list[str]:
    return [event["message"] for event in node.history.events(None, 20) if event["kind"] == "averaging"]


def flat(node: Any) -> torch.Tensor:
    return outer.flatten(node.trainer.weights.masters)


async def test_a_round_takes_the_outer_step_and_nobody_there_takes_none(make: Callable[..., Any]) -> None:
    node = make()
    node.averaging.begin(None)
    start = flat(node)
    assert not node.averaging.due(1, 2)
    for step in (1, 2):
        node.trainer.update(batch(step))
    own = flat(node)
    assert node.averaging.due(2, 2)

    assert await node.averaging.round(node, lambda: pytest.fail("there is nothing to keep")) is False
    assert torch.equal(flat(node), own)
    assert told(node) == ["no outer step after step 2: nobody else came within 60 s; going on alone"]
    assert not node.averaging.due(3, 2)  # the next round is every so many steps, too
    assert node.averaging.due(4, 2)

    other = start + 2 * (own - start)
    node.averaging.averager.brings = [other.numpy()]
    kept: list[torch.Tensor] = []
    assert await node.averaging.round(node, lambda: kept.append(flat(node))) is True
    expected = start + 0.7 * 1.9 * 1.5 * (own - start)
    assert torch.allclose(kept[0], expected, atol=1e-6)
    assert torch.equal(flat(node), kept[0])
    assert "averaged after step 2 with 1 others" in told(node)[-1]
    assert "cosine 1.00" in told(node)[-1]
    assert sorted(path.name for path in (node.place / "averaging").iterdir()) == ["own.bin"]


async def test_a_round_and_its_checkpoint_each_have_the_deadline_of_a_stage(make: Callable[..., Any]) -> None:
    node = make()
    node.progress.deadline = 2.0
    node.averaging.begin(None)
    start = flat(node)
    node.trainer.update(batch(1))
    node.averaging.averager.brings = [start.numpy()]
    come_together = node.averaging.averager.round

    async def late(*arguments: Any) -> Contributions:
        await asyncio.sleep(1.2)
        return await come_together(*arguments)

    node.averaging.averager.round = late
    assert await node.averaging.round(node, lambda: time.sleep(1.2)) is True
    assert node.progress.stages["averaging"] > 1.2
    assert node.progress.stages["checkpoint"] > 1.2
    # and what is configured leaves a round the time in which it is given up
    assert ROUND_SLACK > SLACK_SECONDS


async def test_what_fails_in_a_round_is_told_as_what_it_is(make: Callable[..., Any], tmp_path: Path) -> None:
    node = make()
    node.averaging.begin(None)
    node.trainer.update(batch(1))
    node.averaging.averager.brings = [flat(node).numpy()]
    come_together = node.averaging.averager.round

    async def restarted(*arguments: Any) -> Contributions:
        got: Contributions = await come_together(*arguments)
        got.all[1].path.unlink()
        return got

    async def broken(*arguments: Any) -> Contributions:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    for node.averaging.averager.round in (restarted, broken):
        assert await node.averaging.round(node, lambda: pytest.fail("there is nothing to keep")) is False
    gone, failed = told(node)
    assert gone.endswith("peer-0.bin is gone: the averager was started again meanwhile; going on alone")
    assert failed.endswith("Input/output error; see to that disk")

    (tmp_path / "own.bin").mkdir()  # cannot be replaced by a file
    with pytest.raises(OSError, match="own"):
        outer.write(flat(node), tmp_path / "own.bin")
    assert not (tmp_path / "own.aside").exists()


async def test_a_round_without_room_is_not_begun(make: Callable[..., Any]) -> None:
    node = make()
    node.averaging.begin(None)
    node.trainer.update(batch(1))
    node.lacks = "it takes 9 MB of disk, and limits.disk_mb leaves 0; raise it"
    assert await node.averaging.round(node, lambda: pytest.fail("there is nothing to keep")) is False
    assert node.asked_room == [2 * 4 * len(flat(node))]  # of two nodes, in float32
    assert node.averaging.averager.asked == 0
    assert told(node) == [
        "no outer step after step 1: it takes 9 MB of disk, and limits.disk_mb leaves 0; raise it; going on alone"
    ]


async def test_an_outer_step_that_cannot_be_kept_is_undone(make: Callable[..., Any]) -> None:
    node = make()
    node.averaging.begin(None)
    node.trainer.update(batch(1))
    before, state = flat(node), node.averaging.state
    node.averaging.averager.brings = [(before + 0.01).numpy()]

    def full() -> None:
        assert not torch.equal(flat(node), before)
        raise CheckpointError("the disk is full")

    assert await node.averaging.round(node, full) is False
    assert torch.equal(flat(node), before)
    assert node.averaging.state is state
    assert told(node) == ["the outer step after step 1 is undone: the disk is full"]

    node.averaging.averager.brings = [np.full(len(before), np.nan, np.float32)]
    assert await node.averaging.round(node, full) is False
    assert torch.equal(flat(node), before)
    assert "only 1 contributions are finite" in told(node)[-1]


async def test_an_outer_step_that_is_on_disk_is_not_undone(make: Callable[..., Any]) -> None:
    node = make()
    node.averaging.begin(None)
    node.trainer.update(batch(1))
    before = flat(node)
    node.averaging.averager.brings = [(before + 0.01).numpy()]

    def old_ones_stay() -> None:
        node.checkpoints.base = 1
        raise CheckpointError("an old one cannot be removed")

    assert await node.averaging.round(node, old_ones_stay) is True  # a restart begins with it
    assert not torch.equal(flat(node), before)
    assert "averaged after step 1" in told(node)[-1]


async def test_a_restart_goes_on_from_the_outer_step_bit_for_bit(make: Callable[..., Any]) -> None:
    """Both optimizers come from the checkpoint; what was trained since is repeated."""
    node = make()
    node.averaging.begin(None)
    node.trainer.update(batch(1))
    node.averaging.averager.brings = [(flat(node) + 0.01).numpy()]
    store = CheckpointStore(node.place / "checkpoints", 2)
    store.latest()

    def write(directory: Path) -> None:
        node.trainer.save(directory)
        node.averaging.save(directory)

    def keep() -> None:
        store.save(node.trainer.step, write, {})

    assert await node.averaging.round(node, keep)
    for step in (2, 3):
        node.trainer.update(batch(step))

    again = make()
    found = store.latest()
    assert found.directory is not None
    again.trainer.load(found.directory)
    again.averaging.begin(found.directory)
    assert again.averaging.state.step == 1
    for step in (2, 3):
        again.trainer.update(batch(step))
    assert torch.equal(flat(again), flat(node))
    brings = [(flat(node) - 0.02).numpy()]
    for one in (node, again):
        one.averaging.averager.brings = brings
        assert await one.averaging.round(one, lambda: None)
    assert torch.equal(flat(again), flat(node))
    assert torch.equal(again.averaging.state.momentum, node.averaging.state.momentum)


def test_without_hivemind_it_says_what_to_install(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("node.averaging.find_spec", lambda name: None)
    history: Any = None
    arguments: Any = {"mark": "m", "manifest": b"", "psk": None, "no_room": None}
    assert make_averaging(None, Config(), home, history, **arguments) is None
    config = Config.model_validate({"averaging": {"method": "diloco"}})
    with pytest.raises(ModelError, match=r"pip install -e '.\[averaging\]'"):
        make_averaging(None, config, home, history, **arguments)


# -- whole nodes -----------------------------------------------------------------------------------------------

CONFIG = """
[node]
threads = 1
[model]
path = "{model}"
dtype = "float32"
[rollout]
group_size = 8
engine = "transformers"
[train]
learning_rate = 1e-5
[swarm]
own_groups = 4
foreign_groups = 0
[network]
listen = "/ip4/127.0.0.1/tcp/0"
[web]
port = 0
[eval]
every = 0
tasks = 2
[checkpoint]
every = 1000
[averaging]
method = "diloco"
every = 3
timeout = 60
listen = "/ip4/127.0.0.1/tcp/0"
"""


@contextmanager
def started(home: Home) -> Iterator["subprocess.Popen[bytes]"]:
    with (home.path / "console.log").open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "node", "--home", str(home.path), "up"],
            stdout=output,
            stderr=output,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait(10)


def events(home: Home) -> list[str]:
    history = History(home.database, time.time)
    found = [event["message"] for event in history.events(None, 200) if event["kind"] == "averaging"]
    history.close()
    return found


def until(what: Callable[[], Any], process: "subprocess.Popen[bytes]", home: Home) -> Any:
    deadline, log = time.monotonic() + DEADLINE, home.path / "console.log"
    while not (found := what()):
        assert process.poll() is None, log.read_text()[-3000:]
        assert time.monotonic() < deadline, log.read_text()[-3000:]
        time.sleep(0.2)
    return found


def step_of(home: Home) -> int:
    try:
        return int(connect(home, timeout=5.0).get("status")["step"])
    except (DaemonUnreachable, RequestRefused):
        return -1


def number(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))


@pytest.mark.skipif(find_spec("hivemind") is None, reason="needs shoal[averaging]")
@pytest.mark.slow
@pytest.mark.network
@pytest.mark.averaging
def test_two_nodes_have_the_same_weights_after_a_round_and_go_on_when_one_is_killed(
    tmp_path: Path, tiny_model: Callable[..., Path], evenness: EnvironmentSpec
) -> None:
    model = tiny_model("llama", ascii_only=True)
    manifest = make_manifest("averaged", time.time() - 60, (evenness,), epoch_seconds=86400)
    homes = [Home(tmp_path / name) for name in "ab"]
    for home in homes:
        home.init()
        home.config_path.write_text(CONFIG.format(model=model))
    first, second = homes
    first.found(manifest, b"k" * 32)
    with started(first) as one:
        invite = until(lambda: first.daemon() and connect(first, timeout=5.0).get("swarm").get("invite"), one, first)
        second.join(Invite.parse(invite))
        with started(second) as two:  # their averagers find each other: the swarm has a key
            for home, process in ((first, one), (second, two)):
                until(lambda home=home: [text for text in events(home) if "averaged after" in text], process, home)
            # the first checkpoint is that of the outer step: nothing else wrote one
            assert all(CAUTION in events(home) for home in homes)
            anchors = [
                load_file(min(home.checkpoints.glob("step-*"), key=number) / outer.FILE)["anchor"] for home in homes
            ]
            assert torch.equal(*anchors)
            started_here = [
                child for process in (one, two) for child in psutil.Process(process.pid).children(recursive=True)
            ]
            assert sum("p2pd" in child.name() for child in started_here) == 2
            two.send_signal(signal.SIGKILL)
            two.wait(10)
        # the other one goes on alone, and says so
        before = step_of(first)
        until(lambda: step_of(first) >= before + 4, one, first)
        until(lambda: [text for text in events(first) if "going on alone" in text], one, first)
        one.send_signal(signal.SIGKILL)
        one.wait(10)
    _, alive = psutil.wait_procs(started_here, timeout=20)
    assert not alive
