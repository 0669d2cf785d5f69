"""The in-process engine: samples with the trainer's own weights, on the model thread."""

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence

from node.device import Device
from node.engines.decoding import Limits, decode_groups
from node.engines.requests import check_request
from node.interfaces import PromptRequest, SampledGroup
from node.models import ModelBundle

KNEE = {"cpu": 12.0, "cuda": 128.0}
"""Tokens of a pass below which reading the weights takes longer than the arithmetic, by device: about what a core of
60 GFLOP/s and 10 GB/s does with float32, and a GPU with its launches."""
READER_SECONDS = 60.0
"""How long the model waits for whoever reads its groups before it goes on all the same."""


class TransformersEngine:
    """Samples completions with the model the trainer trains: new weights need no copy, only a new version number."""

    name = "transformers"

    def __init__(
        self, bundle: ModelBundle, device: Device, limits: Limits | None = None, *, drafting: bool = True
    ) -> None:
        """`drafting`: guess at next tokens where it pays (node/engines/drafting.py)."""
        self.bundle, self.device = bundle, device
        knee = KNEE.get(bundle.model.device.type, 0.0) if drafting else 0.0
        self.limits = limits or Limits(knee=knee)
        self.version = 0

    async def generate(
        self, requests: Sequence[PromptRequest], stop: asyncio.Event | None = None
    ) -> AsyncIterator[SampledGroup]:
        """Yield groups as they finish. Closing the iterator, or setting `stop`, stops the model within one token.

        With a `stop`, the model waits after each group until the next one is asked for: whoever stops it because of a
        group stops it at that very token, so that it goes on the same way whenever it is repeated.

        Raises RequestTooLong, and ValueError for an empty prompt, a budget below 1 or a start that cannot go on.
        """
        for request in requests:
            check_request(request, self.bundle.context, self.bundle.name)
        loop = asyncio.get_running_loop()
        # every request becomes one group, so the queue can hold all of them
        ready: asyncio.Queue[SampledGroup] = asyncio.Queue(maxsize=max(1, len(requests)))
        closed = threading.Event()
        stopped = stop.is_set if stop is not None else closed.is_set  # reading an asyncio event is safe in any thread
        seen = threading.Event()

        def emit(group: SampledGroup) -> None:
            seen.clear()
            loop.call_soon_threadsafe(ready.put_nowait, group)
            if stop is not None and not closed.is_set():
                seen.wait(READER_SECONDS)

        work = (self.bundle, tuple(requests), self.version, emit, closed.is_set, stopped, self.limits)
        job = asyncio.ensure_future(self.device.run(decode_groups, *work))
        try:
            for _ in requests:
                getter = asyncio.ensure_future(ready.get())
                try:
                    await asyncio.wait({getter, job}, return_when=asyncio.FIRST_COMPLETED)
                    if not getter.done():
                        job.result()  # raises what went wrong; after a good end the group is on its way
                    yield await getter
                    seen.set()
                finally:
                    getter.cancel()
            await job
        finally:
            closed.set()
            seen.set()
            if not job.done():
                # the thread ends within one token; whoever comes next waits for it in the device's queue
                job.cancel()

    async def update_weights(self, version: int) -> None:
        """Note the version: the weights are the trainer's own."""
        self.version = version

    async def close(self) -> None:
        """Nothing to free: the model is the trainer's."""
