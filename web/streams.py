"""Events over server-sent events (HTML standard, 9.2): a client that comes back resumes after the last id it saw."""

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

from aiohttp import web

from web.answers import Refused

log = logging.getLogger(__name__)

MAX_STREAMS = 16
BEAT_SECONDS = 15.0
"""A comment this often keeps proxies from closing a quiet stream, and finds clients that are gone."""
WRITE_SECONDS = 10.0
"""A client that does not take what it asked for in this time is dropped; it resumes by Last-Event-ID."""


class Streams:
    """The open streams, bounded; `close` ends them at once, so that a stop never waits for a browser."""

    def __init__(self) -> None:
        self._open: dict[asyncio.Task[Any], str | None] = {}
        """Whose session each one is of; None: the token's."""

    def __len__(self) -> int:
        return len(self._open)

    async def send(self, request: web.Request, blocks: AsyncIterator[str], session: str | None) -> web.StreamResponse:
        """Answer with blocks of text until the client leaves. Raises Refused (503) where too many are open."""
        task = asyncio.current_task()
        if task is None or len(self._open) >= MAX_STREAMS:
            raise Refused(
                503, f"{MAX_STREAMS} event streams are open", "close a page of this node", {"Retry-After": "10"}
            )
        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream; charset=utf-8", "X-Accel-Buffering": "no"}
        )
        self._open[task] = session
        try:
            await response.prepare(request)
            await write(response, "retry: 2000\n\n")
            await forward(response, blocks)
        except (ConnectionError, TimeoutError):
            log.debug("an event stream ended: the client left or is too slow; it can resume where it was")
        except Exception:
            # half an answer is on its way: all that can still be said is its end, and the client asks again
            log.exception("an event stream failed")
        finally:
            del self._open[task]
        return response

    def end(self, session: str) -> None:
        """Those of a session that has signed out."""
        for task, of in self._open.items():
            if of == session:
                task.cancel()

    def close(self) -> None:
        for task in self._open:
            task.cancel()


async def forward(response: web.StreamResponse, blocks: AsyncIterator[str]) -> None:
    """Write blocks as they come and beats between them. Raises ConnectionError, TimeoutError."""

    async def following() -> str | None:
        return await anext(blocks, None)

    coming = asyncio.create_task(following())
    try:
        while True:
            await asyncio.wait({coming}, timeout=BEAT_SECONDS)
            if not coming.done():
                await write(response, ": beat\n\n")
                continue
            block = coming.result()
            if block is None:
                return
            await write(response, block)
            coming = asyncio.create_task(following())
    finally:
        coming.cancel()
        await asyncio.wait({coming}, timeout=1.0)


async def write(response: web.StreamResponse, text: str) -> None:
    async with asyncio.timeout(WRITE_SECONDS):
        await response.write(text.encode())
