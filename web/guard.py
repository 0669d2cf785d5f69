"""What every request passes before a handler sees it: Host, Origin, credentials; and the headers of every answer.

A page on another site can send requests here from the user's browser, or rebind its own name to 127.0.0.1 and read
the answers. The first fails on Origin and Sec-Fetch-Site, the second on Host. The cookie of this node is also sent by
pages on other ports of this machine (cookies know no ports), which the same checks refuse.
"""

import ipaddress
import logging
import re
from collections.abc import Awaitable, Callable, Iterable
from typing import Literal

from aiohttp import web

from web.answers import Refused, error_answer
from web.auth import Auth

log = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Credential = Literal["token", "session"]
SHOWN = web.RequestKey[Credential | None]("credential")

LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "[::1]"})
HOST = re.compile(r"(\[[0-9a-f:.]{2,45}\]|[a-z0-9](?:[a-z0-9._-]{0,252}))(?::[0-9]{1,5})?", re.ASCII)
OPEN_ROUTES = frozenset({"/", "/static/{name}", "/login", "/healthz", "/readyz", "/metrics"})
"""Without credentials: the empty page, signing in, and probes (which say less beyond loopback: `Handlers.readyz`)."""

SECURITY_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'; "
    "object-src 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


class Guard:
    """The checks, as one aiohttp middleware, and the one place where errors become answers."""

    def __init__(self, auth: Auth, bound_host: str, allowed_hosts: Iterable[str], hints: Callable[[str], str]) -> None:
        """`hints`: makes commands in a text those for this node's home. Raises ValueError for an allowed host that is
        not a name, an address or one of them with a port."""
        self.auth = auth
        self._hints = hints
        self.hosts = set(LOOPBACK_NAMES)
        if not is_wildcard(bound_host):
            self.hosts.add(host_name(f"[{bound_host}]" if ":" in bound_host else bound_host))
        self.hosts.update(host_name(host) for host in allowed_hosts)

    @web.middleware
    async def middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            self._check_host(request)
            check_origin(request)
            # by the route that will run, not by the path as written: nothing to disagree about
            resource = request.match_info.route.resource
            if resource is None or resource.canonical not in OPEN_ROUTES:
                self._check_credentials(request)
            return await handler(request)
        except Refused as refused:
            return error_answer(refused.status, refused.error, self._fix(request, refused.fix), refused.headers)
        except web.HTTPException as error:
            allowed = {"Allow": error.headers["Allow"]} if "Allow" in error.headers else None
            return error_answer(error.status, f"{error.reason}: {request.path[:80]}", "see docs/api.md", allowed)
        except Exception:
            # the boundary of the process: a fault in one answer must not cost the node, and must not go unseen
            log.exception("%s %s failed", request.method, request.path)
            fix = self._fix(request, "see `shoal logs`, and report the traceback")
            return error_answer(500, "the daemon failed to answer", fix)

    def _fix(self, request: web.Request, words: str) -> str:
        """Its commands as those for this node's home: not to a stranger, whom they would tell where the home is."""
        return self._hints(words) if request.get(SHOWN) is not None else words

    def credential(self, request: web.Request) -> Credential | None:
        """What the client has shown, looked at once: that keeps its session alive. Raises Refused (401)."""
        if SHOWN not in request:
            request[SHOWN] = self._shown(request)
        return request[SHOWN]

    def _shown(self, request: web.Request) -> Credential | None:
        """A wrong token is not made good by a cookie."""
        header = request.headers.get("Authorization")
        if header is not None:
            scheme, _, given = header.partition(" ")
            if scheme.lower() != "bearer" or not self.auth.is_token(given.strip()):
                raise unauthorized("wrong API token")
            return "token"
        cookie = request.cookies.get(cookie_name(request))
        return "session" if cookie and self.auth.is_session(cookie) else None

    def _check_credentials(self, request: web.Request) -> None:
        shown = self.credential(request)
        if shown is None:
            raise unauthorized("not signed in")
        if shown == "session" and request.method not in ("GET", "HEAD") and "Origin" not in request.headers:
            raise Refused(403, "a browser's request without Origin", "use the page of this node, or the API token")

    def _check_host(self, request: web.Request) -> None:
        given = request.headers.getall("Host", [])
        try:
            name = host_name(given[0]) if len(given) == 1 else None
        except ValueError:
            name = None
        if name is None:
            raise Refused(400, "the Host header is missing or not a host", "use the address `shoal open` prints")
        if name not in self.hosts:
            raise Refused(
                421,
                f"this node does not answer as {name!r}",
                f"use http://127.0.0.1, or allow it: shoal config set web.allowed_hosts {name}, with those set before",
            )


def check_origin(request: web.Request) -> None:
    """Refuse what a page of another origin sends. Raises Refused (403)."""
    origin = request.headers.get("Origin")
    foreign = origin is not None and origin.partition("://")[2].lower() != request.headers["Host"].lower()
    fetch_site = request.headers.get("Sec-Fetch-Site", "none")
    # links from elsewhere to the page itself are fine: it holds nothing before it asks the API
    if foreign or (fetch_site not in ("same-origin", "none") and request.path.startswith("/api/")):
        raise Refused(403, "the request comes from a page of another origin", "use the page of this node")


def unauthorized(error: str) -> Refused:
    return Refused(
        401,
        error,
        "in a browser: run `shoal open`; else send 'Authorization: Bearer TOKEN', TOKEN from api.token of the home",
        {"WWW-Authenticate": 'Bearer realm="shoal"'},
    )


def cookie_name(request: web.Request) -> str:
    """One a port, because two nodes on one machine share their cookies."""
    _, _, port = request.headers["Host"].rpartition(":")
    return f"shoal_session_{port if port.isdigit() else 'default'}"


def host_name(text: str) -> str:
    """The name or address of a Host header, lower case, without the port. Raises ValueError."""
    found = HOST.fullmatch(text.lower())
    if found is None:
        raise ValueError(f"{text[:80]!r} is not a host name or address")
    return found[1]


def is_wildcard(host: str) -> bool:
    """Whether a server bound to it listens on every address of the machine."""
    try:
        return host == "" or ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


async def add_headers(request: web.Request, response: web.StreamResponse) -> None:
    """For `on_response_prepare`."""
    response.headers.update(SECURITY_HEADERS)
    response.headers.setdefault("Cache-Control", "no-store")
    response.headers["Server"] = "shoal"
