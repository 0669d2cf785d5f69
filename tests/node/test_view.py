"""What the API says of a daemon whose parts are replaced here."""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema_rs
import msgspec
import pytest

from node.daemon import Daemon
from node.history import History
from node.home import Home
from node.interfaces import Message, Task
from node.models import ModelBundle, decode, encode_completion, load_model
from node.scorer import ScorerError
from node.settings import load
from node.view import DaemonView, _step
from node.view_group import completions, pieces, task_of
from protocol.assignment import own_task, shared_task
from protocol.manifest import embedded_manifest
from protocol.rollout import Completion, RolloutGroup, TaskRef, Turn, pack_logprobs, pack_token_ids
from swarm.experience import ADMITTED, ExperienceStore, GroupRecord, PeerRecord
from web.answers import encode
from web.schemas import SCHEMAS

TASK = TaskRef("chain_sum", "1", 5, 6)
RECORD = GroupRecord(
    digest=b"\xab" * 32,
    origin="foreign",
    producer="12D3KooWpeer",
    epoch=3,
    task=TASK,
    model="m",
    claimed=(1.0,),
    local=(0.5,),
    verdict=ADMITTED,
    detail="",
    received_at=1.0,
    expires_at=2.0,
    parts=({"parsed": 1.0},),
)
GROUP = RolloutGroup(
    epoch=3,
    task=TASK,
    model="m",
    tokenizer=b"",
    policy_version=1,
    completions=(Completion((Turn("assistant", "4"),), "stop", 2, 1.0),),
)


class FakeScorer:
    """Regenerates tasks unless `broken`; remembers whether it was asked as for foreign work."""

    def __init__(self, broken: bool = False) -> None:
        self.broken, self.asked = broken, list[bool]()

    async def tasks(self, refs: Sequence[TaskRef], *, foreign: bool = False) -> list[Task]:
        self.asked.append(foreign)
        if self.broken:
            raise ScorerError("out of breath")
        return [Task((Message("user", f"{ref.seed}+{ref.index}"),), 8) for ref in refs]


def view(scorer: FakeScorer | None) -> DaemonView:
    other = replace(RECORD, digest=b"\xcd" * 32, origin="own")
    store = SimpleNamespace(
        find=lambda group_id: RECORD, group_body=lambda digest: GROUP, same_task=lambda record, limit: [other]
    )
    node: Any = SimpleNamespace(store=store, scorer=scorer, bundle=None, manifest=None)
    return DaemonView(node)


def is_as_described(name: str, answer: Any) -> bool:
    """Whether openapi.json says the same of this answer; raises what is not so."""
    schema = {"$ref": f"#/components/schemas/{name}", "components": {"schemas": SCHEMAS}}
    jsonschema_rs.validator_for(schema).validate(json.loads(encode(answer)))
    return True


async def test_a_group_is_shown_with_its_prompt_as_foreign_work() -> None:
    scorer = FakeScorer()
    shown = await view(scorer).group("abab")
    assert shown["prompt"] == [{"role": "user", "content": "5+6"}]
    assert shown["completions"] == [
        {
            "text": "4", "finish": "stop", "tokens": 2, "claimed": 1.0, "reward": 0.5,
            "pieces": None, "parts": {"parsed": 1.0},
        }
    ]  # fmt: skip
    assert shown["task"] == {"environment": "chain_sum", "version": "1", "seed": "5", "index": 6}
    assert [(other["id"][:4], other["origin"]) for other in shown["siblings"]] == [("cdcd", "own")]
    assert is_as_described("Group", shown)
    assert scorer.asked == [True]


@pytest.mark.parametrize("scorer", [FakeScorer(broken=True), None])
async def test_a_group_whose_task_cannot_be_had_is_shown_without_it(scorer: FakeScorer | None) -> None:
    shown = await view(scorer).group("abab")
    assert shown["prompt"] == []
    assert shown["completions"][0]["text"] == "4"


