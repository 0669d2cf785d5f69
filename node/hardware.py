"""What this machine has, which engine suits it and why, and whether a model fits: before anything is loaded.

A model that does not fit is refused with the sum written out, rather than by the kernel in the middle of a step.
"""

import json
import logging
import math
import shutil
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

import psutil
import torch

from node.config import Config
from node.config_train import TrainConfig
from node.models import ModelError, check_directory, compute_dtype, device_of, model_directory
from node.training.distill import local_teacher
from node.training.lora import require_peft
from node.training.megatron_checks import check_megatron
from node.training.optimizers import check_optimizer

log = logging.getLogger(__name__)

GB = 1 << 30
LARGEST_SHARE = 0.9
"""Of a GPU that vLLM has to itself."""
SPARE = 0.1
"""Of a GPU that it shares: left to CUDA contexts and fragmentation."""
KV_TOKENS = 1024
"""Keys and values without which an engine is of no use, in tokens."""
MOMENT_BYTES = {"adamw": 8, "adamw8bit": 2}
"""Of one trained number, by train.optimizer."""
SMALLEST_CACHE = 64 << 20
"""The same in bytes, for a small model."""


class ModelTooBig(ModelError):
    """The model cannot be trained in this machine's memory; the message has the sum."""


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
class ModelShape:
    """What the memory of a model follows from, read from its files without loading them."""

    name: str
    parameters: int
    kv_bytes: int
    """Keys and values of one token, in 16-bit numbers."""
    layers: int = 0
    width: int = 0
    """Numbers of one token's state between layers."""
    linear: Mapping[str, int] = field(default_factory=dict)
    """Linear layers by name (q_proj), those of experts left out: numbers in and out of one token, in all layers."""
    embedding: int = 0
    """Numbers of the embedding and the output layer."""
    experts: int = 0
    """Numbers of all experts."""

    def adapters(self, config: TrainConfig) -> int:
        """Numbers in the adapters of `train.lora_rank`: A is [rank, in], B is [out, rank]."""
        everywhere = config.lora_targets == ("all-linear",)
        return config.lora_rank * sum(n for name, n in self.linear.items() if everywhere or name in config.lora_targets)

    def activations(self, config: TrainConfig) -> int:
        """About the most numbers that a micro-batch keeps for the way back, experts and output layer left out."""
        kept = sum(self.linear.values())
        if config.gradient_checkpointing != "off" and self.layers:
            kept = self.layers * self.width + kept // self.layers  # what goes into each layer, and all of one layer
        return config.tokens_per_micro_batch * kept

    def gathered(self) -> int:
        """About the most numbers of other processes' that one has at a time: embedding, output and two layers."""
        layer = (self.parameters - self.embedding) // max(1, self.layers)
        return min(self.parameters, self.embedding + 2 * layer)

    def divided(self, config: TrainConfig) -> int:
        """About the numbers that one of the processes of Megatron's trainer holds."""
        parts = config.tensor_parallel * config.pipeline_parallel
        return -(-(self.parameters - self.experts) // parts) + -(-self.experts // (parts * config.expert_parallel))


@dataclass(frozen=True, slots=True)
class EngineChoice:
    """Which engine samples, and why in a plain sentence."""

    name: str
    why: str
    shared_gpu: bool = False
    """vLLM is on the same GPU as the trainer, if there is one."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What training a model takes, in bytes by what for."""

    always: tuple[tuple[str, int], ...]
    update: tuple[tuple[str, int], ...]
    rollout: tuple[tuple[str, int], ...]
    together: bool
    """Whether update and rollout hold their memory at the same time."""
    limit: int
    place: str

    @property
    def total(self) -> int:
        update, rollout = _sum(self.update), _sum(self.rollout)
        return _sum(self.always) + (update + rollout if self.together else max(update, rollout))

    def __str__(self) -> str:
        said = [*map(_said, self.always)]
        if self.together:
            said += map(_said, (*self.update, *self.rollout))
        else:
            either = " + ".join(map(_said, self.update)), " + ".join(map(_said, self.rollout))
            said.append(f"the larger of ({either[0]}) and ({either[1]})")
        return f"{' + '.join(said)} = {self.total / GB:.1f} GB, of {self.limit / GB:.1f} GB {self.place}"


def _sum(parts: tuple[tuple[str, int], ...]) -> int:
    return sum(size for _, size in parts)


def _said(part: tuple[str, int]) -> str:
    return f"{part[0]} {part[1] / GB:.1f}"


@dataclass(frozen=True, slots=True)
class Setup:
    """What was found and decided before a model is loaded."""

    machine: Machine
    choice: EngineChoice
    plan: MemoryPlan


def prepare(config: Config, models: Path) -> Setup:
    """Look at the machine, choose an engine and see whether the model fits. Raises ModelError, ModelTooBig."""
    machine = look(config)
    choice = choose_engine(config, machine)
    check_optimizer(config.train, device_of(config.model.device))
    check_shards(config, machine)
    check_megatron(config.train, model_directory(config.model.path, models), gpus=len(machine.gpus))
    if config.train.lora_rank:
        require_peft()
    shape = model_shape(model_directory(config.model.path, models))
    teacher = local_teacher(config.train)
    plan = plan_memory(
        config,
        shape,
        machine,
        choice,
        compute_dtype(device_of(config.model.device), config.model.dtype),
        model_shape(model_directory(teacher, models)) if teacher else None,
    )
    log.info("memory: %s", plan)
    check_fit(plan, shape)
    return Setup(machine, choice, plan)


def check_shards(config: Config, machine: Machine) -> None:
    """Raises ModelError where there are fewer GPUs than `train.shards`."""
    shards, gpus = config.train.shards, len(machine.gpus)
    if 0 < gpus < shards:
        raise ModelError(
            f"train.shards = {shards} needs a GPU for each, and there {'is' if gpus == 1 else 'are'} {gpus}; set "
            f"train.shards to {gpus}"
        )


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


def model_shape(directory: Path) -> ModelShape:
    """Read the headers of a model's files. Raises ModelError."""
    check_directory(directory)
    try:
        config = json.loads((directory / "config.json").read_text())
        tensors = [tensor for file in directory.glob("*.safetensors") for tensor in _tensors(file)]
        linear: dict[str, int] = {}
        for name, sizes in tensors:
            if len(sizes) == 2 and ".layers." in name and ".experts." not in name:
                layer = name.split(".")[-2]
                linear[layer] = linear.get(layer, 0) + sum(sizes)
        heads = config["num_attention_heads"]
        width = config.get("head_dim") or config["hidden_size"] // heads
        kv = 2 * 2 * config["num_hidden_layers"] * (config.get("num_key_value_heads") or heads) * width
    except (OSError, ValueError, KeyError, TypeError, struct.error) as error:
        raise ModelError(f"{directory}: its files cannot be read ({error!r}); copy the model again, whole") from error
    return ModelShape(
        name=directory.name,
        parameters=sum(math.prod(sizes) for _, sizes in tensors),
        kv_bytes=kv,
        layers=config["num_hidden_layers"],
        width=config["hidden_size"],
        linear=MappingProxyType(linear),
        embedding=sum(math.prod(sizes) for name, sizes in tensors if "embed_tokens" in name or "lm_head" in name),
        experts=sum(math.prod(sizes) for name, sizes in tensors if ".experts." in name),
    )


def _tensors(file: Path) -> list[tuple[str, list[int]]]:
    """Names and shapes."""
    with file.open("rb") as opened:
        (length,) = struct.unpack("<Q", opened.read(8))
        header = json.loads(opened.read(min(length, 100 << 20)))
    return [(name, tensor["shape"]) for name, tensor in header.items() if name != "__metadata__"]


def plan_memory(
    config: Config,
    shape: ModelShape,
    machine: Machine,
    choice: EngineChoice,
    dtype: torch.dtype,
    teacher: ModelShape | None = None,
) -> MemoryPlan:
    """What training and sampling in a compute type take on the device of the model, at their largest.

    With shards that is the first GPU, which has the node's own model besides a worker; on a CPU it is all of them.
    """
    if config.train.shards > 1:
        return _plan_shards(config, shape, machine, choice, dtype, teacher)
    own, width, train = shape.parameters, dtype.itemsize, config.train
    trained = shape.adapters(train) if train.lora_rank else own
    always = [("weights", own * width)]
    if config.federation.publish:
        always.append(("spot checks", own * width))
    if train.lora_rank:
        always.append(("adapters", trained * width))
    if config.federation.follow:
        trained = 0
    if width < 4 and trained:
        always.append(("32-bit adapters" if train.lora_rank else "32-bit weights", trained * 4))
    if trained:
        always.append(("optimizer", trained * MOMENT_BYTES[train.optimizer]))
    if train.kl_coefficient > 0 and not train.lora_rank:
        always.append(("reference", own * width))
    if teacher is not None:
        always.append(("teacher", teacher.parameters * width))
    update = [("gradients", trained * 4)] if trained else []
    if trained and (kept := shape.activations(train)):
        update.append(("activations", kept * width))
    return _plan(config, machine, choice, always, update, _for_rollouts(config, shape, choice, width))


def _plan_shards(
    config: Config,
    shape: ModelShape,
    machine: Machine,
    choice: EngineChoice,
    dtype: torch.dtype,
    teacher: ModelShape | None,
) -> MemoryPlan:
    """Of `train.shards` processes (node/training/fsdp.py): rows of masters, moments and gradients each.

    Megatron's (node/training/megatron.py) hold copies in the compute type besides, and gather nothing.
    """
    own, width, shards, train = shape.parameters, dtype.itemsize, config.train.shards, config.train
    here, said = (1, f"1/{shards} of ") if machine.gpus else (shards, "")
    rows, copies = -(-own // shards) * here, 0
    if train.backend == "megatron":
        rows = copies = shape.divided(train)
        said = "a part of "
    always = [(f"{said}32-bit weights", rows * 4), (f"{said}optimizer", rows * 8)]
    if copies:
        always.append((f"{said}weights", copies * width))
    if train.kl_coefficient > 0:
        always.append((f"{said}reference", copies * width or rows * 4))
    if not machine.gpus or not weights_pass_through(config, choice):
        always.append(("the node's own weights", own * width))
        if config.federation.publish:
            always.append(("spot checks", own * width))
    if teacher is not None:
        always.append(("teacher", teacher.parameters * width))
    update = [(f"{said}gradients", rows * 4)]
    if not copies:
        update.append(("gathered layers with gradients", shape.gathered() * (width + 4) * here))
    update.append(("activations", shape.activations(train) * width * here))
    return _plan(config, machine, choice, always, update, _for_rollouts(config, shape, choice, width))


def weights_pass_through(config: Config, choice: EngineChoice) -> bool:
    """Whether a node with shards needs its own copy of the weights only to write files of them, on no GPU."""
    return choice.name == "vllm" and config.engine.transfer == "files" and not local_teacher(config.train)


def _for_rollouts(config: Config, shape: ModelShape, choice: EngineChoice, width: int) -> list[tuple[str, int]]:
    rollout: list[tuple[str, int]] = []
    if choice.name == "transformers" or choice.shared_gpu:
        if choice.name == "vllm":
            size = 1 if config.engine.quantization == "fp8" else width
            rollout.append(("vLLM's weights", shape.parameters * size))
        rollout.append(("keys and values", max(SMALLEST_CACHE, shape.kv_bytes * KV_TOKENS)))
    return rollout


def _plan(
    config: Config,
    machine: Machine,
    choice: EngineChoice,
    always: list[tuple[str, int]],
    update: list[tuple[str, int]],
    rollout: list[tuple[str, int]],
) -> MemoryPlan:
    together = choice.name == "vllm" and not sleeps(config, choice, machine)
    parts = tuple(always), tuple(update), tuple(rollout), together
    if machine.gpus:
        gpu = machine.gpus[int(config.model.device.partition(":")[2] or 0) % len(machine.gpus)]
        # a vLLM server on the same GPU is another process, which engine.gpu_share is for
        share = config.limits.gpu_memory_share if choice.name == "transformers" else 0.0
        limit = int(gpu.bytes * share) if share else gpu.bytes
        return MemoryPlan(*parts, limit, f"on {gpu.name}")
    return MemoryPlan(*parts, machine.memory, "of memory")


def check_fit(plan: MemoryPlan, shape: ModelShape) -> None:
    """Raises ModelTooBig."""
    if plan.total > plan.limit:
        raise ModelTooBig(
            f"{shape.name} with {shape.parameters / 1e9:.2f} billion parameters does not fit: {plan}; train adapters "
            "only (train.lora_rank), use a smaller model (model.path), model.dtype bfloat16, train.optimizer adamw8bit "
            "on a GPU, several GPUs (train.shards), or a machine with more memory"
        )


def gpu_share(config: Config, plan: MemoryPlan, choice: EngineChoice) -> float:
    """Share of a GPU's memory for vLLM: as set, or what the trainer leaves."""
    if config.engine.gpu_share:
        return config.engine.gpu_share
    if not choice.shared_gpu:
        return LARGEST_SHARE
    trainer = _sum(plan.always) + (_sum(plan.update) if plan.together else 0)
    return max(SPARE, round(1 - SPARE - trainer / plan.limit, 3))
