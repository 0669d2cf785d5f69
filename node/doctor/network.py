"""Checks of clock, ports and how peers reach this node. Nothing here is asked of anybody but the swarm's own peers."""

import ctypes
import errno
import ipaddress
import socket
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil

from node.addresses import interface_addresses
from node.doctor.finding import PROBE_SECONDS, Finding, Subject, failed, ok, warn
from node.home import HomeError, NoSwarm

FUTURE = "from_future"
"""What a peer's record is rejected for whose clock is ahead of ours (protocol/rejection.py)."""
TIME_ERROR, STA_UNSYNC = 5, 0x40
"""`adjtimex(2)`."""
CLOCK_FIX = "turn on time synchronisation: timedatectl set-ntp true, or your system's like"
MANY_FUTURES = 3
"""One peer with a wrong clock is that peer's trouble; this many rejections are looked into."""


class Timex(ctypes.Structure):
    """`struct timex` as far as it is read; the rest is room."""

    _fields_ = (
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        ("room", ctypes.c_char * 512),
    )


def kernel_clock() -> tuple[bool, float] | None:
    """(whether the kernel holds the clock for synchronised, its bound of the error in seconds); None: not told."""
    if sys.platform != "linux":
        return None
    told = Timex()
    state = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.byref(told))
    if state < 0:  # a container may not ask
        return None
    return state != TIME_ERROR and not told.status & STA_UNSYNC, told.maxerror / 1e6


def clock(subject: Subject) -> list[Finding]:
    """Time decides epochs and what is stale. No time server is asked: the kernel and the peers tell."""
    told, findings = kernel_clock(), list[Finding]()
    if told is None:
        findings.append(ok("clock", "not checked: the kernel does not say whether it is synchronised"))
    elif told[0]:
        findings.append(ok("clock", f"the kernel says it is synchronised, to {told[1]:.2g} s at worst"))
    else:
        findings.append(warn("clock", "the kernel says it is not synchronised", CLOCK_FIX))
    if subject.status is not None:
        futures = subject.status["groups"].get("rejected", {}).get(FUTURE, 0)
        if futures >= MANY_FUTURES:
            findings.append(
                warn(
                    "clock",
                    f"{futures} records of peers seemed to come from the future: slow here, or fast there",
                    CLOCK_FIX,
                )
            )
    return findings


def parts(address: str) -> tuple[str, int]:
    """Host and port of a multiaddr `/ip4|ip6|dns.../HOST/tcp/PORT[/p2p/ID]` that the settings have checked."""
    _, _, host, _, port, *_ = address.split("/")
    return host, int(port)


def listen_address(subject: Subject) -> tuple[str, int]:
    """Host and port that the node listens on; 0: chosen at its first start."""
    host, port = parts(subject.config.network.listen)
    return host, port or subject.home.listen_port() or 0


def ports(subject: Subject) -> list[Finding]:
    """The swarm's port and that of the dashboard: free, or ours already."""
    web = subject.config.web
    found = []
    for what, key, (host, port), needed in (
        ("swarm port", "network.listen", listen_address(subject), True),
        ("dashboard", "web.port", (web.host, web.port), False),
    ):
        if port == 0:
            found.append(ok("ports", f"{what}: a free one is chosen at the start ({key})"))
        elif subject.pid is not None and port in listened(subject.pid):
            found.append(ok("ports", f"{what} {port} is held by the running node"))
        elif (why := taken(host, port)) is None:
            found.append(ok("ports", f"{what} {port} is free"))
        elif subject.pid is not None and not needed:
            found.append(ok("ports", f"{what} {port} is taken by another program; the node chose another one"))
        else:
            fix = f"end what holds it, or set another {key}"
            if subject.initialised and subject.home.holder() is not None:
                fix = f"a node that starts or hangs may hold it; {fix}"
            found.append(Finding("ports", "fail" if needed else "warn", f"{what} {host}:{port}: {why}", fix))
    return found


def listened(pid: int) -> set[int]:
    """Ports that a process of this user listens on."""
    return {c.laddr.port for c in connections(pid) if c.status == psutil.CONN_LISTEN}


def connections(pid: int) -> Sequence[Any]:
    try:
        return psutil.Process(pid).net_connections(kind="tcp")
    except psutil.Error:  # it has just ended, or is another user's
        return []


def taken(host: str, port: int) -> str | None:
    """Why nothing can listen there, or None."""
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(where)
            probe.listen(1)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return "another program holds it"
        return error.strerror or str(error)
    return None


