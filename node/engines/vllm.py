"""The vLLM engine: samples over HTTP, from a server of the node's own or from one that runs elsewhere.

Every sample is a stream, so whatever happens to the server, the tokens that came are kept, each with its
log-probability: a failure is raised as EngineFailed with them, and the scheduler has them go on. The next call starts
the server anew or waits for it. New weights are loaded while requests in flight pause; they go on under them, and each
token knows its version.
"""

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Sequence

from node.engines.partial import EngineFailed
from node.engines.requests import check_request
from node.engines.vllm_client import Ask, ServerGone, ServerRefused
from node.engines.vllm_probe import ServerFacts
from node.engines.vllm_streams import Group, Stream
from node.engines.vllm_upkeep import Upkeep
from node.interfaces import PromptRequest, SampledGroup
from node.scheduler import derived_seed

log = logging.getLogger(__name__)

ABORTS, ABORT_SECONDS = 5, 1.0
"""How often a server is asked to end requests, and how long it may take each time; then we hang up."""


class VllmEngine:
    """Samples with one server. Used from one asyncio loop; calls of `generate` may overlap."""

    name = "vllm"

    def __init__(self, upkeep: Upkeep) -> None:
        self._upkeep = upkeep
        self.client, self.server, self.transfer = upkeep.client, upkeep.server, upkeep.transfer
        self.bundle, self.device, self.config = upkeep.bundle, upkeep.device, upkeep.config
        self.version = 0
        self.overlaps = not upkeep.sleep
        """Whether it samples while the trainer works."""
        self._open = upkeep.open
        self._slots = asyncio.Semaphore(upkeep.config.concurrency)
        self._told_unrouted = False

    @property
    def facts(self) -> ServerFacts | None:
        """Of the server, once `start` is done."""
        return self._upkeep.facts

    async def start(self) -> ServerFacts:
        """Have a server that is fit, with this version's weights; what it is. Raises EngineSetupError."""
        return await self._upkeep.start()

    async def update_weights(self, version: int) -> None:
        """From now on sample from this version. Before `start`, and while asleep, it is only noted.

        Raises EngineFailed; the next call of `generate` then tries to bring the server back, with this version.
        """
        self.version = version
        await self._upkeep.want(version)

    async def rest(self) -> None:
        """Give the GPU's memory back, if it is shared and nothing is being sampled; the next call wakes the server."""
        await self._upkeep.rest()

    async def close(self) -> None:
        """Stop the server if it is the node's own; its streams end."""
        await self._upkeep.close()

    # -- sampling ----------------------------------------------------------------------------------------------

    async def generate(
        self, requests: Sequence[PromptRequest], stop: asyncio.Event | None = None
    ) -> AsyncIterator[SampledGroup]:
        """Yield groups as they finish. Closing the iterator aborts what is left at the server.

        Raises RequestTooLong, ValueError for a request that cannot be served, EngineFailed with what there is of the
        unfinished groups when the server fails, and EngineSetupError when it came back as another one.
        """
        for request in requests:
            check_request(request, self._context(), self.bundle.name)
        if not requests:
            return
        await self._upkeep.ready()
        call = secrets.token_hex(6)
        groups = [self._group(f"{call}-{at}", request) for at, request in enumerate(requests)]
        ready: asyncio.Queue[SampledGroup | Exception] = asyncio.Queue()  # at most one entry a group, and one a stream
        streams = [
            asyncio.ensure_future(self._run(group, stream, ready, stop)) for group in groups for stream in group.streams
        ]
        stopper = asyncio.ensure_future(self._stop(stop, groups, streams, ready)) if stop is not None else None
        try:
            left = {group.request.key: group for group in groups}
            while left:
                outcome = await self._next(ready)
                if isinstance(outcome, EngineFailed):
                    raise EngineFailed(str(outcome), [group.outcome(self.version) for group in left.values()])
                if isinstance(outcome, Exception):
                    raise outcome
                del left[outcome.key]
                yield outcome
        finally:
            tasks = [*streams, stopper] if stopper is not None else streams
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)  # their connections are closed when this returns

    def _context(self) -> int:
        """Tokens of prompt and answer that both sides can take."""
        return min(self.bundle.context, self.facts.context if self.facts else self.bundle.context)

    def _group(self, name: str, request: PromptRequest) -> Group:
        starts = (*request.starts, *(None,) * (request.n - len(request.starts)))
        streams = []
        for at, start in enumerate(starts):
            had = len(start.token_ids) if start else 0
            seed = derived_seed(request.seed, at, had)
            streams.append(Stream(f"{name}-{at}", request, start if had else None, seed))
        return Group(request, streams, len(streams))

    async def _next(self, ready: "asyncio.Queue[SampledGroup | Exception]") -> SampledGroup | Exception:
        """What comes next; a failure when no stream of this engine has had a token for too long."""
        loop = asyncio.get_running_loop()
        while True:
            quiet = self.config.stall_seconds - (loop.time() - self._upkeep.heard)
            try:
                async with asyncio.timeout(max(0.01, quiet)):
                    return await ready.get()
            except TimeoutError:
                if self._upkeep.busy or not self._open:  # weights are being loaded, or nobody asked
                    self._upkeep.listen()
                elif loop.time() - self._upkeep.heard >= self.config.stall_seconds:
                    await self._upkeep.give_up()
                    return EngineFailed(
                        f"the vLLM server at {self.client.address} has given no token for "
                        f"{self.config.stall_seconds:.0f} s (engine.stall_seconds); look at its log"
                    )

    async def _run(
        self,
        group: Group,
        stream: Stream,
        ready: "asyncio.Queue[SampledGroup | Exception]",
        stop: asyncio.Event | None,
    ) -> None:
        """Stream one sample; the last one of its group completes the group."""
        try:
            async with self._slots:
                if stop is None or not stop.is_set():
                    await self._stream(stream)
            self._ended(group, ready)
        except ServerGone as gone:
            self._upkeep.up = False
            if stop is not None and stop.is_set():
                self._ended(group, ready)
            else:
                ready.put_nowait(EngineFailed(await self._upkeep.obituary(gone)))
        except ServerRefused as refused:
            ready.put_nowait(ValueError(f"request {group.request.key}: the vLLM server refuses it: {refused}"))
        except Exception as error:  # noqa: BLE001 - whatever it is, it is raised to who asked for the samples
            ready.put_nowait(error)

    def _ended(self, group: Group, ready: "asyncio.Queue[SampledGroup | Exception]") -> None:
        group.open -= 1
        if not group.open:
            ready.put_nowait(group.outcome(self.version))

    async def _stream(self, stream: Stream) -> None:
        request, had = stream.request, stream.start.token_ids if stream.start else ()
        loaded = self._upkeep.loaded
        if loaded is None:
            raise ServerGone(f"{self.client.address}: the server went away")
        stream.marks.append((0, loaded))
        stream.constant = not self.transfer.in_place
        ask = Ask(
            name=stream.name,
            token_ids=(*request.prompt_ids, *had),
            max_tokens=request.max_new_tokens - len(had),
            temperature=request.temperature,
            seed=stream.seed,
            stop_ids=tuple(sorted(self.bundle.stop_ids)),
            salt=self._upkeep.name(loaded),
            model=self.transfer.model,
        )
        if not self._open:
            self._upkeep.listen()
        self._open.add(stream)
        try:
            async for piece in self.client.sample(ask):
                self._upkeep.listen()
                stream.take(piece, self.bundle, self._upkeep.versions)
                if piece.finish and stream.unrouted(self.bundle) and not self._told_unrouted:
                    self._told_unrouted = True
                    log.warning(
                        "the vLLM server does not tell which experts it chose, so the update chooses them anew; "
                        "start it with --enable-return-routed-experts, or set train.routing_replay to off"
                    )
        finally:
            self._open.discard(stream)

    async def _stop(
        self,
        stop: asyncio.Event,
        groups: Sequence[Group],
        streams: Sequence["asyncio.Task[None]"],
        ready: "asyncio.Queue[SampledGroup | Exception]",
    ) -> None:
        """Once a stop is set: have the server end what is open, and hang up on what it does not end."""
        await stop.wait()
        for _ in range(ABORTS):
            names = [stream.name for group in groups for stream in group.streams if stream in self._open]
            try:
                if names:
                    await self.client.abort(names)
            except (ServerGone, ServerRefused) as error:
                log.warning("the vLLM server did not abort: %s", error)
                break
            # again for what reached the server after the abort did
            if not (await asyncio.wait(streams, timeout=ABORT_SECONDS))[1]:
                break
        for task in streams:
            task.cancel()
        await asyncio.wait(streams)
        for group in groups:
            if group.open:  # what was cancelled could not say so
                ready.put_nowait(group.outcome(self.version))
