"""Keeps one vLLM server fit to sample: up, awake, and with the weights of the policy's version.

Weights are written while the server still samples. Where they replace the old ones, requests in flight pause for the
moment of the load and go on under the new ones; adapters are put beside the old ones, and requests in flight go on
under those that they began with.
"""

import asyncio
import logging
import secrets
from collections.abc import Callable

import torch

from node.config import EngineConfig
from node.device import Device
from node.engines.partial import EngineFailed
from node.engines.vllm_client import STREAM_TOKENS, ServerGone, ServerRefused, VllmClient
from node.engines.vllm_probe import EngineSetupError, ServerFacts, Unreachable, inspect, wait_until_healthy
from node.engines.vllm_server import OwnServer
from node.engines.vllm_streams import Stream
from node.engines.vllm_transfer import WeightTransfer
from node.engines.vllm_weights import WeightFilesError
from node.models import ModelBundle

log = logging.getLogger(__name__)

CALL_SECONDS = 60.0
"""Deadline of a control call that computes nothing."""


class Upkeep:
    """The life of one server, the node's own or one that runs elsewhere. Used from one asyncio loop."""

    def __init__(
        self,
        client: VllmClient,
        bundle: ModelBundle,
        device: Device,
        transfer: WeightTransfer,
        config: EngineConfig,
        *,
        server: OwnServer | None = None,
        sleep: bool = False,
        say: Callable[[str], None] = log.info,
        alone: bool = True,
    ) -> None:
        """`server`: the one to start; None: it runs elsewhere. `sleep`: give GPU memory back when `rest` is called.

        `alone`: no other engine could sample while this one is brought up again; one of several leaves its work to
        them meanwhile.
        """
        self.client, self.bundle, self.device, self.transfer = client, bundle, device, transfer
        self.config, self.server, self.sleep, self.say = config, server, sleep, say
        self.alone = alone
        self.facts: ServerFacts | None = None
        """Of the server, once it has been up."""
        self.wanted = 0
        """The version that it should have."""
        self.loaded: int | None = None
        """The version that it has; None: not known, or gone."""
        self.versions: dict[str, int] = {}
        """By the names that the server has for them."""
        self.up = False
        self.asleep = False
        self.open: set[Stream] = set()
        """In flight at the server."""
        self.heard = 0.0
        """When it last gave a sign of life, on the loop's clock."""
        # two nodes, or two lives of one, must not take each other's weights for their own
        self._life = secrets.token_hex(4)
        self._lock = asyncio.Lock()
        """Held while the server is started, loaded, woken or put to sleep."""

    @property
    def busy(self) -> bool:
        """Being started, loaded, woken or put to sleep."""
        return self._lock.locked()

    def name(self, version: int) -> str:
        """What the server calls a version."""
        return f"{self._life}:{version}"

    def listen(self) -> None:
        """Note a sign of life."""
        self.heard = asyncio.get_running_loop().time()

    async def start(self) -> ServerFacts:
        """Have a server that is fit, with the wanted weights; what it is. Raises EngineSetupError."""
        async with self._lock:
            try:
                await self._bring_up()
                await self._load()
            except EngineFailed as failure:
                raise EngineSetupError(str(failure)) from failure
            assert self.facts is not None
            return self.facts

    async def want(self, version: int) -> None:
        """Have this version at the server. Before `start`, and while asleep, it is only noted. Raises EngineFailed."""
        self.wanted = version
        if self.facts is None or self.asleep:
            return
        async with self._lock:
            if not self.up:
                await self._bring_up()
            await self._load()

    async def rest(self) -> None:
        """Give the GPU's memory back, if it is shared and nothing is being sampled; `ready` wakes the server."""
        if not self.sleep or self.asleep or not self.up or self.open or self.busy:
            return
        async with self._lock:
            try:
                await self.client.post("/sleep", seconds=CALL_SECONDS, level=self.transfer.sleep_level)
            except (ServerGone, ServerRefused) as error:
                self.up = False
                log.warning("the vLLM server could not be put to sleep: %s", error)
                return
            self.asleep, self.loaded = True, None  # weights that it does not keep come again anyway

    async def ready(self) -> None:
        """A server that has the wanted version and is awake. Raises EngineFailed.

        One that is down is brought up here where it is alone, else by `want`, after its rest (node/scheduler.py).
        """
        if self.up and self.loaded == self.wanted and self.open:
            return  # it is at work
        async with self._lock:
            if self.up and not self.open and not self.asleep:
                await self._look()
            if not self.up:
                if not self.alone and self.facts is not None:
                    raise EngineFailed(f"the vLLM server at {self.client.address} is down, and others sample meanwhile")
                await self._bring_up()
            await self._load()

    async def give_up(self) -> None:
        """It is of no use as it is: the next call brings it up anew."""
        self.up = False
        if self.server is not None:
            await self.server.stop()

    async def close(self) -> None:
        """Stop the server if it is the node's own; its streams end."""
        self.up = False
        await self.client.close()
        if self.server is not None:
            await self.server.close()
        await self.transfer.close()

    async def obituary(self, gone: ServerGone) -> str:
        """What is known of a server that broke off."""
        if self.server is None:
            return f"{gone}; is it still running?"
        try:
            async with asyncio.timeout(1.0):
                return await self.server.died()
        except TimeoutError:
            return str(gone)

    # -- under the lock ----------------------------------------------------------------------------------------

    async def _look(self) -> None:
        """Whether the server is still the one that was loaded: a container may have been restarted meanwhile."""
        if self.server is not None and not self.server.alive:
            self.up = False
            return
        try:
            named = (await self.client.get("/weight_info", CALL_SECONDS))["weight_version"]
        except (ServerGone, ServerRefused, TypeError, KeyError) as error:
            log.warning("the vLLM server is to be brought up again: %s", error)
            self.up = False
        else:
            if self.versions.get(named) != self.loaded:
                self.loaded = None

    async def _bring_up(self) -> None:
        """Start the server, or wait for it. Raises EngineFailed, and EngineSetupError for what time does not heal."""
        self.loaded, self.asleep = None, False
        self.transfer.forget()
        try:
            if self.server is None:
                await wait_until_healthy(self.client, self.config.start_seconds, self.say)
            else:
                await self._start_own(self.server)
            self.facts = await inspect(
                self.client, self.bundle, self.config, sleep=self.sleep, lora_rank=self.transfer.lora_rank
            )
        except (Unreachable, ServerGone, ServerRefused, WeightFilesError) as error:
            if self.facts is not None:  # it was there, and may come back
                raise EngineFailed(str(error)) from error
            if isinstance(error, ServerRefused):
                raise EngineSetupError(
                    f"the vLLM server at {self.client.address} refuses ({error}); start it without --api-key, "
                    "reachable by this node only"
                ) from error
            raise error if isinstance(error, Unreachable) else EngineSetupError(str(error)) from error
        self.up = True
        self.listen()

    async def _start_own(self, server: OwnServer) -> None:
        """Raises ServerGone when it ends before it answers, Unreachable when it takes too long."""
        if server.alive:  # it is up, and something went wrong all the same
            try:
                await self.client.get("/health")
                return
            except (ServerGone, ServerRefused):
                await server.stop()
        await self.transfer.prepare(self.wanted)
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

    async def _load(self) -> None:
        """Bring the server to the wanted version. Raises EngineFailed."""
        version = self.wanted
        if self.loaded == version and not self.asleep:
            return
        named = self.name(version)
        pauses = self.asleep or self.transfer.in_place
        try:
            if self.loaded != version:
                await self.transfer.prepare(version)
            if self.asleep:
                # the trainer's cached blocks first, then weights, then keys and values: never both at their largest
                await self.device.run(_free_cached)
                await self.client.post("/wake_up", seconds=CALL_SECONDS, tags="weights")
            elif pauses:
                await self.client.post("/pause", seconds=CALL_SECONDS, mode="keep")
            await self.transfer.load(self.client, self.config.update_seconds)
            if not pauses:
                self.loaded = version  # streams that begin from here on name the new adapters
            self.versions[named] = version  # before a stream can end with it
            await self.client.post("/update_weight_version", {"new_version": named}, CALL_SECONDS)
            for stream in self.open if self.transfer.in_place else ():
                # what was sampled before and is still on its way is of the older version
                stream.marks.append((len(stream.token_ids) + STREAM_TOKENS, version))
            if self.asleep:
                await self.client.post("/wake_up", seconds=CALL_SECONDS, tags="kv_cache")
            if pauses:
                # cached keys and values are salted by version besides: a reset that fails costs memory only
                await self.client.post("/reset_prefix_cache", seconds=CALL_SECONDS)
                await self.client.post("/resume", seconds=CALL_SECONDS)
        except WeightFilesError as error:
            raise EngineFailed(str(error)) from error
        except (ServerGone, ServerRefused) as error:
            # a server that could not load has ended its worker, and one that could not be asked is no use either
            self.up, self.loaded = False, None
            raise EngineFailed(
                f"the vLLM server did not take the weights of version {version}: {error}; it must serve "
                f"{self.bundle.name}, and see engine.weights_dir at the same path as this node"
            ) from error
        self.asleep, self.loaded = False, version
        self.listen()


def _free_cached() -> None:
    """Hand back GPU memory that torch keeps for later."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
