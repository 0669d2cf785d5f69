"""One process of a swarm on this machine: what it is started with, and what is known of it."""

import functools
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from node.client import DaemonUnreachable, RequestRefused, connect
from node.history import History
from node.home import Home
from node.isolation import die_with_parent
from node.logs import FILE_BYTES
from swarm.database import StoreError

STOP_SECONDS = 4.5
WELL_SECONDS = 60.0
"""Of answering after which an earlier death of a process counts no more, where it has no steps to show."""
RESTARTS_WITHOUT_PROGRESS = 4

PACE = ("coordinator.groups=16", "coordinator.round_seconds=600", "coordinator.answer_seconds=600")
"""Rounds that are over within a few steps of a machine that all members share."""

Role = Literal["node", "large", "follower", "coordinator"]


class LocalSwarmFailed(Exception):
    """A node keeps dying without getting a step further; the message names it and its log."""


@dataclass(slots=True)
class Member:
    """One process and what is known of it."""

    name: str
    home: Home
    port: int
    web_port: int
    """Of the dashboard: this one, or where it is taken the one before, or a free one."""
    role: Role = "node"
    settings: tuple[str, ...] = ()
    """section.key=value, which make it what it is."""
    process: subprocess.Popen[bytes] | None = None
    status: dict[str, Any] = field(default_factory=dict)
    answered: bool = False
    """Whether the process has told its status."""
    ends: list[str] = field(default_factory=list)
    """What ended its process each time it was started again, in words."""
    fruitless: int = 0
    best_step: int = 0
    retry_at: float = 0.0
    started_at: float = 0.0
    note: str = ""

    @property
    def log(self) -> Path:
        return self.home.logs / "console.log"

    @property
    def step(self) -> int:
        return int(self.status.get("step", 0))

    @property
    def trains(self) -> bool:
        """Whether it has a model of its own to train, and so steps that can be asked for."""
        return self.role in ("node", "large")

    @property
    def has_ended(self) -> bool:
        """Whether it has done its steps and written the last checkpoint."""
        return self.trains and self.status.get("state") == "IDLE"


def start(member: Member, members: int, steps: int | None, settings: Sequence[str]) -> None:
    """Start its process. `members`: processes that share the machine; `settings` are those of all of them."""
    with ExitStack() as held:  # chosen at every start: since the last one another program may have taken it
        wanted, member.web_port = member.web_port, free_port((member.web_port, member.home.page_port()), held)
    if member.web_port != wanted:
        member.home.keep_page_port(member.web_port)
    threads = max(1, (os.cpu_count() or 1) // members)
    flags = [
        f"network.listen=/ip4/127.0.0.1/tcp/{member.port}",
        f"web.port={member.web_port}",
        f"node.threads={threads}",
        f"node.name={member.name}",
        "rollout.engine=transformers",  # nodes of one machine cannot each have its GPU for a vLLM server
        *(PACE if member.role == "coordinator" else ()),
        *settings,
        *member.settings,
    ]
    command = [sys.executable, "-m", "node", "--home", str(member.home.path)]
    command += ["coordinator", "up"] if member.role == "coordinator" else ["up", "--stay"]
    if steps is not None and member.trains:
        command += ["--steps", str(steps)]
    for flag in flags:
        command += ["--set", flag]
    if member.log.exists() and member.log.stat().st_size > FILE_BYTES:
        member.log.replace(member.log.with_suffix(".log.1"))
    with member.log.open("ab") as log:
        # its own session: Ctrl-C reaches this process only, which then stops the nodes in order
        member.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": str(threads)},
            preexec_fn=functools.partial(die_with_parent, signal.SIGTERM),
        )
    member.note, member.answered = "", False


def tend(member: Member, members: int, steps: int | None, settings: Sequence[str], now: float) -> None:
    """Ask a living process how it is; restart a dead one when its back-off is over. Raises LocalSwarmFailed."""
    if member.process is not None and member.process.poll() is None:
        try:
            member.status = connect(member.home, timeout=2.0).get("status")
        except (DaemonUnreachable, RequestRefused) as error:
            member.note = str(error).split(";")[0].strip() if member.answered else "starting"
        else:
            member.note, member.answered = "", True
            if member.step > member.best_step or (not member.trains and now - member.started_at > WELL_SECONDS):
                member.best_step, member.fruitless = member.step, 0
        return
    if member.process is not None:
        code = member.process.returncode
        member.process = None
        member.ends.append(_cause(code))
        member.fruitless += 1
        if member.fruitless >= RESTARTS_WITHOUT_PROGRESS:
            raise LocalSwarmFailed(
                f"{member.name} died {member.fruitless} times without a step in between (exit code {code}) ; "
                f"read {member.log}"
            )
        wait = 2.0**member.fruitless
        member.retry_at = now + wait
        how = f"died ({member.ends[-1]})" if code else "ended"
        member.note = f"{how}, restarting in {wait:.0f} s"
    elif now >= member.retry_at:
        start(member, members, steps, settings)
        member.started_at = now


def _cause(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def stop(members: Sequence[Member]) -> None:
    """Stop all together, killing what has not ended within STOP_SECONDS: the journal has its steps."""
    alive = [member for member in members if member.process is not None and member.process.poll() is None]
    for member in alive:
        assert member.process is not None
        member.process.send_signal(signal.SIGINT)
    deadline = time.monotonic() + STOP_SECONDS
    for member in alive:
        assert member.process is not None
        try:
            member.process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            member.process.kill()  # the kernel ends it when it can; the next node is not kept waiting for that
        member.note = f"stopped; {_last_words(member)}"


def _last_words(member: Member) -> str:
    """What it said of itself at its stop, or else what its history has: what its API said last may be a step old."""
    try:
        history = History(member.home.database, time.time)
    except StoreError:  # held by a process that is being killed
        return f"step {member.step} is saved in {member.home.path}"
    newest, last = history.events(None, 1), history.last_step()
    history.close()
    if newest and newest[0]["kind"] == "stop":
        return str(newest[0]["message"])
    return f"step {last['step']} is saved in {member.home.path}" if last else "there was no step yet to save"


def free_port(wanted: Sequence[int | None], held: ExitStack) -> int:
    """The first of `wanted` where nobody listens, else a free port; held until the swarm's ports are all chosen."""
    for port in (*wanted, 0):
        if port is None:
            continue
        listener = held.enter_context(socket.socket())
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", port))
        except OSError:
            continue
        return int(listener.getsockname()[1])
    raise LocalSwarmFailed("no free TCP port on 127.0.0.1 ; close something that listens")
