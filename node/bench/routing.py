"""`shoal bench routing`: how far rollout and training are apart on a mixture of experts, with routing replay or not.

The model is small and random: what is measured is how often numbers of another type, or of another batch, flip a choice
of experts, and what that does to log-probabilities. Differences are training minus rollout, per sampled token, in nats.
"""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from node.attention import ATTENTION
from node.bench.side import Say, run_side, serve
from node.bench.workload import spec_of
from node.config_train import TrainConfig
from node.device import Device
from node.engines.transformers import TransformersEngine
from node.interfaces import PromptRequest, Sample, TrainGroup, TrainSequence
from node.lean import make_lean
from node.models import ModelBundle
from node.routing import divide, find_routers, noted
from node.training.local import LocalTrainer

SHAPE: Mapping[str, Any] = {
    "vocab_size": 2048,
    "hidden_size": 128,
    "intermediate_size": 256,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
    "max_position_embeddings": 1024,
    "initializer_range": 0.08,
    "tie_word_embeddings": True,
}
KINDS = ("qwen3_moe", "qwen3")
"""With experts, and without any to compare with."""
TYPES = (("bfloat16", "float32"), ("bfloat16", "bfloat16"))
"""(rollout, training)."""
PROMPTS, PROMPT_TOKENS, GROUP_SIZE, NEW_TOKENS = 4, 64, 8, 64
FAR = 0.5
"""A token this far off, in nats, has a ratio beyond 1.6 before anything was learnt."""
DEADLINE = 3600.0


async def compare(threads: int, machine: dict[str, Any]) -> dict[str, Any]:
    return await run_side("node.bench.routing", spec_of(threads), DEADLINE)


def work(spec: Mapping[str, Any], say: Say, directory: Path) -> None:
    torch.set_num_threads(spec["threads"])
    say(measure(directory))


def measure(directory: Path, shape: Mapping[str, Any] = SHAPE) -> dict[str, Any]:
    """Every pair of types, on a model with experts (replayed or not) and on a dense one."""
    rows = []
    for kind in KINDS:
        for rollout_type, train_type in TYPES:
            rollout, training = small_model(kind, rollout_type, shape), small_model(kind, train_type, shape)
            groups = asyncio.run(sampled(rollout))
            for replay in ("auto", "off") if rollout.routing else ("off",):
                trainer = LocalTrainer(training, TrainConfig(routing_replay=replay), dumps=directory)
                row = {"model": kind, "rollout": rollout_type, "training": train_type, "replay": replay == "auto"}
                rows.append({**row, **gaps(trainer, groups), "choices_flipped": flipped(training, groups)})
    return {"rows": rows}


def small_model(kind: str, dtype: str, shape: Mapping[str, Any]) -> ModelBundle:
    """The same random weights for a kind, in a type; without a tokenizer."""
    config = AutoConfig.for_model(kind, **shape, attn_implementation=ATTENTION)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).to(getattr(torch, dtype)).eval()
    make_lean(model)
    return ModelBundle(model, None, frozenset(), -1, b"", kind, Path(), routing=find_routers(model))


async def sampled(bundle: ModelBundle) -> list[TrainGroup]:
    """Groups as the loop makes them of rollouts."""
    rng = np.random.default_rng(0)
    prompts = rng.integers(0, bundle.vocabulary_size, (PROMPTS, PROMPT_TOKENS)).tolist()
    requests = [
        PromptRequest(str(i), tuple(ids), n=GROUP_SIZE, max_new_tokens=NEW_TOKENS, temperature=1.0, seed=i)
        for i, ids in enumerate(prompts)
    ]
    device = Device()
    groups = {group.key: group.samples async for group in TransformersEngine(bundle, device).generate(requests)}
    device.close()
    return [_as_group(bundle, request.prompt_ids, groups[request.key]) for request in requests]


def _as_group(bundle: ModelBundle, prompt: tuple[int, ...], samples: Sequence[Sample]) -> TrainGroup:
    prompt_experts, own = divide(bundle.routing, len(prompt), samples)
    sequences = tuple(
        TrainSequence(one.token_ids, (True,) * len(one.token_ids), 0.0, one.logprobs, experts=experts)
        for one, experts in zip(samples, own, strict=True)
    )
    return TrainGroup(prompt, sequences, "own", prompt_experts)


def gaps(trainer: LocalTrainer, groups: Sequence[TrainGroup]) -> dict[str, float]:
    """Differences of log-probabilities: mean and largest size, KL of the rollout's policy (k3), share of far ones."""
    pairs = [
        (ours, mu)
        for group, rows in zip(groups, trainer.logprobs(groups), strict=True)
        for one, row in zip(group.sequences, rows, strict=True)
        for ours, mu in zip(row, one.behaviour_logprobs or (), strict=True)
    ]
    gap = torch.tensor([ours - mu for ours, mu in pairs], dtype=torch.float64)
    return {
        "tokens": float(len(gap)),
        "mean": float(gap.abs().mean()),
        "largest": float(gap.abs().max()),
        "kl": float((gap.exp() - 1 - gap).mean()),
        "far": float((gap.abs() > FAR).double().mean()),
    }


def flipped(training: ModelBundle, groups: Sequence[TrainGroup]) -> float | None:
    """Share of (token, layer) of the rollout for which the training routers, left alone, choose other experts."""
    routing = training.routing
    if routing is None:
        return None
    differ = total = 0
    for group in groups:
        for one in group.sequences:
            ids = group.prompt_ids + one.token_ids[:-1]
            with torch.no_grad(), noted(routing) as routes:
                training.model(torch.tensor([ids]), use_cache=False)
            free = routing.unpack(routes.of(range(len(ids))), len(ids))
            taken = routing.unpack(group.prompt_experts + one.experts, len(ids))
            differ += int((np.sort(free, -1) != np.sort(taken, -1)).any(-1).sum())
            total += taken.shape[0] * taken.shape[1]
    return differ / total


if __name__ == "__main__":
    serve(work)
