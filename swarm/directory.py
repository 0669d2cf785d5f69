"""The directory of public swarms: their nodes say in the DHT that they are there, and tell whoever asks what of.

There is no server and no list: who asks finds those nodes of listed swarms that the DHT knows, and puts what they say
together. Any node of any of these swarms is a way in.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from protocol.identity import Identity
from protocol.invite import MAX_BOOTSTRAP
from protocol.listing import (
    LISTING_SECONDS,
    MAX_LISTING_BYTES,
    SHARDS,
    Listing,
    directory_key,
    open_listing,
    seal_listing,
    shard_of,
)
from protocol.manifest import Manifest
from protocol.messages import LISTING_PROTOCOL
from protocol.rejection import Rejected
from swarm.allowance import Allowance
from swarm.hearsay import Reach
from swarm.transport import Busy, Transport, TransportError

log = logging.getLogger(__name__)

TELL_SECONDS = 600.0
RETRY_SECONDS = 10.0
"""While no peer is connected there is nobody to tell."""
TELL_DEADLINE = 30.0
ANSWERS_A_SECOND, ANSWERS_AT_ONCE = 0.2, 5.0
"""To one peer; each is made anew, and signed."""
MAX_ASKED = 20
"""Nodes of each key of the directory."""
ASKED_AT_ONCE = 8
ASK_SECONDS = 10.0


async def list_in_directory(
    transport: Transport,
    identity: Identity,
    manifest: Manifest,
    *,
    clock: Callable[[], float],
    addresses: Callable[[], Sequence[str]],
    members: Callable[[], int],
) -> None:
    """A service: answer who asks, and say in the DHT that this node does. Runs until cancelled.

    `addresses`: where others reach this node; `members`: how many nodes of the swarm it has seen in the last day.
    """
    allowance = Allowance(ANSWERS_A_SECOND, ANSWERS_AT_ONCE, clock)
    sealed = b""
    sealed_at = float("-inf")

    async def answer(peer: str, data: bytes) -> bytes:
        nonlocal sealed, sealed_at
        if not allowance.take(peer):
            raise Busy(1 / ANSWERS_A_SECOND)
        now = clock()
        if not 0 <= now - sealed_at < LISTING_SECONDS / 3:
            listing = Listing(manifest, tuple(addresses()[:MAX_BOOTSTRAP]), members())
            sealed, sealed_at = seal_listing(identity, listing, now), now
        return sealed

    transport.serve(LISTING_PROTOCOL, answer, max_request=1)
    key = directory_key(shard_of(manifest))
    while True:
        told = bool(transport.peers())
        if told:
            try:
                async with asyncio.timeout(TELL_DEADLINE):
                    await transport.provide(key)
            except (TransportError, TimeoutError) as error:
                log.info("the directory was not told of this swarm: %s", error or "no answer in time")
                told = False
        await asyncio.sleep(TELL_SECONDS if told else RETRY_SECONDS)


@dataclass(slots=True)
class Found:
    """A swarm that somebody lists."""

    manifest: Manifest
    addresses: list[str]
    members: int
    """The most that one of its nodes says it has seen."""
    listed_by: int = 1
    """Nodes that answered."""

    @property
    def listing(self) -> Listing:
        return Listing(self.manifest, tuple(self.addresses[:MAX_BOOTSTRAP]), self.members)


async def discover(
    transport: Transport, ways_in: Iterable[str], *, clock: Callable[[], float], timeout: float
) -> tuple[list[Found], list[str]]:
    """Public swarms that can be reached through `ways_in`, those with most members first; and what went wrong.

    `timeout`: seconds for all of it. Raises TransportError when no way in answers.
    """
    problems: list[str] = []
    asked: set[str] = set()
    found: dict[bytes, Found] = {}
    places = asyncio.Semaphore(ASKED_AT_ONCE)
    reach = Reach()

    async def enter(address: str) -> bool:
        try:
            peer = await transport.connect(address, timeout=ASK_SECONDS)
        except TransportError as error:
            problems.append(str(error))
            return False
        asked.add(peer)
        connection = transport.connections().get(peer)
        reach.include(connection.host if connection else "")
        return True

    async def ask(peer: str, *, listed: bool) -> None:
        """`listed`: whether the directory names it, so that it must answer."""
        async with places:
            try:
                answer = await transport.request(
                    peer, LISTING_PROTOCOL, b"", max_bytes=MAX_LISTING_BYTES, timeout=ASK_SECONDS
                )
                listing = open_listing(answer, peer, clock())
            except (TransportError, Rejected) as error:
                if listed:
                    problems.append(f"{peer}: {error}")
                return
        addresses = [address for address in listing.addresses if reach.allows(address)]
        if not addresses:
            problems.append(f"{peer}: none of its addresses can be dialled from here: {', '.join(listing.addresses)}")
            return
        known = found.get(listing.manifest.digest)
        if known is None:
            found[listing.manifest.digest] = Found(listing.manifest, addresses, listing.members)
            return
        known.addresses += addresses
        known.members = max(known.members, listing.members)
        known.listed_by += 1

    async def look_up(shard: int) -> None:
        named = await transport.find_providers(directory_key(shard), timeout=ASK_SECONDS)
        new = [peer for peer in named if peer not in asked][:MAX_ASKED]
        asked.update(new)
        await asyncio.gather(*(ask(peer, listed=True) for peer in new))

    try:
        async with asyncio.timeout(timeout):
            if not any(await asyncio.gather(*map(enter, list(ways_in)))):
                raise TransportError("; ".join(problems) or "there is no node to ask")
            # a node that is asked the way may be of a listed swarm itself, and the DHT does not name who asks it
            await asyncio.gather(*(ask(peer, listed=False) for peer in list(asked)), *map(look_up, range(SHARDS)))
    except TimeoutError:
        problems.append(f"not all nodes answered within {timeout:.0f} s")
    return sorted(found.values(), key=lambda one: (-one.members, one.manifest.name)), problems
