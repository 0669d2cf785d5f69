"""Who gets in: credentials, Host, Origin, and the headers of every answer."""

import asyncio
import json
import re
import time

import aiohttp
import pytest

from tests.web.fixture_view import FixtureView
from web.auth import CODE_SECONDS, Auth
from web.guard import host_name
from web.server import WebServer

TOKEN = "a-token-for-tests-0123456789"


def routes() -> list[tuple[str, str]]:
    """Method and path of every route there is, with something in the place of what a path takes."""
    server = WebServer(
        FixtureView(steps=42, peers=3, groups=40, events=7),
        host="127.0.0.1",
        port=0,
        token=TOKEN,
        allowed_hosts=(),
        clock=time.time,
    )
    return [
        (route.method, re.sub(r"\{\w+\}", "abcd", route.resource.canonical))
        for route in server.app.router.routes()
        if route.resource is not None
    ]


API = [(method, path) for method, path in routes() if path.startswith("/api/")]
PRIVATE = [*API, ("GET", "/api/v1/no-such-thing"), ("GET", "/static/../api/v1/status")]


def test_all_that_is_not_in_the_api_is_known():
    assert {path for method, path in routes() if (method, path) not in API} == {
        "/", "/static/abcd", "/login", "/healthz", "/readyz", "/metrics",
    }  # fmt: skip
    assert {"/api/v1/series", "/api/v1/peers/graph", "/api/v1/swarm/invite.svg", "/api/v1/openapi.json"} <= {
        path for _, path in API
    }


async def sign_in(anyone: aiohttp.ClientSession, client: aiohttp.ClientSession) -> str:
    """Gives `anyone` a session; returns the spent code."""
    code = (await (await client.post("/api/v1/login", json={})).json())["code"]
    async with anyone.get("/login", params={"code": code}, allow_redirects=False) as done:
        assert done.status == 303
    return code


@pytest.mark.parametrize(("method", "path"), PRIVATE)
async def test_nothing_private_without_the_right_token(anyone, view, method, path):
    for headers in (
        {},
        {"Authorization": "Bearer wrong"},
        {"Authorization": f"Bearer {TOKEN}x"},
        {"Authorization": f"Basic {TOKEN}"},
        {"Authorization": "Bearer"},
        {"Cookie": f"shoal_session_{anyone._base_url.port}=made-up"},
    ):
        async with anyone.request(method, path, headers=headers) as refused:
            assert refused.status == 401
            assert refused.headers["WWW-Authenticate"] == 'Bearer realm="shoal"'
            assert method == "HEAD" or set(await refused.json()) == {"error", "fix"}
    assert view.calls == []


@pytest.mark.parametrize(("method", "path"), API)
async def test_another_host_or_origin_gets_nothing_of_the_api(anyone, client, view, method, path):
    await sign_in(anyone, client)
    for session, headers, status in (
        (client, {"Host": "evil.example"}, 421),
        (client, {"Origin": "http://evil.example"}, 403),
        (anyone, {"Origin": "http://evil.example"}, 403),
        (anyone, {"Origin": "null"}, 403),
        (anyone, {"Sec-Fetch-Site": "cross-site"}, 403),
        *([(anyone, {}, 403)] if method == "POST" else []),  # a session's POST without an Origin
    ):
        async with session.request(method, path, headers=headers) as refused:
            assert refused.status == status
    assert view.calls == []


async def test_fixes_name_the_home_to_who_is_signed_in(view, monkeypatch):
    server = WebServer(
        view,
        host="127.0.0.1",
        port=0,
        token=TOKEN,
        allowed_hosts=(),
        clock=time.time,
        hints=lambda text: text.replace("shoal ", "shoal --home /here "),
    )
    monkeypatch.setattr(view, "pause", lambda reason: 1 / 0)
    signed = {"Authorization": f"Bearer {TOKEN}"}
    await server.start()
    try:
        async with aiohttp.ClientSession(server.url) as anyone:
            async with anyone.get("/api/v1/groups/abcdef", headers=signed) as missing:
                assert (await missing.json())["fix"] == "list them: shoal --home /here groups"
            async with anyone.post("/api/v1/pause", json={}, headers=signed) as broken:
                assert (await broken.json())["fix"].startswith("see `shoal --home /here logs`")
            async with anyone.get("/api/v1/status") as stranger:
                assert (await stranger.json())["fix"].startswith("in a browser: run `shoal open`;")
    finally:
        await server.stop()


