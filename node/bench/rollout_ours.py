"""Our side of `shoal bench rollout`: node.engines.transformers as the loop calls it."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from node.bench.floor import matrix_weights, work_of
from node.bench.ours import ours
from node.bench.side import Say, Stopwatch, peak_rss, serve
from node.bench.workload import GROUP_SIZE, NEW_TOKENS, PROMPTS, own_refs
from node.engines.transformers import TransformersEngine
from node.interfaces import PromptRequest, SampledGroup, TrainGroup, TrainSequence
from node.rollouts import prompts, sampling_seed


async def work(spec: Mapping[str, Any], say: Say, directory: Path) -> None:
    say(await measure(spec))


async def measure(spec: Mapping[str, Any]) -> dict[str, Any]:
    """A warm-up, `repeats` laps of the step's workload, one of the `ragged` budgets."""
    async with ours(spec) as parts:
        _, prompt_ids = await prompts(parts.bundle, parts.scorer, own_refs(parts.manifest, PROMPTS))
        engine = TransformersEngine(parts.bundle, parts.device)
        endless = TransformersEngine(dataclasses.replace(parts.bundle, stop_ids=frozenset()), parts.device)
        budgets = [NEW_TOKENS] * PROMPTS
        await _lap(engine, prompt_ids[:1], budgets[:1], seed=0)
        uniform = [await _lap(engine, prompt_ids, budgets, seed=i) for i in range(spec["repeats"])]
        ragged = [await _lap(endless, prompt_ids, spec["ragged"], seed=0)] if spec["ragged"] else []
        return {"dtype": parts.dtype, "peak_rss": peak_rss(), "uniform": uniform, "ragged": ragged}


async def _lap(
    engine: TransformersEngine, prompt_ids: Sequence[tuple[int, ...]], budgets: Sequence[int], *, seed: int
) -> dict[str, Any]:
    requests = [
        PromptRequest(str(i), ids, GROUP_SIZE, budget, 1.0, sampling_seed(0, seed, i))
        for i, (ids, budget) in enumerate(zip(prompt_ids, budgets, strict=True))
    ]
    watch = Stopwatch()
    groups = [group async for group in engine.generate(requests)]
    passed = watch.lap()
    counted = work_of([_as_train_group(prompt_ids[int(group.key)], group) for group in groups])
    return {
        **passed,
        "tokens": sum(len(sample.token_ids) for group in groups for sample in group.samples),
        "tokens_prefilled": counted.prefill_tokens,
        "tokens_decoded": counted.decode_tokens,
        "flops": counted.flops(*matrix_weights(engine.bundle.model)),
    }


def _as_train_group(prompt_ids: tuple[int, ...], group: SampledGroup) -> TrainGroup:
    """With nothing to learn from, so that only the sampling counts."""
    sequences = tuple(
        TrainSequence(sample.token_ids, (True,) * len(sample.token_ids), 0.0, None) for sample in group.samples
    )
    return TrainGroup(prompt_ids, sequences, "own")


if __name__ == "__main__":
    serve(work)
