"""What is found and decided before anything is loaded.

A model that does not fit is refused with the sum written out, rather than by the kernel in the middle of a step.
"""

import logging
from dataclasses import dataclass
from pathlib import Path

from node.config import Config
from node.hardware import EngineChoice, Machine, choose_engine, look
from node.memory_plan import MemoryPlan, check_fit, plan_memory
from node.model_shape import model_shape
from node.models import ModelError, compute_dtype, device_of, model_directory
from node.training.distill import local_teacher
from node.training.lora import require_peft
from node.training.megatron_checks import check_megatron
from node.training.optimizers import check_optimizer

log = logging.getLogger(__name__)


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
