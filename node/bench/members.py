"""`shoal bench members`: a coordinator and 32 members, each a process, over libp2p on loopback, through one round.

The coordinator is the real one (`shoal coordinator up`, with its scorer); members have all of a node's network side and
no model (node/bench/coordinator_member.py). What is counted is what the coordinator's processes and transport took
from the first member's start to the last one's board, over the number of members.
"""

import asyncio
import functools
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from node.bench.side import BenchError, Side
from node.client import DaemonUnreachable, connect
from node.coordinator.at_rest import begin, members_of
from node.home import Home
from node.isolation import die_with_parent
from protocol.invite import Invite
from protocol.manifest import Manifest

MEMBER = "node.bench.coordinator_member"
MEMBERS, GROUPS, TASKS = 32, 8, 8
AT_ONCE = 4
"""Members that start together: imports of all of them at once would leave nothing of a small machine for the rest."""
PAUSE_SECONDS = 2.0
"""Between two announcements of a member: 32 on one small machine spend minutes on passing 16 a second on."""
START_SECONDS, STAGE_SECONDS, STOP_SECONDS = 120.0, 1200.0, 10.0
SETTINGS = (
    "network.listen=/ip4/127.0.0.1/tcp/0",
    "web.port=0",
    f"coordinator.groups={GROUPS}",
    f"coordinator.tasks={TASKS}",
    "coordinator.quorum=1",
    "coordinator.round_seconds=3600",
    "coordinator.answer_seconds=3600",
)


async def compare(threads: int, machine: dict[str, Any], members: int = MEMBERS) -> dict[str, Any]:
    """One round. Raises BenchError when somebody does not get through it."""
    with (
        tempfile.TemporaryDirectory(prefix="shoal-bench-") as directory,
        _coordinator(Path(directory), members) as lead,
    ):
        await asyncio.to_thread(lead.wait)
        before = lead.cost()
        took, them = await _round(
            {"threads": 1, "groups": GROUPS, "pause": PAUSE_SECONDS, **lead.way_in(members)}, members
        )
        return _result(members, before, lead.cost(), took, them)


@dataclass(frozen=True, slots=True)
class _Lead:
    """The running coordinator."""

    home: Home
    manifest: Manifest
    process: "subprocess.Popen[bytes]"
    log: Path

    def wait(self) -> None:
        """Until it coordinates. Raises BenchError."""
        until = time.monotonic() + START_SECONDS
        while time.monotonic() < until and self.process.poll() is None:
            try:
                if connect(self.home).get("status")["state"] == "IDLE":
                    return
            except DaemonUnreachable:
                pass
            time.sleep(0.5)
        said = self.log.read_text()[-2000:]
        raise BenchError(f"the coordinator did not start within {START_SECONDS:.0f} s; it said last:\n{said}")

    def way_in(self, members: int) -> dict[str, str]:
        """What a member is started with."""
        membership = members_of(self.home, self.manifest)
        token = membership.invite(uses=members, expires=time.time() + 3600, role="member")
        membership.close()
        info = self.home.daemon()
        assert info is not None
        invite = Invite(self.manifest.digest, info.addresses[:1], self.home.swarm().psk, "bench", token)
        return {"invite": invite.to_uri(), "manifest": self.manifest.to_bytes().hex()}

    def cost(self) -> dict[str, float]:
        """So far: CPU seconds and resident bytes of the coordinator and its scorer; bytes of its transport."""
        main = psutil.Process(self.process.pid)
        times = [one.cpu_times() for one in (main, *main.children(recursive=True))]
        info = self.home.daemon()
        assert info is not None
        with urllib.request.urlopen(f"{info.url}/metrics", timeout=30) as answer:
            lines = answer.read().decode().splitlines()
        counted = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        return {
            "cpu": sum(one.user + one.system for one in times),
            "scorer_cpu": sum(one.user + one.system for one in times[1:]),
            "resident": main.memory_info().rss,
            "in": float(counted["shoal_network_bytes_in_total"]),
            "out": float(counted["shoal_network_bytes_out_total"]),
        }


@contextmanager
def _coordinator(directory: Path, members: int) -> Iterator[_Lead]:
    home, log = Home(directory / "coordinator"), directory / "log"
    home.init()
    manifest = begin(home, home.identity().peer_id, "bench", public=False)
    flags = [word for setting in (*SETTINGS, f"coordinator.least_members={members}") for word in ("--set", setting)]
    command = [sys.executable, "-P", "-m", "node", "--home", str(home.path), "coordinator", "up", *flags]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            preexec_fn=functools.partial(die_with_parent, signal.SIGTERM),
        )
    try:
        yield _Lead(home, manifest, process, log)
    finally:
        process.terminate()
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()


async def _round(spec: dict[str, Any], members: int) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Seconds until all were members, and until all had the board; what each member says."""
    began = time.monotonic()
    async with AsyncExitStack() as stack:
        sides: list[Side] = []
        for first in range(0, members, AT_ONCE):
            some = [
                await stack.enter_async_context(Side(MEMBER, {**spec, "name": f"member {number}"}))
                for number in range(first, min(first + AT_ONCE, members))
            ]
            await asyncio.gather(*(side.line(STAGE_SECONDS) for side in some))
            sides += some
        entered = time.monotonic() - began
        them = await asyncio.gather(*(side.line(STAGE_SECONDS) for side in sides))
        took = {"entered": entered, "evaluated": time.monotonic() - began}
        for side in sides:
            await side.tell({"end": True})
    if any(one["standings"] != members for one in them):
        raise BenchError(f"a board has not everybody: {sorted(one['standings'] for one in them)} of {members}")
    return took, list(them)


def _result(
    members: int, before: dict[str, float], after: dict[str, float], took: dict[str, float], them: list[dict[str, Any]]
) -> dict[str, Any]:
    spent = {name: (after[name] - before[name]) / members for name in before}
    return {
        "members": members,
        "groups": GROUPS,
        "answers_of_each": 4 * TASKS,
        "seconds": took,
        "coordinator_per_member": {
            "cpu_ms": 1e3 * spent["cpu"],
            "of_it_scorer_ms": 1e3 * spent["scorer_cpu"],
            "bytes_in": spent["in"],
            "bytes_out": spent["out"],
            "resident_bytes": spent["resident"],
        },
        "coordinator_resident_mb": after["resident"] / 2**20,
        "member": {
            name: sum(one[name] for one in them) / members
            for name in ("announced", "cpu_seconds", "bytes_in", "bytes_out", "peers")
        },
    }
