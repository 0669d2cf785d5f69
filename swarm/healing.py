"""Heals lost announcements: asks a peer, on meeting it and from time to time, for live ones that this node lacks."""

import asyncio
import random
from collections.abc import Callable

import msgspec

from protocol.manifest import Manifest
from protocol.messages import LIVE_PROTOCOL, MAX_ANNOUNCEMENT_BYTES, LiveRequest, LiveResponse
from protocol.rules import Reason, Rejected
from swarm.accounts import Accounts
from swarm.experience import ExperienceStore, StoreError
from swarm.transport import Transport, TransportError

MAX_HAVE = 1024
MAX_LIVE = 64
"""Both as in protocol.messages."""
MAX_LIVE_BYTES = MAX_LIVE * (MAX_ANNOUNCEMENT_BYTES + 8) + 64
HEAL_ROUNDS = 32
"""Answers taken from one peer at a meeting."""
MAX_WAITING = 256


class Healer:
    """`hear(sealed, peer)` takes an announcement as gossip would bring it, and says whether it was new."""

    def __init__(
        self,
        transport: Transport,
        store: ExperienceStore,
        manifest: Manifest,
        accounts: Accounts,
        clock: Callable[[], float],
        hear: Callable[[bytes, str], bool],
        *,
        heal_seconds: float,
        request_timeout: float,
        seed: int,
    ) -> None:
        self._transport, self._store, self._manifest = transport, store, manifest
        self._accounts, self._clock, self._hear = accounts, clock, hear
        self._heal_seconds, self._timeout = heal_seconds, request_timeout
        self._random = random.Random(seed)
        self._waiting: dict[str, None] = {}
        self._wake = asyncio.Event()

    def soon(self, peer: str) -> None:
        """Ask this peer as soon as a healer is free. With many waiting it is left for another time."""
        if len(self._waiting) < MAX_WAITING:
            self._waiting[peer] = None
            self._wake.set()

    async def meet(self) -> None:
        """Ask one connected peer now and then, at jittered intervals so that a swarm does not ask in step."""
        while True:
            await asyncio.sleep(self._heal_seconds * self._random.uniform(0.75, 1.25))
            if peers := self._transport.peers():
                self.soon(self._random.choice(peers))

    async def run(self) -> None:
        """One healer; several may run."""
        while True:
            if not self._waiting:
                self._wake.clear()
                await self._wake.wait()
                continue
            peer = next(iter(self._waiting))
            del self._waiting[peer]
            try:
                await self._heal(peer)
            except TransportError:
                continue  # it left, or is not of this swarm; there are others, and another time
            except StoreError as error:
                self._accounts.store_trouble(error)

    async def _heal(self, peer: str) -> None:
        for _ in range(HEAL_ROUNDS):
            have = tuple(self._store.live_digests(self._clock(), MAX_HAVE))
            request = msgspec.msgpack.encode(LiveRequest(self._manifest.digest, have))
            answer = await self._transport.request(
                peer, LIVE_PROTOCOL, request, max_bytes=MAX_LIVE_BYTES, timeout=self._timeout
            )
            try:
                announcements = msgspec.msgpack.decode(answer, type=LiveResponse).announcements
            except msgspec.DecodeError as error:
                self._accounts.offence(peer, Rejected(Reason.malformed, f"answer to {LIVE_PROTOCOL}: {error}"))
                return
            new = 0
            for sealed in announcements:
                new += self._hear(sealed, peer)
                await asyncio.sleep(0)
            self._accounts.counters.healed += new
            if len(announcements) < MAX_LIVE or not new:
                return
