"""From stored groups and environments to answered tasks: rendered here, without held-out tasks, within bounds."""

import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from node.config import Config
from node.interfaces import Message
from node.models import ModelBundle, load_model, render_prompt
from node.offline.examples import OfflineError
from node.offline.sources import from_environments, from_experience
from node.scorer import Scorer
from protocol.assignment import held_out_task
from protocol.manifest import EnvironmentSpec, Manifest, embedded_manifest
from protocol.rollout import Completion, RolloutGroup, TaskRef, Turn, pack_logprobs, pack_token_ids
from swarm.experience import ADMITTED, GroupRecord, UnknownGroup


class Store:
    """Groups with their records, the newest first, as an ExperienceStore gives them."""

    def __init__(self) -> None:
        self.records: list[GroupRecord] = []
        self.groups: dict[bytes, RolloutGroup] = {}

    def add(self, ref: TaskRef, group: Any, local: Sequence[float], **changes: Any) -> None:
        digest = bytes([len(self.records)]) * 32
        record = GroupRecord(digest, "own", "12D3", 1, ref, "m", tuple(local), tuple(local), ADMITTED, "", 0.0, 1.0)
        self.records.insert(0, replace(record, row=len(self.records) + 1, **changes))
        if group is not None:
            self.groups[digest] = group

    def summaries(self, before: int | None, limit: int) -> list[GroupRecord]:
        return [record for record in self.records if before is None or record.row < before][:limit]

    def group_body(self, digest: bytes) -> RolloutGroup:
        if digest not in self.groups:
            raise UnknownGroup("gone")
        return self.groups[digest]


@pytest.fixture
def bundle(tiny_model: Callable[[str], Path], tmp_path: Path) -> ModelBundle:
    return load_model(str(tiny_model("llama")), device="cpu", dtype="float32", models=tmp_path)


@pytest.fixture
def manifest(evenness: EnvironmentSpec) -> Manifest:
    return msgspec.structs.replace(embedded_manifest("t", 0), environments=(evenness,))


@pytest.fixture
async def scorer(manifest: Manifest) -> AsyncIterator[Scorer]:
    made = Scorer(manifest.environments, deadline=2, memory_mb=512, clock=time.monotonic)
    await made.start()
    yield made
    await made.close()


def ref(index: int, environment: str = "evenness") -> TaskRef:
    return TaskRef(environment, "1", 7, index)


def completion(text: str, finish: Any = "stop", token_ids: Sequence[int] = (), turns: Any = None) -> Completion:
    return Completion(
        turns=turns or (Turn("assistant", text),),
        finish=finish,
        token_count=len(token_ids) or 1,
        reward=0.5,
        token_ids=pack_token_ids(token_ids),
        logprobs=pack_logprobs([-1.0] * len(token_ids)),
    )


def group(task: TaskRef, *completions: Completion, tokenizer: bytes = b"") -> Any:
    """What `from_group` reads of a group."""

    class Group:
        policy_version = 3

    made: Any = Group()
    made.task, made.completions, made.tokenizer = task, completions, tokenizer
    return made


async def gather(store: Store, bundle: ModelBundle, scorer: Scorer, manifest: Manifest, **given: Any) -> Any:
    config = Config.model_validate({"eval": {"tasks": 2}})
    bounds = {"groups": 100, "max_length": 200, **given}
    return await from_experience(store, bundle, scorer, config, manifest, **bounds)  # type: ignore[arg-type]


async def test_groups_of_one_task_are_one_task(bundle: ModelBundle, scorer: Scorer, manifest: Manifest) -> None:
    store = Store()
    store.add(ref(1), group(ref(1), completion("ab"), completion("c")), (1.0, 0.0))
    store.add(ref(2), group(ref(2), completion("d")), (0.0,))
    store.add(ref(1), group(ref(1), completion("efgh", "length")), (0.5,), origin="foreign")
    source = await gather(store, bundle, scorer, manifest)
    by_prompt = {task.prompt_ids: task.answers for task in source.tasks}
    prompt = render_prompt(bundle, (Message("user", "7 1"),))
    assert source.groups == 3
    assert len(by_prompt) == 2
    found = {(bundle.tokenizer.decode(a.token_ids), a.reward, a.finished) for a in by_prompt[prompt]}
    assert found == {("ab<|im_end|>", 1.0, True), ("c<|im_end|>", 0.0, True), ("efgh", 0.5, False)}


