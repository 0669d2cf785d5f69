"""How a vLLM server gets the trainer's weights: as files that it reads, or over NCCL from GPU to GPU."""

import asyncio
import base64
import functools
import logging
import time
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

import torch
from torch.cuda import nccl

from node.device import Device
from node.engines.vllm_client import VllmClient
from node.engines.vllm_probe import EngineSetupError
from node.engines.vllm_server import OwnServer
from node.engines.vllm_weights import Published, WeightFiles, WeightFilesError
from node.models import ModelBundle

log = logging.getLogger(__name__)


class WeightTransfer(Protocol):
    """Gives a server the trainer's weights."""

    in_place: bool
    """They replace the old ones, for requests in flight too; False: those go on with what they began with."""
    sleep_level: str
    """How much a server may forget while it sleeps: 2 all weights, 1 none."""
    lora_rank: int
    """Of the adapters that it is given; 0: whole weights."""
    model: str
    """What requests name to sample with the newest weights; empty: nothing."""

    async def prepare(self, version: int) -> None:
        """What can be done while the server still samples. Raises WeightFilesError."""

    async def load(self, client: VllmClient, seconds: float) -> None:
        """Have the paused server load what was prepared. Raises ServerGone, ServerRefused, EngineSetupError."""

    async def start(self, server: OwnServer) -> None:
        """Start a server with the newest weights."""

    def forget(self) -> None:
        """The server is another one now."""

    async def close(self) -> None: ...


class FileTransfer:
    """Writes a directory per version; the server reloads it in place."""

    in_place = True
    sleep_level = "2"
    lora_rank = 0
    model = ""

    def __init__(self, files: WeightFiles, device: Device) -> None:
        self.files, self.device = files, device
        self._taken: Published | None = None
        """What this server was given last; other servers may be given the same files."""

    async def prepare(self, version: int) -> None:
        """This version's files, written once. Files that are to be loaded a second time are compared first."""
        latest = self.files.latest
        if latest is None or latest.version != version:
            # on the model thread: nothing may change the weights while they are written
            self._taken = await self.device.run(self._current, version)
        elif latest is not self._taken:  # just written, for another server
            self._taken = latest
        else:
            try:
                await asyncio.to_thread(self.files.verify, latest)
            except WeightFilesError as error:
                log.warning("%s", error)
                self._taken = await self.device.run(self.files.publish, version)

    async def load(self, client: VllmClient, seconds: float) -> None:
        published = self.files.latest
        assert published is not None
        started = time.perf_counter()
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(published.directory)}}
        await client.post("/collective_rpc", body, seconds)
        log.info(
            "vLLM loaded version %d: %.0f MB in %.2f s",
            published.version,
            published.bytes / 1e6,
            time.perf_counter() - started,
        )

    async def start(self, server: OwnServer) -> None:
        assert self.files.latest is not None
        await server.start(self.files.latest.directory)

    def forget(self) -> None:
        """Nothing to forget: files are there for any server."""

    async def close(self) -> None:
        await asyncio.to_thread(self.files.close)

    def _current(self, version: int) -> Published:
        """On the model thread: another server's call, which was there first, may have written them."""
        latest = self.files.latest
        return latest if latest is not None and latest.version == version else self.files.publish(version)


class NcclTransfer:
    """Broadcasts the trainer's own tensors to the server's GPUs; files are written only for the server's start.

    The trainer is rank 0 of a group with all workers. It makes the group's id and sends it by HTTP, so neither side
    needs the other's libraries; both need NCCL of compatible versions. Tensor by tensor, unpacked, as vLLM's
    `NCCLWeightTransferEngine` receives it with `packed` false. Never run here: no GPU (docs/limits.md).
    """

    in_place = True
    sleep_level = "2"
    lora_rank = 0
    model = ""

    def __init__(self, files: WeightFiles, device: Device, bundle: ModelBundle) -> None:
        self._at_start, self.device, self.bundle = FileTransfer(files, device), device, bundle
        self._group: object | None = None

    async def prepare(self, version: int) -> None:
        if self._at_start.files.latest is None:
            await self._at_start.prepare(version)

    async def load(self, client: VllmClient, seconds: float) -> None:
        if self._group is None:
            await self._join(client, seconds)
        tensors = {name: tensor.detach() for name, tensor in self.bundle.model.named_parameters()}
        info = {
            "names": list(tensors),
            "dtype_names": [str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()],
            "shapes": [list(tensor.shape) for tensor in tensors.values()],
        }
        await client.post("/start_weight_update", seconds=seconds)
        await self._together(
            client.post("/update_weights", {"update_info": info}, seconds),
            functools.partial(_broadcast, list(tensors.values()), self._group),
            seconds,
        )
        await client.post("/finish_weight_update", {}, seconds)

    async def start(self, server: OwnServer) -> None:
        await self._at_start.start(server)

    def forget(self) -> None:
        self._group = None

    async def close(self) -> None:
        await self._at_start.close()

    async def _join(self, client: VllmClient, seconds: float) -> None:
        workers = int((await client.get("/get_world_size", seconds))["world_size"])
        unique = nccl.unique_id()
        info = {
            "nccl_unique_id_b64": base64.b64encode(unique).decode(),
            "rank_offset": 1,
            "world_size": workers + 1,
            "packed": False,
        }
        self._group = await self._together(
            client.post("/init_weight_transfer_engine", {"init_info": info}, seconds),
            functools.partial(_join_group, unique, workers + 1, self.bundle.model.device),
            seconds,
        )

    async def _together(self, asked: Coroutine[Any, Any, object], job: Callable[[], object], seconds: float) -> object:
        """Both sides of a collective at once: it returns on neither before the other has come."""
        try:
            async with asyncio.timeout(seconds):
                both = await asyncio.gather(asked, self.device.run(job))
        except TimeoutError as error:
            # the model thread waits inside NCCL for a peer that will not come, and cannot be called back
            raise EngineSetupError(
                f"weights did not go over NCCL within {seconds:.0f} s (engine.update_seconds); "
                "set engine.transfer to files, or NCCL_DEBUG=INFO to see why, and start the node again"
            ) from error
        return both[1]


def _join_group(unique: bytes, ranks: int, device: torch.device) -> object:
    """Be rank 0 of the group; vLLM's workers start with a sum of one number, and so must we."""
    with torch.cuda.device(device):
        group = nccl.init_rank(ranks, unique, 0)
        one = torch.zeros(1, device=device)
        nccl.all_reduce([one], [one], comms=[group])
        torch.cuda.synchronize(device)
    return group


def _broadcast(tensors: list[torch.Tensor], group: object) -> None:
    with torch.cuda.device(tensors[0].device):
        for tensor in tensors:
            nccl.broadcast([tensor.contiguous()], root=0, comms=[group])
        torch.cuda.synchronize()