@pytest.fixture(scope="module")
def bundle(tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> ModelBundle:
    return load_model(str(tiny_model("llama")), device="cpu", dtype="float32", models=tmp_path_factory.mktemp("m"))


def sampled(
    bundle: ModelBundle, text: str, ids: Sequence[int] | None = None, logprobs: int | None = None
) -> Completion:
    """A completion of these ids, or of those that spell the text, with a log-probability of -0.5 a token."""
    ids = encode_completion(bundle, text, "stop") if ids is None else ids
    known = pack_logprobs([-0.5] * (len(ids) if logprobs is None else logprobs))
    return Completion((Turn("assistant", text),), "stop", len(ids), 1.0, pack_token_ids(ids), known)


async def test_tokens_are_shown_as_the_text_they_spell(bundle: ModelBundle) -> None:
    found = await pieces(sampled(bundle, "a \u00e9\U0001f41f!"), bundle)
    assert found is not None
    # the tokenizer makes one token of each byte: of a character, the last one has the text
    assert [piece["text"] for piece in found] == ["a", " ", "", "\u00e9", "", "", "", "\U0001f41f", "!", "<|im_end|>"]
    assert {piece["logprob"] for piece in found} == {-0.5}
    stray = [encode_completion(bundle, "\u00e9", "stop")[1]] * 9  # the second byte of a character, and no first one
    broken = await pieces(sampled(bundle, decode(bundle, stray), stray), bundle)
    assert broken is not None
    assert "".join(piece["text"] for piece in broken) == decode(bundle, stray)
    unknown = await pieces(sampled(bundle, "ab", logprobs=1), bundle)
    assert unknown is not None
    assert [piece["logprob"] for piece in unknown] == [None] * 3


async def test_ids_that_do_not_spell_the_text_are_not_shown(bundle: ModelBundle) -> None:
    ids = encode_completion(bundle, "ab", "stop")
    assert await pieces(sampled(bundle, "ax", ids), bundle) is None
    assert await pieces(sampled(bundle, "ab", [*ids, bundle.vocabulary_size]), bundle) is None
    for bad in ({"token_ids": b"123"}, {"logprobs": b"1"}):
        assert await pieces(msgspec.structs.replace(sampled(bundle, "ab"), **bad), bundle) is None


async def test_tokens_are_shown_of_this_tokenizer_and_up_to_a_bound(
    bundle: ModelBundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = msgspec.structs.replace(
        GROUP, tokenizer=bundle.fingerprint, completions=tuple(sampled(bundle, text) for text in ("ab", "abcd", "a"))
    )
    shown = await completions(group, RECORD, bundle)
    assert [len(one["pieces"]) for one in shown] == [3, 5, 2]
    monkeypatch.setattr("node.view_group.MAX_PIECES", 6)
    assert [one["pieces"] is None for one in await completions(group, RECORD, bundle)] == [False, True, False]
    other = msgspec.structs.replace(group, tokenizer=b"another")
    assert [one["pieces"] for one in await completions(other, RECORD, bundle)] == [None] * 3


def test_the_swarm_in_words_with_its_members(tmp_path: Path, clock: Any) -> None:
    store = ExperienceStore(tmp_path / "node.db", 1 << 20, clock)
    for ago in (10, 3600, 2 * 86400):
        store.peers.save(PeerRecord(f"peer{ago}", 0.0, 0.0, clock.now, False, "tiny", 0.0, clock.now - ago))
    manifest = embedded_manifest("first-words", clock.now - 700)
    node: Any = SimpleNamespace(
        manifest=manifest,
        rounds=None,
        clock=clock,
        store=store,
        home=SimpleNamespace(swarm=lambda: SimpleNamespace(psk=b"k" * 32), is_listed=lambda: False),
        transport=SimpleNamespace(peers=lambda: ("stranger",)),
        presence=SimpleNamespace(invite_uri=lambda: "shoal:x", invite_caution=lambda: ""),
    )
    said = DaemonView(node).swarm()
    assert is_as_described("Swarm", said)
    assert (said["members"], said["private"], said["coordinator"]) == (3, True, None)  # a stranger may ask the way only
    assert said["digest"] == manifest.digest.hex()
    assert said["epochs"] == {
        "seconds": 600, "genesis": manifest.genesis, "own_tasks": 4096, "shared_tasks": 64,
    }  # fmt: skip
    assert said["words"][0] == (
        "The swarm first-words practises 4 kinds of task: letter_counting (25%), chain_sum (25%), "
        "spell_backward (25%), word_sorting (25%)."
    )
    assert said["words"][1] == (
        "An epoch lasts 10 minutes. In each, a node has 4,096 tasks of its own and 64 tasks that every node has."
    )
    assert said["words"][2].startswith("An answer has at most 24 tokens, and a group at most 64 answers and 256 KB.")
    assert "is a secret" in said["words"][-1]
    node.manifest = None
    assert DaemonView(node).swarm() == {}
    store.close()


def test_series_and_events_are_those_of_the_history(tmp_path: Path, clock: Any) -> None:
    history = History(tmp_path / "node.db", clock)
    node: Any = SimpleNamespace(history=history)
    shown = DaemonView(node)
    assert shown.event_range() == (1, 0)
    assert is_as_described("Series", shown.series(400, None, None))
    history.record_step(1, {"reward": 0.5, "foreign_groups": 0, "rewards": {"sums": 0.5}})
    history.event("info", "start", "begun")
    assert is_as_described("Series", shown.series(400, None, None))
    assert (shown.series(400, 1, 1)["environments"], shown.event_range()) == ({"sums": [0.5]}, (1, 1))
    history.close()


@pytest.mark.parametrize(
    ("trained", "saved", "following", "step"),
    [(0, None, None, 40), (41, None, None, 41), (0, 41, None, 41), (42, 41, None, 42), (7, None, "a leader", 7)],
)
def test_the_step_of_a_node_that_has_not_recovered_is_its_last_one(
    trained: int, saved: int | None, following: str | None, step: int
) -> None:
    parts = SimpleNamespace(trainer=SimpleNamespace(step=trained))
    loop: Any = SimpleNamespace(parts=parts, saving=SimpleNamespace(saved=saved), following=following)
    assert _step(loop, 40) == step
    assert _step(None, 40) == 40


def test_shared_tasks_are_known_by_their_seed() -> None:
    manifest = embedded_manifest("t", 0)
    own, shared = own_task(manifest, 3, "me", 0), shared_task(manifest, 3, 0)
    assert [task_of(replace(RECORD, task=task), manifest)["shared"] for task in (own, shared)] == [False, True]


async def test_the_status_has_the_fields_of_its_schema_and_no_others(home: Home) -> None:
    home.found(embedded_manifest("lab", 1e9))
    node = Daemon(home, load(home), clock=time.time)
    status = DaemonView(node).status()
    assert is_as_described("Status", status)
    assert set(status) == set(SCHEMAS["Status"]["properties"])
    node.history.close()