async def test_own_token_ids_are_kept_and_foreign_text_is_encoded_anew(
    bundle: ModelBundle, scorer: Scorer, manifest: Manifest
) -> None:
    bundle = replace(bundle, stop_ids=frozenset({bundle.end_of_turn, bundle.tokenizer.bos_token_id}))
    ids = tuple(bundle.tokenizer.encode("ab", add_special_tokens=False))
    other_stop = (*ids, bundle.tokenizer.bos_token_id)  # decodes to the same text
    store = Store()
    for n, origin in enumerate(("own", "foreign"), 1):
        given = group(ref(n), completion("ab", token_ids=other_stop), tokenizer=bundle.fingerprint)
        store.add(ref(n), given, (1.0,), origin=origin)
    store.add(ref(3), group(ref(3), completion("<|im_end|>hi")), (1.0,), origin="foreign")
    source = await gather(store, bundle, scorer, manifest)
    third, second, first = (task.answers[0].token_ids for task in source.tasks)
    assert first == other_stop
    assert second == (*ids, bundle.end_of_turn)
    assert third.count(bundle.end_of_turn) == 1, "a spelled special token is text"
    assert third[-1] == bundle.end_of_turn


async def test_what_is_left_out_is_counted(bundle: ModelBundle, scorer: Scorer, manifest: Manifest) -> None:
    store = Store()
    held_out = held_out_task(manifest, "evenness", 1)
    turns = (Turn("assistant", "a"), Turn("tool", "b"))
    store.add(held_out, group(held_out, completion("ab")), (1.0,))
    # another seed, the same question
    store.add(ref(9), group(replace_seed(held_out), completion("ab")), (1.0,))
    store.add(ref(1), None, (1.0,))
    store.add(ref(2, "other"), group(ref(2, "other"), completion("ab")), (1.0,))
    store.add(ref(3), group(ref(3), completion("ab", turns=turns)), (1.0,))
    store.add(ref(4), group(ref(4), completion("x" * 300), completion("", "length"), completion("ab")), (0, 0, 1))
    store.add(ref(5), group(ref(5), completion("ab")), (1.0,), verdict="stale")
    store.add(ref(6), group(ref(6), completion("ab")), ())
    source = await gather(store, bundle, scorer, manifest)
    assert source.groups == 6
    assert len(source.tasks) == 1
    assert source.left_out == {
        "groups of held-out tasks": 2,
        "groups whose body is gone": 1,
        "groups whose task cannot be regenerated": 1,
        "groups of several turns": 1,
        "answers that are too long": 1,
        "answers that are empty or broken off": 1,
    }


def replace_seed(task: TaskRef) -> TaskRef:
    """A task of evenness with another seed that asks the same."""
    return TaskRef(task.environment, task.version, task.seed + 1000, task.index)


async def test_the_newest_groups_are_taken(bundle: ModelBundle, scorer: Scorer, manifest: Manifest) -> None:
    store = Store()
    for n in range(5):
        store.add(ref(n), group(ref(n), completion("ab")), (1.0,))
    source = await gather(store, bundle, scorer, manifest, groups=2)
    assert source.groups == 2
    prompts = {bundle.tokenizer.decode(task.prompt_ids) for task in source.tasks}
    assert ["7 3" in prompt or "7 4" in prompt for prompt in prompts] == [True, True]


async def test_nothing_to_use_says_why(bundle: ModelBundle, scorer: Scorer, manifest: Manifest) -> None:
    store = Store()
    with pytest.raises(OfflineError, match=r"experience of this node is empty ; train some steps first \(shoal up\)"):
        await gather(store, bundle, scorer, manifest)
    store.add(ref(2, "other"), group(ref(2, "other"), completion("ab")), (1.0,))
    with pytest.raises(OfflineError, match=r"nothing of 1 groups.*1 groups whose task cannot be regenerated .*other"):
        await gather(store, bundle, scorer, manifest)


async def test_gold_answers_are_checked_and_end_their_turn(
    bundle: ModelBundle, scorer: Scorer, manifest: Manifest
) -> None:
    config = Config.model_validate({"eval": {"tasks": 2}})
    bounds: Any = {"tasks": 16, "max_length": 200, "seed": 3}
    source = await from_environments(bundle, scorer, config, manifest, **bounds)
    assert source.left_out == {"tasks of evenness without an answer that scores 1": 2}
    assert source.groups == 16
    assert {bundle.tokenizer.decode(task.answers[0].token_ids) for task in source.tasks} == {"even<|im_end|>"}
    assert len({task.prompt_ids for task in source.tasks}) == 14
    again = await from_environments(bundle, scorer, config, manifest, **bounds)
    other = await from_environments(bundle, scorer, config, manifest, **{**bounds, "seed": 4})
    assert source.tasks == again.tasks != other.tasks
    with pytest.raises(OfflineError, match="no gold answer can be used: 14 answers that are too long"):
        await from_environments(bundle, scorer, config, manifest, **{**bounds, "max_length": 16})
