"""Finds the averagers of a swarm's other nodes: asks those that are connected, and has the own one dial what they say.

A node only says a port and an id: the host is the one that it is connected from, so nobody can point at somebody else.
"""

import asyncio
import hashlib
import logging
import re
from collections.abc import Callable
from ipaddress import ip_address

import msgspec

from protocol.averagers import AVERAGER_PROTOCOL, MAX_PLACE_BYTES, AveragerPlace, AveragerRequest
from protocol.messages import MAX_REQUEST_BYTES
from protocol.rejection import Reason, Rejected
from swarm.accounts import Accounts
from swarm.allowance import Allowance
from swarm.averaging import Averager
from swarm.newest import remember
from swarm.requests import decoded
from swarm.transport import Busy, Transport, TransportError

log = logging.getLogger(__name__)

LOOK_SECONDS = 5.0
ASK_AGAIN_SECONDS = 60.0
"""An averager has another address after each of its starts."""
AT_ONCE = 16
"""Peers that are asked together: one that is silent takes the whole deadline."""
MAX_PLACES = 16
ASKS_A_MINUTE = 6
_OWN = re.compile(r"/(?:ip4|ip6)/[^/]+/tcp/(\d+)/p2p/(\w+)")


class AveragerFinding:
    """A service: `serve_on` a transport, and `run` until cancelled."""

    def __init__(
        self,
        transport: Transport,
        averager: Averager,
        accounts: Accounts,
        clock: Callable[[], float],
        *,
        swarm: bytes,
        rounds: str,
        request_timeout: float,
        refused: Callable[[str], bool] = lambda peer: False,
    ) -> None:
        """`rounds`: their name, as the averager has it."""
        self._transport, self._averager, self._accounts, self._clock = transport, averager, accounts, clock
        self._swarm, self._timeout, self._refused = swarm, request_timeout, refused
        self._rounds = hashlib.sha256(rounds.encode()).digest()
        self._allowance = Allowance(ASKS_A_MINUTE / 60, ASKS_A_MINUTE, clock)
        self._asked: dict[str, float] = {}
        self.places: dict[str, str] = {}
        """Address of each node's averager, of those heard of last."""

    def serve_on(self, transport: Transport) -> None:
        transport.serve(AVERAGER_PROTOCOL, self.asked, max_request=MAX_REQUEST_BYTES)

    async def asked(self, peer: str, data: bytes) -> bytes:
        """Where the own averager is. Raises Rejected, Busy."""
        if self._refused(peer):
            raise Rejected(Reason.banned, f"{peer} is not on the coordinator's member list")
        if not self._allowance.take(peer):
            raise Busy(ASK_AGAIN_SECONDS)
        request = decoded(data, AveragerRequest, peer, self._accounts.offence)
        own = _OWN.fullmatch(self._averager.addresses[0]) if self._averager.addresses else None
        if (request.swarm, request.rounds) != (self._swarm, self._rounds) or own is None:
            return b""
        return msgspec.msgpack.encode(AveragerPlace(int(own[1]), own[2]))

    async def run(self) -> None:
        while True:
            await self.look()
            await asyncio.sleep(LOOK_SECONDS)

    async def look(self) -> None:
        """Ask who was not asked lately; have the averager dial what is new."""
        now, connections = self._clock(), self._transport.connections()
        self._asked = {peer: at for peer, at in self._asked.items() if peer in connections}
        before = dict(self.places)
        due = [
            peer
            for peer, connection in connections.items()
            if connection.host
            and not self._refused(peer)
            and now - self._asked.get(peer, now - ASK_AGAIN_SECONDS) >= ASK_AGAIN_SECONDS
        ][:AT_ONCE]
        self._asked.update(dict.fromkeys(due, now))
        for peer, place in zip(due, await asyncio.gather(*map(self._ask, due)), strict=True):
            if place is not None:
                remember(self.places, peer, address_of(connections[peer].host, place), MAX_PLACES)
        if self.places != before:
            log.info("averagers of other nodes: %s", " ".join(self.places.values()))
            self._averager.meet(tuple(self.places.values()))

    async def _ask(self, peer: str) -> AveragerPlace | None:
        request = msgspec.msgpack.encode(AveragerRequest(self._swarm, self._rounds))
        try:
            answer = await self._transport.request(
                peer, AVERAGER_PROTOCOL, request, max_bytes=MAX_PLACE_BYTES, timeout=self._timeout
            )
            return msgspec.msgpack.decode(answer, type=AveragerPlace) if answer else None
        except TransportError:  # without an averager, or busy: asked again later
            return None
        except (msgspec.DecodeError, RecursionError) as error:
            self._accounts.note(Rejected(Reason.malformed, f"place of an averager: {error}"), peer)
            return None


def address_of(host: str, place: AveragerPlace) -> str:
    """The multiaddr to dial."""
    return f"/ip{ip_address(host).version}/{host}/tcp/{place.port}/p2p/{place.peer}"
