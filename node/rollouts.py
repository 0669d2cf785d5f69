"""Own and foreign rollouts in the one shape the update wants, and the way between them and the wire."""

import hashlib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from node.config import Config
from node.config_train import TrainConfig
from node.interfaces import Engine, PromptRequest, Sample, Score, Task, TrainGroup, TrainSequence
from node.models import ModelBundle, decode, encode_completion, render_prompt, spells
from node.routing import Routing, divide
from node.scorer import Scorer
from node.selection import overlong_penalty
from protocol.rollout import (
    Completion,
    RolloutGroup,
    TaskRef,
    Turn,
    pack_logprobs,
    pack_token_ids,
    unpack_logprobs,
    unpack_token_ids,
)
from protocol.text import forbidden_character


@dataclass(frozen=True, slots=True)
class Rollout:
    """One task and what one policy answered to it, scored here."""

    origin: Literal["own", "foreign"]
    ref: TaskRef
    prompt_ids: tuple[int, ...]
    samples: tuple[Sample, ...]
    texts: tuple[str, ...]
    scores: tuple[Score, ...]
    budget: int
    """Tokens that an answer may have."""
    behaviour_known: bool = True
    epoch: int = -1
    """In which an own one's task was this node's to practise."""

    @property
    def rewards(self) -> tuple[float, ...]:
        return tuple(score.reward for score in self.scores)

    @property
    def informative(self) -> bool:
        return max(self.rewards) > min(self.rewards)


def sampling_seed(node_seed: int, *parts: str | int) -> int:
    """63-bit seed of one request, from the node's seed and what names the request."""
    text = "/".join(map(str, (node_seed, *parts)))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


async def prompts(
    bundle: ModelBundle, scorer: Scorer, refs: Sequence[TaskRef]
) -> tuple[list[Task], list[tuple[int, ...]]]:
    """Regenerate tasks and render their prompts with this model's chat template."""
    tasks = await scorer.tasks(refs)
    return tasks, [render_prompt(bundle, task.messages) for task in tasks]


def request_key(ref: TaskRef, number: int) -> str:
    """Environment and number of a task: lengths of answers are learnt by environment (node/scheduling/lengths.py)."""
    return f"{ref.environment}/{number}"


async def requests_of(
    bundle: ModelBundle,
    scorer: Scorer,
    config: Config,
    refs: Sequence[TaskRef],
    seeds: Sequence[int],
    n: int,
    numbers: Sequence[int],
) -> list[PromptRequest]:
    """What to ask an engine for `n` completions of each task."""
    tasks, prompt_ids = await prompts(bundle, scorer, refs)
    cap = config.rollout.max_new_tokens
    return [
        PromptRequest(
            key=request_key(ref, number),
            prompt_ids=ids,
            n=n,
            max_new_tokens=min(cap, task.max_tokens) if cap else task.max_tokens,
            temperature=config.rollout.temperature,
            seed=seed,
        )
        for ref, task, ids, seed, number in zip(refs, tasks, prompt_ids, seeds, numbers, strict=True)
    ]


async def scored(
    bundle: ModelBundle,
    scorer: Scorer,
    refs: Sequence[TaskRef],
    sampled: Sequence[Sequence[Sample]],
    prompt_ids: Sequence[tuple[int, ...]],
    budgets: Sequence[int],
    epochs: Sequence[int],
) -> list[Rollout]:
    """Own rollouts from what was sampled of each task. Raises ScorerError."""
    texts = [[decode(bundle, sample.token_ids) for sample in samples] for samples in sampled]
    flat = [(ref, text) for ref, group in zip(refs, texts, strict=True) for text in group]
    found = await scorer.score(flat)
    scores = iter([readable(text, score) for (_, text), score in zip(flat, found, strict=True)])
    return [
        Rollout(
            origin="own",
            ref=ref,
            prompt_ids=prompt_ids[i],
            samples=tuple(sampled[i]),
            texts=tuple(texts[i]),
            scores=tuple(itertools.islice(scores, len(sampled[i]))),
            budget=budgets[i],
            epoch=epochs[i],
        )
        for i, ref in enumerate(refs)
    ]


def readable(text: str, score: Score) -> Score:
    """The score of an own answer, which is worth nothing where it has characters that no peer takes.

    Many of them are white space to a scorer, so that a model would learn to sprinkle them at no cost, and its groups
    would be refused everywhere.
    """
    if forbidden_character(text) is None:
        return score
    return Score(0.0, parsed=False, parts=dict.fromkeys(score.parts, 0.0), failure=score.failure)


