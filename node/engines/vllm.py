"""The vLLM engine: samples over HTTP, from a server of the node's own or from one that runs elsewhere.

Every sample is a stream, so whatever happens to the server, the tokens that came are kept, each with its
log-probability: a failure is raised as EngineFailed with them, and the scheduler has them go on. The next call starts
the server anew or waits for it. New weights are loaded while requests in flight pause; they go on under them, and each
token knows its version.
"""

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Callable, Sequence

import torch

from node.config import EngineConfig
from node.device import Device
from node.engines.partial import EngineFailed
from node.engines.requests import check_request
from node.engines.vllm_client import STREAM_TOKENS, Ask, ServerGone, ServerRefused, VllmClient
from node.engines.vllm_probe import EngineSetupError, ServerFacts, Unreachable, inspect, wait_until_healthy
from node.engines.vllm_server import VllmServer
from node.engines.vllm_streams import Group, Stream
from node.engines.vllm_transfer import WeightTransfer
from node.engines.vllm_weights import WeightFilesError
from node.interfaces import PromptRequest, SampledGroup
from node.models import ModelBundle
from node.scheduler import derived_seed

log = logging.getLogger(__name__)

ABORTS, ABORT_SECONDS = 5, 1.0
"""How often a server is asked to end requests, and how long it may take each time; then we hang up."""
CALL_SECONDS = 60.0
"""Deadline of a control call that computes nothing."""


