"""On-policy distillation between nodes: a teacher's log-probabilities of tokens that another node sampled.

The teacher answers with its present policy between two pieces of its own work; the learner adds the answers to its
batch before the step is journalled (node/training/distill.py says what they are for).
"""

import asyncio
import logging
import math
from collections.abc import Callable, Sequence

import torch

from node.batching import MicroBatch, micro_batches
from node.device import Device
from node.interfaces import TeacherError, TrainGroup, TrainSequence
from node.models import ModelBundle
from node.training.forward import states
from protocol.messages import Digest
from protocol.teaching import (
    MAX_TEACH_ANSWERS,
    MAX_TEACH_GROUPS,
    MAX_TEACH_TOKENS,
    AskedGroup,
    TeachAnswer,
    TeachRequest,
    answer_of,
)
from swarm.accounts import Accounts
from swarm.teaching import TRY_SECONDS, NotTaught, ask
from swarm.transport import Transport

log = logging.getLogger(__name__)

MAX_WORK = 4
"""Times the tokens asked about that may be computed for them."""
MAX_LENGTH = 4096
"""Tokens of a prompt with an answer: attention over more takes memory that this node has not reckoned with."""


class Teaching:
    """Computes answers to other nodes' questions with the present weights."""

    def __init__(self, bundle: ModelBundle, device: Device, step: Callable[[], int], budget: int) -> None:
        """`step`: updates done; `budget`: tokens of one pass."""
        self._bundle, self._device, self._step, self._budget = bundle, device, step, budget

    async def answer(self, request: TeachRequest) -> TeachAnswer:
        """The answer, or the reason why there is none."""
        if problem := self._problem(request):
            return self._refusal(problem)
        try:
            return await self._computed(request)
        except Exception as error:
            log.warning("a question to the teacher failed", exc_info=error)
            return self._refusal("it could not be computed; the teacher's log says why")

    def _refusal(self, why: str) -> TeachAnswer:
        return TeachAnswer(self._bundle.name[:64], self._step(), b"", why)

    def _problem(self, request: TeachRequest) -> str:
        bundle = self._bundle
        if request.fingerprint != bundle.fingerprint:
            return f"the teacher {bundle.name} has another tokenizer; choose a teacher of the same model family"
        longest = max(len(group.prompt) + max(map(len, group.answers)) for group in request.groups)
        most = min(bundle.context, MAX_LENGTH)
        if longest > most:
            return f"{longest} tokens are more than the {most} that the teacher {bundle.name} reads for others"
        highest = max(max((*group.prompt, *sum(group.answers, ()))) for group in request.groups)
        if highest >= bundle.vocabulary_size:
            return f"token {highest} is none of the {bundle.vocabulary_size} of the teacher {bundle.name}"
        return ""

    async def _computed(self, request: TeachRequest) -> TeachAnswer:
        groups = [
            TrainGroup(
                group.prompt,
                tuple(TrainSequence(answer, (True,) * len(answer), 0.0, None) for answer in group.answers),
                "own",
            )
            for group in request.groups
        ]
        members = [(g, s) for g, group in enumerate(groups) for s, one in enumerate(group.sequences) if one.token_ids]
        # up to a second for a question that is then refused: not where the node answers others
        micros = await asyncio.to_thread(micro_batches, groups, members, self._budget)
        work = sum(len(micro.trie) for micro in micros)
        if work > MAX_WORK * request.tokens:  # its prompts would be computed again and again
            return self._refusal(
                f"it takes {work} tokens of work for {request.tokens}; ask about fewer answers a prompt"
            )
        found: dict[tuple[int, int], list[float]] = {}
        for micro in micros:  # the node's own work comes in between
            values = await self._device.run(self._pass, micro)
            at = 0
            for member, path in zip(micro.members, micro.paths, strict=True):
                found[member], at = values[at : at + len(path)], at + len(path)
        flat = [value for member in sorted(found) for value in found[member]]
        if not all(map(math.isfinite, flat)):
            return self._refusal("the teacher's log-probs are not finite")
        return answer_of(self._bundle.name, self._step(), flat)

    def _pass(self, micro: MicroBatch) -> list[float]:
        with torch.no_grad():
            values: list[float] = states(self._bundle.model, micro).logprobs.tolist()
        return values


class PeerTeacher:
    """Another node as the teacher. Where it does not answer, a step goes on with rewards alone, and says so."""

    def __init__(
        self,
        peer: str,
        policy: ModelBundle,
        transport: Transport,
        accounts: Accounts,
        clock: Callable[[], float],
        *,
        swarm: Digest,
        seconds: Callable[[], float],
        tell: Callable[[str], None],
    ) -> None:
        """`seconds`: how long a step waits for it; `tell` is told what people should see."""
        self.name = f"…{peer[-8:]}"
        self._peer, self._fingerprint, self._swarm = peer, policy.fingerprint, swarm
        self._transport, self._accounts, self._clock = transport, accounts, clock
        self._seconds, self._tell = seconds, tell
        self._silent = False
        """Whether the last step got no answer: that is told once."""

    async def logprobs(self, groups: Sequence[TrainGroup]) -> list[list[tuple[float, ...]]]:
        """log-probability of every sequence token under the teacher; [group][sequence][token], nan: it did not say.

        Raises TeacherError where a group is too large to ask about.
        """
        found: list[list[tuple[float, ...]]] = []
        # one that did not answer the last time is not waited for again: only looked at
        seconds = min(TRY_SECONDS, self._seconds()) if self._silent else self._seconds()
        until, problem = self._clock() + seconds, ""
        for part in parts_of(groups):
            request = TeachRequest(self._swarm, self._fingerprint, tuple(map(_asked, part)))
            flat: Sequence[float] = (math.nan,) * request.answered
            if not problem:
                try:
                    _, flat = await ask(
                        self._transport,
                        self._accounts,
                        self._peer,
                        request,
                        seconds=until - self._clock(),
                        clock=self._clock,
                    )
                except NotTaught as why:
                    problem = str(why)
            at = 0
            for group in part:
                rows = []
                for sequence in group.sequences:
                    rows.append(tuple(flat[at : at + len(sequence.token_ids)]))
                    at += len(sequence.token_ids)
                found.append(rows)
        if problem and not self._silent:
            self._tell(f"the teacher {self.name}: {problem}; steps go on with rewards alone")
        self._silent = bool(problem)
        return found


def parts_of(groups: Sequence[TrainGroup]) -> list[list[TrainGroup]]:
    """The groups in order, as many at a time as one request takes. Raises TeacherError."""
    parts: list[list[TrainGroup]] = []
    room = 0
    for group in groups:
        size = len(group.prompt_ids) + sum(len(sequence.token_ids) for sequence in group.sequences)
        if size > MAX_TEACH_TOKENS or len(group.sequences) > MAX_TEACH_ANSWERS:
            raise TeacherError(
                f"a group of {len(group.sequences)} answers with {size} tokens is more than a teacher among peers "
                f"takes ({MAX_TEACH_ANSWERS} answers, {MAX_TEACH_TOKENS} tokens) ; lower rollout.group_size or "
                "rollout.max_new_tokens, or set train.distill_teacher to a model's directory"
            )
        if not parts or size > room or len(parts[-1]) == MAX_TEACH_GROUPS:
            parts.append([])
            room = MAX_TEACH_TOKENS
        parts[-1].append(group)
        room -= size
    return parts


def _asked(group: TrainGroup) -> AskedGroup:
    return AskedGroup(tuple(group.prompt_ids), tuple(tuple(sequence.token_ids) for sequence in group.sequences))
