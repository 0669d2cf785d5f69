"""TRL's trainers on our tokens: DPO, KTO and SFT over examples that are token ids already.

TRL would render and tokenize text itself, with special tokens spelled in it taken for real ones; so its dataset
preparation is passed over. The model is a plain copy in float32 with the library's own attention.
"""

import copy
import logging
import math
import os
import tempfile
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoModelForCausalLM, PrinterCallback, TrainerCallback

from node.config_train import TrainConfig
from node.offline.examples import Labelled, OfflineError, Pair

log = logging.getLogger(__name__)

Method = Literal["dpo", "kto", "sft"]

IGNORED = -100
"""Label of a token that is not trained on."""


@dataclass(frozen=True, slots=True)
class Course:
    """How to train."""

    method: Method
    steps: int
    batch: int
    """Examples of one optimizer step."""
    learning_rate: float
    beta: float
    """DPO and KTO: how dear it is to move away from the model as it was."""
    seed: int
    autocast: bool
    """Compute in bfloat16; the weights are float32 either way."""


@dataclass(slots=True)
class Outcome:
    """What a training did."""

    steps: int = 0
    losses: list[float] = field(default_factory=list)
    last: dict[str, float] = field(default_factory=dict)
    """Everything TRL logged at the last step."""


def require_trl() -> None:
    """Raises OfflineError where TRL is not installed."""
    if find_spec("trl") is None:
        raise OfflineError("offline training is by trl, which is not installed ; .venv/bin/pip install -e '.[trl]'")


def plain_copy(model: Any, weights: dict[str, torch.nn.Parameter]) -> Any:
    """A float32 model of the same architecture with `weights` (by parameter name), as TRL expects models to be."""
    config = copy.deepcopy(model.config)
    with torch.device(model.device):
        plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
    plain.generation_config = copy.deepcopy(model.generation_config)
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            parameter.copy_(weights[name])
    return plain


def train(
    model: Any,
    tokenizer: Any,
    examples: Sequence[Pair] | Sequence[Labelled],
    course: Course,
    config: TrainConfig,
    *,
    work: Path,
    should_stop: Callable[[], bool],
) -> Outcome:
    """Train `model` in place. Returns early once `should_stop`. Writes nothing that is kept; `work` is scratch.

    Raises OfflineError when the loss is not finite or memory runs out; the model is of no use then.
    """
    require_trl()
    # no bars, and no look at the hub for what is all here
    os.environ |= {"TQDM_DISABLE": "1", "HF_HUB_OFFLINE": "1"}
    import datasets

    datasets.disable_progress_bars()
    logging.getLogger("accelerate").setLevel(logging.WARNING)
    watch = _Watch(course, should_stop)
    micro = micro_batch(examples, course, config.tokens_per_micro_batch)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # TRL's own use of what transformers renames
            tempfile.tempdir = str(work)  # where datasets keeps what it computes
            trainer = _trainer(model, copy.deepcopy(tokenizer), examples, course, config, micro, work, watch)
            trainer.remove_callback(PrinterCallback)
            trainer.train()
    except (RuntimeError, MemoryError) as error:
        if not isinstance(error, MemoryError | torch.OutOfMemoryError) and "DefaultCPUAllocator" not in str(error):
            raise
        raise OfflineError(
            f"out of memory with {micro} examples a forward ; lower train.tokens_per_micro_batch"
            f" ({config.tokens_per_micro_batch}) or --max-length"
        ) from error
    finally:
        tempfile.tempdir = None
    return watch.outcome


