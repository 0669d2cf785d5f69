"""The bounded queue between a transport and the one reader of its events."""

import asyncio
from collections import deque

from swarm.transport import Event, Message


class EventQueue:
    """Events in order, at most `limit` of them; iteration ends after `close`. Used from the asyncio thread only.

    When full, gossip is what gives way (the exchange heals a lost announcement); a connection event takes the
    place of the oldest message, because a reader that misses one believes in a peer that is gone.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._waiting: deque[Event] = deque()
        self._wake = asyncio.Event()
        self._closed = False
        self.dropped = 0

    def put(self, event: Event) -> None:
        if self._closed:
            return
        if len(self._waiting) >= self._limit:
            self.dropped += 1
            if isinstance(event, Message):
                return
            oldest = next((i for i, waiting in enumerate(self._waiting) if isinstance(waiting, Message)), 0)
            del self._waiting[oldest]
        self._waiting.append(event)
        self._wake.set()

    def close(self) -> None:
        """End iteration once what is waiting has been read."""
        self._closed = True
        self._wake.set()

    def __aiter__(self) -> "EventQueue":
        return self

    async def __anext__(self) -> Event:
        while not self._waiting:
            if self._closed:
                raise StopAsyncIteration
            self._wake.clear()
            await self._wake.wait()
        return self._waiting.popleft()
