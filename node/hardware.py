"""What this machine has to compute with, and which engine suits it and why."""

import shutil
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from node.config import Config


@dataclass(frozen=True, slots=True)
class Gpu:
    name: str
    bytes: int


@dataclass(frozen=True, slots=True)
class Machine:
    """What there is to compute with."""

    memory: int
    """Bytes that this process may use: the machine's, or its container's limit."""
    gpus: tuple[Gpu, ...]
    vllm: str
    """Path of the vllm program; empty: there is none."""


@dataclass(frozen=True, slots=True)
class EngineChoice:
    """Which engine samples, and why in a plain sentence."""

    name: str
    why: str
    shared_gpu: bool = False
    """vLLM is on the same GPU as the trainer, if there is one."""


def look(config: Config) -> Machine:
    """This machine."""
    gpus: tuple[Gpu, ...] = ()
    if config.model.device != "cpu" and torch.cuda.is_available():
        found = (torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count()))
        gpus = tuple(Gpu(gpu.name, gpu.total_memory) for gpu in found)
    return Machine(memory_limit(), gpus, shutil.which(config.engine.command) or "")


def memory_limit(root: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes of memory this process may use: the machine's, or less where a control group says so."""
    limits = [psutil.virtual_memory().total]
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        try:
            limits.append(int((root / name).read_text()))
        except (OSError, ValueError):  # another version of control groups, none, or "max"
            continue
    return min(limits)


def choose_engine(config: Config, machine: Machine) -> EngineChoice:
    """The engine as set, or for 'auto' the one that suits the machine."""
    asked, engine = config.rollout.engine, config.engine
    if asked == "transformers":
        return EngineChoice("transformers", "rollouts by transformers, in this process (rollout.engine = transformers)")
    if engine.url:
        return EngineChoice(
            "vllm", f"rollouts by the vLLM server at {engine.url}: engine.url names one", not _apart(config)
        )
    if asked == "vllm":
        return EngineChoice(
            "vllm", "rollouts by a vLLM server of this node (rollout.engine = vllm)", not _apart(config)
        )
    if not machine.gpus:
        return EngineChoice(
            "transformers",
            "rollouts by transformers: there is no GPU, and on a CPU it is best to share the trainer's weights",
        )
    names = " and ".join(sorted({gpu.name for gpu in machine.gpus}))
    if not machine.vllm:
        return EngineChoice(
            "transformers",
            f"rollouts by transformers: there is a GPU ({names}), but no program '{engine.command}'; "
            "pip install vllm, or set engine.command or engine.url, for rollouts several times as fast",
        )
    return EngineChoice("vllm", f"rollouts by vLLM: there is a GPU ({names}) and {machine.vllm}", not _apart(config))


def _apart(config: Config) -> bool:
    """Whether the settings give vLLM GPUs that the trainer does not use."""
    first = int(config.model.device.partition(":")[2] or 0)
    trainer = {str(gpu) for gpu in range(first, first + config.train.shards)}
    return bool(config.engine.gpus) and not trainer & set(config.engine.gpus.split(","))


def sleeps(config: Config, choice: EngineChoice, machine: Machine) -> bool:
    """Whether vLLM gives its memory back while the trainer works. On a CPU that frees nothing, and hangs requests."""
    if not machine.gpus or choice.name != "vllm":
        return False
    return choice.shared_gpu if config.engine.sleep == "auto" else config.engine.sleep == "on"
