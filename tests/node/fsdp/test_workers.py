"""Workers that are asked and fail: each cause by name, all ended, nothing left behind. Stand-ins without torch."""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from node.config_train import TrainConfig
from node.training import launching
from node.training import workers as module
from node.training.worker_wire import Done, Failed, Memory
from node.training.workers import WorkerPlan, Workers, WorkersLost

STAND_IN = """
import socket, sys, time
import msgspec
from node.training.worker_wire import *

connection = socket.socket(fileno=int(sys.argv[1]))
frames = Frames(msgspec.msgpack.Decoder(Setup).decode)
while not (found := frames.read(connection)):
    pass
rank, count = found[0].rank, found[0].count
frames = Frames(msgspec.msgpack.Decoder(Command).decode)


def say(message):
    connection.sendall(frame(message))


def command():
    while not (found := frames.read(connection)):
        pass
    return found[0]


def beat_for_ever():
    while True:
        say(Beat())
        time.sleep(0.2)


"""
WELL = (
    "say(Done(0))\nwhile True:\n    assert isinstance(command(), Memory)\n    say(Done(1, memory={'weights': rank}))\n"
)


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Workers]]:
    made: list[Workers] = []
    monkeypatch.setattr(module, "GRACE_SECONDS", 0.3)

    def make(second: str, *, silent: float = 30.0, seconds: float = 60.0) -> Workers:
        """The first worker is well; `second` is what the other one does."""
        script = tmp_path / "stand_in.py"
        body = "".join(f"    {line}\n" for line in second.splitlines())
        script.write_text(f"{STAND_IN}if rank == 1:\n{body}{WELL}")
        monkeypatch.setattr(launching, "COMMAND", (sys.executable, str(script)))
        plan = WorkerPlan(2, "cpu", "float32", "m", tmp_path, 1, 0.0, tmp_path, tmp_path / "logs" / "trainer.log")
        made.append(Workers(plan, silent=silent))
        made[-1].start(TrainConfig(), seconds)
        return made[-1]

    yield make
    for workers in made:
        workers.kill()


def test_all_are_asked_and_answer_in_order(start: Callable[..., Workers]) -> None:
    workers = start("pass")
    assert workers.ask(Memory(), 60.0) == [Done(1, memory={"weights": rank}) for rank in (0, 1)]
    pids = workers.pids
    workers.kill()
    assert not any(psutil.pid_exists(pid) for pid in pids)
    with pytest.raises(WorkersLost, match="workers have ended"):
        workers.ask(Memory(), 60.0)


def test_a_failure_that_leaves_the_worker_well_is_an_answer(start: Callable[..., Workers]) -> None:
    workers = start("say(Done(0))\ncommand()\nsay(Failed('skipped', 'nothing', 'look'))\ncommand()")
    assert workers.ask(Memory(), 60.0)[1] == Failed("skipped", "nothing", "look")
    assert workers.ask(Memory(), 60.0) == [Done(1, memory={"weights": 0}), Done(0)]


@pytest.mark.parametrize(
    ("second", "why", "kind"),
    [
        ("sys.exit('boom: an error')", r"worker 2 \(process \d+\) ended with code 1; see .*\nboom: an error", "gone"),
        ("import os; os.abort()", "worker 2 .* was ended by SIGABRT", "gone"),
        ("connection.sendall(b'\\0\\0\\0\\1\\xc1'); time.sleep(60)", "worker 2 .* no message", "gone"),
        ("connection.sendall(b'\\xff' * 9); time.sleep(60)", "worker 2 .* a message of 4294967295 bytes", "gone"),
        ("say(Failed('memory', 'no room')); sys.exit(1)", "worker 2 .* ran out of memory: no room", "memory"),
        ("say(Failed('model', 'no experts')); sys.exit(1)", "^no experts$", "model"),
        ("say(Failed('error', 'RuntimeError: x')); sys.exit(1)", "worker 2 .* failed: RuntimeError: x", "gone"),
    ],
)
def test_why_a_worker_does_not_come_up(
    start: Callable[..., Workers], second: str, why: str, kind: str, tmp_path: Path
) -> None:
    before = {child.pid for child in psutil.Process().children()}  # other tests' may be there, ended or not
    with pytest.raises(WorkersLost, match=why) as lost:
        start(second)
    assert lost.value.kind == kind
    assert {child.pid for child in psutil.Process().children()} <= before


def test_one_that_only_beats_has_a_deadline_and_one_that_is_silent_another(start: Callable[..., Workers]) -> None:
    began = time.monotonic()
    workers = start("say(Done(0))\ncommand()\nbeat_for_ever()", silent=30.0)
    with pytest.raises(WorkersLost, match=r"worker 2 .* has not answered within 2 s, .*limits\.stage_seconds"):
        workers.ask(Memory(), 2.0)
    with pytest.raises(WorkersLost, match=r"worker 2 .* has not been heard of for 2 s"):
        start("say(Done(0))\ncommand()\ntime.sleep(60)", silent=2.0).ask(Memory(), 60.0)
    assert time.monotonic() - began < 50


def test_a_launch_takes_its_time_from_that_of_the_start(
    start: Callable[..., Workers], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = launching.spawn

    def slow(*arguments: Any) -> Any:
        time.sleep(1.5)
        return real(*arguments)

    monkeypatch.setattr(launching, "spawn", slow)
    began = time.monotonic()
    with pytest.raises(WorkersLost, match=r"has not answered within [12] s"):
        start("beat_for_ever()", seconds=4.5)
    assert time.monotonic() - began < 7


def test_a_node_that_stops_does_not_wait_for_an_answer(start: Callable[..., Workers]) -> None:
    workers = start("say(Done(0))\ncommand()\nbeat_for_ever()")
    pids = workers.pids
    threading.Timer(0.5, workers.close).start()
    with pytest.raises(WorkersLost, match="was ended by SIGKILL"):
        workers.ask(Memory(), 60.0)
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_the_passphrase_is_kept_from_workers(start: Callable[..., Workers], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_PASSPHRASE", "secret")
    with pytest.raises(WorkersLost, match="none of it"):
        start("import os; say(Failed('error', str(os.environ.get('SHOAL_PASSPHRASE', 'none of it')))); sys.exit(1)")


def test_those_that_were_started_end_when_one_more_cannot_be(
    start: Callable[..., Workers], monkeypatch: pytest.MonkeyPatch
) -> None:
    real, made = launching.spawn, list[Any]()

    def spawn(*arguments: Any) -> Any:
        if made:
            raise OSError(12, "Cannot allocate memory")
        made.append(real(*arguments))
        return made[0]

    monkeypatch.setattr(launching, "spawn", spawn)
    with pytest.raises(WorkersLost, match=r"worker 2 of 2 cannot be started: .*Cannot allocate memory"):
        start("pass")
    assert made[0].wait(10) == -9
