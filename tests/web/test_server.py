"""The server's lifetime: where it listens, why it cannot, how fast it stops."""

import asyncio
import json
import time

import aiohttp
import pytest

from web.server import PortInUse, WebServer, WebServerError

TOKEN = "a-token-for-tests-0123456789"


def make(view, clock, host="127.0.0.1", port=0, token=TOKEN, allowed_hosts=()):
    return WebServer(view, host=host, port=port, token=token, allowed_hosts=allowed_hosts, clock=clock)


async def test_a_port_in_use_names_the_port_and_the_fix(view, clock, server):
    port = int(server.url.rpartition(":")[2])
    second = make(view, clock, port=port)
    with pytest.raises(
        PortInUse, match=rf"^port {port} of 127\.0\.0\.1 is in use .* ; .*shoal config set web\.port N$"
    ):
        await second.start()
    await second.stop()


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid"])
async def test_an_address_this_machine_has_not(view, clock, host):
    with pytest.raises(WebServerError, match=rf"^cannot listen on {host}:0: .* ; shoal config set web\.host 127"):
        await make(view, clock, host=host).start()


@pytest.mark.parametrize("settings", [{"allowed_hosts": ("http://reef.lan",)}, {"host": "a b"}, {"token": ""}])
def test_settings_that_cannot_work(view, clock, settings):
    with pytest.raises(WebServerError, match=" ; "):
        make(view, clock, **settings)


async def test_on_every_address_it_is_reached_over_loopback_and_only_with_the_token(view, clock):
    server = make(view, clock, host="0.0.0.0")
    await server.start()
    try:
        assert server.url.startswith("http://127.0.0.1:")
        async with aiohttp.ClientSession(server.url) as session, session.get("/api/v1/status") as refused:
            assert refused.status == 401
    finally:
        await server.stop()


async def test_idle_connections_cannot_take_all_descriptors(view, clock, monkeypatch):
    monkeypatch.setattr("web.server.MAX_CONNECTIONS", 4)
    server = make(view, clock)
    await server.start()
    try:
        port = int(server.url.rpartition(":")[2])
        idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(6)]
        async with aiohttp.ClientSession(server.url) as session, session.get("/healthz") as answer:
            assert answer.status == 200
        for reader, _ in idle[:3]:
            assert await asyncio.wait_for(reader.read(), 10) == b""  # the oldest were closed
        reader, newest = idle[-1]
        newest.write(b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        assert (await asyncio.wait_for(reader.readline(), 10)).startswith(b"HTTP/1.1 200")
        await asyncio.gather(*(asyncio.open_connection("127.0.0.1", port) for _ in range(40)))
        await asyncio.open_connection("127.0.0.1", port)
        await asyncio.sleep(0.1)
        assert len(server._runner.server.connections) <= 8
        for _, writer in idle:
            writer.close()
    finally:
        await server.stop()


TOO_LONG = "the request's address or headers are too long", "send less, or clear this host's cookies"


@pytest.mark.parametrize(
    ("request_line", "headers", "error", "fix"),
    [
        (b"GET /" + b"a" * 9000, b"", *TOO_LONG),
        (b"GET /", b"Cookie: " + b"a" * 9000, *TOO_LONG),
        (b"GET /", b"A: b\r\n" * 200 + b"C: d", *TOO_LONG),
        (b"\x16\x03\x01", b"", "the request is malformed", "send HTTP/1.1"),
    ],
    ids=["path", "cookie", "headers", "tls"],
)
async def test_a_malformed_request_is_refused_and_fills_no_log(view, clock, caplog, request_line, headers, error, fix):
    server = make(view, clock)
    await server.start()
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(server.url.rpartition(":")[2]))
        writer.write(request_line + b" HTTP/1.1\r\nHost: 127.0.0.1\r\n" + headers + b"\r\n\r\n")
        head, _, said = (await asyncio.wait_for(reader.read(), 10)).partition(b"\r\n\r\n")
        assert head.startswith((b"HTTP/1.0 400", b"HTTP/1.1 400"))
        assert b"Content-Security-Policy: default-src 'self'" in head
        assert json.loads(said) == {"error": error, "fix": fix}
        writer.close()
    finally:
        await server.stop()
    assert caplog.text == ""


async def test_stop_is_fast_with_open_streams_and_idle_connections(view, clock):
    server = make(view, clock)
    await server.start()
    url = server.url
    async with aiohttp.ClientSession(url, headers={"Authorization": f"Bearer {TOKEN}"}) as session:
        streams = [await session.get("/api/v1/events/stream") for _ in range(5)]
        async with session.get("/healthz") as answer:
            assert answer.status == 200
        started = time.perf_counter()
        await server.stop()
        assert time.perf_counter() - started < 1.0
        for stream in streams:
            stream.close()
        with pytest.raises(aiohttp.ClientConnectionError):
            await session.get("/healthz")
    assert len(server.streams) == 0
    again = make(view, clock, port=int(url.rpartition(":")[2]))
    await again.start()
    await again.stop()


async def test_stop_is_fast_while_an_answer_hangs(view, clock):
    async def forever(group_id):
        await asyncio.sleep(60)

    view.group = forever
    server = make(view, clock)
    await server.start()
    async with aiohttp.ClientSession(server.url, headers={"Authorization": f"Bearer {TOKEN}"}) as session:
        hanging = asyncio.ensure_future(session.get("/api/v1/groups/abcd"))
        await asyncio.sleep(0.05)
        started = time.perf_counter()
        await server.stop()
        assert time.perf_counter() - started < 1.0
        with pytest.raises(aiohttp.ClientError):
            await hanging


async def test_stop_without_start_and_twice(view, clock):
    server = make(view, clock)
    await server.stop()
    await server.start()
    await server.stop()
    await server.stop()
    with pytest.raises(WebServerError, match="does not run"):
        _ = server.url
