"""How the libp2p host is configured, and what is checked before it listens."""

import errno
import logging
import math
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from libp2p import new_host
from libp2p.abc import IHost, INetConn, INetStream, INetwork, INotifee
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.network.config import ConnectionConfig
from libp2p.rcmgr import new_resource_manager
from multiaddr import Multiaddr

from swarm.libp2p_addresses import expand_unspecified
from swarm.transport import TransportError

MAX_CONNECTIONS = 128
ADDRESS_SECONDS = 5.0
"""How long own addresses are taken to be as they were."""


@dataclass(frozen=True, slots=True)
class HostSettings:
    seed: bytes
    """32-byte Ed25519 private key."""
    listen: tuple[str, ...]
    announce: tuple[str, ...]
    """Multiaddrs to tell others instead of the listen addresses."""
    psk: bytes | None


def configured_host(settings: HostSettings) -> IHost:
    """TCP, Noise and Yamux, without the library's own ideas of whom to refuse and whom to dial."""
    # py-libp2p logs peers that go away and refused streams as warnings and errors; we report those ourselves.
    logging.getLogger("libp2p").setLevel(logging.CRITICAL)

    def advertised(listening: Sequence[Multiaddr]) -> list[Multiaddr]:
        announced = [Multiaddr(address) for address in settings.announce]
        return announced or expand_unspecified(list(listening))

    host = new_host(
        key_pair=create_new_key_pair(settings.seed),
        listen_addrs=[Multiaddr(address) for address in settings.listen],
        muxer_preference="YAMUX",
        psk=settings.psk.hex() if settings.psk is not None else None,
        resource_manager=new_resource_manager(
            enable_metrics=False,
            # A node that trains is often short of memory and busy; neither is a reason to refuse peers.
            enable_memory_limits=False,
            enable_memory_pooling=False,
            enable_circuit_breaker=False,
            enable_graceful_degradation=False,
        ),
        connection_config=ConnectionConfig(
            max_connections=MAX_CONNECTIONS,
            high_watermark=MAX_CONNECTIONS,
            min_connections=0,
            low_watermark=0,
        ),
        addrs_factory=advertised,
        disable_identify_address_discovery=True,
    )
    host.get_addrs = _remembered(host, time.monotonic)
    # Whom to dial is the discovery service's business. Whatever the watermarks are, the library dials everybody in its
    # peerstore, banned ones too, until it is half way between them.
    host.get_network().auto_connector.maybe_connect = _dial_nobody
    return host


async def _dial_nobody() -> None:
    pass


def _remembered(host: IHost, clock: Callable[[], float]) -> Callable[[], list[Multiaddr]]:
    """`host.get_addrs` with a memory: the library asks at every gossip message, and interfaces seldom change."""
    ask = host.get_addrs
    known: list[Multiaddr] = []
    asked_at, listeners = -math.inf, 0

    def get_addrs() -> list[Multiaddr]:
        nonlocal known, asked_at, listeners
        now, listening = clock(), len(host.get_network().listeners)
        if now - asked_at > ADDRESS_SECONDS or listening != listeners:
            known, asked_at, listeners = ask(), now, listening
        return list(known)

    return get_addrs


def check_port_is_free(address: Multiaddr) -> None:
    """Raise TransportError when the port is taken or the address is not ours.

    The library listens with SO_REUSEPORT, so a second node would silently share the port: ask the kernel without it.
    """
    family = address.protocols()[0].name
    ip, port = address.value_for_protocol(family), int(address.value_for_protocol("tcp"))
    probe = socket.socket(socket.AF_INET6 if ":" in ip else socket.AF_INET)
    try:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((ip, port))
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise TransportError(
                f"port {port} of {ip} is in use (network.listen) ; stop what uses it (`ss -ltnp sport = :{port}` shows "
                f"that), or choose another: shoal config set network.listen /{family}/{ip}/tcp/N"
            ) from error
        raise TransportError(
            f"cannot listen on {address}: {error.strerror} (network.listen) ; give an address of this machine and a "
            f"port over 1023: shoal config set network.listen /{family}/{'0.0.0.0' if family == 'ip4' else '::'}/tcp/N"
        ) from error
    finally:
        probe.close()


class ConnectionEvents(INotifee):
    """The library's connection events as calls with the peer's id, which Noise has proven."""

    def __init__(self, joined: Callable[[str], None], left: Callable[[str], None]) -> None:
        self._joined = joined
        self._left = left

    async def connected(self, network: INetwork, conn: INetConn) -> None:
        if not conn.is_closed:
            self._joined(str(conn.muxed_conn.peer_id))

    async def disconnected(self, network: INetwork, conn: INetConn) -> None:
        self._left(str(conn.muxed_conn.peer_id))

    async def opened_stream(self, network: INetwork, stream: INetStream) -> None: ...

    async def closed_stream(self, network: INetwork, stream: INetStream) -> None: ...

    async def listen(self, network: INetwork, multiaddr: Multiaddr) -> None: ...

    async def listen_close(self, network: INetwork, multiaddr: Multiaddr) -> None: ...
