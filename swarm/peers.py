"""Discovery: a node that knows one peer soon knows all, and stays connected to them.

Bootstrap peers are dialled until they answer; through them the node meets at the rendezvous of its swarm (provider
records under the manifest digest) whoever else is there, dials them, and dials again whoever is lost. Nothing here
is ever fatal: an unreachable peer is tried again with back-off, for ever if it is a bootstrap peer.
"""

import asyncio
import logging
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from swarm.backing_off import pause_after
from swarm.transport import NoAddress, Transport, TransportError

DIAL_SECONDS = 10.0
LOOKUP_SECONDS = 15.0
FIRST_BACK_OFF, LONGEST_BACK_OFF = 0.5, 30.0
DIALS_AT_ONCE = 8
ENOUGH = 4
"""Connections with which one more or less is no reason to look up at once. A look-up asks some twenty peers: with more
connected it becomes rarer, or a swarm of dozens spends its processors on it."""
INTERVAL = 30.0
"""Seconds between two look-ups once the set of peers is stable and no more than ENOUGH are connected."""
LONGEST_INTERVAL = 300.0
MAX_KNOWN = 512
MAX_STRANGERS = 64
"""Of them, those that the rendezvous told of and that were never connected: whoever answers may make them up."""
STRANGER_DIALS = 3
"""A stranger that failed so many dials gives its place to a new one."""
GIVE_UP_SECONDS = 3600.0
"""A lost peer that is no bootstrap peer is dialled for this long; the rendezvous tells of it when it returns."""

log = logging.getLogger(__name__)


@dataclass(slots=True)
class KnownPeer:
    address: str
    is_bootstrap: bool
    last_seen: float
    next_dial: float
    failures: int = 0
    """Dials that failed since it was connected."""
    is_stranger: bool = False
    """Heard of at the rendezvous, and not connected so far."""

    @property
    def turn(self) -> tuple[bool, bool, int, float]:
        """Who is dialled first: bootstrap peers, whom we met, strangers not tried yet, then who has waited longest."""
        return not self.is_bootstrap, self.is_stranger, self.failures if self.is_stranger else 0, self.next_dial


