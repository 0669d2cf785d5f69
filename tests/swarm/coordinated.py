"""Coordinators and bare members on one in-memory hub, with a clock that runs as fast as a test wants."""

import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from protocol.identity import Identity
from protocol.manifest import Coordination, EnvironmentSpec, Manifest, make_manifest
from protocol.messages import ReportRequest, ReportResponse, Trained
from protocol.rollout import TaskRef
from protocol.rounds import Pace, State
from swarm.coordination.access import Access
from swarm.coordination.chain import Chain
from swarm.coordination.coordinator import STEP_SECONDS, Coordinator
from swarm.coordination.entering import Entering, send_report
from swarm.coordination.log_sync import LogSync
from swarm.coordination.membership import Membership
from swarm.coordination.reports import Reports
from swarm.coordination.round_log import RoundLog
from swarm.memory import MemoryHub
from swarm.transport import Message, PeerConnected
from tests.swarm.world import until, who

PACE = Pace(round_seconds=600, answer_seconds=30, least_members=1, quorum=1.0, groups=0, tasks=2, samples=1)


class Clock:
    """Wall time, and whatever a test adds to it."""

    def __init__(self) -> None:
        self.ahead = 0.0

    def __call__(self) -> float:
        return time.time() + self.ahead


def manifest_of(*coordinators: str, listed_only: bool = True) -> Manifest:
    return make_manifest(
        "coordinated",
        time.time() - 100,
        (EnvironmentSpec("even", "1", 1, {"max_tokens": 4}), EnvironmentSpec("odd", "1", 3, {})),
        coordination=Coordination(tuple(who(name).peer_id for name in coordinators), listed_only),
    )


async def score(items: Sequence[tuple[TaskRef, str]]) -> list[float]:
    """What the answer says, when it names its task."""
    return [float(text.split()[1]) if text.split()[0] == str(ref.seed % 1000) else 0.0 for ref, text in items]


class Peer:
    """What coordinators and members have in common here."""

    def __init__(self, hub: MemoryHub, path: Path, name: str, manifest: Manifest, clock: Callable[[], float]) -> None:
        self.identity: Identity = who(name)
        self.path, self.manifest, self.clock = path / f"{name}.db", manifest, clock
        self.transport = hub.transport(self.identity)
        self.events: list[tuple[str, str]] = []
        self.log = RoundLog(self.path, manifest.digest)
        self.chain = Chain(self.log, manifest, clock, me=self.id, on_event=self.told)
        self.sync = LogSync(self.transport, self.chain, clock, request_timeout=5, sync_seconds=0.2, on_event=self.told)
        self.tasks: list[asyncio.Task[None]] = []

    @property
    def id(self) -> str:
        return self.identity.peer_id

    def told(self, kind: str, message: str) -> None:
        self.events.append((kind, message))

    def kinds(self, kind: str) -> list[str]:
        return [message for one, message in self.events if one == kind]

    async def stop(self) -> None:
        for task in self.tasks:
            assert not task.done(), task
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        self.tasks.clear()
        await self.transport.stop()


class Leader(Peer):
    """A coordinator. `begin` again with the same name and path is a restart."""

    def __init__(self, *common, pace: Pace = PACE, patience: float = 1.0, settle: float = 0.0, **options) -> None:
        super().__init__(*common)
        self.membership = Membership(self.path, self.manifest.digest, self.clock, listed_only=self.manifest.listed_only)
        self.reports = Reports(self.path, self.manifest.digest)
        self.coordinator = Coordinator(
            self.transport, self.identity, self.manifest, self.sync, self.membership, self.reports,
            options.pop("score", score), self.clock, pace, patience=patience, settle=settle, on_event=self.told,
            **options,
        )  # fmt: skip

    async def start(self) -> "Leader":
        await self.transport.start()
        self.tasks = [asyncio.create_task(self.coordinator.run())]
        await asyncio.sleep(0)
        return self


class Bare(Peer):
    """A member without experience exchange."""

    def __init__(self, *common, token: bytes | None = None) -> None:
        super().__init__(*common)
        self.access = Access(self.transport, self.manifest, self.clock, grace=0.3, on_event=self.told)
        self.chain.on_members = self.access.take
        self.entering = Entering(
            self.transport, self.sync, token, request_timeout=5, retry_seconds=0.2, on_event=self.told
        )

    async def start(self) -> "Bare":
        await self.transport.start()
        self.sync.serve_on(self.transport)
        runs = (self.sync.run(), self.entering.run(), self.access.run(), self._listen())
        self.tasks = [asyncio.create_task(run) for run in runs]
        await asyncio.sleep(0)
        return self

    async def _listen(self) -> None:
        async for event in self.transport.events():
            if isinstance(event, Message):
                self.sync.hear(event.data, event.forwarder)
            elif isinstance(event, PeerConnected):
                self.sync.met(event.peer)

    async def answer(self, rewards: Sequence[float | None], trained: dict[str, int] | None = None) -> ReportResponse:
        """Hand in answers that score these rewards, one for each task, to whoever leads."""
        from protocol.assignment import round_task

        head = self.chain.round
        assert head is not None
        each = head.tasks * head.samples
        answers = []
        for i, spec in enumerate(self.manifest.environments):
            for n in range(each):
                reward = rewards[i * each + n]
                ref = round_task(self.manifest, head.seed, spec.name, n // head.samples)
                answers.append(None if reward is None else f"{ref.seed % 1000} {reward}")
        counts = tuple(Trained(peer, groups) for peer, groups in (trained or {}).items())
        report = ReportRequest(self.manifest.digest, head.number, tuple(answers), counts)
        assert self.chain.leader is not None
        return await send_report(self.transport, self.chain.leader, report, 5.0)


class Hall:
    """Makes peers on one hub and ends them."""

    def __init__(self, path: Path) -> None:
        self.path, self.hub, self.clock = path, MemoryHub(), Clock()
        self.manifest = manifest_of("lead", "spare")
        self.peers: list[Peer] = []

    async def leader(self, name: str = "lead", **options) -> Leader:
        peer = Leader(self.hub, self.path, name, self.manifest, self.clock, **options)
        self.peers.append(peer)
        return await peer.start()

    async def member(self, name: str, *to: Peer, token: bytes | None = None) -> Bare:
        peer = Bare(self.hub, self.path, name, self.manifest, self.clock, token=token)
        self.peers.append(peer)
        await peer.start()
        for other in to:
            await peer.transport.connect(other.transport.addresses()[0], timeout=1)
        return peer

    async def swarm(self, lead: Leader, *names: str) -> list[Bare]:
        """Members with invites, all connected to the leader and listed."""
        token = lead.membership.invite(uses=len(names), expires=self.clock() + 60, role="member")
        members = [await self.member(name, lead, token=token) for name in names]
        await until(lambda: all(member.entering.listed for member in members))
        return members

    async def wait(self, lead: Leader, seconds: float) -> None:
        """So many seconds pass, in steps that are not taken for a clock that was set."""
        end = self.clock() + seconds
        while self.clock() < end:
            self.clock.ahead += STEP_SECONDS / 2
            now = self.clock()
            await until(lambda: lead.coordinator._looked >= now)  # noqa: B023

    async def kill(self, peer: Peer) -> None:
        await peer.stop()
        self.peers.remove(peer)

    async def stop(self) -> None:
        for peer in self.peers:
            await peer.stop()


def is_at(peers: list[Bare] | list[Leader], number: int, state: State) -> bool:
    return all(
        peer.chain.round is not None and (peer.chain.round.number, peer.chain.round.state) == (number, state)
        for peer in peers
    )