def reachability(subject: Subject) -> list[Finding]:
    """Whether peers can dial this node, as far as that can be known from here."""
    network = subject.config.network
    host, port = listen_address(subject)
    dialled_by = incoming(subject.pid, port) if subject.pid is not None else []
    outside = sorted(host for host in dialled_by if is_public(host))
    if outside or network.announce:
        return [*_dialled(dialled_by), *map(_announced, network.announce)]
    if is_loopback(host):
        return [
            warn(
                "reachability",
                f"network.listen = {network.listen}: only this machine can dial this node",
                "shoal config set network.listen /ip4/0.0.0.0/tcp/7946, if others shall",
            )
        ]
    info = subject.home.daemon() if subject.pid is not None else None
    if info is not None and info.addresses and all(is_loopback(parts(address)[0]) for address in info.addresses):
        return [ok("reachability", "the running node listens on this machine only, as it was started (`shoal local`)")]
    public = [address for address in own_addresses(host) if is_public(address)]
    if public:
        said = f"it listens on a public address ({public[0]}); whether a firewall lets peers in, only they can tell"
        return [*_dialled(dialled_by), ok("reachability", said)]
    where = f"TCP port {port}" if port else "the TCP port"
    return [
        *_dialled(dialled_by),
        warn(
            "reachability",
            "all its addresses are private: peers beyond your network cannot dial it. It can dial "
            "them, so it trains with others all the same",
            f"to be dialled: forward {where} in the router to this machine, and shoal config set network.announce "
            f"/ip4/OUTSIDE-ADDRESS/tcp/{port or 'PORT'}",
        ),
    ]


def _dialled(by: Sequence[str]) -> list[Finding]:
    return [ok("reachability", f"dialled by {len(by)} peers now: {', '.join(sorted(by)[:5])}")] if by else []


def _announced(address: str) -> Finding:
    host, port = parts(address)
    if (why := unreachable(host, port)) is None:
        return ok("reachability", f"{address} (network.announce) answers")
    return warn(
        "reachability",
        f"{address} (network.announce) does not answer from here: {why}",
        "some routers refuse their own outside address from within; else check the port's forwarding",
    )


def incoming(pid: int, port: int) -> list[str]:
    """Hosts that have connected to a port of a process and still are; this machine's own left out."""
    own = {*interface_addresses(4), *interface_addresses(6)}
    hosts = {
        c.raddr.ip.removeprefix("::ffff:")
        for c in connections(pid)
        if c.status == psutil.CONN_ESTABLISHED and c.laddr.port == port and c.raddr
    }
    return sorted(hosts - own)


def own_addresses(host: str) -> list[str]:
    """Addresses behind a host to listen on: of all interfaces, where it is the unspecified one."""
    given = ipaddress.ip_address(host)
    return interface_addresses(given.version) if given.is_unspecified else [host]


def is_public(host: str) -> bool:
    return ipaddress.ip_address(host).is_global


def is_loopback(host: str) -> bool:
    return ipaddress.ip_address(host).is_loopback


def unreachable(host: str, port: int) -> str | None:
    """Why a TCP connection cannot be made, or None. Waits PROBE_SECONDS at most for each of its addresses."""
    try:
        socket.create_connection((host, port), PROBE_SECONDS).close()
    except TimeoutError:
        return f"no answer within {PROBE_SECONDS:.0f} s"
    except OSError as error:
        return error.strerror or str(error)
    return None


def bootstrap(subject: Subject) -> list[Finding]:
    """Whether the peers of the invite and of network.bootstrap can be dialled."""
    try:
        invited = subject.home.swarm().bootstrap if subject.initialised else ()
    except NoSwarm:
        invited = ()
    except HomeError as error:
        return [failed("bootstrap", error)]
    addresses = list(dict.fromkeys((*invited, *subject.config.network.bootstrap)))
    if not addresses:
        return [ok("bootstrap", "no peer to dial: this node waits for others (shoal swarm invite)")]
    with ThreadPoolExecutor(len(addresses)) as pool:
        faults = list(pool.map(lambda address: unreachable(*parts(address)), addresses))
    if not any(faults):
        return [ok("bootstrap", f"all {len(addresses)} answer")]
    peers = subject.status["peers"] if subject.status is not None else 0
    alone = all(faults) and not peers
    fix = "check that those nodes are up and their ports open, or join with a fresh invite"
    return [
        Finding("bootstrap", "fail" if alone else "warn", f"{address.partition('/p2p/')[0]}: {fault}", fix)
        for address, fault in zip(addresses, faults, strict=True)
        if fault
    ]
