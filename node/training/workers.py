"""The worker processes of the sharded trainer: started together, asked together, and ended together when one fails."""

import logging
import selectors
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import msgspec

from node.config_train import TrainConfig
from node.engines.vllm_server import log_tail
from node.interfaces import Interrupted
from node.training.launching import Launcher, LaunchFailed, LocalLauncher, Process
from node.training.worker_wire import Beat, Command, Done, Failed, Frames, Reply, Setup, WireError, frame

log = logging.getLogger(__name__)

Kind = Literal["float32", "bfloat16"]
SILENT_SECONDS = 60.0
"""Without a beat, of which there is one a second: a machine that swaps is slow, too."""
POLL_SECONDS = 0.1
GRACE_SECONDS = 1.0
"""After the first sign of trouble, for the others: who lost a connection says so before the one that broke it is seen
to be gone."""
END_SECONDS = 2.0
"""For a killed process to be gone; a node has 4 s to stop in all."""
ENDS = ("model", "memory", "error")
"""Kinds of failure after which a worker has ended."""


@dataclass(frozen=True, slots=True)
class WorkerPlan:
    """What workers are started with."""

    count: int
    device: Literal["cpu", "cuda"]
    dtype: Kind
    """Compute type."""
    model: str
    """As `model.path` has it."""
    models: Path
    threads: int
    """Of one worker."""
    gpu_memory_share: float
    dumps: Path
    log: Path


class WorkersLost(Exception):
    """A worker has ended, hangs or is out of memory, and all were ended; the message says which and why."""

    def __init__(self, why: str, kind: Literal["gone", "memory", "model"] = "gone") -> None:
        super().__init__(why)
        self.kind = kind


@dataclass(slots=True)
class _Worker:
    rank: int
    process: Process
    connection: socket.socket
    where: str = ""
    frames: Frames = field(default_factory=lambda: Frames(msgspec.msgpack.Decoder(Reply).decode))
    heard: float = 0.0
    answer: Done | Failed | None = None
    trouble: str = ""
    """Why nothing more comes from it."""

    @property
    def name(self) -> str:
        return f"worker {self.rank + 1} (process {self.process.pid}{self.where and f' on {self.where}'})"