class VllmEngine:
    """Samples with one server. Used from one asyncio loop; calls of `generate` may overlap."""

    name = "vllm"

    def __init__(
        self,
        client: VllmClient,
        bundle: ModelBundle,
        device: Device,
        transfer: WeightTransfer,
        config: EngineConfig,
        *,
        server: VllmServer | None = None,
        sleep: bool = False,
        say: Callable[[str], None] = log.info,
    ) -> None:
        """`server`: the one to start; None: it runs elsewhere. `sleep`: give GPU memory back when `rest` is called."""
        self.client, self.bundle, self.device, self.transfer = client, bundle, device, transfer
        self.config, self.server, self.sleep, self.say = config, server, sleep, say
        self.version = 0
        self.overlaps = not sleep
        """Whether it samples while the trainer works."""
        self.facts: ServerFacts | None = None
        """Of the server, once `start` is done."""
        # two nodes, or two lives of one, must not take each other's weights for their own
        self._life = secrets.token_hex(4)
        self._loaded: int | None = None
        """The version that the server has; None: not known, or gone."""
        self._versions: dict[str, int] = {}
        self._up = False
        self._asleep = False
        self._lock = asyncio.Lock()
        """Held while the server is started, loaded, woken or put to sleep."""
        self._open: set[Stream] = set()
        self._slots = asyncio.Semaphore(config.concurrency)
        self._told_unrouted = False
        self._heard = 0.0
        """When the last token came, on the loop's clock."""

    # -- life ------------------------------------------------------------------------------------------------

    async def start(self) -> ServerFacts:
        """Have a server that is fit, with this version's weights; what it is. Raises EngineSetupError."""
        async with self._lock:
            try:
                await self._bring_up()
                await self._load()
            except EngineFailed as failure:
                raise EngineSetupError(str(failure)) from failure
            assert self.facts is not None
            return self.facts

    async def update_weights(self, version: int) -> None:
        """From now on sample from this version. Before `start`, and while asleep, it is only noted.

        Raises EngineFailed; the next call of `generate` then tries to bring the server back, with this version.
        """
        self.version = version
        if self.facts is None or self._asleep:
            return
        async with self._lock:
            if not self._up:
                await self._bring_up()
            await self._load()

    async def rest(self) -> None:
        """Give the GPU's memory back, if it is shared and nothing is being sampled; the next call wakes the server."""
        if not self.sleep or self._asleep or not self._up or self._open or self._lock.locked():
            return
        async with self._lock:
            try:
                await self.client.post("/sleep", seconds=CALL_SECONDS, level="2")
            except (ServerGone, ServerRefused) as error:
                self._up = False
                log.warning("the vLLM server could not be put to sleep: %s", error)
                return
            # level 2 keeps no weights: they come again anyway
            self._asleep, self._loaded = True, None

    async def close(self) -> None:
        """Stop the server if it is the node's own; its streams end."""
        self._up = False
        await self.client.close()
        if self.server is not None:
            await self.server.close()
        await self.transfer.close()

    async def _ready(self) -> None:
        """A server that has this version and is awake. Raises EngineFailed."""
        if self._up and self._loaded == self.version and self._open:
            return  # it is at work
        async with self._lock:
            if self._up and not self._open and not self._asleep:
                await self._look()
            if not self._up:
                await self._bring_up()
            await self._load()

    async def _look(self) -> None:
        """Whether the server is still the one that was loaded: a container may have been restarted meanwhile."""
        if self.server is not None and not self.server.alive:
            self._up = False
            return
        try:
            named = (await self.client.get("/weight_info", CALL_SECONDS))["weight_version"]
        except (ServerGone, ServerRefused, TypeError, KeyError) as error:
            log.warning("the vLLM server is to be brought up again: %s", error)
            self._up = False
        else:
            if self._versions.get(named) != self._loaded:
                self._loaded = None

    async def _bring_up(self) -> None:
        """Start the server, or wait for it. Raises EngineFailed, and EngineSetupError for what time does not heal."""
        self._loaded, self._asleep = None, False
        self.transfer.forget()
        try:
            if self.server is None:
                await wait_until_healthy(self.client, self.config.start_seconds, self.say)
            else:
                await self._start_own(self.server)
            self.facts = await inspect(self.client, self.bundle, self.config, sleep=self.sleep)
        except (Unreachable, ServerGone, ServerRefused, WeightFilesError) as error:
            if self.facts is not None:  # it was there, and may come back
                raise EngineFailed(str(error)) from error
            if isinstance(error, ServerRefused):
                raise EngineSetupError(
                    f"the vLLM server at {self.client.address} refuses ({error}); start it without --api-key, "
                    "reachable by this node only"
                ) from error
            raise error if isinstance(error, Unreachable) else EngineSetupError(str(error)) from error
        self._up = True
        self._heard = asyncio.get_running_loop().time()

    async def _start_own(self, server: VllmServer) -> None:
        """Raises ServerGone when it ends before it answers, Unreachable when it takes too long."""
        if server.alive:  # it is up, and something went wrong all the same
            try:
                await self.client.get("/health")
                return
            except (ServerGone, ServerRefused):
                await server.stop()
        await self.transfer.prepare(self.version)
        await self.transfer.start(server)
        died = asyncio.ensure_future(server.died())
        healthy = asyncio.ensure_future(wait_until_healthy(self.client, self.config.start_seconds, self.say))
        try:
            await asyncio.wait({died, healthy}, return_when=asyncio.FIRST_COMPLETED)
            if died.done():
                raise ServerGone(died.result())
            await healthy
        finally:
            died.cancel()
            healthy.cancel()

    # -- weights -----------------------------------------------------------------------------------------------

    async def _load(self) -> None:
        """Bring the server to this version. Raises EngineFailed."""
        version = self.version
        if self._loaded == version and not self._asleep:
            return
        named = f"{self._life}:{version}"
        try:
            if self._loaded != version:
                await self.transfer.prepare(version)
            if self._asleep:
                # the trainer's cached blocks first, then weights, then keys and values: never both at their largest
                await self.device.run(_free_cached)
                await self.client.post("/wake_up", seconds=CALL_SECONDS, tags="weights")
            else:
                await self.client.post("/pause", seconds=CALL_SECONDS, mode="keep")
            await self.transfer.load(self.client, self.config.update_seconds)
            await self.client.post("/update_weight_version", {"new_version": named}, CALL_SECONDS)
            self._versions[named] = version
            for stream in self._open:
                # what was sampled before and is still on its way is of the older version
                stream.marks.append((len(stream.token_ids) + STREAM_TOKENS, version))
            if self._asleep:
                await self.client.post("/wake_up", seconds=CALL_SECONDS, tags="kv_cache")
            # cached keys and values are salted by version besides: a reset that fails costs memory only
            await self.client.post("/reset_prefix_cache", seconds=CALL_SECONDS)
            await self.client.post("/resume", seconds=CALL_SECONDS)
        except WeightFilesError as error:
            raise EngineFailed(str(error)) from error
        except (ServerGone, ServerRefused) as error:
            # a server that could not load has ended its worker, and one that could not be asked is no use either
            self._up, self._loaded = False, None
            raise EngineFailed(
                f"the vLLM server did not take the weights of version {version}: {error}; it must serve "
                f"{self.bundle.name}, and see engine.weights_dir at the same path as this node"
            ) from error
        self._asleep, self._loaded = False, version
        self._heard = asyncio.get_running_loop().time()

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
        await self._ready()
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
            quiet = self.config.stall_seconds - (loop.time() - self._heard)
            try:
                async with asyncio.timeout(max(0.01, quiet)):
                    return await ready.get()
            except TimeoutError:
                if self._lock.locked() or not self._open:  # weights are being loaded, or nobody asked
                    self._heard = loop.time()
                elif loop.time() - self._heard >= self.config.stall_seconds:
                    self._up = False
                    if self.server is not None:
                        await self.server.stop()
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
            self._up = False
            if stop is not None and stop.is_set():
                self._ended(group, ready)
            else:
                ready.put_nowait(EngineFailed(await self._obituary(gone)))
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
        if self._loaded is None:
            raise ServerGone(f"{self.client.address}: the server went away")
        stream.marks.append((0, self._loaded))
        ask = Ask(
            name=stream.name,
            token_ids=(*request.prompt_ids, *had),
            max_tokens=request.max_new_tokens - len(had),
            temperature=request.temperature,
            seed=stream.seed,
            stop_ids=tuple(sorted(self.bundle.stop_ids)),
            salt=f"{self._life}:{self._loaded}",
        )
        if not self._open:
            self._heard = asyncio.get_running_loop().time()
        self._open.add(stream)
        try:
            async for piece in self.client.sample(ask):
                self._heard = asyncio.get_running_loop().time()
                stream.take(piece, self.bundle, self._versions)
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

    async def _obituary(self, gone: ServerGone) -> str:
        """What is known of a server that broke off."""
        if self.server is None:
            return f"{gone}; is it still running?"
        try:
            async with asyncio.timeout(1.0):
                return await self.server.died()
        except TimeoutError:
            return str(gone)


def _free_cached() -> None:
    """Hand back GPU memory that torch keeps for later."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
