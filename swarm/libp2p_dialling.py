"""Keeps the libp2p host from dialling what peers made up (swarm.hearsay), whichever part of the library dials."""

from collections.abc import Awaitable, Callable, Iterable

from libp2p.abc import INetwork, ITransport
from multiaddr import Multiaddr

from swarm.hearsay import Reach, host_of
from swarm.libp2p_addresses import ADDRESSES_PER_PEER, without_peer
from swarm.newest import remember

MAX_GIVEN = 256
Resolve = Callable[[str], Awaitable[list[str]]]
"""IP addresses of a host name; none where it is not known."""


class DialGate:
    """Refuses in the one place that every dial of the library passes: where a transport is chosen for an address."""

    def __init__(self, network: INetwork, listen: Iterable[str], resolve: Resolve) -> None:
        self.known = Reach(host for host in map(host_of, listen) if host not in ("0.0.0.0", "::"))
        self._resolve = resolve
        self._given: dict[str, None] = {}
        """What the owner gave, as it was given."""
        chosen = network.transport_manager
        choose = chosen.transport_for_dialing

        def for_dialing(address: Multiaddr) -> ITransport | None:
            return choose(address) if self.allows(address) else None

        chosen.transport_for_dialing = for_dialing

    def give(self, address: Multiaddr) -> None:
        """The owner of this node named this address."""
        text = str(without_peer(address))
        self.known.include(host_of(text))
        remember(self._given, text, None, MAX_GIVEN)

    def allows(self, address: Multiaddr) -> bool:
        text = str(without_peer(address))
        return text in self._given or self.known.allows(text)

    async def dialled(self, told: Iterable[Multiaddr]) -> list[Multiaddr]:
        """Of addresses that peers told of, those that may be dialled; host names as what they lead to now."""
        found: dict[Multiaddr, None] = {}
        names = 0
        for address in map(without_peer, told):
            if self.allows(address):
                found[address] = None
            elif str(address).startswith("/dns") and names < ADDRESSES_PER_PEER:
                names += 1
                _, _, host, _, port, *_ = [*str(address).split("/"), "", "", "", ""]
                for ip in await self._resolve(host):
                    resolved = Multiaddr(f"/{'ip6' if ':' in ip else 'ip4'}/{ip}/tcp/{port}")
                    if self.allows(resolved):
                        found[resolved] = None
        return list(found)
