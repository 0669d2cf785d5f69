"""What processes of a node and of a coordinator share: an identity that its swarm can reach, a web page, and an end."""

import asyncio
import logging
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, NoReturn

from node.addresses import caution, reachable
from node.config import Config
from node.history import History
from node.home import DaemonInfo, Home
from node.joining import keep_page_port, keep_port, listen_address, page_port
from node.progress import Progress, innermost
from node.watchdog import watch
from protocol.invite import Invite
from protocol.manifest import Manifest
from swarm.directory import list_in_directory
from swarm.libp2p_transport import Libp2pTransport
from swarm.peers import Discovery
from swarm.throttle import Throttle
from web.server import WebServer
from web.view import NodeView

log = logging.getLogger(__name__)

STOP_SECONDS = 4.0
"""How long a stop may take before the process exits anyway; what counts is on disk at any instant."""


class Stopped(Exception):
    """A stop was asked for, or the step goal is reached."""


class Presence:
    """One process of a home. `what` it is: node, or coordinator."""

    def __init__(self, home: Home, config: Config, clock: Callable[[], float], what: str) -> None:
        self.home, self.config, self.clock, self.what = home, config, clock, what
        self.identity = home.identity()
        self.started_at = clock()
        self.progress = Progress(clock, config.limits.stage_seconds, since=clock())
        self.history = History(home.database, clock)
        self.throttle = Throttle()
        self.throttle.limit(config.limits.upload_kbps, config.limits.download_kbps)
        self.stopped = asyncio.Event()
        swarm, network = home.swarm(), config.network
        self.transport = Libp2pTransport(
            self.identity,
            [listen_address(home, network)],
            announce=network.announce,
            psk=swarm.psk,
            throttle=self.throttle,
        )
        self.discovery = Discovery(
            self.transport,
            (*swarm.bootstrap, *network.bootstrap),
            swarm.manifest_digest,
            clock=time.monotonic,
        )

    async def run(
        self, services: Coroutine[Any, Any, None], stop: Callable[[], object], goodbye: Callable[[int], None]
    ) -> int:
        """Run the services until they end or a signal asks for a `stop`; the exit code, which `goodbye` is told, too.

        It is 0 after a stop, and 1 after a failure, which is written to the log and the history.
        """
        asyncio_loop = asyncio.get_running_loop()
        for signum in (signal.SIGINT, signal.SIGTERM):
            asyncio_loop.add_signal_handler(signum, stop)
        running, stopped = asyncio.create_task(services), asyncio.create_task(self.stopped.wait())
        await asyncio.wait({running, stopped}, return_when=asyncio.FIRST_COMPLETED)
        code = 0
        if running.done():
            code = self._outcome(running)
        else:
            self.progress.say("STOPPING", "a stop was asked for")
        running.cancel()
        _, pending = await asyncio.wait({running}, timeout=STOP_SECONDS)
        if pending:
            log.warning("the services did not stop within %.0f s; leaving them", STOP_SECONDS)
        stopped.cancel()
        goodbye(code)
        if pending:
            leave(self.home, code)  # asyncio would wait for them without end
        return code

    def _outcome(self, services: asyncio.Task[None]) -> int:
        """Exit code of the services that ended by themselves."""
        error = services.exception()
        if error is None or (isinstance(error, BaseExceptionGroup) and error.subgroup(Stopped)):
            return 0
        said = self.progress.fail(error)
        log.error("the %s failed", self.what, exc_info=innermost(error))
        self.history.event("error", "failed", said)  # `shoal status` reads it from then on
        return 1

    @asynccontextmanager
    async def services(self, view: NodeView, close: Callable[[], Awaitable[None]]) -> AsyncIterator[asyncio.TaskGroup]:
        """Be there: listen, serve the web page, look for peers. Other services go into the group that this gives.

        `close` takes their parts apart, after the web page is gone and before the network is.
        """
        web = WebServer(
            view,
            host=self.config.web.host,
            port=page_port(self.home, self.config.web),
            token=self.home.token(),
            allowed_hosts=self.config.web.allowed_hosts,
            clock=self.clock,
            hints=self.home.hints,
        )
        await self.transport.start()
        try:
            await web.start()
            self.home.write_daemon(DaemonInfo(os.getpid(), web.url, self.started_at, self.transport.addresses()))
            keep_port(self.home, self.config.network, self.transport)
            keep_page_port(self.home, self.config.web, web.url)
            log.info("the dashboard is at %s (sign in with: %s)", web.url, self.home.command("open"))
            log.info("%s %s listens at %s", self.what, self.identity.peer_id, ", ".join(self.transport.addresses()))
            async with asyncio.TaskGroup() as group:
                group.create_task(self.told(self._watch_transport()), name="transport")
                group.create_task(self.told(self.discovery.run()), name="discovery")
                group.create_task(self.told(watch(self.progress, self.home.logs / "stacks.log")), name="watchdog")
                yield group
        finally:
            await web.stop()
            await close()
            await self.transport.stop()

    async def told(self, service: Coroutine[Any, Any, None]) -> None:
        """Run a service; what breaks it is said while the API still answers, not only once all have stopped."""
        try:
            await service
        except Stopped:
            raise
        except Exception as error:
            self.progress.fail(error)
            raise

    async def _watch_transport(self) -> None:
        raise await self.transport.failed()

    async def list_publicly(self, manifest: Manifest, members: Callable[[], int]) -> None:
        """A service: tell the public directory of this swarm."""
        await list_in_directory(
            self.transport,
            self.identity,
            manifest,
            clock=self.clock,
            addresses=lambda: reachable(self.transport.addresses()),
            members=members,
        )

    def invite_uri(self) -> str:
        """A link with this process as the way in. It has no token: into a listed swarm it lets nobody new."""
        swarm = self.home.swarm()
        return Invite(swarm.manifest_digest, reachable(self.transport.addresses()), swarm.psk, swarm.name).to_uri()

    def invite_caution(self) -> str:
        return caution(reachable(self.transport.addresses()), self.config.network.announce)


def leave(home: Home, code: int) -> NoReturn:
    """End the process at once: taking torch apart takes seconds, and a matrix product cannot be interrupted.

    Everything is on disk: files are fsynced as they are written, and what the model thread computes is journalled.
    """
    home.remove_daemon()  # `shoal down` takes this for the end of the process
    home.clear_holder()
    logging.shutdown()
    sys.stdout.flush()
    os._exit(code)
