"""The node's own rollouts: tasks begun as the policy wants, sampled by the engine, scored."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from node.config import Config, RolloutConfig
from node.engines.requests import RequestTooLong
from node.interfaces import Engine, PromptRequest
from node.models import ModelBundle
from node.rollouts import Rollout, request_key, requests_of, scored
from node.scheduler import Dispatch, Scheduler
from node.scheduling.rounds import Begun, Plan, Rounds
from node.scorer import Scorer, ScorerError


class PolicyError(ValueError):
    """A setting of rollout.* cannot be had with this engine; the message says which ones can."""


def plan_of(config: RolloutConfig) -> Plan:
    return Plan(config.policy, config.over_provision, config.max_staleness, config.window)


def schedule(config: RolloutConfig, engines: Sequence[Engine]) -> Scheduler:
    """The scheduler over a node's engines. Raises PolicyError for settings that these engines cannot do."""
    transformers = any(engine.name == "transformers" for engine in engines)
    if config.policy == "asynchronous" and not all(getattr(engine, "overlaps", False) for engine in engines):
        raise PolicyError(
            "rollout.policy asynchronous needs an engine that samples while the trainer works: vllm, not asleep "
            "meanwhile (engine.sleep); with this one set rollout.policy to synchronous, partial or tail"
        )
    if config.dispatch != "whole" and transformers:
        raise PolicyError(
            f"rollout.dispatch {config.dispatch} needs an engine that takes requests at any time: vllm; with "
            "transformers, which decodes all of a step together, set rollout.dispatch to whole"
        )
    if config.dispatch == "whole":
        return Scheduler(engines)
    return Scheduler(engines, Dispatch(config.dispatch, config.concurrency, config.chunk_tokens, config.kv_tokens))


class OwnRollouts:
    """What a node samples for its steps. Used from the loop's task."""

    def __init__(self, engine: Engine, bundle: ModelBundle, scorer: Scorer, config: Config) -> None:
        self.bundle, self.scorer, self.config = bundle, scorer, config
        self.rounds = Rounds(engine, plan_of(config.rollout), self._prepare)

    async def take(self, count: int, tasks: Callable[[int], Sequence[Begun]], *, long: bool = True) -> list[Rollout]:
        """`count` scored groups, in the order they were begun; `tasks` are the next ones to begin, and `long` as in
        `Rounds.take`.

        Raises ScorerError, RequestTooLong, and what else the engine raises. What was begun then stays for the next
        call, but a task that cannot be regenerated, or is too long for the model, would fail every call to come: those
        that were not sent to an engine are passed over.
        """
        rounds = self.rounds
        taken: list[Begun] = []
        try:
            rounds.begin(tasks(rounds.missing(count, long=long)))
            taken = await rounds.take(count, long=long)
            if rounds.plan.policy == "asynchronous":
                rounds.begin(tasks(rounds.missing(count, ahead=True)))
                await rounds.ahead()
            return await scored(
                self.bundle,
                self.scorer,
                [one.ref for one in taken],
                [one.samples for one in taken],
                [one.prompt_ids for one in taken],
                [one.budget for one in taken],
                [one.epoch for one in taken],
            )
        except (ScorerError, RequestTooLong):
            rounds.put_back(taken)
            rounds.forget_unsent()
            raise

    async def _prepare(self, tasks: Sequence[Begun]) -> list[PromptRequest]:
        """What goes on keeps the prompt and the budget that it was begun with, whatever the settings are now."""
        fresh = [one for one in tasks if not one.samples]
        made = await requests_of(
            self.bundle,
            self.scorer,
            self.config,
            [one.ref for one in fresh],
            [one.seed for one in fresh],
            self.config.rollout.group_size,
            [one.place for one in fresh],
        )
        requests = iter(made)
        return [self._again(one) if one.samples else next(requests) for one in tasks]

    def _again(self, one: Begun) -> PromptRequest:
        return PromptRequest(
            key=request_key(one.ref, one.place),
            prompt_ids=one.prompt_ids,
            n=len(one.samples),
            max_new_tokens=one.budget,
            temperature=self.config.rollout.temperature,
            seed=one.seed,
        )

    def restore(self, state: Mapping[str, Any]) -> str:
        """Go on with what a saved state had begun; says in words what that is, empty when it is nothing.

        Tasks that the scorer does not know are left out: they are of another swarm, which this home was in before.
        """
        self.rounds.restore(state.get("begun", ()))
        self.rounds.begun = [one for one in self.rounds.begun if self.scorer.knows(one.ref)]
        begun = self.rounds.begun
        if not begun:
            return ""
        anew = sum(not one.samples for one in begun)
        tokens = sum(one.tokens for one in begun)
        return f"goes on with {len(begun)} groups of the steps before ({tokens} tokens kept, {anew} begun anew)"
