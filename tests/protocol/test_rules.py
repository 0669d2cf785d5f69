import json
import random
from typing import Any

import msgspec
import pytest

from protocol.assignment import held_out_task, own_task, shared_task
from protocol.envelope import Domain
from protocol.manifest import embedded_manifest
from protocol.rejection import Reason, Rejected
from protocol.rollout import Completion, RolloutGroup, TaskRef, Turn, pack_logprobs, pack_token_ids
from protocol.rules import (
    check_budget,
    check_informative,
    check_rewards,
    is_informative,
    producer_quota,
)

OTHER_SWARM = embedded_manifest("other", 1_800_000_000).digest


def refusal(call: Any, *args: Any, **kwargs: Any) -> tuple[Reason, str]:
    with pytest.raises(Rejected) as caught:
        call(*args, **kwargs)
    assert str(caught.value) == f"{caught.value.reason}: {caught.value.detail}"
    return caught.value.reason, caught.value.detail


def heard(swarm: Any, changes: dict[str, Any]) -> Reason:
    """Why an announcement with these fields changed is refused."""
    group = swarm.group()
    announcement = msgspec.structs.replace(swarm.announcement(group, swarm.seal(group)), **changes)
    return refusal(swarm.hear, swarm.seal(announcement, Domain.announcement))[0]


def pulled(swarm: Any, group: RolloutGroup, **facts: Any) -> tuple[Reason, str]:
    """Why a sealed and rightly announced group is refused."""
    raw = swarm.seal(group)
    return refusal(swarm.admit, raw, swarm.announcement(group, raw), **facts)


def test_a_good_announcement_and_its_group_are_admitted(swarm: Any) -> None:
    group = swarm.group()
    raw = swarm.seal(group)
    announcement = swarm.announcement(group, raw)
    sealed = swarm.seal(announcement, Domain.announcement)
    assert len(sealed) < 300
    opened, heard_announcement = swarm.hear(sealed)
    assert (opened.producer, heard_announcement) == (swarm.me.peer_id, announcement)
    opened, admitted = swarm.admit(raw, announcement)
    assert admitted == group
    assert opened.digest == announcement.group
    check_rewards(admitted, group.rewards, 1e-4)
    check_budget(admitted, 16)
    check_informative(group.rewards)


def test_shared_tasks_are_admitted_from_anybody(swarm: Any) -> None:
    group = swarm.group(task=shared_task(swarm.manifest, 1, 0))
    raw = swarm.seal(group)
    assert swarm.admit(raw, swarm.announcement(group, raw))[1] == group


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"swarm": OTHER_SWARM}, Reason.wrong_swarm),
        ({"swarm": bytes(31)}, Reason.malformed),
        ({"size": 262_145}, Reason.too_large),
        ({"size": 0}, Reason.malformed),
        ({"completions": 65}, Reason.too_large),
        ({"completions": 1}, Reason.malformed),
        ({"tokens": 8 * 4096 + 1}, Reason.too_large),
        ({"model": "a\x00b"}, Reason.malformed),
        ({"model": "x" * 65}, Reason.malformed),
        ({"reward_mean": float("nan")}, Reason.malformed),
        ({"reward_std": float("inf")}, Reason.malformed),
        ({"reward_std": -0.1}, Reason.malformed),
        ({"epoch": 2}, Reason.from_future),
        ({"epoch": 2**63 - 1}, Reason.from_future),
        ({"epoch": 0}, Reason.unassigned_task),
        ({"task": TaskRef("chain_sum", "rg0.1.25-1", 1, 1)}, Reason.unassigned_task),
    ],
)
def test_bad_announcements(swarm: Any, changes: dict[str, Any], reason: Reason) -> None:
    assert heard(swarm, changes) is reason


def test_an_announcement_is_capped_at_2_kib(swarm: Any) -> None:
    assert refusal(swarm.hear, bytes(2049)) == (Reason.too_large, "2049 sealed bytes, at most 2048")


def test_a_banned_producer_is_not_heard(swarm: Any) -> None:
    group = swarm.group()
    raw = swarm.seal(group)
    sealed = swarm.seal(swarm.announcement(group, raw), Domain.announcement)
    me = swarm.me.peer_id
    assert refusal(swarm.hear, sealed, banned=lambda peer: peer == me)[0] is Reason.banned
    assert pulled(swarm, group, banned=lambda peer: peer == me)[0] is Reason.banned


