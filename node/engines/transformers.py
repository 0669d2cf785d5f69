"""The in-process engine: samples with the trainer's own weights, on the model thread."""

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence

from node.device import Device
from node.engines.decoding import Limits, decode_groups
from node.interfaces import PromptRequest, SampledGroup, Trainer, TrainGroup, TrainSequence
from node.models import ModelBundle

AGREEMENT = {"float32": 1e-3, "bfloat16": 0.5}
"""How far an engine's and a trainer's log-probability of one token may be apart, by compute type."""


class RequestTooLong(ValueError):
    """A prompt and its token budget do not fit the model's context."""


class AgreementError(Exception):
    """Engine and trainer give different log-probabilities to the same tokens: training would be biased."""


class TransformersEngine:
    """Samples completions with the model the trainer trains: new weights need no copy, only a new version number."""

    name = "transformers"

    def __init__(self, bundle: ModelBundle, device: Device, limits: Limits | None = None) -> None:
        self.bundle, self.device, self.limits = bundle, device, limits or Limits()
        self.version = 0

    async def generate(
        self, requests: Sequence[PromptRequest], stop: asyncio.Event | None = None
    ) -> AsyncIterator[SampledGroup]:
        """Yield groups as they finish. Closing the iterator, or setting `stop`, stops the model within one token.

        Raises RequestTooLong, and ValueError for an empty prompt, a budget below 1 or a start that cannot go on.
        """
        for request in requests:
            self._check(request)
        loop = asyncio.get_running_loop()
        # every request becomes one group, so the queue can hold all of them and the model never waits for the reader
        ready: asyncio.Queue[SampledGroup] = asyncio.Queue(maxsize=max(1, len(requests)))
        closed = threading.Event()
        stopped = stop.is_set if stop is not None else closed.is_set  # reading an asyncio event is safe in any thread

        def emit(group: SampledGroup) -> None:
            loop.call_soon_threadsafe(ready.put_nowait, group)

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
                finally:
                    getter.cancel()
            await job
        finally:
            closed.set()
            if not job.done():
                # the thread ends within one token; whoever comes next waits for it in the device's queue
                job.cancel()

    async def update_weights(self, version: int) -> None:
        """Note the version: the weights are the trainer's own."""
        self.version = version

    async def close(self) -> None:
        """Nothing to free: the model is the trainer's."""

    def _check(self, request: PromptRequest) -> None:
        if not request.prompt_ids or request.max_new_tokens < 1 or request.n < 1:
            raise ValueError(f"request {request.key}: prompt, max_new_tokens and n must not be empty or 0")
        total = len(request.prompt_ids) + request.max_new_tokens
        if total > self.bundle.context:
            raise RequestTooLong(
                f"request {request.key}: {len(request.prompt_ids)} prompt tokens and max_new_tokens "
                f"{request.max_new_tokens} exceed the context of {self.bundle.context} tokens of {self.bundle.name}; "
                "lower rollout.max_new_tokens or choose a shorter task"
            )
        if len(request.starts) > request.n:
            raise ValueError(f"request {request.key}: {len(request.starts)} starts, but n is {request.n}; raise n")
        for start in request.starts:
            if start.finish == "stop" or len(start.token_ids) >= request.max_new_tokens:
                raise ValueError(
                    f"request {request.key}: a start of {len(start.token_ids)} tokens that ended by {start.finish} "
                    f"has nothing to go on to with max_new_tokens {request.max_new_tokens}; leave it out"
                )


async def check_agreement(
    engine: TransformersEngine, trainer: Trainer, prompts: Sequence[tuple[int, ...]], *, tokens: int = 8
) -> float:
    """Sample a little and compare both sides' log-probabilities; returns the largest difference in nats.

    Run at start: a wrong mask, position or type shows here and not as a run that learns nothing. Raises AgreementError.
    """
    requests = [
        PromptRequest(key=str(i), prompt_ids=prompt, n=2, max_new_tokens=tokens, temperature=1.0, seed=i)
        for i, prompt in enumerate(prompts)
    ]
    sampled = [group async for group in engine.generate(requests)]
    groups = [
        TrainGroup(
            prompt_ids=prompts[int(group.key)],
            sequences=tuple(
                TrainSequence(sample.token_ids, (True,) * len(sample.token_ids), 0.0, sample.logprobs)
                for sample in group.samples
            ),
            origin="own",
        )
        for group in sampled
    ]
    trained = await engine.device.run(trainer.logprobs, groups)
    difference = max(
        abs(ours - theirs)
        for group, rows in zip(groups, trained, strict=True)
        for sequence, row in zip(group.sequences, rows, strict=True)
        for ours, theirs in zip(sequence.behaviour_logprobs or (), row, strict=True)
    )
    kind = str(engine.bundle.model.dtype).removeprefix("torch.")
    if not difference <= AGREEMENT[kind]:
        raise AgreementError(
            f"engine and trainer differ by {difference:.4f} nats on a sampled token ({kind}, allowed "
            f"{AGREEMENT[kind]}) with model {engine.bundle.name}; use another model or model.dtype float32"
        )
    return difference
