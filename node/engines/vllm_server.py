"""A `vllm serve` of the node's own: a child process with its own process group, log file and Unix socket.

It listens on a socket in a directory that only this user can enter, never on a port: its control endpoints have no
authentication. It is ended by process id, its children with it.
"""

import asyncio
import contextlib
import getpass
import logging
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import psutil

from node.engines.vllm_client import Address
from swarm.backing_off import pause_after
from swarm.child import inherited, open_log, scratch_directory

log = logging.getLogger(__name__)

STOP_SECONDS = 2.0
"""Between asking it to end and killing it; a node has 4 s to stop in all."""
POLL_SECONDS = 0.02
"""Between two looks at whether its children have ended."""
LOG_TAIL = 12
"""Lines of the log that an error shows."""
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0
"""Seconds before a start that follows failures: doubled with each failure in a row."""
HEALTHY_SECONDS = 120.0
"""A server that lived this long is no failure in a row when it dies."""
TROUBLE = ("error", "exception", "traceback")


@dataclass(frozen=True, slots=True)
class ServerPlan:
    """What to start."""

    command: str
    """The vllm program, found in PATH or by its path."""
    arguments: tuple[str, ...]
    """After `vllm serve MODEL --uds SOCKET`."""
    environment: tuple[tuple[str, str], ...]
    """Variables besides the node's own."""
    log_path: Path


class OwnServer(Protocol):
    """A server that the node starts and ends: a child process (VllmServer), or one that Ray places (node/large)."""

    @property
    def address(self) -> Address: ...

    @property
    def alive(self) -> bool: ...

    async def start(self, model: Path) -> None:
        """Start it with a model directory, after a pause where it died before. Returns before it answers.

        May raise ServerGone.
        """

    async def died(self) -> str:
        """Wait until it ends; why, with the end of its log."""

    async def stop(self) -> None:
        """End it and all it started, soon."""

    async def close(self) -> None:
        """The same, for good."""


class Pauses:
    """How long to wait before a start: longer with each failure in a row."""

    def __init__(self) -> None:
        self._failures = 0
        self._started: float | None = None

    def before(self, now: float) -> float:
        """Seconds to wait at `now`, on a monotonic clock, where `began` was said of an earlier start."""
        if self._started is None:
            return 0.0
        self._failures = 1 if now - self._started > HEALTHY_SECONDS else self._failures + 1
        return pause_after(self._failures - 1, FIRST_PAUSE, LONGEST_PAUSE)

    def began(self, now: float) -> None:
        self._started = now


class VllmServer:
    """One server process, started anew whenever `start` is called after it died. Used from one asyncio loop."""

    def __init__(self, plan: ServerPlan) -> None:
        self.plan = plan
        self.directory = scratch_directory(plan.log_path)
        self.address = Address("http://vllm", str(self.directory / "socket"))
        self._process: asyncio.subprocess.Process | None = None
        self._pauses = Pauses()

    @property
    def pid(self) -> int | None:
        """Of the process that runs now."""
        return self._process.pid if self.alive and self._process else None

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def start(self, model: Path) -> None:
        """Start it with a model directory, after a pause where it died before. Returns before it answers."""
        assert not self.alive
        loop = asyncio.get_running_loop()
        pause = self._pauses.before(loop.time())
        await self._reap()
        await asyncio.sleep(pause)
        clear(self.address.socket)
        self._pauses.began(loop.time())
        arguments = ["serve", str(model), "--uds", self.address.socket, *self.plan.arguments]
        log.info("starting %s %s (log: %s)", self.plan.command, " ".join(arguments), self.plan.log_path)
        with open_log(self.plan.log_path) as output:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                str(Path(__file__).with_name("vllm_child.py")),
                str(os.getpid()),
                self.plan.command,
                *arguments,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment(os.environ, self.directory, self.plan.environment),
                start_new_session=True,
            )

    async def died(self) -> str:
        """Wait until the process ends; why, with the end of its log."""
        assert self._process is not None
        code = await self._process.wait()
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        return f"{self.plan.command} serve {how}; its log {self.plan.log_path} ends:\n{log_tail(self.plan.log_path)}"

    async def stop(self) -> None:
        """End it and all it started, within STOP_SECONDS and a little."""
        await self._reap()

    async def _reap(self) -> None:
        """End what is left of the process group: the server's own children outlive it when it is killed."""
        if self._process is None:
            return
        group = self._process.pid
        if _signal_group(group, signal.SIGTERM):
            try:
                async with asyncio.timeout(STOP_SECONDS):
                    await self._process.wait()
                    # Python's tracker of shared memory goes last: killed, it would leave that in /dev/shm
                    while _lives(group):  # noqa: ASYNC110 - nothing tells of the end of another's child
                        await asyncio.sleep(POLL_SECONDS)
            except TimeoutError:
                log.warning("vllm (process group %d) did not end in %.0f s; it is killed", group, STOP_SECONDS)
            _signal_group(group, signal.SIGKILL)
        await self._process.wait()

    async def close(self) -> None:
        await self.stop()
        shutil.rmtree(self.directory, ignore_errors=True)


def _signal_group(group: int, number: signal.Signals) -> bool:
    """False: nobody of it is left."""
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return False
    return True


def _lives(group: int) -> bool:
    """Whether there are more than zombies in it, which stay where process 1 does not reap: as in a bare container."""
    for pid in psutil.pids():
        with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
            if os.getpgid(pid) == group and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                return True
    return False


def environment(own: Mapping[str, str], scratch: Path, more: Sequence[tuple[str, str]]) -> dict[str, str]:
    """Variables of the child: ours without secrets and settings, and what it needs.

    What it makes for its own time goes to `scratch`, since it leaves that when it is killed: sockets (64 bytes of 107
    in /tmp) and the files that its workers meet by. What torch compiled for it stays where torch itself would keep it.
    """
    needed = {
        "VLLM_SERVER_DEV_MODE": "1",  # weights and pauses; it listens on a private socket only
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "TMPDIR": str(scratch),
    }
    compiled = {"TORCHINDUCTOR_CACHE_DIR": str(Path(tempfile.gettempdir(), f"torchinductor_{_user()}"))}
    return {**compiled, **inherited(own), **needed, **dict(more)}


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # in a container a user may have a number only
        return f"uid_{os.getuid()}"


def clear(socket: str) -> None:
    """Remove what a killed server left: it could not listen there again."""
    Path(socket).unlink(missing_ok=True)


def log_tail(path: Path) -> str:
    """The lines of the last 64 KB that tell of trouble, or the very last ones where none does."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - (64 << 10)))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError as error:
        return f"(the log cannot be read: {error})"
    telling = [line for line in lines if any(word in line.lower() for word in TROUBLE)]
    return "\n".join(line[:300] for line in (telling or lines)[-LOG_TAIL:])