def micro_batch(examples: Sequence[Pair] | Sequence[Labelled], course: Course, budget: int) -> int:
    """Examples of one forward, so that they have at most `budget` tokens padded to the longest, and at least one.

    As many in each forward of a step, which has as few more than `course.batch` as that allows. KTO takes two at least:
    it estimates the KL from prompts paired with each other's answers.
    """
    longest = max(map(_tokens, examples))
    smallest = 2 if course.method == "kto" else 1
    most = max(smallest, min(budget // longest, course.batch, len(examples)))
    return max(smallest, math.ceil(course.batch / math.ceil(course.batch / most)))


def _tokens(example: Pair | Labelled) -> int:
    if isinstance(example, Pair):
        return 2 * (len(example.prompt_ids) + max(len(example.chosen_ids), len(example.rejected_ids)))
    return len(example.prompt_ids) + len(example.completion_ids)


class _Watch(TrainerCallback):
    """Collects losses, says how far it is, stops when asked to or when the loss is lost."""

    def __init__(self, course: Course, should_stop: Callable[[], bool]) -> None:
        self.course, self.should_stop, self.outcome = course, should_stop, Outcome()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.outcome.steps = state.global_step
        control.should_training_stop = control.should_training_stop or self.should_stop()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        if not logs or "loss" not in logs:
            return
        loss = float(logs["loss"])
        if not math.isfinite(loss):
            raise OfflineError(
                f"the loss of step {state.global_step} is {loss} ; lower --learning-rate"
                f" ({self.course.learning_rate:g}); nothing was changed"
            )
        self.outcome.losses.append(loss)
        self.outcome.last = {name: float(value) for name, value in logs.items() if isinstance(value, int | float)}
        log.info("step %d of %d, loss %.4f", state.global_step, self.course.steps, loss)


def _trainer(
    model: Any,
    tokenizer: Any,
    examples: Sequence[Any],
    course: Course,
    config: TrainConfig,
    micro: int,
    work: Path,
    watch: _Watch,
) -> Any:
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer, SFTConfig, SFTTrainer

    class Preferences(DPOTrainer):
        def _prepare_dataset(self, dataset: Any, *_: Any) -> Any:
            return dataset

    class Labels(KTOTrainer):
        def _prepare_dataset(self, dataset: Any, *_: Any) -> Any:
            return dataset

    given: dict[str, Any] = {
        "output_dir": str(work),
        "use_cpu": model.device.type == "cpu",
        "bf16": course.autocast,
        "per_device_train_batch_size": micro,
        "gradient_accumulation_steps": math.ceil(course.batch / micro),
        "gradient_checkpointing": False,
        "max_steps": course.steps,
        "max_length": None,
        "learning_rate": course.learning_rate,
        "lr_scheduler_type": "linear",
        "warmup_steps": course.steps // 10,
        "adam_beta1": config.betas[0],
        "adam_beta2": config.betas[1],
        "weight_decay": config.weight_decay,
        "max_grad_norm": config.max_grad_norm,
        "logging_steps": 1,
        "logging_nan_inf_filter": False,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "seed": course.seed % 2**32,
    }
    parts: dict[str, Any] = {"model": model, "processing_class": tokenizer, "callbacks": [watch]}
    if course.method == "sft":
        rows = [
            {
                "input_ids": [*example.prompt_ids, *example.completion_ids],
                "labels": [IGNORED] * len(example.prompt_ids) + list(example.completion_ids),
            }
            for example in examples
        ]
        return SFTTrainer(args=SFTConfig(**given), train_dataset=Dataset.from_list(rows), **parts)
    given |= {"beta": course.beta, "precompute_ref_log_probs": True}
    if course.method == "dpo":
        rows = [
            {
                "prompt_ids": list(example.prompt_ids),
                "chosen_ids": list(example.chosen_ids),
                "rejected_ids": list(example.rejected_ids),
            }
            for example in examples
        ]
        return Preferences(args=DPOConfig(**given), train_dataset=Dataset.from_list(rows), **parts)
    wanted = sum(example.desirable for example in examples)
    desirable, undesirable = kto_weights(wanted, len(examples) - wanted)
    given |= {"desirable_weight": desirable, "undesirable_weight": undesirable, "dataloader_drop_last": True}
    return Labels(args=KTOConfig(**given), train_dataset=Dataset.from_list(kto_rows(examples, micro)), **parts)


def kto_rows(examples: Sequence[Labelled], micro: int) -> list[dict[str, Any]]:
    """Rows for KTO, each with the answer of the row before it in its micro-batch, from which the KL is estimated."""
    rows: list[dict[str, Any]] = []
    for start in range(0, len(examples), micro):
        batch = examples[start : start + micro]
        rows += [
            {
                "prompt_ids": list(example.prompt_ids),
                "completion_ids": list(example.completion_ids),
                "KL_completion_ids": list(batch[i - 1].completion_ids),
                "label": example.desirable,
            }
            for i, example in enumerate(batch)
        ]
    return rows


def kto_weights(wanted: int, unwanted: int) -> tuple[float, float]:
    """Loss weights of wanted and unwanted examples so that both kinds count alike (arXiv 2402.01306, eq. 8).

    Both numbers are at least 1.
    """
    return (unwanted / wanted, 1.0) if wanted < unwanted else (1.0, wanted / unwanted)
