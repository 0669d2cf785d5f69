"""The start-up check that an engine samples from the policy that the trainer trains."""

from collections.abc import Sequence

from node.device import Device
from node.interfaces import Engine, PromptRequest, Sample, Trainer, TrainGroup, TrainSequence
from node.routing import Routing, divide

AGREEMENT = {"float32": 1e-3, "float16": 0.1, "bfloat16": 0.5, "fp8": 2.0}
"""How far an engine's and a trainer's log-probability of one token may be apart, by the coarser compute type.

float16 is what a server elsewhere may compute in: 0.03 was seen with the embedded model, and 0.15 with bfloat16.
"""


class AgreementError(Exception):
    """Engine and trainer give different log-probabilities to the same tokens: training would be biased."""


async def check_agreement(
    engine: Engine,
    trainer: Trainer,
    device: Device,
    prompts: Sequence[tuple[int, ...]],
    *,
    dtypes: Sequence[str],
    tokens: int = 8,
    routing: Routing | None = None,
) -> float:
    """Sample a little and compare both sides' log-probabilities; returns the largest difference in nats.

    `dtypes` are the compute types of both sides; with `routing`, the trainer takes the experts that the engine notes.
    Run at start: a wrong mask, position, type or version of the weights shows here and not as a run that learns
    nothing. Raises AgreementError.
    """
    requests = [
        PromptRequest(key=str(i), prompt_ids=prompt, n=2, max_new_tokens=tokens, temperature=1.0, seed=i)
        for i, prompt in enumerate(prompts)
    ]
    sampled = [group async for group in engine.generate(requests)]
    groups = [_as_train_group(prompts[int(group.key)], group.samples, routing) for group in sampled]
    trained = await device.run(trainer.logprobs, groups)
    difference = max(
        abs(ours - theirs)
        for group, rows in zip(groups, trained, strict=True)
        for sequence, row in zip(group.sequences, rows, strict=True)
        for ours, theirs in zip(sequence.behaviour_logprobs or (), row, strict=True)
    )
    kind = max(dtypes, key=AGREEMENT.__getitem__)
    if not difference <= AGREEMENT[kind]:
        raise AgreementError(
            f"engine {engine.name} and trainer differ by {difference:.4f} nats on a sampled token ({kind}, allowed "
            f"{AGREEMENT[kind]}); give both the same model, set model.dtype to float32, or use another model"
        )
    return difference


def _as_train_group(prompt: tuple[int, ...], samples: Sequence[Sample], routing: Routing | None) -> TrainGroup:
    prompt_experts, experts = divide(routing, len(prompt), samples)
    sequences = tuple(
        TrainSequence(sample.token_ids, (True,) * len(sample.token_ids), 0.0, sample.logprobs, experts=chosen)
        for sample, chosen in zip(samples, experts, strict=True)
    )
    return TrainGroup(prompt, sequences, "own", prompt_experts)
