"""A node's own rollouts: from tasks to scored groups, with a real engine and a scorer that can be out of breath."""

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from node.config import Config
from node.device import Device
from node.engines.choose import make_engines
from node.engines.requests import RequestTooLong
from node.engines.transformers import TransformersEngine
from node.hardware import EngineChoice
from node.interfaces import Message, Score, Task
from node.models import load_model
from node.rollouts import to_group
from node.scheduling.own import OwnRollouts, PolicyError, schedule
from node.scheduling.rounds import Begun
from node.scorer import ScorerError
from protocol.rollout import TaskRef


class FakeScorer:
    """Tasks with budgets that differ; answers are worth their length."""

    def __init__(self) -> None:
        self.breathless = False
        self.lost: set[int] = set()
        self.long: set[int] = set()

    def knows(self, ref: TaskRef) -> bool:
        return ref.environment == "e"

    async def tasks(self, refs: Sequence[TaskRef]) -> list[Task]:
        if lost := self.lost.intersection(ref.index for ref in refs):
            raise ScorerError(f"task {lost} cannot be regenerated")
        return [Task((Message("user", self.text(ref.index)),), 3 + 9 * (ref.index % 2)) for ref in refs]

    def text(self, index: int) -> str:
        return str(index) * (600 if index in self.long else 1)

    async def score(self, answers: Sequence[tuple[TaskRef, str]]) -> list[Score]:
        if self.breathless:
            raise ScorerError("out of breath")
        return [Score(float(len(text)), True) for _, text in answers]


@pytest.fixture
def own(tiny_model: Callable[..., Path], tmp_path: Path) -> OwnRollouts:
    torch.set_num_threads(1)
    bundle = load_model(str(tiny_model("llama", ascii_only=True)), device="cpu", dtype="float32", models=tmp_path)
    config = Config.model_validate(
        {"rollout": {"policy": "partial", "over_provision": 2.0, "max_staleness": 2, "group_size": 2}}
    )
    engine = schedule(config.rollout, [TransformersEngine(bundle, Device())])
    scorer: Any = FakeScorer()
    return OwnRollouts(engine, bundle, scorer, config)


