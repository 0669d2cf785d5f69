"""Raw libp2p clients against what coordinators, leaders and listed nodes serve: bounded, in time, and noted."""

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import trio
from libp2p.custom_types import TProtocol
from libp2p.peer.id import ID

from protocol.messages import (
    ENTER_PROTOCOL,
    LISTING_PROTOCOL,
    LISTS_PROTOCOL,
    REPORT_PROTOCOL,
    ROUNDS_PROTOCOL,
    EnterRequest,
    rounds_topic,
)
from protocol.policy import PIECES_PROTOCOL, POLICY_PROTOCOL
from swarm import libp2p_host, libp2p_streams
from swarm.accounts import Accounts
from swarm.directory import list_in_directory
from swarm.experience import ExperienceStore
from swarm.libp2p_transport import Libp2pTransport
from swarm.policies import PolicyServing, PolicyStore
from swarm.reputation import Reputation
from swarm.transport import MAX_STREAMS_PER_PEER, Busy, RequestFailed
from tests.swarm.coordinated import Clock, Leader, manifest_of
from tests.swarm.world import until, who

pytestmark = pytest.mark.network
DECODED = (ROUNDS_PROTOCOL, LISTS_PROTOCOL, ENTER_PROTOCOL, REPORT_PROTOCOL, POLICY_PROTOCOL, PIECES_PROTOCOL)
ALL = (*DECODED, LISTING_PROTOCOL)


class Wire:
    """Real transports where a hub would give pretended ones."""

    def transport(self, identity: Any) -> Libp2pTransport:
        return Libp2pTransport(identity, ["/ip4/127.0.0.1/tcp/0"])


class Attack:
    """An open swarm's coordinator that is a leader and listed, too, and somebody who knows its address."""

    def __init__(self, path: Path) -> None:
        self.manifest = manifest_of("lead", listed_only=False)
        self.lead = Leader(Wire(), path, "lead", self.manifest, Clock())  # type: ignore[arg-type]
        self.experience = ExperienceStore(path / "experience.db", 1 << 20, time.time)
        self.reputation = Reputation(self.experience, time.time)
        self.eve, self.anna = (Wire().transport(who(name)) for name in ("eve", "anna"))

    async def start(self) -> "Attack":
        lead = self.lead
        await lead.start()
        accounts = Accounts(lead.transport, self.reputation, time.time, lead.told)
        PolicyServing(PolicyStore(lead.path.parent / "policy"), lead.id, accounts, time.time).serve_on(lead.transport)
        self.listed = asyncio.create_task(
            list_in_directory(
                lead.transport,
                lead.identity,
                self.manifest,
                clock=time.time,
                addresses=lead.transport.addresses,
                members=lambda: 1,
            )
        )
        for peer in (self.eve, self.anna):
            await peer.start()
            await peer.connect(lead.transport.addresses()[0], timeout=20)
        await until(lambda: {self.eve.peer_id, self.anna.peer_id} <= set(lead.transport.peers()))
        return self

    async def stop(self) -> None:
        self.listed.cancel()
        for peer in (self.eve, self.anna):
            await peer.stop()
        await self.lead.stop()
        self.experience.close()

    @property
    def served(self) -> int:
        """Streams that are served now."""
        return int(self.lead.transport._host.streams._serving.total())  # type: ignore[attr-defined]

    async def raw(self, protocol: str, *writes: bytes, pause: float = 0.0, patience: float = 10.0) -> bytes:
        """Open a stream, write, and read until the server ends it."""
        host = self.eve._running()

        async def in_trio() -> bytes:
            stream = await host._host.new_stream(ID.from_base58(self.lead.id), [TProtocol(protocol)])
            answer = b""
            with trio.move_on_after(patience):
                try:
                    for piece in writes:
                        await stream.write(piece)
                        await trio.sleep(pause)
                    while got := await stream.read(4096):
                        answer += got
                except libp2p_host.STREAM_ERRORS:
                    return answer
                return answer
            return b"the server held on"

        return await self.eve._thread.call(in_trio)

    async def honest(self) -> bool:
        """Whether somebody else is served meanwhile."""
        request = msgspec.msgpack.encode(EnterRequest(self.manifest.digest, b""))
        for _ in range(20):
            try:
                return b"member" in await self.anna.request(
                    self.lead.id, ENTER_PROTOCOL, request, max_bytes=1024, timeout=10
                )
            except Busy as busy:
                await asyncio.sleep(busy.seconds)
        return False

    def noted(self) -> list[str]:
        return [
            said for kind, said in self.lead.events if kind == "rejected" and said.startswith(self.eve.peer_id[-8:])
        ]