class Workers:
    """All methods are called from one thread, but `close`."""

    def __init__(self, plan: WorkerPlan, launcher: Launcher | None = None, *, silent: float = SILENT_SECONDS) -> None:
        """`launcher`: None starts them on this machine."""
        self.plan, self._silent = plan, silent
        self._launcher = launcher or LocalLauncher(plan.log, plan.threads)
        self._workers: list[_Worker] = []

    @property
    def pids(self) -> list[int]:
        return [worker.process.pid for worker in self._workers]

    def __str__(self) -> str:
        pids = " and ".join(map(str, self.pids)) or "none running"
        return f"{self.plan.device}, {self.plan.dtype}, processes {pids}"

    def start(self, train: TrainConfig, seconds: float) -> None:
        """Start them with the model as its files have it, all within `seconds`. Raises WorkersLost."""
        self.kill()
        plan, until = self.plan, time.monotonic() + seconds
        try:
            launched = self._launcher.launch(plan.count, seconds)
            self._workers = [_Worker(rank, one.process, one.connection, one.where) for rank, one in enumerate(launched)]
            log.info("started %d workers: processes %s (log: %s)", plan.count, self.pids, plan.log)
            meeting = self._launcher.meeting()
        except LaunchFailed as failed:
            self.kill()
            raise WorkersLost(str(failed)) from failed
        setups = [
            Setup(
                rank=rank,
                count=plan.count,
                store=meeting,
                device=plan.device,
                dtype=plan.dtype,
                model=plan.model,
                models=str(plan.models),
                train=train.model_dump(mode="json"),
                threads=plan.threads,
                gpu_memory_share=plan.gpu_memory_share,
                dumps=str(plan.dumps),
                seconds=seconds,
            )
            for rank in range(plan.count)
        ]
        self._tell([frame(setup) for setup in setups], until)
        self._answers(until, _never)

    def ask(
        self, command: Command, seconds: float, should_stop: Callable[[], bool] = lambda: False
    ) -> Sequence[Done | Failed]:
        """What each worker answers. Raises WorkersLost; and Interrupted, with all of them ended, once `should_stop`."""
        if not self._workers:
            raise WorkersLost("the trainer's workers have ended")
        data, until = frame(command), time.monotonic() + seconds
        self._tell([data] * len(self._workers), until)
        return self._answers(until, should_stop)

    def _tell(self, frames: Sequence[bytes], until: float) -> None:
        for worker, data in zip(self._workers, frames, strict=True):
            worker.answer = None
            patience = max(POLL_SECONDS, min(self._silent, until - time.monotonic()))
            worker.connection.settimeout(patience)
            try:
                worker.connection.sendall(data)
            except TimeoutError:
                worker.trouble = f"has read nothing for {patience:.0f} s"
            except OSError as error:
                worker.trouble = str(error)

    def _answers(self, until: float, should_stop: Callable[[], bool]) -> list[Done | Failed]:
        begun = time.monotonic()
        first_trouble: float | None = None
        with selectors.DefaultSelector() as selector:
            for worker in self._workers:
                worker.heard = begun
                if not worker.trouble:
                    selector.register(worker.connection, selectors.EVENT_READ, worker)
            while True:
                for key, _ in selector.select(POLL_SECONDS):
                    self._hear(key.data)
                    if key.data.trouble:
                        selector.unregister(key.fileobj)
                now = time.monotonic()
                if should_stop():
                    self.kill()
                    raise Interrupted("a stop was asked for during the update; the step is repeated at the next start")
                for worker in self._workers:
                    if worker.answer is None and not worker.trouble and now - worker.heard > self._silent:
                        worker.trouble = f"has not been heard of for {self._silent:.0f} s"
                if any(worker.trouble or _has_ended(worker.answer) for worker in self._workers):
                    first_trouble = first_trouble or now
                    if now - first_trouble > GRACE_SECONDS:
                        raise self._lost()
                elif all(worker.answer for worker in self._workers):
                    return [worker.answer for worker in self._workers if worker.answer]
                elif now > until:
                    late = [worker for worker in self._workers if worker.answer is None]
                    for worker in late:
                        worker.trouble = (
                            f"has not answered within {until - begun:.0f} s, all that was left of its time (raise "
                            "limits.stage_seconds if it only works long)"
                        )
                    raise self._lost()

    def _hear(self, worker: _Worker) -> None:
        try:
            messages = worker.frames.read(worker.connection)
        except WireError as error:
            worker.trouble = str(error)
            return
        worker.heard = time.monotonic()
        for message in messages:
            if not isinstance(message, Beat):
                worker.answer = message

    def _lost(self) -> WorkersLost:
        """Why, by the likeliest cause; all workers are ended."""
        workers = self._workers
        codes = [worker.process.poll() for worker in workers]
        self.kill()
        told = [
            (worker, worker.answer)
            for worker in workers
            if isinstance(worker.answer, Failed) and worker.answer.kind in ENDS
        ]
        for worker, failed in told:
            if failed.kind == "model":
                return WorkersLost(failed.why, "model")
            if failed.kind == "memory":
                return WorkersLost(f"{worker.name} ran out of memory: {failed.why}", "memory")
        for worker, code in zip(workers, codes, strict=True):
            if code is not None and code < 0:
                return WorkersLost(f"{worker.name} was ended by {signal.Signals(-code).name}")
        for worker, code in zip(workers, codes, strict=True):
            if worker.trouble and not _has_ended(worker.answer):
                how = worker.trouble if code is None else f"ended with code {code}"
                return WorkersLost(f"{worker.name} {how}; see {self.plan.log}\n{log_tail(self.plan.log)}")
        worker, failed = told[0]
        return WorkersLost(f"{worker.name} failed: {failed.why}")

    def kill(self) -> None:
        """End all of them now: what they hold is in the checkpoint and the journal."""
        for worker in self._workers:
            worker.process.kill()
            worker.connection.close()
        for worker in self._workers:
            try:
                worker.process.wait(END_SECONDS)
            except subprocess.TimeoutExpired:  # inside a driver, say: the kernel ends it when it can
                log.warning("%s was killed and has not ended within %.0f s", worker.name, END_SECONDS)
        self._launcher.clear()
        self._workers = []

    def close(self) -> None:
        """End them for good, from any thread; whoever waits for an answer is told that they are gone."""
        for worker in self._workers:
            worker.process.kill()
        self._launcher.clear()


def _never() -> bool:
    return False


def _has_ended(answer: Done | Failed | None) -> bool:
    return isinstance(answer, Failed) and answer.kind in ENDS
