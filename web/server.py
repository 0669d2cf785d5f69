"""The local HTTP server's lifetime: bind, say where, stop at once."""

import asyncio
import errno
import ipaddress
import logging
import socket
from collections.abc import Callable, Iterable

from aiohttp import web
from aiohttp.http_exceptions import LineTooLong

from web.answers import error_answer
from web.auth import Auth
from web.guard import SECURITY_HEADERS, Guard, add_headers
from web.handlers import Handlers
from web.queries import MAX_BODY
from web.streams import Streams
from web.view import NodeView

MAX_CONNECTIONS = 128
"""Open at a time; one more closes the oldest, so that idle ones cannot take all of the process's descriptors."""
IDLE_SECONDS = 30.0
"""How long an unused connection stays open."""
STOP_SECONDS = 0.3
"""What a stop gives answers in progress; aiohttp takes it at most twice."""


# aiohttp tells of malformed requests with a traceback each, and anybody can send one; faults of ours web/guard.py logs
QUIET = logging.getLogger("web.http")
QUIET.disabled = True


class WebServerError(Exception):
    """The server cannot start; the message names the setting and the fix."""


class PortInUse(WebServerError):
    """Somebody else listens there."""


class Connection(web.RequestHandler):
    """aiohttp's, but what is no HTTP is refused as all else is: it never comes to web/guard.py."""

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        super().handle_error(request, status, exc, message)
        if status >= 500:
            refused = error_answer(status, "the daemon failed to answer", "see `shoal logs`")
        elif isinstance(exc, LineTooLong) or "Too many" in str(exc):
            # browsers send the cookies of a host's other ports, too
            what, fix = "the request's address or headers are too long", "send less, or clear this host's cookies"
            refused = error_answer(status, what, fix)
        else:
            refused = error_answer(status, "the request is malformed", "send HTTP/1.1")
        refused.headers.update(SECURITY_HEADERS)
        refused.force_close()
        return refused


class WebServer:
    """The API and the dashboard of one node, from `start` to `stop`."""

    def __init__(
        self,
        view: NodeView,
        *,
        host: str,
        port: int,
        token: str,
        allowed_hosts: Iterable[str],
        clock: Callable[[], float],
        hints: Callable[[str], str] = str,
    ) -> None:
        """`clock` in seconds, for codes and sessions. `hints`: makes commands in a text those for this node's home.
        Raises WebServerError for settings that cannot work.
        """
        self.host, self.port = host, port
        try:
            auth = Auth(token, clock)
        except ValueError as error:
            raise WebServerError(f"{error} ; remove api.token from the home: a new one is made") from error
        try:
            guard = Guard(auth, host, allowed_hosts, hints)
        except ValueError as error:
            raise WebServerError(f"web.host or web.allowed_hosts: {error} ; give names or addresses") from error
        self.streams = Streams()
        self.app = web.Application(middlewares=[guard.middleware], client_max_size=MAX_BODY)
        self.app.on_response_prepare.append(add_headers)
        self.app.add_routes(Handlers(view, auth, guard, self.streams).routes())
        self._runner: web.AppRunner | None = None
        self._listening: asyncio.Server | None = None

    async def start(self) -> None:
        """Listen. Raises PortInUse, WebServerError."""
        runner = web.AppRunner(self.app, handler_cancellation=True, shutdown_timeout=STOP_SECONDS)
        await runner.setup()
        try:
            self._listening = await asyncio.get_running_loop().create_server(
                lambda: _accept(runner), self.host, self.port, backlog=MAX_CONNECTIONS
            )
        except OSError as error:
            await runner.cleanup()
            raise _unusable(self.host, self.port, error) from error
        self._runner = runner

    @property
    def url(self) -> str:
        """Where this machine reaches the server, without a trailing slash. Only while it runs."""
        if self._listening is None:
            raise WebServerError("the web server does not run ; start it first")
        address, port = self._listening.sockets[0].getsockname()[:2]
        ip = ipaddress.ip_address(address)
        if ip.is_unspecified:
            address = "::1" if ip.version == 6 else "127.0.0.1"
        return f"http://[{address}]:{port}" if ip.version == 6 else f"http://{address}:{port}"

    async def stop(self) -> None:
        """Close everything within a second, streams first. Harmless when it does not run."""
        runner, self._runner = self._runner, None
        listening, self._listening = self._listening, None
        if runner is None or listening is None:
            return
        listening.close()
        self.streams.close()
        await runner.cleanup()


def check_port(host: str, port: int) -> None:
    """Raises what `WebServer.start` would, before anything is done that takes long."""
    try:
        socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
    except OSError as error:
        raise _unusable(host, port, error) from error


def _unusable(host: str, port: int, error: OSError) -> WebServerError:
    where = f"{host}:{port}"
    if error.errno == errno.EADDRINUSE:
        return PortInUse(
            f"port {port} of {host} is in use (web.port) ; stop what uses it, or choose another (0: any free one): "
            "shoal config set web.port N"
        )
    if error.errno == errno.EACCES:
        return WebServerError(
            f"not allowed to listen on {where} ; choose a port over 1023: shoal config set web.port N"
        )
    return WebServerError(f"cannot listen on {where}: {error.strerror or error} ; shoal config set web.host 127.0.0.1")


def _accept(runner: web.AppRunner) -> asyncio.Protocol:
    """What answers a new connection."""
    assert runner.server is not None
    open_ones = runner.server.connections  # oldest first
    for surplus in open_ones[: max(0, len(open_ones) + 1 - MAX_CONNECTIONS)]:
        surplus.force_close()
    # no access log: the address of a sign-in holds its code
    return Connection(
        runner.server,
        loop=asyncio.get_running_loop(),
        access_log=None,  # type: ignore[arg-type]
        logger=QUIET,
        keepalive_timeout=IDLE_SECONDS,
    )