@pytest.mark.parametrize("path", ["/", "/static/page.js", "/healthz", "/readyz", "/metrics"])
async def test_what_is_open_on_loopback(anyone, path):
    async with anyone.get(path) as answer:
        assert answer.status == 200


async def test_a_code_signs_a_browser_in_once(anyone, client, view):
    async with client.post("/api/v1/login", json={}) as made:
        login = await made.json()
    assert login["expires_in"] == CODE_SECONDS
    assert login["path"] == f"/login?code={login['code']}"
    async with anyone.get(login["path"], allow_redirects=False) as done:
        assert (done.status, done.headers["Location"]) == (303, "/")
        cookie = done.headers["Set-Cookie"]
        assert "HttpOnly" in cookie
        assert "SameSite=Strict" in cookie
        # two nodes on one machine share their cookies: the name has the port
        assert cookie.startswith(f"shoal_session_{anyone._base_url.port}=")
        assert login["code"] not in cookie
    async with anyone.get("/api/v1/status") as status:
        assert (await status.json())["step"] == 42
    anyone.cookie_jar.clear()
    async with anyone.get(login["path"], allow_redirects=False) as again:
        assert again.status == 401
        assert "Set-Cookie" not in again.headers
        assert "shoal open" in await again.text()


async def test_an_expired_code_and_an_invented_one(anyone, client, clock):
    code = (await (await client.post("/api/v1/login", json={})).json())["code"]
    clock.now += CODE_SECONDS
    for given in (code, "", "x" * 5000):
        async with anyone.get("/login", params={"code": given}, allow_redirects=False) as refused:
            assert refused.status == 401
            assert "Set-Cookie" not in refused.headers


async def test_a_preview_does_not_spend_the_code(anyone, client):
    path = (await (await client.post("/api/v1/login", json={})).json())["path"]
    async with anyone.head(path, allow_redirects=False) as preview:
        assert preview.status in (401, 405)
    async with anyone.get(path, allow_redirects=False) as done:
        assert done.status == 303


async def test_a_wrong_token_is_not_made_good_by_a_cookie(anyone, client):
    await sign_in(anyone, client)
    async with anyone.get("/api/v1/status", headers={"Authorization": "Bearer wrong"}) as refused:
        assert refused.status == 401


async def test_a_session_posts_only_from_this_page(anyone, client, view, server):
    await sign_in(anyone, client)
    port = anyone._base_url.port
    for origin in (None, "null", "http://evil.example", f"http://127.0.0.1:{port + 1}", "http://127.0.0.1", ""):
        headers = {} if origin is None else {"Origin": origin}
        async with anyone.post("/api/v1/pause", json={}, headers=headers) as refused:
            assert refused.status == 403, origin
    assert view.calls == []
    async with anyone.post("/api/v1/pause", json={}, headers={"Origin": server.url}) as done:
        assert done.status == 202
    assert view.calls == [("pause", "asked for over the API")]


async def test_a_session_makes_no_more_sessions(anyone, client, server, monkeypatch):
    await sign_in(anyone, client)
    asked, is_session = [], Auth.is_session
    monkeypatch.setattr(Auth, "is_session", lambda auth, cookie: asked.append(cookie) or is_session(auth, cookie))
    async with anyone.post("/api/v1/login", json={}, headers={"Origin": server.url}) as refused:
        assert refused.status == 403
    assert len(asked) == 1, "what is shown is looked at once a request"


@pytest.mark.parametrize("key", ["engine.command", "engine.args", "web.host", "swarm.join", "model.path"])
async def test_a_session_does_not_set_what_runs_here_and_who_may_ask(anyone, client, view, server, key):
    await sign_in(anyone, client)
    value = "embedded" if key == "model.path" else "x"  # what is no model is refused whoever asks
    asked = {"json": {key: value, "swarm.own_groups": 2}, "headers": {"Origin": server.url}}
    async with anyone.post("/api/v1/config", **asked) as refused:
        assert refused.status == 403
        assert (await refused.json())["fix"] == f"shoal config set {key} VALUE"
    assert view.calls == []
    async with client.post("/api/v1/config", json={key: value}) as done:
        assert done.status == 200