@pytest.fixture
async def attack(tmp_path: Path) -> AsyncIterator[Attack]:
    made = await Attack(tmp_path).start()
    yield made
    await made.stop()


async def test_garbage_is_refused_noted_and_banned_in_the_end(attack: Attack) -> None:
    for protocol in DECODED:
        with pytest.raises(RequestFailed):
            await attack.eve.request(attack.lead.id, protocol, b"\xc1" * 200, max_bytes=1000, timeout=10)
    assert any("malformed" in said for said in attack.noted())
    assert attack.reputation.of(attack.eve.peer_id).penalty > 0  # by the leader's part, for two of them
    assert await attack.honest()
    attempts = 0
    while attack.eve.peer_id in attack.lead.transport.peers() and attempts < 30:
        attempts += 1
        with pytest.raises(RequestFailed):
            await attack.eve.request(attack.lead.id, ROUNDS_PROTOCOL, b"\xc1", max_bytes=1000, timeout=10)
        await asyncio.sleep(0.05)
    assert attempts < 30
    assert await attack.honest()


async def test_a_length_over_the_cap_is_not_waited_for_and_noted(attack: Attack) -> None:
    for protocol in ALL:
        began = time.monotonic()
        assert await attack.raw(protocol, b"\xff\xff\xff\xf0", b"x" * 4096) == b""
        assert time.monotonic() - began < 8
    await until(lambda: any("too_large: a request on" in said for said in attack.noted()))
    assert await attack.honest()


async def test_a_trickle_and_silence_end_at_the_deadline(attack: Attack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libp2p_streams, "REQUEST_READ_SECONDS", 0.5)
    trickle = [b"\x00\x00\x00\x40", *[b"x"] * 60]
    for protocol in ALL:
        began = time.monotonic()
        answers = await asyncio.gather(attack.raw(protocol, *trickle, pause=0.1), attack.raw(protocol))
        assert b"the server held on" not in answers, protocol
        assert time.monotonic() - began < 8
    await until(lambda: attack.served == 0)


async def test_hundreds_of_streams_are_served_some_at_a_time_and_others_meanwhile(attack: Attack) -> None:
    before = psutil.Process().memory_info().rss
    whole = (1 << 20).to_bytes(4, "big") + bytes(1 << 20)
    most, over = 0, False

    async def watch() -> None:
        nonlocal most
        while not over:
            most = max(most, attack.served)
            await asyncio.sleep(0.005)

    watching = asyncio.create_task(watch())
    # a megabyte that is no report on each of them, all but its last byte
    streams = [asyncio.create_task(attack.raw(REPORT_PROTOCOL, whole[:-1], patience=15.0)) for _ in range(200)]
    assert await attack.honest()
    answers = await asyncio.gather(*streams, return_exceptions=True)
    over = True
    await watching
    assert 0 < most <= MAX_STREAMS_PER_PEER + 2  # anna's, and what is being ended
    assert b"the server held on" not in answers
    assert psutil.Process().memory_info().rss - before < 400 << 20  # of both ends, 200 MB of them eve's own
    await until(lambda: attack.served <= 1, 20)


async def test_gossip_that_is_no_round_is_on_the_forwarders_account(
    attack: Attack,
) -> None:
    topic = rounds_topic(attack.manifest.digest)
    await attack.eve.subscribe(topic)

    def noted() -> bool:
        return any("malformed" in said for said in attack.noted())

    for _ in range(100):
        await attack.eve.publish(topic, b"\x97\x02" + b"\x91" * 100)
        await asyncio.sleep(0.1)
        if noted():
            break
    assert noted()
    assert attack.lead.chain.round is not None
    assert not attack.lead.chain.faults
