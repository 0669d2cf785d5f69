"""Whose turn it is to use the scorer process; no process is started."""

import asyncio

from node.scorer import Scorer


async def test_a_turn_that_is_cancelled_while_it_ends_is_over() -> None:
    scorer = Scorer((), deadline=1.0, memory_mb=256, clock=lambda: 0.0)
    await scorer._take_turn(foreign=True)
    async with scorer._turn:  # as while others that were woken look whether it is theirs
        ending = asyncio.create_task(scorer._end_turn())
        await asyncio.sleep(0)
        ending.cancel()
    await asyncio.wait({ending})
    assert ending.cancelled()
    async with asyncio.timeout(1.0):
        await scorer._take_turn(foreign=False)
