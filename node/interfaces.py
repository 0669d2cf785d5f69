"""The seams inside a node: what the loop asks of an engine, a trainer and an environment.

Values are frozen; token ids and log-probabilities are plain tuples, so that they cross threads, processes and
the journal without torch. Tensors live behind these seams only.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

import msgspec

if TYPE_CHECKING:
    import torch

    from node.config_train import TrainConfig  # at run time pydantic would cost the scorer process its start

FinishReason = Literal["stop", "length", "aborted"]


class Message(msgspec.Struct, frozen=True, array_like=True):
    """One chat message of a prompt."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str


class Score(msgspec.Struct, frozen=True, array_like=True):
    """What a scorer says of one answer. An unparseable answer is counted apart from a wrong one."""

    reward: float
    parsed: bool
    parts: dict[str, float] = {}
    failure: str | None = None
    """`scorer_failed` with why, when the scorer crashed or missed its deadline; the reward is then 0."""

    @property
    def all_parts(self) -> dict[str, float]:
        """The parts, whether the answer was parsed among them."""
        return {"parsed": float(self.parsed), **self.parts}


class Task(msgspec.Struct, frozen=True, array_like=True):
    """A regenerated task. `metadata` (answer included) never leaves the process that scores."""

    messages: tuple[Message, ...]
    """The prompt as chat turns, worked examples included, ready for the model's chat template."""
    max_tokens: int
    """Token budget of one answer."""


class Environment(Protocol):
    """Verifiable tasks from a seed. Runs inside the scorer process (node/scorer.py), never in the daemon."""

    name: str
    version: str
    evaluates: bool
    """Whether scoring may evaluate an answer (parse a formula, run code). May be left out: then it may."""

    def task(self, seed: int, index: int) -> Task:
        """The same task for the same (seed, index) on every machine that has this version."""

    def score(self, seed: int, index: int, answer: str) -> Score:
        """Score one answer, reward in [0, 1]. May raise: the scorer process turns that into `scorer_failed`."""

    def gold(self, seed: int, index: int) -> str | None:
        """An answer that scores 1, for a warm start (node/offline); None where none is known. May be left out."""

    def prepare(self, seed: int, index: int) -> None:
        """Make a task that is costly to make and keep it, in the process whose children score. May be left out."""

    def self_check(self) -> Sequence[str]:
        """Problems found on a sample of tasks (gold answer not scoring 1, prompt over budget); empty is good."""


@dataclass(frozen=True, slots=True)
class PromptRequest:
    """Sample `n` completions of one prompt."""

    key: str
    prompt_ids: tuple[int, ...]
    n: int
    max_new_tokens: int
    temperature: float
    seed: int
    """Seeds this request's own generator, so its draws do not depend on what else is in the batch."""
    starts: "tuple[Sample, ...]" = ()
    """At most `n` unfinished samples to go on with (divided and partial rollouts); the others begin at the prompt.

    `max_new_tokens` counts from the end of the prompt, and the sample that comes back holds the start's tokens too,
    each with the log-probability and version it was sampled with.
    """


@dataclass(frozen=True, slots=True)
class Sample:
    """One sampled completion."""

    token_ids: tuple[int, ...]
    """Sampled tokens; the end-of-turn token is the last one when `finish` is 'stop'."""
    logprobs: tuple[float, ...]
    """log-probability of each token under the behaviour policy at temperature 1 (what the trainer computes)."""
    finish: FinishReason
    version: int
    """Policy version that sampled its first token: the oldest one in it."""
    spans: tuple[tuple[int, int], ...] = ()
    """(version, tokens) in order, where more than one version sampled it; empty: all of it is `version`'s."""
    experts: bytes = b""
    """Which experts the prompt's tokens and its own went to, as far as noted (node/routing.py)."""


@dataclass(frozen=True, slots=True)
class SampledGroup:
    key: str
    samples: tuple[Sample, ...]


class Engine(Protocol):
    """Samples completions. The in-process engine shares the trainer's tensors; vLLM is told of new weights."""

    name: str
    version: int

    def generate(
        self, requests: Sequence[PromptRequest], stop: asyncio.Event | None = None
    ) -> AsyncIterator[SampledGroup]:
        """Yield groups as they finish, in any order. Closing the iterator aborts and forgets what is left.

        Once `stop` is set, what is left is yielded at once, its unfinished samples with finish 'aborted' and the
        tokens they have, so that they can be the `starts` of a later request.
        """

    async def update_weights(self, version: int) -> None:
        """From now on sample from this version of the policy."""

    async def close(self) -> None: ...


