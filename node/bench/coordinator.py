"""`shoal bench coordinator`: what a member costs a coordinator, with 1,000 members simulated in this process.

All of them follow the log as real nodes do, over the in-memory transport: they enter with an invite, hear records by
gossip, pull lists, announce groups, report answers. CPU is the time inside the coordinator's own calls; bytes are
its transport's counters; memory is what Python holds more after the members came than before, with stand-ins that have
nothing of their own. The scorer is a stand-in too: scoring is measured by `shoal bench scorer`.
"""

import asyncio
import random
import tempfile
import time
import tracemalloc
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from node.bench.coordinator_member import Simulated
from node.bench.side import BenchError
from protocol.identity import Identity
from protocol.manifest import Coordination, Manifest, embedded_manifest
from protocol.messages import (
    ENTER_PROTOCOL,
    REPORT_PROTOCOL,
    ROUNDS_PROTOCOL,
    EnterRequest,
    ReportRequest,
    RoundsRequest,
)
from protocol.rollout import TaskRef
from protocol.rounds import Pace, State
from swarm.coordination.chain import Chain
from swarm.coordination.coordinator import Coordinator
from swarm.coordination.log_sync import LogSync
from swarm.coordination.membership import Membership
from swarm.coordination.reports import Reports
from swarm.coordination.round_log import RoundLog
from swarm.memory import MemoryHub
from swarm.transport import TransportStats

MEMBERS = 1000
NEIGHBOURS = 3
GROUPS = 8
"""Announced by each member in a round."""
STAGE_SECONDS = 900.0
PACE = Pace(10**6, 10**6, least_members=1, quorum=1.0, groups=GROUPS, tasks=8, samples=1)


