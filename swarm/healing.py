"""Heals lost announcements: asks a peer, on meeting it and from time to time, for live ones that this node lacks."""

import asyncio
import math
import random
from collections.abc import Callable

import msgspec

from protocol.manifest import Manifest
from protocol.messages import (
    LIVE_PROTOCOL,
    MAX_ANNOUNCEMENT_BYTES,
    MAX_HAVE,
    MAX_LIVE,
    LiveRequest,
    LiveResponse,
)
from protocol.rules import Reason, Rejected
from swarm.accounts import Accounts
from swarm.experience import ExperienceStore, StoreError
from swarm.transport import Busy, Transport, TransportError

MAX_LIVE_BYTES = MAX_LIVE * (MAX_ANNOUNCEMENT_BYTES + 8) + 64
HEAL_ROUNDS = 32
"""Answers taken from one peer at a meeting."""
MEETING_SECONDS = 30.0
"""For all of them: what is not healed by then is another time."""
SETTLED_SECONDS = 5
"""Younger announcements are not asked for from time to time: gossip is still bringing them. On meeting a peer they are,
because nothing was gossiped between the two before."""
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
        self._waiting: dict[str, int] = {}
        """Whom to ask, for what is how old at least (s)."""
        self._wake = asyncio.Event()

    def met(self, peer: str) -> None:
        """Ask a new peer for everything as soon as a healer is free. With many waiting it is left for another time."""
        self._soon(peer, 0)

    async def meet(self) -> None:
        """Ask one connected peer now and then, at jittered intervals so that a swarm does not ask in step."""
        while True:
            await asyncio.sleep(self._heal_seconds * self._random.uniform(0.75, 1.25))
            if peers := self._transport.peers():
                self._soon(self._random.choice(peers), SETTLED_SECONDS)

    async def run(self) -> None:
        """One healer; several may run."""
        while True:
            if not self._waiting:
                self._wake.clear()
                await self._wake.wait()
                continue
            peer = next(iter(self._waiting))
            settled = self._waiting.pop(peer)
            try:
                async with asyncio.timeout(MEETING_SECONDS):
                    await self._heal(peer, settled)
            except (TransportError, TimeoutError):
                continue  # it left, is slow, or is not of this swarm; there are others, and another time
            except StoreError as error:
                self._accounts.store_trouble(error)

    def _soon(self, peer: str, settled: int) -> None:
        if len(self._waiting) < MAX_WAITING:
            self._waiting[peer] = min(settled, self._waiting.get(peer, settled))
            self._wake.set()

    async def _heal(self, peer: str, settled: int) -> None:
        """Ask for what was made lately, and, where a request cannot name all that is known here, for ever older parts.

        An answer begins with the newest that the request does not name. So a part is asked for by what the peer has
        known since the oldest of the part before was made, with the latest of what was made by then named.
        """
        made_by, lifetime = math.inf, self._manifest.caps.group_ttl_seconds
        for _ in range(HEAL_ROUNDS):
            now = self._clock()
            have = self._store.announcements.digests(now, MAX_HAVE, expires_by=made_by + lifetime)
            age = settled if made_by == math.inf else max(settled, math.ceil(now - made_by))
            answer = await self._ask(peer, LiveRequest(self._manifest.digest, tuple(have), age))
            try:
                announcements = msgspec.msgpack.decode(answer, type=LiveResponse).announcements
            except msgspec.DecodeError as error:
                self._accounts.offence(Rejected(Reason.malformed, f"answer to {LIVE_PROTOCOL}: {error}"), peer)
                return
            new = 0
            for sealed in announcements:
                heard = self._hear(sealed, peer)
                new += heard
                self._accounts.counters.healed += heard
                await asyncio.sleep(0)
            if len(announcements) < MAX_LIVE:
                return
            if not new:
                oldest = min(have.values(), default=math.inf) - lifetime
                if len(have) < MAX_HAVE or oldest >= made_by:
                    return
                made_by = oldest

    async def _ask(self, peer: str, request: LiveRequest) -> bytes:
        """The answer, however often the peer asks to wait: the caller holds a deadline. Raises TransportError."""
        raw = msgspec.msgpack.encode(request)
        while True:
            try:
                return await self._transport.request(
                    peer, LIVE_PROTOCOL, raw, max_bytes=MAX_LIVE_BYTES, timeout=self._timeout
                )
            except Busy as busy:
                self._accounts.counters.put_off += 1
                await asyncio.sleep(busy.seconds)