class TrainSequence(msgspec.Struct, frozen=True, array_like=True):
    """One completion to learn from. All tuples have one entry a token."""

    token_ids: tuple[int, ...]
    mask: tuple[bool, ...]
    """False: environment or tool text, or a completion cut off: seen but not trained on."""
    reward: float
    """The local score, shaped by the data rules; the update makes advantages of it (node/algorithms/estimate.py)."""
    behaviour_logprobs: tuple[float, ...] | None
    """mu of each token, None where unknown (foreign text): then the correction weight is 1."""
    teacher_logprobs: tuple[float, ...] | None = None
    """log-probability of each token under a teacher, where there is one (node/training/distill.py)."""
    parts: dict[str, float] = {}
    """Components of the reward by name, for the advantages that ask for them (gdpo)."""
    experts: bytes = b""
    """Which experts its tokens went to in the rollout, as far as known (node/routing.py)."""


class TrainGroup(msgspec.Struct, frozen=True, array_like=True):
    """Completions that share one prompt: one row of the shared-prompt forward."""

    prompt_ids: tuple[int, ...]
    sequences: tuple[TrainSequence, ...]
    origin: Literal["own", "foreign"]
    prompt_experts: bytes = b""
    """The same for the prompt's tokens."""

    @property
    def uniform(self) -> bool:
        """Whether all rewards are equal, so that comparing the completions teaches nothing."""
        return len({sequence.reward for sequence in self.sequences}) < 2


class Batch(msgspec.Struct, frozen=True, array_like=True):
    """Everything one update consumes. With the weights before it, it determines the weights after it."""

    step: int
    groups: tuple[TrainGroup, ...]


@dataclass(frozen=True, slots=True)
class UpdateStats:
    """What one update did. Means are over trained tokens of the whole step, and over optimizer steps if several."""

    loss: float
    grad_norm: float
    learning_rate: float
    tokens_trained: int
    tokens_forwarded: int
    """Includes prompt tokens."""
    kl_behaviour: float
    """mean(mu - new) over own tokens: the mismatch between rollout and training, measured each step."""
    max_mismatch: float
    """max |mu - old| over own tokens. With policies `partial` and `asynchronous` some are of older versions, which
    counts too: without it the number is what engine and trainer make of the same weights."""
    clip_fraction: float
    ess: float
    """Effective sample size of the correction weights, as a share in (0, 1]."""
    entropy: float
    kl_reference: float | None
    micro_batches: int
    oom_retries: int
    kl_teacher: float | None = None
    """mean(old - teacher) over the tokens a teacher was asked about: reverse KL per token, to be distilled away."""
    optimizer_steps: int = 1
    critic_loss: float | None = None
    """Mean over trained tokens and optimizer steps; None without a critic."""


class Teacher(Protocol):
    """A model whose distribution is learned from, besides rewards. It has the policy's tokenizer."""

    name: str

    async def logprobs(self, groups: Sequence[TrainGroup]) -> list[list[tuple[float, ...]]]:
        """log-probability of every sequence token under the teacher; [group][sequence][token]. Raises TeacherError."""


class TeacherError(Exception):
    """The teacher cannot be had, has another tokenizer, or did not answer; the message says the fix."""


class StepSkipped(Exception):
    """This step made no update; the message says why in words a person can read, `advice` what to do if it goes on."""

    def __init__(self, why: str, advice: str = "see shoal logs") -> None:
        super().__init__(why)
        self.advice = advice


class Interrupted(Exception):
    """A stop was asked for; nothing of the unit of work in progress has taken effect."""


class TrainerLost(Exception):
    """The trainer's processes have ended, and with them what was not saved; the message says why.

    `again` starts them anew, with the initial model: blocking, for the model thread; it may raise this again.
    """

    def __init__(self, why: str, again: Callable[[], None]) -> None:
        super().__init__(why)
        self.again = again


class Trainer(Protocol):
    """Owns the policy and its optimizer. All methods are synchronous and run on the model thread.

    Where it is made of other processes, any of them may raise TrainerLost.
    """

    step: int
    """Updates done; also the policy version."""

    def configure(self, config: "TrainConfig") -> None:
        """Use these settings from the next update on: a journalled step is repeated with those it was made with."""

    def update(self, batch: Batch, should_stop: Callable[[], bool] = ...) -> UpdateStats:
        """Advantages, then one optimizer step or several. Raises StepSkipped (nothing to learn; non-finite, dumped).

        Raises Interrupted between micro-batches before the first optimizer step; after it the update is finished.
        """

    def logprobs(self, groups: Sequence[TrainGroup]) -> list[list[tuple[float, ...]]]:
        """log-probability of every sequence token under the current policy; [group][sequence][token]."""

    def save(self, directory: Path) -> None:
        """Write model (safetensors, HF layout with tokenizer) and optimizer into an existing empty directory."""

    def load(self, directory: Path) -> None:
        """Inverse of `save`, in place. Raises CheckpointError."""

    def export(self, directory: Path) -> None:
        """Write only what inference needs: a directory `from_pretrained` loads."""

    def snapshot(self, dtype: Literal["float32", "bfloat16"]) -> "Mapping[str, torch.Tensor]":
        """A copy of all weights by name in main memory, in that type, as they are computed with now."""

    def memory(self) -> Mapping[str, int]:
        """Bytes held, by kind: weights, gradients, optimizer."""
