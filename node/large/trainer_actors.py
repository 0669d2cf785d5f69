"""Trainer workers that Ray places: an actor in each bundle starts `node.training.worker` and gives it a connection to
the node, over TCP between processes that know the same secret.

What the workers do, and what becomes of them, is the sharded trainer's as ever (node/training/workers.py). An actor
only holds the place: the worker ends with it, and with the connection.
"""

import contextlib
import logging
import secrets
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from node.large import ray_cluster
from node.large.handshake import Stranger, answer, dial, new_secret
from node.large.ray_cluster import ActorGone, RayCluster, address_here, gpus_here
from node.large.room import Bundle
from node.training.launching import Launched, LaunchFailed, on_one_machine, spawn

log = logging.getLogger(__name__)

DIAL_SECONDS = 30.0
ANSWER_SECONDS = 5.0
"""For who connects to say who it is."""
POLL_SECONDS = 0.2
ASK_SECONDS = 2.0
"""For an actor to say whether its worker lives."""


class TrainerActor:
    """In a process of Ray's, in a bundle."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def start(
        self, host: str, port: int, secret: bytes, name: str, log_path: str, threads: int, one_machine: bool
    ) -> tuple[int, list[str]]:
        """Start the worker with a connection to the node; its process id, and its GPUs."""
        with dial(host, port, secret, name, DIAL_SECONDS) as connection:
            variables = on_one_machine() if one_machine else {}
            self._process = spawn(connection, Path(log_path), threads, variables)
        return self._process.pid, gpus_here()

    def poll(self) -> int | None:
        """None while the worker runs, else how it ended, as Popen has it."""
        return self._process.poll() if self._process is not None else None

    def meeting(self) -> str:
        """A free port of this machine for torch.distributed."""
        host = address_here()
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as free:
            free.bind((host, 0))
            port = free.getsockname()[1]
        return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


class RayProcess:
    """A worker's process, by way of its actor."""

    def __init__(self, actor: Any, pid: int) -> None:
        self._actor, self.pid = actor, pid

    def poll(self) -> int | None:
        """An actor that is gone took its worker with it, as by SIGKILL."""
        try:
            code: int | None = ray_cluster.result(self._actor.poll.remote(), ASK_SECONDS)
        except ActorGone:
            return -signal.SIGKILL
        except TimeoutError:
            return None
        return code

    def kill(self) -> None:
        ray_cluster.kill(self._actor)

    def wait(self, timeout: float) -> int:
        until = time.monotonic() + timeout
        while time.monotonic() < until:
            code = self.poll()
            if code is not None:
                return code
            time.sleep(POLL_SECONDS)
        raise subprocess.TimeoutExpired("worker", timeout)


class RayLauncher:
    """Starts workers in the bundles of a placement group. Used from the model thread, but `clear`."""

    def __init__(
        self, cluster: RayCluster, group: Any, bundles: Sequence[Bundle], *, log: Path, threads: int, meet: Path
    ) -> None:
        """`meet`: directory for the file by which workers of one machine find each other."""
        self._cluster, self._group, self._bundles = cluster, group, bundles
        self._log, self._threads, self._meet = log, threads, meet
        self._one_machine = len({bundle.node for bundle in bundles}) == 1
        self._actors: list[Any] = []
        self._file: Path | None = None
        self.gpus: dict[int, list[str]] = {}
        """Of each worker that was started, by its rank."""

    def launch(self, count: int, seconds: float) -> list[Launched]:
        assert count == len(self._bundles)
        until = time.monotonic() + seconds
        # a part that is not started within a stage leaves its bundle to the next try
        self._actors = [
            self._cluster.actor(TrainerActor, self._group, bundle.number, bundle) for bundle in self._bundles
        ]
        connections: dict[str, socket.socket] = {}
        try:
            started = self._meet_all(connections, until)
        except (ActorGone, TimeoutError, OSError) as error:
            for connection in connections.values():
                connection.close()
            for actor in self._actors:
                ray_cluster.kill(actor)
            raise LaunchFailed(
                f"Ray did not start the trainer's workers on {_hosts(self._bundles)}: {error}; {ray_cluster.NOT_THERE}"
            ) from error
        self.gpus = {rank: gpus for rank, (_, gpus) in enumerate(started)}
        return [
            Launched(RayProcess(actor, pid), connections[str(rank)], bundle.host)
            for rank, (actor, (pid, _), bundle) in enumerate(zip(self._actors, started, self._bundles, strict=True))
        ]

    def _meet_all(self, connections: dict[str, socket.socket], until: float) -> list[tuple[int, list[str]]]:
        """Have all workers started, and their connections by rank. Raises ActorGone, TimeoutError, OSError."""
        secret, host = new_secret(), address_here()
        with socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET) as listener:
            listener.settimeout(POLL_SECONDS)
            port = listener.getsockname()[1]
            asked = [
                actor.start.remote(host, port, secret, str(rank), str(self._log), self._threads, self._one_machine)
                for rank, actor in enumerate(self._actors)
            ]
            names = {str(rank) for rank in range(len(asked))}
            while connections.keys() != names:
                if time.monotonic() > until:
                    missing = ", ".join(
                        f"{bundle.number + 1} on {bundle.host}"
                        for bundle in self._bundles
                        if str(bundle.number) not in connections
                    )
                    raise TimeoutError(f"worker {missing} did not connect in time (limits.stage_seconds)")
                self._accept(listener, secret, names, connections)
                for reference in asked:
                    with contextlib.suppress(TimeoutError):  # it works on it
                        ray_cluster.result(reference, 0)
        left = max(1.0, until - time.monotonic())
        return [ray_cluster.result(reference, left) for reference in asked]

    def _accept(
        self, listener: socket.socket, secret: bytes, names: set[str], connections: dict[str, socket.socket]
    ) -> None:
        try:
            connection, peer = listener.accept()
        except TimeoutError:
            return
        try:
            name = answer(connection, secret, ANSWER_SECONDS)
        except (Stranger, OSError) as error:
            log.warning("hung up on %s, which is no worker: %s", peer, error)
            connection.close()
            return
        if name not in names or name in connections:
            log.warning("hung up on %s, a second worker %r", peer, name)
            connection.close()
            return
        connections[name] = connection

    def meeting(self) -> str:
        """A file where all are on one machine; else a port on the first one's, which nothing protects (docs/limits)."""
        if self._one_machine:
            self._meet.mkdir(parents=True, exist_ok=True)
            self._file = self._meet / f".meeting-{secrets.token_hex(8)}"
            return f"file://{self._file}"
        try:
            found: str = ray_cluster.result(self._actors[0].meeting.remote(), ANSWER_SECONDS)
        except (ActorGone, TimeoutError) as error:
            raise LaunchFailed(
                f"the first worker on {self._bundles[0].host} has no port for the others: {error}"
            ) from error
        return found

    def clear(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.unlink(missing_ok=True)


def _hosts(bundles: Sequence[Bundle]) -> str:
    return ", ".join(dict.fromkeys(bundle.host for bundle in bundles))
