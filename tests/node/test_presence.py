"""What a node's and a coordinator's process say when a part of them breaks."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from node.presence import Presence, Stopped
from node.progress import Progress


async def test_what_breaks_a_service_is_said_while_the_others_stop() -> None:
    progress = Progress(lambda: 0.0, 60.0)
    presence: Any = SimpleNamespace(progress=progress)
    seen: list[str] = []

    async def breaks() -> None:
        raise BaseExceptionGroup("of a service that has tasks of its own", [OSError("the disk is gone")])

    async def stops_slowly() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            seen.append(progress.state)

    async def run() -> None:
        async with asyncio.TaskGroup() as services:
            services.create_task(stops_slowly())
            services.create_task(Presence.told(presence, breaks()))

    with pytest.raises(ExceptionGroup):
        await run()
    assert seen == ["FAILED"]
    assert progress.reason == "OSError: the disk is gone"

    async def ends() -> None:
        raise Stopped

    progress.say("TRAINING")
    with pytest.raises(Stopped):
        await Presence.told(presence, ends())
    assert progress.state == "TRAINING"
