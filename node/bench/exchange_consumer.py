"""The receiving side of `shoal bench exchange`."""

import asyncio
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from node.bench.exchange_node import children_cpu, exchange_node
from node.bench.side import Say, serve

POLL_SECONDS = 0.005
FIRST_SECONDS = 240.0
IDLE_SECONDS = 30.0
"""Without a further group for this long, what is missing is not coming."""


async def consume(spec: Mapping[str, Any], say: Say, directory: Path) -> None:
    """Say where to dial; take groups until all are admitted, or none has come for a while; say what that took."""
    genesis = int(time.time()) - 1
    async with exchange_node(spec, "consumer", genesis, directory) as node:
        running = asyncio.create_task(node.exchange.run())
        say({"address": node.transport.addresses()[0], "genesis": genesis})
        async with asyncio.timeout(FIRST_SECONDS):
            while not node.exchange.counters()["heard"]:  # noqa: ASYNC110 - the exchange has counters, not events
                await asyncio.sleep(POLL_SECONDS)
        before, cpu, scorer_cpu = node.transport.stats(), time.process_time(), children_cpu()
        admitted, finished_at = 0, time.time()
        while admitted < spec["groups"] and time.time() - finished_at < IDLE_SECONDS:
            await asyncio.sleep(POLL_SECONDS)
            now = node.exchange.counters()["admitted"]
            if now > admitted:
                admitted, finished_at = now, time.time()
        after = node.transport.stats()
        say(
            {
                "finished_at": finished_at,
                "admitted": admitted,
                "cpu_seconds": time.process_time() - cpu,
                "scorer_cpu_seconds": children_cpu() - scorer_cpu,
                "bytes_in": after.bytes_in - before.bytes_in,
                "bytes_out": after.bytes_out - before.bytes_out,
                "counters": {
                    **node.exchange.counters(),
                    "gossip_messages": after.messages_in,
                    "dropped_events": after.dropped_events,
                },
            }
        )
        running.cancel()
        await asyncio.wait({running})


if __name__ == "__main__":
    serve(consume)
