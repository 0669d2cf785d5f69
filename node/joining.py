"""How a process joins its home's swarm: the addresses that it and its page listen at, and the manifest, from the home
or a peer.
"""

import asyncio
import logging
from urllib.parse import urlsplit

from node.config import NetworkConfig, WebConfig
from node.home import Home
from node.progress import Progress
from protocol.manifest import Manifest
from swarm.fetch import FetchFailed, fetch_manifest
from swarm.transport import Transport, TransportError
from web.server import WebServerError, check_port

log = logging.getLogger(__name__)


def listen_address(home: Home, network: NetworkConfig) -> str:
    """The configured address; a free port (tcp/0) is kept once chosen, so that invites stay good."""
    kept = home.listen_port()
    return (
        f"{network.listen.removesuffix('/0')}/{kept}" if network.listen.endswith("/tcp/0") and kept else network.listen
    )


def keep_port(home: Home, network: NetworkConfig, transport: Transport) -> None:
    """Remember the port that tcp/0 became."""
    for address in transport.addresses():
        parts = address.split("/")
        if "tcp" in parts and network.listen.endswith("/tcp/0"):
            home.keep_listen_port(int(parts[parts.index("tcp") + 1]))


def page_port(home: Home, page: WebConfig) -> int:
    """The configured port of the dashboard; with 0 the one that it took before, where that is free."""
    if page.port:
        return page.port
    kept = home.page_port()
    if kept is None:
        return 0
    try:
        check_port(page.host, kept)
    except WebServerError:
        return 0
    return kept


def keep_page_port(home: Home, page: WebConfig, url: str) -> None:
    """Remember the port that 0 became."""
    taken = urlsplit(url).port
    if page.port == 0 and taken is not None:
        home.keep_page_port(taken)


async def know_manifest(home: Home, transport: Transport, progress: Progress, timeout: float) -> Manifest:
    """The swarm's manifest: from the home, or from a peer by the invite's digest; waits for one.

    `timeout` (s) is for each peer that is asked.
    """
    manifest = home.manifest()
    if manifest is not None:
        return manifest
    digest = home.swarm().manifest_digest
    while True:
        peers = transport.peers()
        missing = "no peer of the invite is reachable yet"
        if peers:
            missing = f"{len(peers)} connected, but none has sent the swarm's manifest yet"
        progress.say("WAITING", missing, "check that the inviting node is up and its port reachable")
        if peers:
            try:
                raw = await fetch_manifest(transport, digest, peers, timeout=timeout)
            except (TransportError, FetchFailed) as error:
                log.info("manifest not fetched yet: %s", error)
            else:
                manifest = Manifest.from_bytes(raw)
                home.keep_manifest(manifest)
                return manifest
        await asyncio.sleep(0.5)
