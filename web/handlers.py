"""One function an endpoint: read the question, ask the view, answer. What passes is decided in `web.guard`.

docs/api.md describes them for users.
"""

import contextlib
import functools
import io
from collections.abc import Callable, Iterator
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler

from web.answers import Refused, answer, encode
from web.auth import CODE_SECONDS, COOKIE_SECONDS, Auth
from web.endpoints import GET, MAX_REASON, POST
from web.files import Files
from web.guard import Guard, cookie_name
from web.live import Live
from web.openapi import document
from web.probes import prometheus, readiness, trouble
from web.queries import asked, body, group_id
from web.streams import Streams
from web.view import NodeView, NotFound, NothingToHold, SettingOverridden, SettingRefused

LOOPBACK = ("127.", "::1", "::ffff:127.")
FOR_THE_TOKEN = ("engine.command", "engine.args", "web.", "swarm.join", "model.path")
"""Settings that say what runs here and who may ask it: a session, which is for less than the token, cannot set them."""


class Handlers:
    """The endpoints, over one view."""

    def __init__(self, view: NodeView, auth: Auth, guard: Guard, streams: Streams) -> None:
        self.view, self.auth, self.guard, self.streams = view, auth, guard, streams
        self.files, self.live = Files(), Live(view)

    def routes(self) -> list[web.RouteDef]:
        api = "/api/v1"
        return [
            web.get("/", self.page),
            web.get("/static/{name}", self.static),
            web.get("/login", self.login, allow_head=False),
            web.get("/healthz", self.healthz),
            web.get("/readyz", self.readyz),
            web.get("/metrics", self.metrics),
            web.post(f"{api}/login", self.new_code),
            web.post(f"{api}/logout", self.logout),
            web.get(f"{api}/status", _answered("status", self.view.status)),
            web.get(f"{api}/steps", _answered("steps", self.view.steps)),
            web.get(f"{api}/series", _answered("series", self.view.series)),
            web.get(f"{api}/evaluations", _answered("evaluations", self.view.evaluations)),
            web.get(f"{api}/groups", self.groups),
            web.get(f"{api}/groups/{{id}}", self.group),
            web.get(f"{api}/peers", self.peers),
            web.get(f"{api}/peers/graph", _answered("peers/graph", self.view.peer_graph)),
            web.get(f"{api}/swarm", _answered("swarm", self.view.swarm)),
            web.get(f"{api}/swarm/invite.svg", self.invite),
            web.get(f"{api}/events", _answered("events", self.view.events)),
            web.get(f"{api}/events/stream", self.stream, allow_head=False),
            web.get(f"{api}/config", _answered("config", self.view.config)),
            web.post(f"{api}/config", self.change),
            web.get(f"{api}/openapi.json", self.openapi),
            web.post(f"{api}/pause", self.pause),
            web.post(f"{api}/resume", self.resume),
            web.post(f"{api}/stop", self.stop),
        ]

    # -- the page and signing in ------------------------------------------------------------------------------

    async def page(self, request: web.Request) -> web.Response:
        """The same page for everybody: it holds nothing until its script has asked the API."""
        return self.files.answer(request, "index.html")

    async def static(self, request: web.Request) -> web.Response:
        return self.files.answer(request, request.match_info["name"])

    async def login(self, request: web.Request) -> web.Response:
        """Spend a code, set the cookie. With a code that is not good, the page says so (401).

        Not for HEAD: whatever previews links must not spend the code.
        """
        cookie = self.auth.new_session(request.query.get("code", ""))
        if cookie is None and self.guard.credential(request) is None:
            return self.files.answer(request, "index.html", status=401)
        # 303, so that the code is in no history entry and no reload sends it again
        home = web.Response(status=303, headers={"Location": "/"})
        if cookie is not None:
            home.set_cookie(
                cookie_name(request),
                cookie,
                max_age=int(COOKIE_SECONDS),
                path="/",
                httponly=True,
                samesite="Strict",
            )
        return home

    async def new_code(self, request: web.Request) -> web.Response:
        """A one-time sign-in for a browser, for who holds the token: a session cannot make more of itself."""
        if self.guard.credential(request) != "token":
            raise Refused(403, "only the API token can make a sign-in code", "run `shoal open`")
        await body(request, POST["login"].fields)
        code = self.auth.new_code()
        return answer({"code": code, "path": f"/login?code={code}", "expires_in": CODE_SECONDS})

    async def logout(self, request: web.Request) -> web.Response:
        await body(request, POST["logout"].fields)
        name = cookie_name(request)
        session = request.cookies.get(name, "")
        self.auth.end_session(session)
        self.streams.end(session)
        done = answer({})
        done.del_cookie(name, path="/", httponly=True, samesite="Strict")
        return done

    # -- probes -----------------------------------------------------------------------------------------------

    async def healthz(self, request: web.Request) -> web.Response:
        """200 while the process answers; says nothing of the training."""
        return answer({"alive": True})

    async def readyz(self, request: web.Request) -> web.Response:
        """503 when the node failed or steps too slowly. The reasons are for this machine and for the token."""
        status = self.view.status()
        reasons = readiness(status)
        verdict = {"ready": not reasons, "state": status["state"]}
        if self._is_trusted(request):
            verdict["reasons"] = reasons
        return answer(verdict, 503 if reasons else 200)

    async def metrics(self, request: web.Request) -> web.Response:
        """Open to this machine; from elsewhere with the token, which Prometheus can send."""
        if not self._is_trusted(request):
            raise Refused(401, "metrics beyond loopback need the token", "set `authorization` in the scrape config")
        return web.Response(
            body=prometheus({**self.view.metrics(), **trouble(self.view.status()["groups"])}).encode(),
            headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"},
        )

    def _is_trusted(self, request: web.Request) -> bool:
        return (request.remote or "").startswith(LOOPBACK) or self.guard.credential(request) is not None

    # -- what the node knows ----------------------------------------------------------------------------------

    async def groups(self, request: web.Request) -> web.Response:
        given = asked(request, GET["groups"].parameters)
        before, limit = given.pop("before"), given.pop("limit")
        return answer(
            self.view.groups(before, limit, {name: value for name, value in given.items() if value is not None})
        )

    async def group(self, request: web.Request) -> web.Response:
        asked(request, GET["groups/{id}"].parameters)
        try:
            return answer(await self.view.group(group_id(request)))
        except NotFound as missing:
            raise Refused(404, str(missing) or "no such group", "list them: shoal groups") from missing

    async def peers(self, request: web.Request) -> web.Response:
        given = asked(request, GET["peers"].parameters)
        return answer(
            self.view.peers(
                given["offset"],
                given["limit"],
                sort=given["sort"],
                descending=given["descending"] == "1",
                search=given["search"] or "",
            )
        )

    async def invite(self, request: web.Request) -> web.Response:
        """The invite as a QR code, for a phone's camera or a screen across the room."""
        asked(request, GET["swarm/invite.svg"].parameters)
        invite = self.view.swarm().get("invite")
        if not invite:
            raise Refused(404, "this node has no invite yet", "wait until it knows its swarm: shoal status")
        import segno  # only here: who never asks for it need not load it

        try:
            code = segno.make_qr(invite, error="l", boost_error=False)
        except segno.DataOverflowError:
            raise Refused(
                404, f"an invite of {len(invite)} characters is too long for a QR code", "use it as text"
            ) from None
        drawn = io.BytesIO()
        code.save(drawn, kind="svg", scale=4, border=4, xmldecl=False, light="#fff", title="Invite", omitsize=False)
        return web.Response(body=drawn.getvalue(), content_type="image/svg+xml", charset="utf-8")

    async def stream(self, request: web.Request) -> web.StreamResponse:
        """The status, and events from `Last-Event-ID` or `after` on; without either, those that happen from now on."""
        parameters = GET["events/stream"].parameters
        after = asked(request, parameters)["after"]
        seen = request.headers.get("Last-Event-ID")
        if seen:
            # what the browser says when it comes back is newer than the address it first opened
            after = parameters["after"].read("Last-Event-ID", seen)
        if after is None:
            after = self.view.event_range()[1]
        by_session = self.guard.credential(request) == "session"
        session = request.cookies[cookie_name(request)] if by_session else None
        return await self.streams.send(request, self.live.blocks(after), session)

    async def openapi(self, request: web.Request) -> web.Response:
        asked(request, GET["openapi.json"].parameters)
        return web.Response(text=_openapi(), content_type="application/json")

    # -- what a person can ask of it --------------------------------------------------------------------------

    async def change(self, request: web.Request) -> web.Response:
        """Change settings: all that are named, or none where one is not good."""
        values = await body(request, POST["config"].fields)
        if not values:
            raise Refused(400, "no setting is named", 'send {"section.key": value}')
        kept = sorted(key for key in values if key.startswith(FOR_THE_TOKEN))
        if kept and self.guard.credential(request) != "token":
            raise Refused(403, f"a browser may not change {kept[0]}", f"shoal config set {kept[0]} VALUE")
        try:
            return answer(self.view.change(values))
        except SettingRefused as refused:
            what, _, fix = str(refused).partition(" ; ")
            raise Refused(409 if isinstance(refused, SettingOverridden) else 400, what, fix) from refused

    async def pause(self, request: web.Request) -> web.Response:
        """Pause after the step in progress, for a reason that the status shows."""
        reason = (await body(request, POST["pause"].fields)).get("reason", "asked for over the API")
        if not isinstance(reason, str) or len(reason) > MAX_REASON or not reason.isprintable():
            raise Refused(400, f"reason is not a line of at most {MAX_REASON} characters", "send a short one")
        with _training():
            self.view.pause(reason)
        return answer(self.view.status(), 202)

    async def resume(self, request: web.Request) -> web.Response:
        await body(request, POST["resume"].fields)
        with _training():
            self.view.resume()
        return answer(self.view.status(), 202)

    async def stop(self, request: web.Request) -> web.Response:
        """Stop the daemon in good order; it answers first."""
        await body(request, POST["stop"].fields)
        self.view.stop()
        return answer({}, 202)


def _answered(name: str, ask: Callable[..., Any]) -> Handler:
    """The endpoint of a question that the view answers as it stands, of the values of the query."""

    async def handler(request: web.Request) -> web.Response:
        return answer(ask(*asked(request, GET[name].parameters).values()))

    return handler


@contextlib.contextmanager
def _training() -> Iterator[None]:
    """Around what only a node that trains can do."""
    try:
        yield
    except NothingToHold as refused:
        what, _, fix = str(refused).partition(" ; ")
        raise Refused(409, what, fix) from refused


@functools.cache
def _openapi() -> str:
    return encode(document())