def test_somebody_elses_task_cannot_be_announced(swarm: Any) -> None:
    group = swarm.group()
    announcement = swarm.announcement(group, swarm.seal(group))
    sealed = swarm.seal(announcement, Domain.announcement, by=swarm.other)
    assert refusal(swarm.hear, sealed)[0] is Reason.unassigned_task


def test_an_announcement_may_not_outlive_the_manifest(swarm: Any) -> None:
    group = swarm.group()
    raw = swarm.seal(group)
    announcement = swarm.announcement(group, raw)
    start = swarm.now - 5
    swarm.hear(swarm.seal(announcement, Domain.announcement, issued=start, expires=start + 1800))
    eternal = swarm.seal(announcement, Domain.announcement, issued=start, expires=start + 1801)
    assert refusal(swarm.hear, eternal) == (Reason.from_future, "lives for 1801 s, at most 1800 s")


def test_a_body_is_what_was_announced(swarm: Any) -> None:
    group = swarm.group()
    raw = swarm.seal(group)
    announced = swarm.announcement(group, raw)
    assert refusal(swarm.admit, swarm.seal(swarm.group(1)), announced)[0] is Reason.hash_mismatch
    assert refusal(swarm.admit, raw[:-1], announced)[0] is Reason.hash_mismatch
    for change in ({"task": swarm.group(1).task}, {"completions": 7}, {"epoch": 0}):
        lied = swarm.announcement(group, raw, **change)
        assert refusal(swarm.admit, raw, lied)[0] is Reason.malformed


def test_the_size_of_a_body_is_capped_before_it_is_hashed(swarm: Any) -> None:
    announced = swarm.announcement(swarm.group(), b"")
    assert refusal(swarm.admit, bytes(262_145), announced)[0] is Reason.too_large


def test_producer_signer_and_announcer_are_one(swarm: Any) -> None:
    group = swarm.group()
    assert pulled(swarm, group, producer=swarm.other.peer_id)[0] is Reason.wrong_producer
    raw = swarm.seal(group, by=swarm.other)
    assert refusal(swarm.admit, raw, swarm.announcement(group, raw))[0] is Reason.wrong_producer


def test_a_group_is_admitted_once(swarm: Any) -> None:
    group = swarm.group()
    raw = swarm.seal(group)
    announced = swarm.announcement(group, raw)
    known = {announced.group}
    assert refusal(swarm.admit, raw, announced, seen=known.__contains__)[0] is Reason.replayed
    assert swarm.admit(raw, announced, seen=set().__contains__)[1] == group


def test_swarm_and_epoch_of_a_body(swarm: Any) -> None:
    elsewhere = embedded_manifest("other", swarm.manifest.genesis)
    foreign = swarm.group(task=own_task(elsewhere, 1, swarm.me.peer_id, 0))
    assert pulled(swarm, foreign)[0] is Reason.unassigned_task, "its seed is another swarm's"
    task = own_task(swarm.manifest, 2, swarm.me.peer_id, 0)
    assert pulled(swarm, swarm.group(epoch=2, task=task))[0] is Reason.from_future
    # epoch 1 ends at +1200 s and its groups live 1800 s longer at most, however they are re-sealed
    group = swarm.group()
    late = type(swarm)(now=swarm.manifest.genesis + 3000.0)
    assert pulled(late, group) == (Reason.stale, "from epoch 1, now is epoch 5")
    in_time = type(swarm)(now=swarm.manifest.genesis + 2999.0)
    raw = in_time.seal(group)
    assert in_time.admit(raw, in_time.announcement(group, raw))[1] == group


def test_a_sender_a_little_ahead_may_be_in_the_next_epoch_already(swarm: Any) -> None:
    group = swarm.group(epoch=2, task=own_task(swarm.manifest, 2, swarm.me.peer_id, 0))
    for seconds, admitted in ((29.0, True), (31.0, False)):
        here = type(swarm)(now=swarm.manifest.genesis + 1200.0 - seconds)
        raw = here.seal(group)
        if admitted:
            assert here.admit(raw, here.announcement(group, raw))[1] == group
        else:
            assert pulled(here, group)[0] is Reason.from_future


