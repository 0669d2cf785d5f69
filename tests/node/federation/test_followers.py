"""Which followers' groups a leader uses: fresh ones, whose log-probabilities are those of the version they claim."""

import functools
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from node.config import Config
from node.federation.followers import Followers
from node.federation.parts import FederationError, make_following, make_leading
from node.federation.spot_check import SpotCheck, compare
from node.foreign_groups import ForeignGroups
from node.interfaces import Message, Task, TrainGroup, TrainSequence
from node.models import ModelBundle, decode, encode_completion, render_prompt
from node.progress import Progress
from node.rollouts import train_group
from node.training.forward import run, sequence_logprobs
from protocol.manifest import embedded_manifest
from protocol.policy import claiming
from protocol.rejection import Reason, Rejected
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
from swarm.experience import UnknownGroup
from swarm.records import PoolEntry
from swarm.sampler import Sampler
from tests.node.federation.conftest import LEADER, Lead

MakeLead = Callable[..., Lead]
PROMPT = (Message("user", "say"),)


class Scorer:
    async def tasks(self, refs: Any, *, foreign: bool = False) -> list[Task]:
        return [Task(PROMPT, 8) for _ in refs]


class World:
    """A leader's side: a pool of groups, and what became of them."""

    def __init__(self, lead: Lead, bundle: ModelBundle, **federation: Any) -> None:
        self.lead, self.pool, self.groups = lead, list[PoolEntry](), dict[bytes, RolloutGroup]()
        self.withdrawn: dict[bytes, Rejected] = {}
        self.used: list[tuple[list[bytes], list[bytes]]] = []
        federation = {"spot_check": 1.0, "staleness": 2, **federation}
        self.parts: Any = SimpleNamespace(
            config=Config.model_validate({"federation": federation, "swarm": {"foreign_groups": 8}}),
            manifest=embedded_manifest("one", time.time() - 60),
            bundle=bundle, trainer=lead.trainer, device=lead.device, scorer=Scorer(), sampler=Sampler(0),
            progress=Progress(time.time, 60.0), clock=time.time, exchange=self, store=self, rounds=None,
            history=SimpleNamespace(event=lambda *said: None),
        )  # fmt: skip
        check = SpotCheck(lead.publisher, bundle, LEADER)
        self.foreign = ForeignGroups(self.parts, Followers(self.parts, lead.publisher, check))

    def add(self, group: RolloutGroup, producer: str = "follower") -> bytes:
        digest = len(self.pool).to_bytes(32, "big")
        self.groups[digest] = group
        self.pool.append(PoolEntry(digest, producer, (0.0, 1.0) * 2, 0.0, group.model))
        return digest

    async def choose(self) -> int:
        return len(await self.foreign.choose())

    # what the exchange and the store are asked

    def withdraw(self, digest: bytes, producer: str, rejected: Rejected) -> None:
        self.withdrawn[digest] = rejected

    def group_body(self, digest: bytes) -> RolloutGroup:
        if digest not in self.groups:
            raise UnknownGroup("gone")
        return self.groups[digest]

    def mark_used(self, chosen: list[bytes], followed: list[bytes]) -> None:
        self.used.append((chosen, followed))

    def weight(self, peer: str) -> float:
        return 1.0


