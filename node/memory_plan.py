"""What training and sampling take of a device's memory, with the sum written out."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from node.config import Config
from node.config_train import TrainConfig
from node.hardware import EngineChoice, Machine, sleeps
from node.model_shape import ModelShape
from node.models import ModelError
from node.training.distill import local_teacher

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
AVERAGER = 400 << 20
"""Of hivemind's processes (node/averager_process.py), together."""
LIBRARIES = 500 << 20
"""Of a process in main memory before it has a model: torch, transformers, the tokenizer, the network, the tables."""
SCORER = 100 << 20
"""Of its processes in main memory, together."""


class ModelTooBig(ModelError):
    """The model cannot be trained in this machine's memory; the message has the sum."""


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


def _sum(parts: Iterable[tuple[str, int]]) -> int:
    return sum(size for _, size in parts)


def _said(part: tuple[str, int]) -> str:
    return f"{part[0]} {part[1] / GB:.1f}"


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
        return plan_shards(config, shape, machine, choice, dtype, teacher)
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
    if not machine.gpus:
        always += [("libraries", LIBRARIES), ("scorer", SCORER)]
    update = [("gradients", trained * 4), *_of_pass(shape, train, machine, width)] if trained else []
    if trained == own and shape.vocabulary:
        # both, before they are added to each other and to those of the micro-batches before
        update.append(("gradients of embedding and output", 2 * shape.vocabulary * shape.width * width))
    if config.averaging.method != "none" and not machine.gpus:  # it is in main memory
        always += [("outer optimizer", own * 8), ("averager", AVERAGER)]
        update = max(update, [("a round of averaging", own * 8)], key=_sum)
    return _plan(config, machine, choice, always, update, _for_rollouts(config, shape, choice, width))


def plan_shards(
    config: Config,
    shape: ModelShape,
    machine: Machine,
    choice: EngineChoice,
    dtype: torch.dtype,
    teacher: ModelShape | None = None,
) -> MemoryPlan:
    """Of `train.shards` processes (node/training/fsdp.py): rows of masters, moments and gradients each.

    Megatron's (node/training/megatron.py) hold copies in the compute type besides, and gather nothing.
    """
    own, width, shards, train = shape.parameters, dtype.itemsize, config.train.shards, config.train
    here, said = (1, f"1/{shards} of " if shards > 1 else "") if machine.gpus else (shards, "")
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
    if not machine.gpus:
        always += [("libraries", LIBRARIES * (1 + shards)), ("scorer", SCORER)]
    update = [(f"{said}gradients", rows * 4)]
    if not copies:
        update.append(("gathered layers with gradients", shape.gathered() * (width + 4) * here))
    update += [(what, size * here) for what, size in _of_pass(shape, train, machine, width)]
    return _plan(config, machine, choice, always, update, _for_rollouts(config, shape, choice, width))


def weights_pass_through(config: Config, choice: EngineChoice) -> bool:
    """Whether a node with shards needs its own copy of the weights only to write files of them, on no GPU."""
    return choice.name == "vllm" and config.engine.transfer == "files" and not local_teacher(config.train)


def _of_pass(shape: ModelShape, train: TrainConfig, machine: Machine, width: int) -> list[tuple[str, int]]:
    """What a micro-batch's way there and back takes besides gradients."""
    # without a GPU there is no error that `auto` could act on: the kernel ends the process
    recomputed = train.gradient_checkpointing in (("on", "auto") if machine.gpus else ("on",))
    parts = [
        ("activations", shape.activations(train, recomputed=recomputed) * width),
        ("output layer", shape.output_layer(train)),
    ]
    return [part for part in parts if part[1]]


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
            "only (train.lora_rank), compute layers twice (train.gradient_checkpointing on), use a smaller model "
            "(model.path), model.dtype bfloat16, train.optimizer adamw8bit on a GPU, several GPUs (train.shards), or a "
            "machine with more memory"
        )


def gpu_share(config: Config, plan: MemoryPlan, choice: EngineChoice) -> float:
    """Share of a GPU's memory for vLLM: as set, or what the trainer leaves."""
    if config.engine.gpu_share:
        return config.engine.gpu_share
    if not choice.shared_gpu:
        return LARGEST_SHARE
    trainer = _sum(plan.always) + (_sum(plan.update) if plan.together else 0)
    return max(SPARE, round(1 - SPARE - trainer / plan.limit, 3))
