"""Where peers can be dialled: multiaddr parsing, own addresses, and a bounded book of what was learnt."""

import socket
from collections import OrderedDict

import psutil
from multiaddr import Multiaddr
from multiaddr.exceptions import Error as MultiaddrError

from protocol.identity import IdentityError, public_key_of
from swarm.transport import PeerUnreachable

BOOK_PEERS, ADDRESSES_PER_PEER = 1024, 4


def parse(multiaddr: str) -> tuple[Multiaddr | None, str]:
    """`(where, peer id)` of an address that ends in `/p2p/<id>`; `where` is None for a bare `/p2p/<id>`.

    Raises PeerUnreachable when it is no such address.
    """
    where, marker, peer = multiaddr.rpartition("/p2p/")
    try:
        public_key_of(peer)
        address = Multiaddr(where) if where else None
    except (IdentityError, MultiaddrError, ValueError) as error:
        raise PeerUnreachable(f"{multiaddr!r} is no peer address: {error}") from None
    if not marker:
        raise PeerUnreachable(f"{multiaddr!r} names no peer: an address must end in /p2p/<peer id>")
    return address, peer


def without_peer(address: Multiaddr) -> Multiaddr:
    return Multiaddr(str(address).partition("/p2p/")[0])


def expand_unspecified(listening: list[Multiaddr]) -> list[Multiaddr]:
    """Listen addresses as others can dial them: `/ip4/0.0.0.0` becomes one address for each own IPv4 address."""
    own = [
        entry.address
        for entries in psutil.net_if_addrs().values()
        for entry in entries
        if entry.family == socket.AF_INET
    ]
    expanded: list[Multiaddr] = []
    for address in listening:
        text = str(address)
        if text.startswith("/ip4/0.0.0.0/"):
            expanded += [Multiaddr(text.replace("0.0.0.0", ip, 1)) for ip in own]
        else:
            expanded.append(address)
    return expanded


class AddressBook:
    """Newest addresses of the peers met last. The library's peerstore forgets them, and identify replaces them."""

    def __init__(self) -> None:
        self._entries: OrderedDict[str, tuple[Multiaddr, ...]] = OrderedDict()

    def add(self, peer: str, addresses: tuple[Multiaddr, ...]) -> None:
        if not addresses:
            return
        kept = dict.fromkeys(without_peer(a) for a in (*addresses, *self._entries.get(peer, ())))
        self._entries[peer] = tuple(kept)[:ADDRESSES_PER_PEER]
        self._entries.move_to_end(peer)
        if len(self._entries) > BOOK_PEERS:
            self._entries.popitem(last=False)

    def get(self, peer: str) -> tuple[Multiaddr, ...]:
        return self._entries.get(peer, ())

    def forget(self, peer: str) -> None:
        self._entries.pop(peer, None)