class Discovery:
    """A service: `run` until cancelled.

    `rendezvous`: the key under which the peers of this swarm find each other (manifest digest). `clock`: seconds,
    monotonic. `max_peers`: no more is dialled when so many are connected. `tick`: seconds between two looks at the
    connections.
    """

    def __init__(
        self,
        transport: Transport,
        bootstrap: Iterable[str],
        rendezvous: bytes,
        *,
        clock: Callable[[], float],
        max_peers: int = 32,
        tick: float = 0.5,
    ) -> None:
        self._transport = transport
        self._rendezvous = rendezvous
        self._clock = clock
        self._max_peers = max_peers
        self._tick = tick
        # Seeded by the peer id, so that nodes that lost the same bootstrap peer do not all come back at once.
        self._random = random.Random(transport.peer_id)
        self._known: dict[str, KnownPeer] = {}
        self._connected: frozenset[str] = frozenset()
        self._next_lookup, self._lookup_gap = 0.0, tick
        self.last_error: str | None = None
        """Why the last dial of a bootstrap peer failed; None once one answered."""
        for address in bootstrap:
            peer = address.rpartition("/p2p/")[2]
            if peer != transport.peer_id:
                self._known[peer] = KnownPeer(address, is_bootstrap=True, last_seen=clock(), next_dial=0.0)

    def unreached(self) -> str:
        """How many were dialled in vain, and why, while nobody is connected; empty where that is not so."""
        tried = sum(known.failures > 0 for known in self._known.values())
        if self._connected or not tried:
            return ""
        return f"{tried} tried: {self.last_error}" if self.last_error else f"{tried} tried"

    async def run(self) -> None:
        while True:
            await self.step()
            await asyncio.sleep(self._tick)

    async def step(self) -> None:
        """Look at the connections once, and look up and dial what is due."""
        self._look_at_connections()
        if self._connected and self._clock() >= self._next_lookup:
            await self._look_up()
        await self._dial_due()

    def _look_at_connections(self) -> None:
        now, connected = self._clock(), frozenset(self._transport.peers())
        for peer in connected:
            known = self._known.get(peer)
            if known is None:
                # It dialled us. The transport keeps its address, so its id is enough to dial it when it is lost.
                known = self._known[peer] = KnownPeer(f"/p2p/{peer}", is_bootstrap=False, last_seen=now, next_dial=0.0)
            known.last_seen, known.next_dial = now, 0.0
            known.failures, known.is_stranger = 0, False
        if connected != self._connected and len(connected) <= ENOUGH:
            self._next_lookup, self._lookup_gap = now, self._tick
        self._connected = connected
        self._forget(now)

    def _forget(self, now: float) -> None:
        lost = sorted(
            (known.last_seen, peer)
            for peer, known in self._known.items()
            if not known.is_bootstrap and peer not in self._connected
        )
        surplus = len(self._known) - MAX_KNOWN
        for number, (last_seen, peer) in enumerate(lost):
            if number < surplus or now - last_seen > GIVE_UP_SECONDS:
                del self._known[peer]

    async def _look_up(self) -> None:
        """Say that we are here and ask who else is. Often after a change, then ever less."""
        try:
            async with asyncio.timeout(LOOKUP_SECONDS):
                await self._transport.provide(self._rendezvous)
                found = await self._transport.find_providers(self._rendezvous, timeout=LOOKUP_SECONDS)
        except (TransportError, TimeoutError) as error:
            log.info("look-up of the swarm's peers failed: %s", error or "no answer in time")
            found = ()
        now = self._clock()
        for peer in found:
            if peer in self._known or peer == self._transport.peer_id:
                continue
            if not self._room_for_a_stranger():
                break
            self._known[peer] = KnownPeer(
                f"/p2p/{peer}", is_bootstrap=False, last_seen=now, next_dial=now, is_stranger=True
            )
        rarest = max(INTERVAL, min(LONGEST_INTERVAL, INTERVAL * len(self._connected) / ENOUGH))
        self._lookup_gap = min(rarest, self._lookup_gap * 2)
        self._next_lookup = now + self._lookup_gap

    def _room_for_a_stranger(self) -> bool:
        """Whether one more may be remembered, if need be in the place of the one that failed most dials."""
        if len(self._known) >= MAX_KNOWN:
            return False
        strangers = {peer: known.failures for peer, known in self._known.items() if known.is_stranger}
        if len(strangers) < MAX_STRANGERS:
            return True
        failed_most = max(strangers, key=strangers.__getitem__)
        if strangers[failed_most] < STRANGER_DIALS:
            return False
        del self._known[failed_most]
        return True

    async def _dial_due(self) -> None:
        now = self._clock()
        room = min(DIALS_AT_ONCE, self._max_peers - len(self._connected))
        due = [peer for peer, known in self._known.items() if peer not in self._connected and known.next_dial <= now]
        due.sort(key=lambda peer: self._known[peer].turn)
        await asyncio.gather(*(self._dial(peer) for peer in due[: max(0, room)]))

    async def _dial(self, peer: str) -> None:
        known = self._known[peer]
        try:
            await self._transport.connect(known.address, timeout=DIAL_SECONDS)
        except TransportError as error:  # whatever the library raised over one peer must not end the service
            if known.is_bootstrap:
                self.last_error = str(error)
            log.debug("dialling %s: %s", known.address, error)
            if isinstance(error, NoAddress) and not known.is_bootstrap and not known.is_stranger:
                del self._known[peer]  # it came to ask something and listens nowhere: who takes part says where
                return
        else:
            if known.is_bootstrap:
                self.last_error = None
            return
        known.failures += 1
        pause = pause_after(known.failures, FIRST_BACK_OFF, LONGEST_BACK_OFF)
        known.next_dial = self._clock() + pause * self._random.uniform(0.75, 1.25)
