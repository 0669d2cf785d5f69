"""Connections between machines: who knows the secret gets through, nobody else does, and nobody can hold one up."""

import asyncio
import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from aiohttp import ClientSession, UnixConnector, web

from node.large import handshake, tunnel
from node.large.handshake import DIAL, MAX_NAME, NONCE_BYTES, Stranger, answer, dial, new_secret, proof
from node.large.tunnel import FarEnd, NearEnd

pytestmark = pytest.mark.network

SECRET = bytes(range(32))


def met(other: Callable[[int], object], secret: bytes = SECRET, seconds: float = 5.0) -> str | Exception:
    """What the listener makes of who comes."""
    found: list[str | Exception] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(10)

        def listen() -> None:
            connection, _ = listener.accept()
            with connection:
                try:
                    found.append(answer(connection, secret, seconds))
                    connection.sendall(b"welcome")
                except (Stranger, OSError) as error:
                    found.append(error)

        thread = threading.Thread(target=listen)
        thread.start()
        other(listener.getsockname()[1])
        thread.join(10)
    return found[0]


def test_both_sides_know_each_other() -> None:
    def come(port: int) -> None:
        with dial("127.0.0.1", port, SECRET, "worker 3", 5.0) as connection:
            assert connection.gettimeout() is None
            assert connection.recv(7, socket.MSG_WAITALL) == b"welcome"

    assert met(come) == "worker 3"


def test_another_secret_is_refused_on_both_sides() -> None:
    def come(port: int) -> None:
        with pytest.raises((Stranger, OSError)):
            dial("127.0.0.1", port, new_secret(), "worker 3", 5.0)

    assert str(met(come)) == "it does not know the secret"


def test_a_listener_that_does_not_know_it_is_found_out() -> None:
    """It can echo what it was sent, and say what it likes."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def pretend() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(bytes(NONCE_BYTES))
                said = connection.recv(1000)
                connection.sendall(said[-32:])

        thread = threading.Thread(target=pretend)
        thread.start()
        with pytest.raises(Stranger, match="does not know the secret"):
            dial("127.0.0.1", listener.getsockname()[1], SECRET, "a", 5.0)
        thread.join(10)


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (b"", "it hung up"),
        (b"GET / HTTP/1.1\r\n\r\n", "it hung up"),
        (os.urandom(32) + b"\x01a" + bytes(32), "it does not know the secret"),
        (os.urandom(32) + bytes([MAX_NAME + 1]) + bytes(200), "a name of 65 bytes"),
        (os.urandom(32) + b"\x02\xff\xfe" + bytes(32), "it does not know the secret"),
    ],
)
def test_strangers(said: bytes, why: str) -> None:
    def come(port: int) -> None:
        with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
            connection.sendall(said)
            with contextlib.suppress(OSError):  # hung up on before it was read to its end
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(1000):
                    pass

    assert str(met(come)) == why


def test_a_recorded_dial_is_of_no_use() -> None:
    recorded = os.urandom(32) + b"\x01a" + proof(SECRET, DIAL, bytes(32), bytes(32), b"a")

    def come(port: int) -> None:
        with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
            connection.sendall(recorded)
            while connection.recv(1000):
                pass

    assert str(met(come)) == "it does not know the secret"


def test_a_byte_now_and_then_gains_nothing() -> None:
    def come(port: int) -> None:
        with socket.create_connection(("127.0.0.1", port)) as connection:
            for _ in range(20):
                try:
                    connection.sendall(b"x")
                except OSError:
                    return
                time.sleep(0.1)

    began = time.monotonic()
    assert str(met(come, seconds=0.5)) in ("it did not say who it is", "it hung up")
    assert time.monotonic() - began < 5


# -- tunnels ---------------------------------------------------------------------------------------------------


async def serve(path: Path) -> web.AppRunner:
    async def hello(request: web.Request) -> web.Response:
        return web.Response(body=await request.read() + b"!")

    app = web.Application(client_max_size=1 << 24)
    app.router.add_post("/", hello)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.UnixSite(runner, str(path)).start()
    return runner


async def test_http_goes_through_and_strangers_do_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = await serve(tmp_path / "server")
    far, near = FarEnd(str(tmp_path / "server"), SECRET), NearEnd(tmp_path / "near")
    port = await far.listen("127.0.0.1")
    await near.point("127.0.0.1", port, SECRET)
    assert (tmp_path / "near").stat().st_mode & 0o777 == 0o600
    body = os.urandom(3_000_000)
    async with ClientSession(connector=UnixConnector(str(tmp_path / "near"))) as session:

        async def post(content: bytes) -> bytes:
            async with session.post("http://x/", data=content) as response:
                return await response.read()

        answers = await asyncio.gather(*(post(body[at:]) for at in range(20)))
        assert answers == [body[at:] + b"!" for at in range(20)]

    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"POST / HTTP/1.1\r\nContent-Length: 0\r\n\r\n" + bytes(200))
    assert len(await reader.read()) == NONCE_BYTES, "a nonce and no more"
    writer.close()

    # one too many is hung up on, before it is listened to
    monkeypatch.setattr(tunnel, "MAX_CONNECTIONS", 0)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    assert await reader.read() == b""
    assert far._relays.refused == 1
    writer.close()
    monkeypatch.undo()

    # silent ones do not stay
    monkeypatch.setattr(tunnel, "HANDSHAKE_SECONDS", 0.2)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    async with asyncio.timeout(5):
        await reader.read()
    writer.close()

    # a far end that is gone, or that has another secret, is an end of the stream
    for secret in (new_secret(), SECRET):
        if secret == SECRET:
            await far.close()
        await near.point("127.0.0.1", port, secret)
        reader, writer = await asyncio.open_unix_connection(tmp_path / "near")
        async with asyncio.timeout(5):
            assert await reader.read() == b""
        writer.close()
    await near.close()
    await runner.cleanup()


def test_secrets_are_long_and_new() -> None:
    assert len({new_secret() for _ in range(100)}) == 100
    assert len(new_secret()) == handshake.SECRET_BYTES == 32