def test_unassigned_tasks(swarm: Any) -> None:
    me, other, manifest = swarm.me.peer_id, swarm.other.peer_id, swarm.manifest
    for task in (
        own_task(manifest, 1, other, 0),
        own_task(manifest, 0, me, 0),
        held_out_task(manifest, "chain_sum", 0),
        msgspec.structs.replace(own_task(manifest, 1, me, 0), environment="n_queens"),
        msgspec.structs.replace(own_task(manifest, 1, me, 0), index=4096),
    ):
        assert pulled(swarm, swarm.group(task=task))[0] is Reason.unassigned_task


def test_unknown_environments(swarm: Any) -> None:
    group = swarm.group()
    newer = msgspec.structs.replace(group.task, version="rg9-1")
    reason, detail = pulled(swarm, swarm.group(task=newer))
    assert reason is Reason.unknown_environment
    assert detail == f"{group.task.environment} rg9-1: the manifest has rg0.1.25-1"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"turns": ()}, Reason.malformed),
        ({"turns": (Turn("user", "hi"),)}, Reason.malformed),
        ({"turns": (Turn("assistant", "x"),) * 17}, Reason.too_large),
        ({"token_count": 4097, "token_ids": b"", "logprobs": b""}, Reason.too_large),
        ({"token_count": 11}, Reason.malformed),
        ({"token_ids": bytes(44)}, Reason.malformed),
        ({"logprobs": bytes(23)}, Reason.malformed),
        ({"logprobs": pack_logprobs([-1.0] * 11) + b"\x00\x7e"}, Reason.malformed),
        ({"logprobs": pack_logprobs([-1.0] * 11) + b"\x00\xfc"}, Reason.malformed),
        ({"logprobs": pack_logprobs([-1.0] * 11) + b"\x00\x3c"}, Reason.malformed),
        ({"reward": float("nan")}, Reason.malformed),
        ({"reward": float("-inf")}, Reason.malformed),
        ({"finish": "bored"}, Reason.malformed),
        ({"turns": (Turn("assistant", "a\x00b"),)}, Reason.malformed),
        ({"turns": (Turn("assistant", "a\x1b[2J"),)}, Reason.malformed),
        ({"turns": (Turn("assistant", "a\u202eb"),)}, Reason.malformed),
        ({"turns": (Turn("assistant", "ok"), Turn("tool", "\u2066"))}, Reason.malformed),
    ],
)
def test_bad_completions(swarm: Any, changes: dict[str, Any], reason: Reason) -> None:
    group = swarm.with_completion(**changes)
    assert pulled(swarm, group)[0] is reason


def test_bad_numbers_of_completions(swarm: Any) -> None:
    completions = swarm.group().completions
    assert pulled(swarm, swarm.group(completions=completions[:1]))[0] is Reason.malformed
    assert pulled(swarm, swarm.group(completions=completions * 9))[0] is Reason.too_large


def test_a_lone_surrogate_is_malformed(swarm: Any) -> None:
    payload = msgspec.msgpack.encode(swarm.with_completion(turns=(Turn("assistant", "abc!"),)))
    raw = swarm.seal(payload.replace(b"\xa4abc!", b"\xa4a\xed\xa0\x80"))
    assert refusal(swarm.admit, raw, swarm.announcement(swarm.group(), raw))[0] is Reason.malformed


def test_ordinary_text_of_any_script_passes(swarm: Any) -> None:
    text = "Привет\n\t日本語 שלום 👩‍👩‍👧 \ufffd <|im_end|><script>"
    group = swarm.with_completion(turns=(Turn("assistant", text),), token_ids=b"", logprobs=b"")
    raw = swarm.seal(group)
    assert swarm.admit(raw, swarm.announcement(group, raw))[1].completions[0].text == text


