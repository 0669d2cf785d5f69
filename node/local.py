"""A whole swarm on this machine: node processes with a home each, joined through an invite of the first one.

This process only supervises: it starts the nodes, restarts one that dies (with back-off, saying so), shows what
their APIs say, and stops them. Nothing of a node runs here.
"""

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from node.client import DaemonUnreachable, RequestRefused, connect
from node.history import History
from node.home import Home, NoSwarm
from node.local_table import LiveTable
from node.logs import FILE_BYTES
from node.settings import ConfigError, Settings
from protocol.invite import Invite
from protocol.manifest import embedded_manifest
from swarm.database import StoreError

FIRST_PAGE = 8420
STOP_SECONDS = 4.5
MAX_BACKOFF = 60.0
RESTARTS_WITHOUT_PROGRESS = 4
PR_SET_PDEATHSIG = 1
PAGE = 500
OWN_OF_EACH = frozenset({"network.listen", "web.port", "node.name"})


class LocalSwarmFailed(Exception):
    """A node keeps dying without getting a step further; the message names it and its log."""


@dataclass(slots=True)
class Member:
    """One node process and what is known of it."""

    name: str
    home: Home
    log: Path
    port: int
    web_port: int
    """Of the dashboard: this one, or a free one where it is taken."""
    process: subprocess.Popen[bytes] | None = None
    status: dict[str, Any] = field(default_factory=dict)
    answered: bool = False
    """Whether the process has told its status."""
    restarts: int = 0
    fruitless: int = 0
    best_step: int = 0
    retry_at: float = 0.0
    note: str = ""

    @property
    def step(self) -> int:
        return int(self.status.get("step", 0))


def prepare(root: Path, nodes: int) -> list[Member]:
    """Make (or find) the homes of a swarm of `nodes` under `root`, all in the swarm that node-1 founded.

    Raises HomeLocked when one of them runs already.
    """
    members: list[Member] = []
    with ExitStack() as held:
        for number in range(1, nodes + 1):
            home = Home(root / f"node-{number}")
            home.init()
            held.enter_context(home.lock())  # of a swarm that runs already neither ports nor invite may change
            port = _free_port(home.listen_port(), held)
            home.keep_listen_port(port)
            members.append(Member(f"node-{number}", home, home.logs / "console.log", port, FIRST_PAGE + number - 1))
        first = members[0]
        try:
            swarm = first.home.swarm()
        except NoSwarm:
            first.home.found(embedded_manifest("local", time.time()))
            swarm = first.home.swarm()
        way_in = f"/ip4/127.0.0.1/tcp/{first.port}/p2p/{first.home.identity().peer_id}"
        invite = Invite(swarm.manifest_digest, (way_in,), swarm.psk, swarm.name)
        for member in members[1:]:
            member.home.join(invite)
    return members


def run(
    home: Home, settings: Settings, *, nodes: int, steps: int | None, as_json: bool, overrides: Mapping[str, str]
) -> bool:
    """`shoal local`: returns whether it went on for as long as was asked.

    Homes are node-1, node-2, ... in `home`, whose settings are `settings`; the nodes get `overrides`, the flags.
    Raises ConfigError and LocalSwarmFailed.
    """
    _refuse_what_nodes_would_not_see(home, settings, nodes)
    members = prepare(home.path, nodes)
    flags = [f"{key}={value}" for key, value in overrides.items()]
    if as_json:
        report = supervise(members, steps, flags, show=lambda members: None)
        print(json.dumps(report))  # noqa: T201 - the answer of the command
    else:
        with LiveTable() as table:
            supervise(members, steps, flags, show=table.show)
    return steps is None or all(map(_has_ended, members))


def _refuse_what_nodes_would_not_see(home: Home, settings: Settings, nodes: int) -> None:
    """Raises ConfigError for a setting that would be ignored, or that all nodes cannot share."""
    for key, source in settings.sources.items():
        if source == "config.toml":
            raise ConfigError(
                f"{home.config_path} sets {key}, but each node of `shoal local` reads the config.toml of its home ; "
                f"move it to {home.path / 'node-1' / home.config_path.name} and so on, or pass --set {key}=..."
            )
        if source != "default" and key in OWN_OF_EACH and nodes > 1:
            raise ConfigError(
                f"{source} sets {key}, which {nodes} nodes on one machine cannot share ; leave it out: "
                "`shoal local` chooses it for each node and shows the address of its page"
            )


