"""Hugging Face's side of `shoal bench rollout`: one `generate` over all rows, repeated and padded on the left."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from node.bench.side import Say, Stopwatch, peak_rss, serve
from node.bench.workload import GROUP_SIZE, NEW_TOKENS, PROMPTS, bench_config, bench_manifest, bench_scorer, own_refs
from node.home import models_dir
from node.models import EMBEDDED, embedded_directory
from protocol.manifest import Manifest

PROBE_TOKENS = 4


def work(spec: Mapping[str, Any], say: Say, directory: Path) -> None:
    say(measure(spec))


def measure(spec: Mapping[str, Any]) -> dict[str, Any]:
    """A few tokens of one prompt, to warm up and to compare types by; then what our side does."""
    started = time.monotonic()
    torch.set_num_threads(spec["threads"])
    source = embedded_directory(models_dir()) if spec["model"] == EMBEDDED else spec["model"]
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[spec["dtype"]]
    model = AutoModelForCausalLM.from_pretrained(
        source, dtype=dtype, attn_implementation="sdpa", local_files_only=True
    ).eval()
    tokenizer = AutoTokenizer.from_pretrained(source, local_files_only=True, padding_side="left")
    chats = asyncio.run(_chats(bench_manifest(), spec["model"]))
    start_seconds = time.monotonic() - started
    stop = tokenizer.eos_token_id
    probe = _lap(model, tokenizer, chats[:1], [PROBE_TOKENS], stop)
    uniform = [_lap(model, tokenizer, chats, [NEW_TOKENS] * PROMPTS, stop) for _ in range(spec["repeats"])]
    ragged = [_lap(model, tokenizer, chats, spec["ragged"], None)] if spec["ragged"] else []
    return {
        "probe": probe,
        "start_seconds": start_seconds,
        "peak_rss": peak_rss(),
        "uniform": uniform,
        "ragged": ragged,
    }


async def _chats(manifest: Manifest, model: str) -> list[list[dict[str, str]]]:
    scorer = bench_scorer(manifest, bench_config(model))
    await scorer.start()
    tasks = await scorer.tasks(own_refs(manifest, PROMPTS))
    await scorer.close()
    return [[{"role": message.role, "content": message.content} for message in task.messages] for task in tasks]


def _lap(
    model: Any, tokenizer: Any, chats: Sequence[list[dict[str, str]]], budgets: Sequence[int], stop: int | None
) -> dict[str, Any]:
    """One batch; of each row the tokens within its budget count, up to and with the first `stop`."""
    rows = [chat for chat in chats for _ in range(GROUP_SIZE)]
    limits = [budget for budget in budgets for _ in range(GROUP_SIZE)]
    torch.manual_seed(0)
    watch = Stopwatch()
    batch = tokenizer.apply_chat_template(
        rows, add_generation_prompt=True, padding=True, return_dict=True, return_tensors="pt"
    )
    model.generation_config = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=max(budgets),
        eos_token_id=stop,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.inference_mode():
        output = model.generate(**batch)
    passed = watch.lap()
    tokens = 0
    for row, limit in zip(output[:, batch["input_ids"].shape[1] :].tolist(), limits, strict=True):
        kept = row[:limit]
        tokens += kept.index(stop) + 1 if stop in kept else len(kept)
    return {**passed, "tokens": tokens}


if __name__ == "__main__":
    serve(work)