async def sample(
    engine: Engine,
    bundle: ModelBundle,
    scorer: Scorer,
    config: Config,
    refs: Sequence[TaskRef],
    seeds: Sequence[int],
    n: int,
    sampled: Callable[[int], None] | None = None,
) -> list[Rollout]:
    """Sample and score `n` completions of each task; rollouts come back in the order of `refs`.

    `sampled` is told how many tasks are sampled, as they are.
    """
    requests = await requests_of(bundle, scorer, config, refs, seeds, n, range(len(refs)))
    groups = {}
    async for group in engine.generate(requests):
        groups[group.key] = group.samples
        if sampled is not None:
            sampled(len(groups))
    return await scored(
        bundle,
        scorer,
        refs,
        [groups[request.key] for request in requests],
        [request.prompt_ids for request in requests],
        [request.max_new_tokens for request in requests],
        [-1] * len(refs),
    )


def to_group(rollout: Rollout, *, epoch: int, bundle: ModelBundle, model: str = "") -> RolloutGroup:
    """The wire form of an own rollout. `model`: what it says of the model, if not its name."""
    return RolloutGroup(
        epoch=epoch,
        task=rollout.ref,
        model=(model or bundle.name)[:64],
        tokenizer=bundle.fingerprint,
        policy_version=min(sample.version for sample in rollout.samples),
        completions=tuple(
            Completion(
                turns=(Turn(role="assistant", text=text),),
                finish=sample.finish,
                token_count=len(sample.token_ids),
                reward=score.reward,
                token_ids=pack_token_ids(sample.token_ids),
                logprobs=pack_logprobs(sample.logprobs),
            )
            for text, sample, score in zip(rollout.texts, rollout.samples, rollout.scores, strict=True)
        ),
    )


async def from_group(
    group: RolloutGroup, rewards: Sequence[float], bundle: ModelBundle, scorer: Scorer, *, use_behaviour: bool
) -> Rollout:
    """A foreign group as this node sees it: prompt regenerated, text re-encoded, locally computed rewards.

    With `use_behaviour` and the same tokenizer, the producer's token ids and log-probabilities are kept where the
    ids really spell the text, and nothing else.
    """
    (task,), (prompt_ids,) = await prompts(bundle, scorer, [group.task])
    same_tokenizer = use_behaviour and group.tokenizer == bundle.fingerprint
    samples = []
    for completion in group.completions:
        ids = encode_completion(bundle, completion.text, completion.finish)
        logprobs: tuple[float, ...] = ()
        if same_tokenizer and completion.token_ids and completion.logprobs:
            claimed = unpack_token_ids(completion.token_ids)
            if spells(bundle, claimed, completion.text, completion.finish):
                ids, logprobs = claimed, unpack_logprobs(completion.logprobs)
        samples.append(Sample(ids, logprobs, completion.finish, group.policy_version))
    return Rollout(
        origin="foreign",
        ref=group.task,
        prompt_ids=prompt_ids,
        samples=tuple(samples),
        texts=tuple(completion.text for completion in group.completions),
        scores=tuple(Score(reward=reward, parsed=True) for reward in rewards),
        budget=task.max_tokens,
        behaviour_known=all(len(sample.logprobs) == len(sample.token_ids) for sample in samples),
    )


def train_group(rollout: Rollout, config: TrainConfig, routing: Routing | None = None) -> TrainGroup:
    """A rollout as the trainer takes it, its rewards shaped by the data rules.

    Empty and, with `mask_truncated`, cut-off completions stay in it: they count for the others' advantages.
    """
    sequences = []
    prompt_experts, experts = divide(routing, len(rollout.prompt_ids), rollout.samples)
    for sample, score, chosen in zip(rollout.samples, rollout.scores, experts, strict=True):
        length = len(sample.token_ids)
        shaped = score.reward + overlong_penalty(length, rollout.budget, config.overlong_buffer, config.overlong_factor)
        trained = sample.finish == "stop" or not config.mask_truncated
        sequences.append(
            TrainSequence(
                token_ids=sample.token_ids,
                mask=(trained,) * length,
                reward=shaped,
                behaviour_logprobs=sample.logprobs if rollout.behaviour_known else None,
                parts=score.all_parts if config.advantage == "gdpo" else {},
                experts=chosen,
            )
        )
    return TrainGroup(rollout.prompt_ids, tuple(sequences), rollout.origin, prompt_experts)