class Pool(World):
    """`store.pool` is a method there, and a list here."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.parts.store = SimpleNamespace(
            pool=lambda now: [entry for entry in self.pool if entry.digest not in self.withdrawn],
            group_body=self.group_body,
            mark_used=self.mark_used,
        )


@pytest.fixture
async def lead(make_lead: MakeLead) -> Lead:
    lead = make_lead(staleness=2)
    for version in range(5):
        if version:
            lead.update(version)
        await lead.publish()
    return lead


def sampled(lead: Lead, model: ModelBundle, version: int, *, shift: float = 0.0, noise: float = 0.0) -> RolloutGroup:
    """A group as a follower at that version sends it: log-probs of the published weights, and how far they are off."""
    lead.publisher.load(version, dict(model.model.named_parameters()))
    prompt = render_prompt(model, PROMPT)
    texts = ["one answer", "another one", "and a third", "four"]
    ids = [encode_completion(model, text, "stop") for text in texts]
    group = TrainGroup(prompt, tuple(TrainSequence(i, (True,) * len(i), 0.0, None) for i in ids), "foreign")
    (rows,) = sequence_logprobs([group], 512, functools.partial(run, model.model))
    chance = torch.Generator().manual_seed(version)
    noisy = [[min(0.0, p + shift + noise * float(torch.randn((), generator=chance))) for p in row] for row in rows]
    state = next(name for name, number in lead.publisher.versions.items() if number == version)
    return RolloutGroup(
        epoch=0,
        task=TaskRef("any", "1", 0, 0),
        model=claiming("tiny", LEADER.peer_id, bytes.fromhex(state)),
        tokenizer=model.fingerprint,
        policy_version=version,
        completions=tuple(
            Completion(
                (Turn("assistant", decode(model, i)),), "stop", len(i), 0.0, pack_token_ids(i), pack_logprobs(row)
            )
            for i, row in zip(ids, noisy, strict=True)
        ),
    )


async def test_fresh_and_honest_groups_are_used_with_their_log_probs(lead: Lead, model: Any) -> None:
    world, bundle = Pool(lead, lead.bundle), model()
    groups = [sampled(lead, bundle, version) for version in (4, 3, 2)]
    digests = [world.add(group) for group in groups]
    rollouts = await world.foreign.choose()
    assert world.withdrawn == {}
    assert len(rollouts) == 3
    assert all(rollout.behaviour_known for rollout in rollouts)
    assert sorted({sample.version for rollout in rollouts for sample in rollout.samples}) == [2, 3, 4]
    trained = train_group(rollouts[0], world.parts.config.train)
    assert trained.sequences[0].behaviour_logprobs is not None
    ((chosen, followed),) = world.used
    assert sorted(chosen) == sorted(followed) == digests


async def test_rounding_as_of_another_engine_passes(lead: Lead, model: Any) -> None:
    world = Pool(lead, lead.bundle)
    for seed in range(6):
        world.add(sampled(lead, model(), 4 - seed % 3, noise=0.04))
    assert await world.choose() == 6
    assert world.withdrawn == {}


async def test_the_weights_of_the_trainer_are_untouched_by_a_check(lead: Lead, model: Any) -> None:
    world, before = Pool(lead, lead.bundle), [p.clone() for p in lead.bundle.model.parameters()]
    world.add(sampled(lead, model(), 2))
    assert await world.choose() == 1
    assert all(a.equal(b) for a, b in zip(before, lead.bundle.model.parameters(), strict=True))


async def test_groups_too_far_behind_are_withdrawn(lead: Lead, model: Any) -> None:
    world, bundle = Pool(lead, lead.bundle), model()
    late = world.add(sampled(lead, bundle, 1))
    unknown = world.add(sampled(lead, bundle, 4))
    world.pool[1] = PoolEntry(unknown, "follower", (0.0, 1.0) * 2, 0.0, claiming("tiny", LEADER.peer_id, b"\xee" * 32))
    assert world.foreign.missing() == 8
    assert {digest: rejected.reason for digest, rejected in world.withdrawn.items()} == {
        late: Reason.stale_policy,
        unknown: Reason.stale_policy,
    }
    assert await world.choose() == 0


async def test_groups_of_the_newest_version_stay_fresh_however_many_updates_follow(lead: Lead, model: Any) -> None:
    world, bundle = Pool(lead, lead.bundle), model()
    for version in (4, 2):
        world.add(sampled(lead, bundle, version))
    lead.trainer.step = 13  # with publish_every 10, the next one is to come
    assert await world.choose() == 2
    assert world.withdrawn == {}
    assert sorted(world.foreign.behind) == [0, 2]


async def test_groups_of_newer_versions_are_preferred(lead: Lead, model: Any) -> None:
    world, bundle = Pool(lead, lead.bundle, staleness=4), model()
    groups = [sampled(lead, bundle, version) for version in (4, 3, 2)]
    for _ in range(40):
        for group in groups:
            world.add(group)
    ages: list[int] = []
    for _ in range(3):
        assert await world.choose() == 8
        ages += world.foreign.behind
    assert 2 * ages.count(2) < ages.count(0) > ages.count(1)  # 4, 2 and 1 of 7 are expected


async def test_cheats_are_found_out(lead: Lead, model: Any) -> None:
    world, bundle = Pool(lead, lead.bundle), model()
    good = sampled(lead, bundle, 4)
    shifted = world.add(sampled(lead, bundle, 4, shift=-0.3), "a")
    made_up = world.add(sampled(lead, bundle, 4, noise=1.5), "b")
    honest = world.add(good, "d")
    assert await world.choose() == 1
    assert {digest: rejected.reason for digest, rejected in world.withdrawn.items()} == dict.fromkeys(
        (shifted, made_up), Reason.logprob_mismatch
    )
    assert world.used[0][1] == [honest]


async def test_all_groups_of_who_was_caught_are_checked(lead: Lead, model: Any) -> None:
    world, bundle = Pool(lead, lead.bundle, spot_check=0.2), model()
    lies = [sampled(lead, bundle, 4, noise=1.5 + 0.01 * i) for i in range(8)]
    for _ in range(4):
        for group in lies:
            world.add(group, "liar")
    for _ in range(12):
        await world.choose()
    trained = sum(len(followed) for _, followed in world.used)
    assert len(world.withdrawn) + trained > 8
    before = trained
    for group in lies:  # caught by now: none is let through
        world.add(group, "liar")
    await world.choose()
    assert sum(len(followed) for _, followed in world.used) == before


async def test_without_memory_for_a_check_followers_groups_are_left_out(
    lead: Lead, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, told = Pool(lead, lead.bundle), list[tuple[str, ...]]()
    world.parts.history = SimpleNamespace(event=lambda *said: told.append(said))
    world.add(sampled(lead, model(), 4))
    world.add(RolloutGroup(0, TaskRef("any", "1", 0, 1), "tiny", b"", 0, sampled(lead, model(), 4).completions))

    def no_room(*arguments: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(SpotCheck, "check", no_room)
    assert await world.choose() == 1
    assert (world.used[0][1], world.withdrawn) == ([], {})
    assert told[0][:2] == ("error", "policy")
    monkeypatch.setattr(SpotCheck, "check", lambda *arguments: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        await world.choose()


async def test_a_claim_without_usable_log_probs_gains_nothing_and_costs_nothing(lead: Lead, model: Any) -> None:
    """An honest follower's model may sample a special token between others, whose ids are not taken then."""
    world, bundle = Pool(lead, lead.bundle), model()
    group = sampled(lead, bundle, 4)
    first, *others = group.completions
    ids, logprobs = unpack_token_ids(first.token_ids), unpack_logprobs(first.logprobs)
    strayed = msgspec.structs.replace(
        first,
        token_ids=pack_token_ids((bundle.tokenizer.bos_token_id, *ids)),
        logprobs=pack_logprobs((-9.0, *logprobs)),
        token_count=len(ids) + 1,
    )
    world.add(msgspec.structs.replace(group, completions=(strayed, *others)))
    world.add(msgspec.structs.replace(group, tokenizer=b""))
    rollouts = await world.foreign.choose()
    assert [rollout.behaviour_known for rollout in rollouts] == [False, False]
    assert {rollout.samples[0].token_ids for rollout in rollouts} == {ids}
    assert world.withdrawn == {}


