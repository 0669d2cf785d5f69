"""Who starts the workers of a sharded trainer, and hands back a socket to each: here, by processes of this machine.

The other one is node/large/trainer_actors.py, which has Ray start them on several.
"""

import contextlib
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from swarm.child import inherited, open_log, scratch_directory

COMMAND = (sys.executable, "-P", "-m", "node.training.worker")
"""-P: a `torch.py` in the directory where the node was started is not torch."""
ROOT = Path(__file__).parents[2]
"""Where the worker's modules are found: the same ones as the node's."""


class Process(Protocol):
    """A worker's process, wherever it runs: what is used of `subprocess.Popen`."""

    pid: int

    def poll(self) -> int | None:
        """None while it runs; else its exit code, or the signal that ended it, negative."""

    def kill(self) -> None:
        """End it at once. Does not wait, and does nothing where it has ended."""

    def wait(self, timeout: float) -> int:
        """Wait for its end. Raises subprocess.TimeoutExpired."""


@dataclass(frozen=True, slots=True)
class Launched:
    """A worker that waits for its Setup."""

    process: Process
    connection: socket.socket
    where: str = ""
    """The machine, in words; empty: this one."""


class LaunchFailed(Exception):
    """Not all workers could be started, and those that were have ended; the message says why."""


class Launcher(Protocol):
    def launch(self, count: int, seconds: float) -> Sequence[Launched]:
        """Start as many workers, in the order of their ranks, within `seconds`. Raises LaunchFailed."""

    def meeting(self) -> str:
        """Where those that were launched last find each other: an `init_method` of torch.distributed.

        Raises LaunchFailed.
        """

    def clear(self) -> None:
        """Remove what was made for them besides their processes. From any thread, also twice."""


class LocalLauncher:
    """Child processes of this one, with a socket pair each."""

    def __init__(self, log: Path, threads: int) -> None:
        """`threads`: of one worker."""
        self._log, self._threads = log, threads
        self._directory: Path | None = None

    def launch(self, count: int, seconds: float) -> list[Launched]:
        launched: list[Launched] = []
        with contextlib.ExitStack() as begun:  # undone unless all are there
            try:
                self._directory = scratch_directory(self._log)
                for _ in range(count):
                    ours, theirs = socket.socketpair()
                    begun.callback(ours.close)
                    with theirs:
                        process = spawn(theirs, self._log, self._threads, on_one_machine())
                    begun.callback(process.kill)
                    launched.append(Launched(process, ours))
            except OSError as error:
                raise LaunchFailed(f"worker {len(launched) + 1} of {count} cannot be started: {error}") from error
            begun.pop_all()
        return launched

    def meeting(self) -> str:
        return f"file://{self._directory}/store"

    def clear(self) -> None:
        directory, self._directory = self._directory, None
        if directory is not None:
            shutil.rmtree(directory, ignore_errors=True)


def on_one_machine() -> dict[str, str]:
    """Variables of workers that all run on one machine."""
    return {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}


def spawn(
    connection: socket.socket, log: Path, threads: int, variables: Mapping[str, str]
) -> "subprocess.Popen[bytes]":
    """A worker's process on this machine; it gets a socket that the node has the other end of."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    with open_log(log) as output:
        return subprocess.Popen(
            [*COMMAND, str(connection.fileno())],
            pass_fds=(connection.fileno(),),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**inherited(os.environ), "OMP_NUM_THREADS": str(threads), "PYTHONPATH": path, **variables},
            start_new_session=True,
        )
