"""What an offline trainer learns from: pairs, labels or answers to imitate, chosen from scored answers by token ids."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

FULL_SCORE = 1 - 1e-6
"""Rewards are in [0, 1]."""


class OfflineError(Exception):
    """Offline training cannot begin or was given up; the message says why and the fix. Nothing was changed."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One scored answer to a task."""

    token_ids: tuple[int, ...]
    """The end-of-turn token is the last one when `finished`."""
    reward: float
    """Computed here, in [0, 1]."""
    finished: bool
    """It ended its turn by itself. An answer that was cut off is no model to follow: it never says when to stop."""


@dataclass(frozen=True, slots=True)
class AnsweredTask:
    """A task and every answer to it, whoever gave them."""

    prompt_ids: tuple[int, ...]
    answers: tuple[Answer, ...]

    def distinct(self) -> list[Answer]:
        return list({answer.token_ids: answer for answer in self.answers}.values())


@dataclass(frozen=True, slots=True)
class Pair:
    """Two answers to one prompt, one better than the other (DPO)."""

    prompt_ids: tuple[int, ...]
    chosen_ids: tuple[int, ...]
    rejected_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Labelled:
    """An answer that is wanted or not (KTO), or one to imitate (SFT: all of them wanted)."""

    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    desirable: bool


def preference_pairs(
    tasks: Sequence[AnsweredTask], *, per_task: int, threshold: float, rng: random.Random
) -> list[Pair]:
    """Best against worst, then second best against second worst, up to `per_task`; in random order.

    Ties make no pair; the chosen answer is finished and scores at least `threshold`. Raises OfflineError without any.
    """
    found: dict[Pair, None] = {}
    for task in tasks:
        answers = task.distinct()
        rng.shuffle(answers)  # which of equally good answers is taken
        answers.sort(key=lambda answer: answer.reward)
        best = [answer for answer in reversed(answers) if answer.finished and answer.reward >= threshold]
        for chosen, rejected in zip(best[:per_task], answers, strict=False):
            if chosen.reward > rejected.reward:
                found[Pair(task.prompt_ids, chosen.token_ids, rejected.token_ids)] = None
    if not found:
        rewards = sorted({answer.reward for task in tasks for answer in task.answers})
        if len(rewards) == 1:
            raise OfflineError(
                f"all answers to {len(tasks)} tasks got the same reward, {rewards[0]:g} ; train some steps more (shoal"
                " up), choose easier tasks, or begin with --method sft --from-environments"
            )
        raise OfflineError(
            f"no pair in {len(tasks)} tasks: no task has a finished answer of reward {threshold:g} or more beside a"
            " worse one ; lower --threshold, or train some steps more (shoal up)"
        )
    return rng.sample(list(found), len(found))


def labelled(tasks: Sequence[AnsweredTask], *, threshold: float, rng: random.Random) -> list[Labelled]:
    """Every distinct answer, wanted from reward `threshold` on; in random order.

    Good ones that are cut off are left out. Raises OfflineError unless there are both kinds.
    """
    found: dict[Labelled, None] = {}
    for task in tasks:
        for answer in task.distinct():
            desirable = answer.reward >= threshold
            if answer.finished or not desirable:
                found[Labelled(task.prompt_ids, answer.token_ids, desirable)] = None
    wanted = sum(example.desirable for example in found)
    if wanted in (0, len(found)):
        kind, way = ("unwanted", "raise") if wanted else ("wanted", "lower")
        raise OfflineError(
            f"none of {len(found)} answers is {kind} at a threshold of {threshold:g} ; {way} --threshold, or train some"
            " steps more (shoal up)"
        )
    return rng.sample(list(found), len(found))


def to_imitate(tasks: Sequence[AnsweredTask], *, threshold: float, rng: random.Random) -> list[Labelled]:
    """Every distinct finished answer of reward `threshold` or more; in random order. Raises OfflineError if none."""
    found = {
        Labelled(task.prompt_ids, answer.token_ids, True): None
        for task in tasks
        for answer in task.answers
        if answer.finished and answer.reward >= min(threshold, FULL_SCORE)
    }
    if not found:
        best = max((answer.reward for task in tasks for answer in task.answers), default=0.0)
        raise OfflineError(
            f"no finished answer to {len(tasks)} tasks scores {threshold:g}, the best {best:g} ; lower --threshold, or"
            " begin with --from-environments, which takes the environments' own answers"
        )
    return rng.sample(list(found), len(found))