async def test_other_groups_are_as_they_were(lead: Lead, model: Any) -> None:
    """Without a claim, or with that of another leader, log-probs are not used unless swarm.foreign_ratio says so."""
    world, group = Pool(lead, lead.bundle), sampled(lead, model(), 4, noise=3.0)
    for name in ("tiny", claiming("tiny", "12D3KooW" + "x" * 44, b"\1" * 32)):
        world.add(RolloutGroup(0, group.task, name, group.tokenizer, 4, group.completions))
    rollouts = await world.foreign.choose()
    assert len(rollouts) == 2
    assert not any(rollout.behaviour_known for rollout in rollouts)
    assert world.withdrawn == {}
    assert world.used[0][1] == []


async def test_the_share_that_is_drawn_is_that_of_the_setting_and_a_secret(lead: Lead) -> None:
    check = SpotCheck(lead.publisher, lead.bundle, LEADER)
    digests = [i.to_bytes(32, "big") for i in range(2000)]
    drawn = [check.drawn(digest, 0.1) for digest in digests]
    assert 140 < sum(drawn) < 260
    assert drawn == [SpotCheck(lead.publisher, lead.bundle, LEADER).drawn(digest, 0.1) for digest in digests]
    other: Any = SimpleNamespace(sign=lambda data: b"another key's signature")
    assert drawn != [SpotCheck(lead.publisher, lead.bundle, other).drawn(digest, 0.1) for digest in digests]
    assert not any(check.drawn(digest, 0.0) for digest in digests)
    assert all(check.drawn(digest, 1.0) for digest in digests)


@pytest.mark.parametrize("claimed", [[-1.0, -2.0], [-1.09, -2.09], [-1.2, -2.0]])
def test_what_rounding_makes_is_tolerated(claimed: list[float]) -> None:
    compare([claimed], [[-1.0, -2.0]], "bfloat16")


@pytest.mark.parametrize("claimed", [[-1.21, -2.0], [-1.0, -2.6], [-1.0, float("nan")]])
def test_what_rounding_does_not_make_is_not(claimed: list[float]) -> None:
    with pytest.raises(Rejected) as found:
        compare([claimed], [[-1.0, -2.0]], "bfloat16")
    assert found.value.reason is Reason.logprob_mismatch


@pytest.mark.parametrize("side", [{"publish": True}, {"follow": LEADER.peer_id}])
def test_a_model_that_rounds_is_not_held_to_float32(side: dict[str, Any]) -> None:
    parts: Any = SimpleNamespace(
        config=Config.model_validate({"federation": {"dtype": "float32", **side}}),
        bundle=SimpleNamespace(model=SimpleNamespace(dtype=torch.bfloat16)),
    )
    nothing: Any = None
    make = make_leading if "publish" in side else make_following
    with pytest.raises(FederationError, match=r"computes in bfloat16 .* ; set federation\.dtype to bfloat16"):
        make(parts, *[nothing] * (2 if "publish" in side else 3))


def test_float32_is_held_closer() -> None:
    compare([[-1.0005]], [[-1.0]], "float32")
    with pytest.raises(Rejected):
        compare([[-1.01]], [[-1.0]], "float32")