def supervise(
    members: Sequence[Member],
    steps: int | None,
    settings: Sequence[str],
    *,
    show: Callable[[Sequence[Member]], None],
    clock: Callable[[], float] = time.monotonic,
) -> dict[str, Any]:
    """Run the swarm until Ctrl-C or until every node has done `steps`; returns the report of `shoal local --json`.

    `settings` are `section.key=value` for every node. Raises LocalSwarmFailed.
    """
    nodes = len(members)
    # either way of asking is a KeyboardInterrupt, also where a shell started this in the background, SIGINT ignored
    before = {number: signal.signal(number, signal.default_int_handler) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        for member in members:
            _start(member, nodes, steps, settings)
        # a node is idle once it has done its steps and written the last checkpoint
        while steps is None or not all(map(_has_ended, members)):
            for member in members:
                _tend(member, nodes, steps, settings, clock())
            show(members)
            time.sleep(1.0)
    except KeyboardInterrupt:
        pass  # the usual way to end; what follows is the same as after the last step
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)  # an impatient second Ctrl-C must not leave nodes behind
        _stop(members)
        for number, handler in before.items():
            signal.signal(number, handler)
    show(members)
    return {"nodes": [_report(member) for member in members]}


def _has_ended(member: Member) -> bool:
    return member.status.get("state") == "IDLE"


def _start(member: Member, nodes: int, steps: int | None, settings: Sequence[str]) -> None:
    with ExitStack() as held:  # chosen at every start: since the last one another program may have taken it
        member.web_port = _free_port(member.web_port, held)
    threads = max(1, (os.cpu_count() or 1) // nodes)
    flags = [
        f"network.listen=/ip4/127.0.0.1/tcp/{member.port}",
        f"web.port={member.web_port}",
        f"node.threads={threads}",
        f"node.name={member.name}",
        "rollout.engine=transformers",  # nodes of one machine cannot each have its GPU for a vLLM server
        *settings,
    ]
    command = [sys.executable, "-m", "node", "--home", str(member.home.path), "up", "--stay"]
    if steps is not None:
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
            preexec_fn=_die_with_parent if sys.platform == "linux" else None,
        )
    member.note, member.answered = "", False


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _tend(member: Member, nodes: int, steps: int | None, settings: Sequence[str], now: float) -> None:
    """Ask a living node how it is; restart a dead one when its back-off is over."""
    if member.process is not None and member.process.poll() is None:
        try:
            member.status = connect(member.home, timeout=2.0).get("status")
        except (DaemonUnreachable, RequestRefused) as error:
            member.note = str(error).split(";")[0].strip() if member.answered else "starting"
        else:
            member.note, member.answered = "", True
            if member.step > member.best_step:
                member.best_step, member.fruitless = member.step, 0
        return
    if member.process is not None:
        code = member.process.returncode
        member.process = None
        member.restarts += 1
        member.fruitless += 1
        if member.fruitless >= RESTARTS_WITHOUT_PROGRESS:
            raise LocalSwarmFailed(
                f"{member.name} died {member.fruitless} times without a step in between (exit code {code}) ; "
                f"read {member.log}"
            )
        wait = min(MAX_BACKOFF, 2.0**member.fruitless)
        member.retry_at = now + wait
        member.note = f"died ({_cause(code)}), restarting in {wait:.0f} s"
    elif now >= member.retry_at:
        _start(member, nodes, steps, settings)


def _cause(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def _report(member: Member) -> dict[str, Any]:
    """A node's part of the report: its history, and what its API said last (nothing, if it never came up)."""
    status = member.status
    history = History(member.home.database, time.time)
    steps: list[dict[str, Any]] = []
    while page := history.steps(steps[-1]["step"] if steps else 0, PAGE):
        steps += page
    held_out, trained_foreign = [history.held_out_start(), history.held_out_latest()], history.trained_foreign()
    history.close()
    groups = status.get("groups", {})
    speeds = [step["tokens_per_second"] for step in steps]
    checkpoints = sorted(member.home.checkpoints.glob("step-*"), key=lambda path: int(path.name.split("-")[1]))
    return {
        "peer_id": member.home.identity().peer_id,
        "steps": len(steps),
        "reward": [step["reward"] for step in steps],
        "held_out": held_out,
        "groups": {name: groups.get(name, 0) for name in ("published", "fetched", "admitted")}
        | {"rejected": groups.get("rejected", {}), "trained_foreign": trained_foreign},
        "mixed": [[step["own_groups"], step["foreign_groups"]] for step in steps],
        "tokens_per_second": sum(speeds) / len(speeds) if speeds else 0.0,
        "peak_rss_mb": status.get("peak_rss_mb"),
        "restarts": member.restarts,
        "checkpoint": str(checkpoints[-1]) if checkpoints else None,
    }


def _stop(members: Sequence[Member]) -> None:
    """Stop all nodes together, killing what has not ended within STOP_SECONDS: the journal has its steps."""
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


def _free_port(wanted: int | None, held: ExitStack) -> int:
    """`wanted` when nobody listens there, else a free port; held until the swarm's ports are all chosen."""
    for port in (wanted, 0):
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