class Tasks:
    """The tasks of an epoch in order."""

    def __init__(self) -> None:
        self.given = 0

    def __call__(self, count: int) -> list[Begun]:
        first, self.given = self.given, self.given + count
        return [Begun(TaskRef("e", "1", 0, i), epoch=i // 4, seed=i) for i in range(first, self.given)]


async def test_unfinished_groups_go_on_in_the_next_step_and_are_published_as_old_as_they_are(own: OwnRollouts) -> None:
    tasks = Tasks()
    first = await own.take(2, tasks)
    assert [rollout.ref.index for rollout in first] == [0, 2]  # budgets of 3, not of 12
    assert [(one.ref.index, one.tokens > 0) for one in own.rounds.begun] == [(1, True), (3, True)]
    await own.rounds.engine.update_weights(1)
    rest = await own.take(2, tasks)
    await own.rounds.engine.update_weights(2)
    rest += await own.take(2, tasks)
    assert tasks.given == 8
    assert {1, 3} <= {rollout.ref.index for rollout in rest}
    for rollout in first + rest:
        assert rollout.epoch == rollout.ref.index // 4
        assert rollout.budget == 3 + 9 * (rollout.ref.index % 2)
        assert rollout.rewards == tuple(float(len(text)) for text in rollout.texts)
        assert all(len(sample.logprobs) == len(sample.token_ids) for sample in rollout.samples)
        assert {sample.finish for sample in rollout.samples} <= {"stop", "length"}
    (one,) = (rollout for rollout in rest if rollout.ref.index == 1)
    assert to_group(one, epoch=one.epoch, bundle=own.bundle).policy_version == 0
    (crossed,) = {sample.spans[0] for sample in one.samples}
    assert crossed[0] == 0


async def test_groups_that_could_not_be_scored_are_the_first_of_the_next_step(own: OwnRollouts) -> None:
    tasks = Tasks()
    scorer: Any = own.scorer
    scorer.breathless = True
    with pytest.raises(ScorerError):
        await own.take(2, tasks)
    scorer.breathless = False
    rollouts = await own.take(2, tasks)
    assert [rollout.ref.index for rollout in rollouts] == [0, 2]
    assert tasks.given == 4


async def test_a_task_that_cannot_be_regenerated_fails_one_step_and_not_all_to_come(own: OwnRollouts) -> None:
    tasks = Tasks()
    scorer: Any = own.scorer
    await own.take(2, tasks)
    kept = [one.ref.index for one in own.rounds.begun]
    scorer.lost = {5, *kept}  # what has tokens already goes on without its task
    with pytest.raises(ScorerError, match="5"):
        await own.take(2, tasks)
    assert [one.ref.index for one in own.rounds.begun] == kept
    rollouts = await own.take(2, tasks)
    assert not {4, 5} & {rollout.ref.index for rollout in rollouts}


async def test_a_task_too_long_for_the_model_fails_one_step_and_not_all_to_come(own: OwnRollouts) -> None:
    tasks = Tasks()
    scorer: Any = own.scorer
    scorer.long = {1}
    with pytest.raises(RequestTooLong, match="exceed the context of 512"):
        await own.take(2, tasks)
    assert own.rounds.begun == []
    assert len(await own.take(2, tasks)) == 2


async def test_an_answer_goes_on_with_its_budget_after_a_smaller_one_was_set(own: OwnRollouts) -> None:
    await own.take(2, Tasks())
    state = {"begun": own.rounds.state()}
    assert max(one.tokens for one in own.rounds.begun) > 2
    rollout = own.config.rollout.model_copy(update={"max_new_tokens": 1, "policy": "synchronous"})
    later = OwnRollouts(own.rounds.engine, own.bundle, own.scorer, own.config.model_copy(update={"rollout": rollout}))
    later.restore(state)
    rollouts = await later.take(2, Tasks())
    assert [(rollout.ref.index, rollout.budget) for rollout in rollouts] == [(1, 12), (3, 12)]


async def test_tasks_of_a_swarm_that_was_left_are_not_gone_on_with(own: OwnRollouts) -> None:
    await own.take(2, Tasks())
    own.rounds.begun[0].ref = TaskRef("other", "1", 0, 1)
    assert own.restore({"begun": own.rounds.state()}).startswith("goes on with 1 groups")
    assert [one.ref.environment for one in own.rounds.begun] == ["e"]


async def test_what_is_kept_over_a_restart_is_said(own: OwnRollouts) -> None:
    assert own.restore({}) == ""
    await own.take(2, Tasks())
    tokens = sum(one.tokens for one in own.rounds.begun)
    state = {"begun": own.rounds.state()}
    assert own.restore(state) == f"goes on with 2 groups of the steps before ({tokens} tokens kept, 0 begun anew)"


def test_policies_that_an_engine_cannot_do_are_refused() -> None:
    transformers: Any = SimpleNamespace(name="transformers", version=0)
    vllm: Any = SimpleNamespace(name="vllm", version=0, overlaps=True)
    asleep: Any = SimpleNamespace(name="vllm", version=0, overlaps=False)

    def rollout(**settings: Any) -> Any:
        return Config.model_validate({"rollout": settings}).rollout

    for engine in (transformers, asleep):
        with pytest.raises(PolicyError, match=r"set rollout\.policy to synchronous, partial or tail"):
            schedule(rollout(policy="asynchronous"), [engine])
    with pytest.raises(PolicyError, match=r"set rollout\.dispatch to whole"):
        schedule(rollout(dispatch="divided"), [transformers])
    made = schedule(rollout(dispatch="divided", chunk_tokens=128, policy="asynchronous"), [vllm, vllm])
    assert (made.name, made.dispatch.by, made.dispatch.chunk_tokens) == ("2 x vllm", "divided", 128)
    assert schedule(rollout(), [transformers]).dispatch.concurrency == 0


def test_several_servers_have_directories_of_their_own(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    bundle = load_model(str(tiny_model("llama")), device="cpu", dtype="float32", models=tmp_path)
    config = Config.model_validate(
        {
            "engine": {"url": "http://one:8000", "others": "http://two:8000,http://three:8000"},
            "rollout": {"policy": "asynchronous", "dispatch": "divided"},
        }
    )
    setup: Any = SimpleNamespace(
        machine=SimpleNamespace(gpus=(), vllm=""), choice=EngineChoice("vllm", "named"), plan=None
    )
    engines = make_engines(setup, config, bundle, Device(), home=tmp_path, peer_id="x" * 30, say=print)
    assert [str(engine.client.address) for engine in engines] == [  # type: ignore[union-attr]
        "http://one:8000",
        "http://two:8000",
        "http://three:8000",
    ]
    roots = [engine.transfer.files.root for engine in engines]  # type: ignore[union-attr]
    assert roots == [tmp_path / "weights", tmp_path / "weights-1", tmp_path / "weights-2"]
    assert schedule(config.rollout, engines).name == "3 x vllm"
    with pytest.raises(ValueError, match=r"set engine\.url to the first one"):
        Config.model_validate({"engine": {"others": "http://two:8000"}})
