"""TRL's side of `shoal bench step`: GRPOTrainer as its documentation says, set to what is fastest on a CPU.

That is: no gradient checkpointing, no reference model (beta 0), attention by sdpa, nothing logged or saved. In bfloat16
the weights are bfloat16, which is faster than autocast. Rewards come from the same scorer process as ours.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from node.bench.side import Say, Stopwatch, peak_rss, serve
from node.bench.workload import (
    GROUP_SIZE,
    NEW_TOKENS,
    bench_config,
    bench_manifest,
    bench_scorer,
    own_refs,
)
from node.config import Config
from node.home import models_dir
from node.interfaces import Task
from node.models import EMBEDDED, embedded_directory

MICRO_BATCH = 8
"""Completions of one forward and backward: 64 at once need more memory than most machines have, and are not faster."""


class Laps(TrainerCallback):
    """Times every optimizer step from the end of the one before it, and counts what was done in it."""

    def __init__(self) -> None:
        self.steps: list[dict[str, Any]] = []
        self.tokens = {"tokens_generated": 0, "tokens_rolled_out": 0, "tokens_forwarded": 0, "groups_uniform": 0}
        self._before = dict(self.tokens)
        self._watch = Stopwatch()

    def count_forward(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Hook of the model: tokens that it computes, padding included, in training and in generation."""
        kind = "tokens_forwarded" if torch.is_grad_enabled() else "tokens_rolled_out"
        self.tokens[kind] += (kwargs["input_ids"] if "input_ids" in kwargs else args[0]).numel()

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._watch.lap()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        done = {key: count - self._before[key] for key, count in self.tokens.items()}
        self.steps.append({**self._watch.lap(), **done})
        self._before = dict(self.tokens)


def work(spec: Mapping[str, Any], say: Say, directory: Path) -> None:
    say(measure(spec, str(directory)))


def measure(spec: Mapping[str, Any], directory: str) -> dict[str, Any]:
    """One optimizer step on one prompt, to warm up and to compare types by; then `steps` on `prompts` prompts each.

    Without `prompts` the first is all.
    """
    started = time.monotonic()
    torch.set_num_threads(spec["threads"])
    source = embedded_directory(models_dir()) if spec["model"] == EMBEDDED else spec["model"]
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[spec["dtype"]]
    model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, attn_implementation="sdpa", local_files_only=True)
    tokenizer = AutoTokenizer.from_pretrained(source, local_files_only=True)
    config, manifest = bench_config(spec["model"]), bench_manifest()
    prompts, steps = spec["prompts"], spec["steps"]
    refs = own_refs(manifest, max(1, prompts * steps))
    with asyncio.Runner() as runner:
        scorer = bench_scorer(manifest, config)
        runner.run(scorer.start())
        tasks = runner.run(scorer.tasks(refs))

        def score(numbers: Sequence[int], answers: Sequence[str]) -> list[float]:
            items = [(refs[number], answer) for number, answer in zip(numbers, answers, strict=True)]
            return [one.reward for one in runner.run(scorer.score(items))]

        start_seconds = time.monotonic() - started
        (probe,) = _train(model, tokenizer, config, tasks[:1], score, 1, directory)
        timed = _train(model, tokenizer, config, tasks, score, steps, directory) if prompts else []
        runner.run(scorer.close())
    return {
        "probe": probe,
        "steps": timed,
        "start_seconds": start_seconds,
        "micro_batch": MICRO_BATCH,
        "peak_rss": peak_rss(),
    }


def _train(
    model: Any,
    tokenizer: Any,
    config: Config,
    tasks: Sequence[Task],
    score: Callable[[Sequence[int], Sequence[str]], list[float]],
    steps: int,
    directory: str,
) -> list[dict[str, Any]]:
    """`steps` optimizer steps on all of `tasks`, an equal share of them each; what each step took and did."""
    laps = Laps()

    def reward(
        completions: list[list[dict[str, str]]], completion_ids: list[list[int]], number: list[int], **_: Any
    ) -> list[float]:
        rewards = score(number, [completion[0]["content"] for completion in completions])
        laps.tokens["tokens_generated"] += sum(map(len, completion_ids))
        groups = [rewards[i : i + GROUP_SIZE] for i in range(0, len(rewards), GROUP_SIZE)]
        laps.tokens["groups_uniform"] += sum(min(group) == max(group) for group in groups)
        return rewards

    train = config.train
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=GRPOConfig(
            output_dir=directory,
            use_cpu=True,
            bf16=False,
            per_device_train_batch_size=MICRO_BATCH,
            gradient_accumulation_steps=len(tasks) // steps * GROUP_SIZE // MICRO_BATCH,
            gradient_checkpointing=False,
            num_generations=GROUP_SIZE,
            max_completion_length=NEW_TOKENS,
            temperature=config.rollout.temperature,
            beta=0.0,
            epsilon=train.clip_low,
            epsilon_high=train.clip_high,
            learning_rate=train.learning_rate,
            lr_scheduler_type="constant",
            adam_beta1=train.betas[0],
            adam_beta2=train.betas[1],
            weight_decay=train.weight_decay,
            max_grad_norm=train.max_grad_norm,
            max_steps=steps,
            shuffle_dataset=False,
            logging_strategy="no",
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            seed=config.node.seed,
        ),
        train_dataset=Dataset.from_list(
            [
                {"prompt": [msgspec.structs.asdict(m) for m in task.messages], "number": i}
                for i, task in enumerate(tasks)
            ]
        ),
        processing_class=tokenizer,
        callbacks=[laps],
    )
    hook = model.register_forward_pre_hook(laps.count_forward, with_kwargs=True)
    trainer.train()
    hook.remove()
    return laps.steps


if __name__ == "__main__":
    serve(work)
