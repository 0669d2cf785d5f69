"""A worker of the sharded trainer: `python -m node.training.worker FD`, started by node/training/workers.py.

It holds its rows of the model, does what it is told over the socket FD, and ends with the node: when the socket does,
even in the middle of a matrix product.
"""

import logging
import os
import queue
import signal
import socket
import sys
import threading
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from node.isolation import die_with_parent
from node.training.worker_wire import (
    Beat,
    Command,
    Configure,
    Done,
    Failed,
    Files,
    Frames,
    Logprobs,
    Memory,
    Setup,
    Update,
    WireError,
    frame,
)

if TYPE_CHECKING:
    import torch

    from node.config_train import TrainConfig
    from node.training.fsdp import Shards
    from node.training.local import LocalTrainer
    from node.training.megatron import Megatron

log = logging.getLogger(__name__)

BEAT_SECONDS = 1.0


class Connection:
    """The worker's end: one thread reads, one says that the process lives, and whoever has an answer sends it."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket, self._sending = connection, threading.Lock()
        first: queue.Queue[Any] = queue.Queue(1)
        self._commands: queue.Queue[Any] = queue.Queue(1)  # the node waits for an answer before the next one
        threading.Thread(target=self._read, args=(first,), daemon=True).start()
        threading.Thread(target=self._beat, daemon=True).start()
        self.setup: Setup = first.get()

    def next(self) -> Command:
        """The next command; waits for it without end, as long as the node is there."""
        command: Command = self._commands.get()
        return command

    def send(self, message: Done | Failed | Beat) -> None:
        data = frame(message)
        with self._sending:
            self._socket.sendall(data)

    def _read(self, first: "queue.Queue[Any]") -> None:
        try:
            frames = Frames(msgspec.msgpack.Decoder(Setup).decode)
            while not (found := frames.read(self._socket)):
                pass
            first.put(found[0])
            frames = Frames(msgspec.msgpack.Decoder(Command).decode)
            while True:
                for command in frames.read(self._socket):
                    self._commands.put(command)
        except WireError:
            os._exit(1)  # the node is gone, and with it the reason to go on

    def _beat(self) -> None:
        try:
            while True:
                self.send(Beat())
                threading.Event().wait(BEAT_SECONDS)
        except OSError:
            os._exit(1)


def main(descriptor: int) -> None:
    """Serve one node. Ends the process."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the node's, which ends its workers
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    connection = Connection(socket.socket(fileno=descriptor))
    logging.info("worker %d of %d, process %d", connection.setup.rank + 1, connection.setup.count, os.getpid())
    code = 0
    try:
        _serve(connection)
    except Exception as error:
        log.exception("the worker fails")
        connection.send(_ended(error))
        code = 1
    os._exit(code)


def _ended(error: Exception) -> Failed:
    from node.memory import out_of_memory
    from node.models import ModelError

    said = f"{type(error).__name__}: {error}"
    if isinstance(error, ModelError):
        return Failed("model", str(error))
    return Failed("memory" if out_of_memory(error) else "error", said[:2000])


def _serve(connection: Connection) -> None:
    import torch
    import torch.distributed as dist

    from node.config_train import TrainConfig
    from node.device import use_threads
    from node.memory import share_gpu
    from node.training.local import LocalTrainer

    setup = connection.setup
    use_threads(setup.threads)
    device = torch.device(setup.device)
    if setup.device == "cuda":
        device = torch.device("cuda", setup.rank % torch.cuda.device_count())  # Ray shows each worker its own only
        torch.cuda.set_device(device)
        share_gpu(device, setup.gpu_memory_share)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if setup.device == "cuda" else "gloo",
        init_method=setup.store,
        rank=setup.rank,
        world_size=setup.count,
        timeout=timedelta(seconds=setup.seconds),
    )
    config = TrainConfig.model_validate(setup.train)
    shards = _ranks(config, device, {"float32": torch.float32, "bfloat16": torch.bfloat16}[setup.dtype], setup.seconds)
    bundle = shards.load(setup.model, Path(setup.models))
    trainer = LocalTrainer(bundle, config, dumps=Path(setup.dumps), ranks=shards)
    connection.send(Done(trainer.step))
    while True:
        connection.send(_answer(connection.next(), trainer, shards))


def _ranks(config: "TrainConfig", device: "torch.device", dtype: "torch.dtype", seconds: float) -> "Shards | Megatron":
    """All workers together, by `train.backend`."""
    if config.backend == "megatron":
        from node.training.megatron import Megatron

        return Megatron(device, dtype, config, seconds)
    from node.training.fsdp import Shards

    return Shards(device, dtype)


def _answer(command: Command, trainer: "LocalTrainer", shards: "Shards | Megatron") -> Done | Failed:
    """Do it; what all workers fail at alike, or without waiting for each other, is told and no more."""
    from node.checkpoint import CheckpointError
    from node.disk import failed_write
    from node.interfaces import StepSkipped

    try:
        return _done(command, trainer, shards)
    except StepSkipped as skipped:
        return Failed("skipped", str(skipped), skipped.advice)
    except CheckpointError as error:
        return Failed("checkpoint", str(error))
    except Exception as error:
        if isinstance(command, Files) and command.do != "load" and failed_write(error):
            return Failed("disk", str(error))
        raise


def _done(command: Command, trainer: "LocalTrainer", shards: "Shards | Megatron") -> Done:
    from node.config_train import TrainConfig
    from node.engines.vllm_weights import digest

    match command:
        case Configure(train):
            trainer.configure(TrainConfig.model_validate(train))
        case Update(batch):
            stats = trainer.update(batch)
            return Done(trainer.step, stats=stats if shards.rank == 0 else None)
        case Logprobs(groups):
            logprobs = trainer.logprobs(groups)
            return Done(trainer.step, logprobs=logprobs if shards.rank == 0 else [])
        case Files("save", directory):
            trainer.save(Path(directory))
        case Files("load", directory):
            trainer.load(Path(directory))
        case Files("export", directory):
            trainer.export(Path(directory))
        case Files("hand_over", directory):
            files = shards.gather(trainer.bundle, trainer.weights.masters, Path(directory), shards.dtype)
            sums = {file: digest(Path(directory) / file) for file in files} if shards.rank == 0 else {}
            return Done(trainer.step, sums=sums)
        case Memory():
            return Done(trainer.step, memory=dict(trainer.memory()))
    return Done(trainer.step)


if __name__ == "__main__":
    main(int(sys.argv[1]))
