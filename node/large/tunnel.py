"""A Unix socket of one machine, reached from another one: how the node talks to a vLLM server that Ray placed.

The server listens on a private Unix socket, as everywhere (its control endpoints have no authentication). Beside it
the far end of the tunnel listens on a port and lets nobody in who does not know the secret; the near end is a Unix
socket in a private directory of the node.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from pathlib import Path

from node.large.handshake import Stranger, answer_stream, dial

log = logging.getLogger(__name__)

MAX_CONNECTIONS = 4096
"""At a time, at either end; more are hung up on."""
HANDSHAKE_SECONDS = 10.0
PIECE_BYTES = 64 << 10


class FarEnd:
    """On the machine of the server. Used from one asyncio loop."""

    def __init__(self, upstream: str, secret: bytes) -> None:
        """`upstream`: path of the Unix socket that connections end at."""
        self._upstream, self._secret = upstream, secret
        self._relays = _Relays()
        self._server: asyncio.Server | None = None

    async def listen(self, host: str) -> int:
        """Listen at an address of this machine; the port."""
        self._server = await asyncio.start_server(self._welcome, host, 0)
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def _welcome(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with self._relays.one(writer) as admitted:
            if not admitted:
                return
            try:
                await answer_stream(reader, writer, self._secret, HANDSHAKE_SECONDS)
            except (Stranger, OSError) as error:
                log.warning("hung up on %s: %s", writer.get_extra_info("peername"), error)
                return
            try:
                upstream = await asyncio.open_unix_connection(self._upstream)
            except OSError as error:
                log.debug("%s does not listen: %s", self._upstream, error)  # not yet, while it starts
                return
            await relay((reader, writer), upstream)

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()


class NearEnd:
    """On the node's machine; may be pointed at another far end at any time. Used from one asyncio loop."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._relays = _Relays()
        self._server: asyncio.Server | None = None
        self._target: tuple[str, int, bytes] | None = None

    async def point(self, host: str, port: int, secret: bytes) -> None:
        """From now on lead there. Connections that are open go on where they lead."""
        self._target = host, port, secret
        if self._server is None:
            self._server = await asyncio.start_unix_server(self._welcome, self._path)
            self._path.chmod(0o600)

    def unpoint(self) -> None:
        """Lead nowhere: who connects is hung up on."""
        self._target = None

    async def _welcome(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with self._relays.one(writer) as admitted:
            if not admitted or self._target is None:
                return
            host, port, secret = self._target
            try:
                connection = await asyncio.to_thread(dial, host, port, secret, "node", HANDSHAKE_SECONDS)
                upstream = await asyncio.open_connection(sock=connection)
            except (Stranger, OSError) as error:
                log.warning("%s:%d is not reached: %s", host, port, error)
                return
            await relay((reader, writer), upstream)

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()


Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def relay(one: Streams, other: Streams) -> None:
    """Pass on bytes both ways until one side ends or breaks; both are closed then."""
    ways = [asyncio.ensure_future(_pass_on(*pair)) for pair in ((one[0], other[1]), (other[0], one[1]))]
    try:
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for way in ways:
            way.cancel()
        await asyncio.gather(*ways, return_exceptions=True)
        other[1].close()


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):  # a side that breaks off is a side that ends
        while piece := await reader.read(PIECE_BYTES):
            writer.write(piece)
            await writer.drain()


class _Relays:
    """Counts connections."""

    def __init__(self) -> None:
        self.open = self.refused = 0

    @contextlib.asynccontextmanager
    async def one(self, writer: asyncio.StreamWriter) -> AsyncIterator[bool]:
        """Whether there is room for it; it is closed in the end."""
        admitted = self.open < MAX_CONNECTIONS
        self.open += admitted
        if not admitted:
            self.refused += 1
            log.warning("%d connections are open; %d were refused so far", self.open, self.refused)
        try:
            yield admitted
        finally:
            self.open -= admitted
            writer.close()
