"""The bounded queue between a transport and the one reader of its events."""

import asyncio
from collections import deque
from threading import Lock

from swarm.transport import Event, Message, OversizeRequest

GIVES_WAY = (Message, OversizeRequest)


class EventQueue:
    """Events in order, at most `limit` of them; iteration ends after `close`.

    `put` may be called from any thread: the queue is where events cross into asyncio, so that a slow reader costs
    dropped gossip and never memory. When full, gossip is what gives way (the exchange heals a lost announcement);
    a connection event takes the place of the oldest message, because a reader that misses one believes in a peer
    that is gone.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._waiting: deque[Event] = deque()
        self._lock = Lock()
        self._reader: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None
        self._closed = False
        self.dropped = 0

    def put(self, event: Event) -> None:
        with self._lock:
            if self._closed:
                return
            if len(self._waiting) >= self._limit:
                self.dropped += 1
                if isinstance(event, GIVES_WAY):
                    return
                oldest = next((i for i, waiting in enumerate(self._waiting) if isinstance(waiting, GIVES_WAY)), 0)
                del self._waiting[oldest]
            self._waiting.append(event)
            if len(self._waiting) == 1:
                self._wake()

    def close(self) -> None:
        """End iteration once what is waiting has been read."""
        with self._lock:
            self._closed = True
            self._wake()

    def _wake(self) -> None:
        if self._reader is not None:
            loop, wake = self._reader
            if not loop.is_closed():
                loop.call_soon_threadsafe(wake.set)

    def __aiter__(self) -> "EventQueue":
        return self

    async def __anext__(self) -> Event:
        while True:
            with self._lock:
                if self._waiting:
                    return self._waiting.popleft()
                if self._closed:
                    raise StopAsyncIteration
                wake = asyncio.Event()
                self._reader = (asyncio.get_running_loop(), wake)
            await wake.wait()
