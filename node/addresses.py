"""Under which addresses others can dial this node, and who these others are."""

import ipaddress
from collections.abc import Sequence
from pathlib import Path

import psutil

CONTAINER_MARKS = ("/.dockerenv", "/run/.containerenv")
"""Files that Docker and Podman put into a container."""


def reachable(addresses: Sequence[str]) -> tuple[str, ...]:
    """Multiaddrs others can dial: an unspecified address becomes this machine's, those of the LAN first."""
    found: dict[str, None] = {}
    for address in addresses:
        _, kind, host, *rest = address.split("/")
        if kind not in ("ip4", "ip6") or not ipaddress.ip_address(host).is_unspecified:
            found[address] = None
            continue
        for own in interface_addresses(4 if kind == "ip4" else 6):
            found["/".join(("", kind, own, *rest))] = None
    return tuple(found)


def interface_addresses(version: int) -> list[str]:
    """This machine's addresses of IP version 4 or 6, loopback last, link-local (useless without a zone) left out."""
    parsed = []
    for entries in psutil.net_if_addrs().values():
        for entry in entries:
            try:
                address = ipaddress.ip_address(entry.address)
            except ValueError:  # a hardware address, or link-local with its zone
                continue
            if address.version == version and not address.is_link_local:
                parsed.append(address)
    return [str(address) for address in sorted(set(parsed), key=lambda a: (a.is_loopback, str(a)))]


def in_container() -> bool:
    return any(Path(mark).exists() for mark in CONTAINER_MARKS)


def caution(addresses: Sequence[str], announced: Sequence[str]) -> str:
    """What keeps others from using an invite with these addresses, and the fix; "" where nothing is known to."""
    if addresses and all(address.startswith(("/ip4/127.", "/ip6/::1/")) for address in addresses):
        return (
            "these addresses are of this machine only, so nobody elsewhere can use the invite ; "
            "shoal config set network.listen /ip4/0.0.0.0/tcp/7946, then start the node again"
        )
    if not announced and in_container():
        return (
            "these addresses are of this container, so nobody on another machine can use the invite ; "
            "set SHOAL_NETWORK_ANNOUNCE=/ip4/HOST/tcp/PORT with the machine's own address and the published port (for "
            "Compose's coordinator SHOAL_COORDINATOR_ANNOUNCE), then start it again"
        )
    return ""
