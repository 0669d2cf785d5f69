"""What event streams tell, looked at once for all of them: log events by number, and snapshots of the status."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any

from web.answers import encode
from web.view import NodeView

LOOK_SECONDS = 0.5
"""How often a stream looks for something to tell."""
STATUS_SECONDS = 1.0
"""At most one snapshot of the status in this time."""
STILL_SECONDS = 15.0
"""A snapshot this often where nothing but its clocks changes."""
PAGE = 100
CLOCKS = frozenset({"stage_seconds", "last_step_age", "rss_mb", "uptime"})
"""Parts of the status that change by themselves."""


class Live:
    """Shared by the open streams: each remembers only where it is, so that a slow one costs no memory."""

    def __init__(self, view: NodeView) -> None:
        self._view = view
        self._looked_at = self._made_at = float("-inf")
        self._last: Mapping[str, Any] | None = None
        self._number, self._snapshot = 0, ""

    def snapshot(self) -> tuple[int, str]:
        """The number and the text of the latest snapshot of the status; a new one if it is time for it."""
        now = asyncio.get_running_loop().time()
        if now - self._looked_at >= STATUS_SECONDS:
            self._looked_at = now
            status = self._view.status()
            still = {name: value for name, value in status.items() if name not in CLOCKS}
            if still != self._last or now - self._made_at >= STILL_SECONDS:
                self._made_at, self._last = now, still
                self._number, self._snapshot = self._number + 1, f"event: status\ndata: {encode(status)}\n\n"
        return self._number, self._snapshot

    async def blocks(self, after: int) -> AsyncIterator[str]:
        """What one stream sends, as text: events after id `after`, and the status when it changed.

        Events that the node no longer has cannot be sent: a `gap` says so, with the ids of the oldest and the newest
        event there is, and the stream goes on after the newest.
        """
        seen = 0
        while True:
            number, snapshot = self.snapshot()
            if number != seen:
                seen = number
                yield snapshot
            oldest, newest = self._view.event_range()
            if after < oldest - 1 or after > newest:
                after = newest
                yield f"id: {newest}\nevent: gap\ndata: {encode({'oldest': oldest, 'newest': newest})}\n\n"
            events = self._view.events(after, PAGE) if newest > after else ()
            for event in events:
                after = event["id"]
                yield f"id: {after}\ndata: {encode(event)}\n\n"
            if len(events) < PAGE:
                await asyncio.sleep(LOOK_SECONDS)