def test_rewards_are_compared(swarm: Any) -> None:
    group = swarm.group()
    check_rewards(group, [reward + 5e-5 for reward in group.rewards], 1e-4)
    local = list(group.rewards)
    local[3] = 0.5
    assert refusal(check_rewards, group, local, 1e-4) == (
        Reason.reward_mismatch,
        "completion 3 claims reward 1, scored 0.5 here",
    )
    with pytest.raises(ValueError, match="zip"):
        check_rewards(group, group.rewards[:-1], 1e-4)


def test_budget_by_count_and_by_text(swarm: Any) -> None:
    check_budget(swarm.group(), 12)
    assert refusal(check_budget, swarm.group(), 11)[0] is Reason.over_budget
    long = swarm.with_completion(turns=(Turn("assistant", "x" * (16 * 128 + 1)),))
    assert refusal(check_budget, long, 16)[0] is Reason.over_budget
    foreign = (Turn("assistant", "x"), Turn("tool", "y" * 10_000))
    check_budget(swarm.with_completion(turns=foreign), 16)


def test_informative() -> None:
    assert is_informative([0, 1, 0])
    assert not is_informative([0.5, 0.5])
    assert not is_informative([1.0])
    assert not is_informative([])
    assert refusal(check_informative, [0.0, 0.0]) == (Reason.uninformative, "all 2 completions scored 0")


@pytest.mark.parametrize(
    ("batch", "share", "producers", "quota"),
    [
        (4, 0.5, 1, 4),
        (4, 0.5, 2, 2),
        (4, 0.25, 8, 1),
        (4, 0.01, 100, 1),
        (3, 0.5, 2, 2),
        (8, 1.0, 5, 8),
        (4, 0.5, 0, 0),
    ],
)
def test_quota(batch: int, share: float, producers: int, quota: int) -> None:
    assert producer_quota(batch, share, producers) == quota


def test_completion_is_immutable(swarm: Any) -> None:
    completion: Completion = swarm.group().completions[0]
    with pytest.raises(AttributeError):
        completion.reward = 1.0  # type: ignore[misc]


def test_a_sealed_group_is_at_most_half_of_its_json(swarm: Any) -> None:
    """Ids as numbers and log-probabilities to 4 digits in the JSON; no two completions alike, so little compresses."""
    chance = random.Random(0)
    completions, plain = [], []
    for _ in range(8):
        ids = [chance.randrange(49152) for _ in range(12)]
        logprobs = [round(-chance.expovariate(1.0), 4) for _ in range(12)]
        text = " ".join("".join(chance.choices("etaoinshrdlu", k=5)) for _ in range(6))
        turn = Turn("assistant", text)
        completions.append(Completion((turn,), "stop", 12, 1.0, pack_token_ids(ids), pack_logprobs(logprobs)))
        plain.append(
            {
                "turns": [{"role": "assistant", "text": text}],
                "finish": "stop",
                "token_count": 12,
                "reward": 1.0,
                "token_ids": ids,
                "logprobs": logprobs,
            }
        )
    group = swarm.group(completions=tuple(completions))
    task = group.task
    as_json = json.dumps(
        {
            "swarm": swarm.manifest.digest.hex(),
            "producer": swarm.me.peer_id,
            "epoch": group.epoch,
            "task": {name: getattr(task, name) for name in task.__struct_fields__},
            "model": group.model,
            "tokenizer": group.tokenizer.hex(),
            "policy_version": group.policy_version,
            "completions": plain,
        },
        separators=(",", ":"),
    )
    raw = swarm.seal(group)
    announced = swarm.seal(swarm.announcement(group, raw), Domain.announcement)
    assert len(raw) <= len(as_json) / 2.5
    assert len(raw) + len(announced) <= len(as_json) / 2


@pytest.mark.parametrize("fraction", [0.0, 0.0004, 0.4999, 0.5, 0.9995])
def test_rounding_to_seconds_never_outlives_the_manifest(swarm: Any, fraction: float) -> None:
    group = swarm.group()
    start = swarm.now - 5 + fraction
    times = {"issued": start, "expires": start + swarm.manifest.caps.group_ttl_seconds}
    raw = swarm.seal(group, **times)
    opened, _ = swarm.hear(swarm.seal(swarm.announcement(group, raw), Domain.announcement, **times))
    assert (opened.issued, opened.expires) == (int(start), int(start) + swarm.manifest.caps.group_ttl_seconds)