class Times:
    """CPU seconds inside calls, by name, and how many calls there were."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.calls: Counter[str] = Counter()

    def of(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """The same call, timed."""

        def timed(*values: Any) -> Any:
            began = time.thread_time()
            try:
                return call(*values)
            finally:
                self.seconds[name] += time.thread_time() - began
                self.calls[name] += 1

        return timed

    def waiting(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """The same for a call that is awaited and gives nothing up meanwhile."""

        async def timed(*values: Any) -> Any:
            began = time.thread_time()
            try:
                return await call(*values)
            finally:
                self.seconds[name] += time.thread_time() - began
                self.calls[name] += 1

        return timed


class Lead:
    """A coordinator with its calls timed."""

    def __init__(self, hub: MemoryHub, directory: Path, identity: Identity, manifest: Manifest) -> None:
        self.transport = hub.transport(identity)
        database = directory / "node.db"
        log = RoundLog(database, manifest.digest, durable=True)
        self.chain = Chain(log, manifest, time.time, me=identity.peer_id)
        self.sync = LogSync(self.transport, self.chain, time.time)
        self.membership = Membership(database, manifest.digest, time.time, listed_only=True)
        self.reports = Reports(database, manifest.digest)
        self.coordinator = Coordinator(
            self.transport, identity, manifest, self.sync, self.membership, self.reports, _score, time.time,
            PACE, settle=0.0,
        )  # fmt: skip

    def measure(self, times: Times) -> None:
        lead = self.coordinator
        lead._enter = times.waiting("enter", lead._enter)  # type: ignore[method-assign]
        lead._report = times.waiting("report", lead._report)  # type: ignore[method-assign]
        lead.step = times.waiting("tick", lead.step)  # type: ignore[method-assign]
        lead._gate.check = times.of("announcement", lead._gate.check)  # type: ignore[method-assign]
        lead._heard_group = times.of("announcement", lead._heard_group)  # type: ignore[method-assign]
        lead._evaluation.score_next = times.waiting("score", lead._evaluation.score_next)  # type: ignore[method-assign]
        sync = self.sync
        sync._answer_rounds = times.waiting("follow", sync._answer_rounds)  # type: ignore[method-assign]
        sync._answer_list = times.waiting("follow", sync._answer_list)  # type: ignore[method-assign]


async def _score(items: Sequence[tuple[TaskRef, str]]) -> list[float]:
    return [0.5] * len(items)


async def compare(threads: int, machine: dict[str, Any], members: int = MEMBERS) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as directory:
        held = await memory(Path(directory), members)
    with tempfile.TemporaryDirectory() as directory:
        found = await simulate(Path(directory), members)
    return {"members": members, **found, "memory": held}


async def simulate(directory: Path, members: int) -> dict[str, Any]:
    """One round, from the first invite to the board. Raises BenchError when a stage does not end."""
    hub, times, identity = MemoryHub(), Times(), _key("lead")
    manifest = embedded_manifest("bench", time.time(), Coordination((identity.peer_id,), listed_only=True))
    lead = Lead(hub, directory, identity, manifest)
    lead.measure(times)
    token = lead.membership.invite(uses=members, expires=time.time() + 3600, role="member")
    keys = [_key(f"member {number}") for number in range(members)]
    them = [Simulated(hub.transport(key), key, manifest, token) for key in keys]
    random_ = random.Random(0)
    for transport in (lead.transport, *(one.transport for one in them)):
        await transport.start()
    running = [asyncio.create_task(run) for run in (lead.coordinator.run(), *(one.run() for one in them))]
    stages: dict[str, float] = {}
    begun = lead.transport.stats()

    async def stage(name: str, is_done: Callable[[], bool]) -> None:
        began = time.monotonic()
        while not is_done():
            for task in running:
                if task.done():
                    raise BenchError(f"{name}: a member or the coordinator ended: {task.exception()}")
            if time.monotonic() - began > STAGE_SECONDS:
                raise BenchError(f"{name} did not end within {STAGE_SECONDS:.0f} s")
            await asyncio.sleep(0.25)
        stages[name] = time.monotonic() - began

    def passed(since: TransportStats) -> dict[str, float]:
        now = lead.transport.stats()
        return {"in": (now.bytes_in - since.bytes_in) / members, "out": (now.bytes_out - since.bytes_out) / members}

    def all_at(state: State) -> bool:
        return all(one.chain.round is not None and one.chain.round.state is state for one in them)

    try:
        for one in them:
            await one.transport.connect(lead.transport.addresses()[0], timeout=30)
            for other in random_.sample(them, min(NEIGHBOURS, members - 1)):
                if other is not one:
                    await one.transport.connect(other.transport.addresses()[0], timeout=30)
        await stage("enter", lambda: all_at(State.open) and all(one.entering.listed for one in them))
        entered, opened = passed(begun), lead.transport.stats()
        number = lead.chain.round.number if lead.chain.round else 0
        for slot in range(GROUPS):
            for one in them:
                await one.announce(slot)
                await asyncio.sleep(0)
        await stage("practise", lambda: all_at(State.closing))
        for one in them:
            await one.report()
        await stage(
            "evaluate",
            lambda: all(one.chain.board is not None and one.chain.board.number == number for one in them),
        )
        board = them[-1].chain.board
        if board is None or len(board.standings) != members or any(one.mean != 0.5 for one in board.standings):
            raise BenchError("the board does not have everybody's score")
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    return {
        "simulated": {"neighbours": NEIGHBOURS, "groups": GROUPS, "seconds": stages},
        "cpu_ms_per_member": {
            name: 1e3 * seconds / members for name, seconds in times.seconds.items() if name != "tick"
        },
        "cpu_ms_per_call": {name: 1e3 * times.seconds[name] / times.calls[name] for name in times.seconds},
        "calls": dict(times.calls),
        "bytes_per_member": {"enter": entered, "round": passed(opened)},
        "disk_bytes_per_member": (directory / "node.db").stat().st_size / members,
    }


async def memory(directory: Path, members: int) -> dict[str, Any]:
    """Bytes that Python holds for each member: entered, heard of, having asked for the log and reported."""
    hub, identity = MemoryHub(), _key("lead")
    manifest = embedded_manifest("bench", time.time(), Coordination((identity.peer_id,), listed_only=True))
    lead = Lead(hub, directory, identity, manifest)
    await lead.transport.start()
    lead.coordinator.serve_on(lead.transport)
    token = lead.membership.invite(uses=members, expires=time.time() + 3600, role="member")
    peers = [_key(f"member {number}").peer_id for number in range(members)]
    enter = msgspec.msgpack.encode(EnterRequest(manifest.digest, token))
    asks = msgspec.msgpack.encode(RoundsRequest(manifest.digest))
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for peer in peers:
            await lead.transport.answer(peer, ENTER_PROTOCOL, enter)
        await lead.coordinator.step()  # waiting
        await lead.coordinator.step()  # open
        record = lead.chain.round
        assert record is not None
        lead.reports.hear(record.number, dict.fromkeys(peers, GROUPS))
        await lead.coordinator.step()  # closing
        report = ReportRequest(manifest.digest, record.number, ("an answer",) * (4 * PACE.tasks))
        for peer in peers:
            await lead.transport.answer(peer, ROUNDS_PROTOCOL, asks)
            await lead.transport.answer(peer, REPORT_PROTOCOL, msgspec.msgpack.encode(report))
        while lead.chain.round is not None and await lead.coordinator._evaluation.score_next(lead.chain.round):
            pass
        await lead.coordinator.step()  # evaluated
        if lead.chain.board is None or len(lead.chain.board.standings) != members:
            raise BenchError("the board does not have everybody")
        held = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
        await lead.transport.stop()
    return {"bytes_per_member": held / members}


def _key(name: str) -> Identity:
    return Identity.from_seed(name.encode().ljust(32, b"."))
