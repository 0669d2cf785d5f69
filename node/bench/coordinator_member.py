"""A member of a coordinated swarm without a model: follows the log as a node does, enters, announces and reports.

`Simulated` is used by `shoal bench coordinator`, many in a process; as a process of its own by `shoal bench members`.
"""

import asyncio
import hashlib
import random
import resource
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from node.bench.side import BenchError, Say, serve
from protocol.assignment import own_task
from protocol.envelope import Domain, seal
from protocol.identity import Identity
from protocol.invite import Invite
from protocol.manifest import Manifest
from protocol.messages import Announcement, ReportRequest, announce_topic, rounds_topic
from protocol.rounds import State
from swarm.coordination.access import Access
from swarm.coordination.chain import Chain
from swarm.coordination.entering import Entering, send_report
from swarm.coordination.log_sync import LogSync
from swarm.coordination.round_log import RoundLog
from swarm.gate import AnnouncementGate
from swarm.libp2p_transport import Libp2pTransport
from swarm.peers import Discovery
from swarm.transport import Message, PeerConnected, Transport, TransportError

LOOK_SECONDS = 0.25
LATER_SECONDS = 30.0
"""Between two groups once a member is through with a round."""
TRIES_SECONDS = 300.0
NEIGHBOURS = 6
"""That a member process dials: everybody connected to everybody would keep a small machine busy with that alone."""


class Simulated:
    """A member over any transport, which its owner starts."""

    def __init__(
        self, transport: Transport, identity: Identity, manifest: Manifest, token: bytes | None, timeout: float = 300
    ) -> None:
        self.identity, self.manifest, self.transport, self._timeout = identity, manifest, transport, timeout
        log = RoundLog(Path(":memory:"), manifest.digest)
        self.chain = Chain(log, manifest, time.time, me=identity.peer_id)
        self.sync = LogSync(transport, self.chain, time.time, request_timeout=timeout)
        self.access = Access(transport, manifest, time.time)
        self.chain.on_members = self.access.take
        self.entering = Entering(transport, self.sync, token, request_timeout=timeout)

    async def run(self) -> None:
        self.sync.serve_on(self.transport)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.sync.run())
            tasks.create_task(self.entering.run())
            tasks.create_task(self._listen())

    async def _listen(self) -> None:
        async for event in self.transport.events():
            if isinstance(event, Message) and event.topic == rounds_topic(self.manifest.digest):
                self.sync.hear(event.data, event.forwarder)
            elif isinstance(event, PeerConnected):
                self.sync.met(event.peer)

    async def announce(self, slot: int) -> None:
        """Say that there is a group of the task in this slot."""
        now = time.time()
        task = own_task(self.manifest, self.manifest.epoch_at(now), self.identity.peer_id, slot)
        group = random.Random(f"{self.identity.peer_id}{slot}").randbytes(32)
        content = Announcement(
            self.manifest.digest, group, 4096, self.manifest.epoch_at(now), task, "simulated", 8, 0.5, 0.5, 96
        )
        raw = seal(self.identity, Domain.announcement, msgspec.msgpack.encode(content), issued=now, expires=now + 600)
        await self.transport.publish(announce_topic(self.manifest.digest, 0), raw)

    async def report(self) -> None:
        """Hand in answers to the closing round. Raises BenchError when they are not taken, TransportError."""
        record, leader = self.chain.round, self.chain.leader
        assert record is not None
        assert leader is not None
        answers = ("an answer of forty characters, as many are",) * (len(record.mix) * record.tasks)
        report = ReportRequest(self.manifest.digest, record.number, answers)
        answer = await send_report(self.transport, leader, report, self._timeout)
        if not answer.taken:
            raise BenchError(f"a report was not taken: {answer.detail}")


# -- as a process --------------------------------------------------------------------------------------------


async def live(spec: Mapping[str, Any], say: Say, directory: Path) -> None:
    """Say that it is a member; take part in one round; say what its board has and what that cost; until input ends."""
    identity = Identity.from_seed(hashlib.sha256(spec["name"].encode()).digest())
    invite, manifest = Invite.parse(spec["invite"]), Manifest.from_bytes(bytes.fromhex(spec["manifest"]))
    transport = Libp2pTransport(identity, ["/ip4/127.0.0.1/tcp/0"], psk=invite.psk)
    await transport.start()
    member = Simulated(transport, identity, manifest, invite.token, timeout=30.0)
    gate = AnnouncementGate(manifest, time.time, banned=member.access.barred)
    # as a node does: without relays, only who is connected to the coordinator is heard
    await transport.subscribe(announce_topic(manifest.digest, 0), gate.check)
    discovery = Discovery(transport, invite.bootstrap, manifest.digest, clock=time.monotonic, max_peers=NEIGHBOURS)
    running = [asyncio.create_task(member.run()), asyncio.create_task(discovery.run())]
    try:
        await _until(running, lambda: member.entering.listed)
        say({"listed": True})
        await _until(running, lambda: _state(member) is State.open)
        groups = 0
        while _state(member) is State.open:  # gossip may lose one, and a node goes on practising until the round closes
            await member.announce(groups)
            groups += 1
            await asyncio.sleep(spec["pause"] if groups < spec["groups"] else LATER_SECONDS)
        await _until(running, lambda: _state(member) is State.closing)
        record = member.chain.round
        assert record is not None
        until = time.monotonic() + TRIES_SECONDS
        while True:
            try:
                await member.report()
                break
            except TransportError as error:
                if time.monotonic() > until:
                    raise BenchError(f"the coordinator takes no report: {error}") from error
                await asyncio.sleep(1.0)
        await _until(running, lambda: _board_of(member) >= record.number)
        board = member.chain.board
        assert board is not None
        used, stats = resource.getrusage(resource.RUSAGE_SELF), transport.stats()
        say(
            {
                "standings": len(board.standings),
                "announced": groups,
                "cpu_seconds": used.ru_utime + used.ru_stime,
                "bytes_in": stats.bytes_in,
                "bytes_out": stats.bytes_out,
                "peers": len(transport.peers()),
            }
        )
        await asyncio.to_thread(sys.stdin.readline)  # the others still pull from this one
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await transport.stop()


async def _until(running: list["asyncio.Task[None]"], is_done: Callable[[], bool]) -> None:
    while not is_done():
        for task in running:
            if task.done():
                raise BenchError(f"a service ended: {task.exception()!r}")
        await asyncio.sleep(LOOK_SECONDS)


def _state(member: Simulated) -> State | None:
    return member.chain.round.state if member.chain.round else None


def _board_of(member: Simulated) -> int:
    """The round whose board it has; -1: none."""
    return member.chain.board.number if member.chain.board else -1


if __name__ == "__main__":
    serve(live)
