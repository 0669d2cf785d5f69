"""Which of the addresses that peers tell of are dialled: a lie must not send a node about its owner's own network.

A node that was told only public addresses by its owner dials no private ones on hearsay, and one that lives in a
private network dials none of this machine. What the owner gives (invite, network.bootstrap) is dialled as it is.
"""

from collections.abc import Iterable
from enum import IntEnum
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address

LEAST_PORT, OTHER_PORTS = 1024, frozenset((443,))
"""Below are other services, whose owners would take a dial for an attack."""
NAT64 = IPv6Network("64:ff9b::/96")


class Scope(IntEnum):
    """How far an address leads; each includes those before it."""

    public = 0
    private = 1
    machine = 2


def scope_of(host: str) -> Scope | None:
    """Of an IP address; None: nobody is dialled there (unspecified, link-local, multicast, reserved). Raises
    ValueError."""
    address: IPv4Address | IPv6Address = ip_address(host.partition("%")[0])
    if isinstance(address, IPv6Address):
        if address.ipv4_mapped is not None:
            return scope_of(str(address.ipv4_mapped))
        if address in NAT64:
            return scope_of(str(IPv4Address(int(address) & 0xFFFFFFFF)))
        if address.sixtofour is not None or address.teredo is not None:  # they lead to an IPv4 address within
            return None
    if address.is_loopback:
        return Scope.machine
    if address.is_unspecified or address.is_link_local or address.is_multicast or address.is_reserved:
        return None
    return Scope.public if address.is_global else Scope.private


class Reach:
    """The widest scope of what the owner gave."""

    def __init__(self, hosts: Iterable[str] = ()) -> None:
        self.widest = Scope.public
        for host in hosts:
            self.include(host)

    def include(self, host: str) -> None:
        """The owner gave an address of this host; one that is no IP address, or empty, changes nothing."""
        try:
            scope = scope_of(host)
        except ValueError:
            return
        if scope is not None:
            self.widest = max(self.widest, scope)

    def allows(self, multiaddr: str) -> bool:
        """Whether an address that others told of may be dialled. A host name may lead anywhere, later too: in public,
        none is.
        """
        _, kind, host, transport, port, *_ = [*multiaddr.split("/"), "", "", "", ""]
        if transport != "tcp" or not (port.isascii() and port.isdigit()):
            return False
        if int(port) < LEAST_PORT and int(port) not in OTHER_PORTS:
            return False
        if kind in ("dns", "dns4", "dns6"):
            return self.widest > Scope.public
        try:
            scope = scope_of(host) if kind == f"ip{ip_address(host).version}" else None
        except ValueError:
            return False
        return scope is not None and scope <= self.widest


def host_of(multiaddr: str) -> str:
    """What stands where a multiaddr has its host."""
    return [*multiaddr.split("/"), "", ""][2]