async def test_signing_out(anyone, client, server):
    await sign_in(anyone, client)
    (cookie,) = anyone.cookie_jar
    assert (
        int(cookie["max-age"]) > 365 * 24 * 3600
    )  # one that is used every day is signed out by the node or not at all
    kept = {cookie.key: cookie.value}
    streams = [await one.get("/api/v1/events/stream") for one in (anyone, client)]
    async with anyone.post("/api/v1/logout", json={}, headers={"Origin": server.url}) as done:
        assert done.status == 200
    async with asyncio.timeout(5):
        while len(server.streams) > 1:  # noqa: ASYNC110 - the stream tells nobody that it has ended
            await asyncio.sleep(0.01)
    assert not streams[1].content.at_eof()  # of the token, which has not signed out
    async with anyone.get("/api/v1/status", cookies=kept) as refused:
        assert refused.status == 401


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
async def test_pages_of_other_origins_get_nothing_from_the_api(client, site):
    async with client.get("/api/v1/status", headers={"Sec-Fetch-Site": site}) as refused:
        assert refused.status == 403
    async with client.get("/", headers={"Sec-Fetch-Site": site}) as page:
        assert page.status == 200


async def test_a_foreign_origin_is_refused_even_with_the_token(client):
    async with client.get("/api/v1/status", headers={"Origin": "http://evil.example"}) as refused:
        assert refused.status == 403
        assert "Access-Control-Allow-Origin" not in refused.headers


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:8420", "127.0.0.1.evil.example", "localhost.evil.example", "10.0.0.1", "0.0.0.0"],
)
@pytest.mark.parametrize("path", ["/", "/healthz", "/metrics", "/api/v1/status", "/login?code=x"])
async def test_a_rebound_name_is_refused(client, host, path):
    async with client.get(path, headers={"Host": host}) as refused:
        assert refused.status == 421
        fix = (await refused.json())["fix"]
    assert f"shoal config set web.allowed_hosts {host.partition(':')[0]}, with those set before" in fix
    assert "reef.lan" not in fix  # a page that rebinds its name may read this


@pytest.mark.parametrize("host", ["", "a b", "localhost@evil", "localhost/x", "[::1", "x" * 300, "local\thost"])
async def test_a_broken_host_is_refused(client, host):
    async with client.get("/api/v1/status", headers={"Host": host}) as refused:
        assert refused.status == 400


@pytest.mark.parametrize(
    "host", ["127.0.0.1:1", "localhost", "LOCALHOST:8420", "[::1]:8420", "reef.lan", "Reef.LAN:80"]
)
async def test_loopback_names_and_allowed_hosts_are_answered(client, host):
    async with client.get("/api/v1/status", headers={"Host": host}) as answer:
        assert answer.status == 200


def test_host_names():
    assert host_name("Node.Lan:8420") == "node.lan"
    assert host_name("[::1]:80") == "[::1]"
    with pytest.raises(ValueError, match="not a host name"):
        host_name("http://node.lan")


@pytest.mark.parametrize("path", ["/", "/static/page.css", "/login?code=x", "/readyz", "/api/v1/status", "/nowhere"])
async def test_headers_of_every_answer(client, path):
    async with client.get(path) as answer:
        headers = answer.headers
    assert headers["Content-Security-Policy"].startswith("default-src 'self'; ")
    assert "frame-ancestors 'none'" in headers["Content-Security-Policy"]
    assert "unsafe" not in headers["Content-Security-Policy"]
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Referrer-Policy"] == "no-referrer"
    assert headers["X-Frame-Options"] == "DENY"
    assert headers["Cross-Origin-Resource-Policy"] == "same-origin"
    assert headers["Cache-Control"] == (
        "no-cache" if path in ("/", "/static/page.css", "/login?code=x") else "no-store"
    )
    assert headers["Server"] == "shoal"


async def test_a_fault_is_an_answer_and_a_traceback_in_the_log(client, view, caplog):
    view.peer_rows = None
    async with client.get("/api/v1/peers/graph") as answer:
        assert answer.status == 500
        assert json.loads(await answer.text())["error"] == "the daemon failed to answer"
    assert "TypeError" in caplog.text
