"""The admission chain: what a node checks, in this order, before it believes a foreign rollout group.

Pure functions; each raises `Rejected` with a named reason, and nothing else whatever the bytes. An announcement
is checked before its group is pulled, the pulled body by `check_group`, then, once the node has regenerated the
task and scored the completions itself, `check_rewards`, `check_budget` and `check_informative`. `producer_quota`
bounds what one producer fills of a batch.
"""

import math
from collections.abc import Callable, Sequence

import msgspec

from protocol.assignment import is_assigned
from protocol.envelope import MAX_CLOCK_SKEW, Domain, Opened, digest_of, unseal
from protocol.manifest import Manifest
from protocol.messages import MAX_ANNOUNCEMENT_BYTES, Announcement
from protocol.rejection import Reason, Rejected
from protocol.rollout import Completion, RolloutGroup, TaskRef, unpack_logprobs
from protocol.text import forbidden_character

__all__ = [
    "MAX_TEXT_BYTES_PER_TOKEN",
    "Reason",
    "Rejected",
    "check_announcement",
    "check_budget",
    "check_group",
    "check_informative",
    "check_rewards",
    "is_informative",
    "producer_quota",
]

MAX_TEXT_BYTES_PER_TOKEN = 128
"""No tokenizer in use packs more text into one token (runs of spaces come closest), so more is a false count."""

_announcement_decoder = msgspec.msgpack.Decoder(Announcement)
_group_decoder = msgspec.msgpack.Decoder(RolloutGroup)


def check_announcement(
    raw: bytes, manifest: Manifest, now: float, *, banned: Callable[[str], bool]
) -> tuple[Opened, Announcement]:
    """Rules 1-6 for a sealed announcement, whoever forwarded it, as far as nodes of a swarm judge them alike. `now` in
    unix seconds.

    Whether its group is known already is for the caller to ask: hearing of a group twice is no offence.
    """
    opened = unseal(raw, Domain.announcement, max_bytes=MAX_ANNOUNCEMENT_BYTES, now=now)
    try:
        announcement = _announcement_decoder.decode(opened.payload)
    except (msgspec.DecodeError, RecursionError) as error:
        raise Rejected(Reason.malformed, f"announcement: {error}") from error
    caps = manifest.caps
    if announcement.size > caps.max_group_bytes:
        raise Rejected(Reason.too_large, f"announces {announcement.size} bytes, at most {caps.max_group_bytes}")
    if announcement.size == 0:
        raise Rejected(Reason.malformed, "announces a group of 0 bytes")
    _check_completion_count(announcement.completions, manifest)
    if announcement.tokens > announcement.completions * caps.max_tokens_per_completion:
        raise Rejected(
            Reason.too_large,
            f"announces {announcement.tokens} tokens in {announcement.completions} completions, "
            f"at most {caps.max_tokens_per_completion} each",
        )
    _check_text("model", announcement.model)
    for name, value in (("reward_mean", announcement.reward_mean), ("reward_std", announcement.reward_std)):
        if not math.isfinite(value):
            raise Rejected(Reason.malformed, f"{name} is {value}")
    if announcement.reward_std < 0:
        raise Rejected(Reason.malformed, f"reward_std is {announcement.reward_std}, below 0")
    if banned(opened.producer):
        raise Rejected(Reason.banned, f"{opened.producer} is banned here")
    if announcement.swarm != manifest.digest:
        raise Rejected(
            Reason.wrong_swarm,
            f"from swarm {announcement.swarm.hex()[:16]}, this node is in {manifest.digest.hex()[:16]}",
        )
    _check_time(opened, announcement.epoch, manifest, now)
    _check_task(announcement.task, announcement.epoch, opened.producer, manifest)
    return opened, announcement


def check_group(
    raw: bytes,
    manifest: Manifest,
    now: float,
    *,
    producer: str,
    announced: Announcement,
    seen: Callable[[bytes], bool],
    banned: Callable[[str], bool],
) -> tuple[Opened, RolloutGroup]:
    """Rules 1-6 for a pulled body, whoever served it. `now` in unix seconds.

    `producer` and `announced` are what `check_announcement` returned for the announcement the body was pulled
    by; `seen(digest)` says whether a group of that digest was admitted before. Rewards come next, once the task
    is regenerated: `check_rewards`.
    """
    if len(raw) > manifest.caps.max_group_bytes:
        raise Rejected(Reason.too_large, f"{len(raw)} bytes, at most {manifest.caps.max_group_bytes}")
    if digest_of(raw) != announced.group:
        raise Rejected(
            Reason.hash_mismatch, f"the body's SHA-256 begins {digest_of(raw).hex()[:16]}, "
            f"announced was {announced.group.hex()[:16]}"
        )  # fmt: skip
    opened = unseal(raw, Domain.group, max_bytes=manifest.caps.max_group_bytes, now=now)
    try:
        group = _group_decoder.decode(opened.payload)
    except (msgspec.DecodeError, RecursionError) as error:
        raise Rejected(Reason.malformed, f"group: {error}") from error
    _check_contents(group, manifest)
    if opened.producer != producer:
        raise Rejected(Reason.wrong_producer, f"signed by {opened.producer}, announced by {producer}")
    if banned(producer):
        raise Rejected(Reason.banned, f"{producer} is banned here")
    _check_time(opened, group.epoch, manifest, now)
    if seen(opened.digest):
        raise Rejected(Reason.replayed, f"group {opened.digest.hex()[:16]} was admitted before")
    _check_task(group.task, group.epoch, producer, manifest)
    if (group.task, group.epoch, len(group.completions)) != (announced.task, announced.epoch, announced.completions):
        raise Rejected(Reason.malformed, "task, epoch or number of completions differ from the announcement")
    return opened, group


def check_rewards(group: RolloutGroup, local: Sequence[float], tolerance: float) -> None:
    """Rule 7: the claimed rewards against those this node computed itself, one a completion."""
    for number, (completion, ours) in enumerate(zip(group.completions, local, strict=True)):
        if abs(completion.reward - ours) > tolerance:
            raise Rejected(
                Reason.reward_mismatch, f"completion {number} claims reward {completion.reward:g}, scored {ours:g} here"
            )


def check_budget(group: RolloutGroup, max_tokens: int) -> None:
    """Rule 8: no completion beyond the task's token budget, by its count or by the text it claims to be."""
    for number, completion in enumerate(group.completions):
        if completion.token_count > max_tokens:
            raise Rejected(
                Reason.over_budget, f"completion {number} has {completion.token_count} tokens, the task {max_tokens}"
            )
        size = sum(len(turn.text.encode()) for turn in completion.turns if turn.role == "assistant")
        if size > max_tokens * MAX_TEXT_BYTES_PER_TOKEN:
            raise Rejected(
                Reason.over_budget, f"completion {number} has {size} bytes of text for a budget of {max_tokens} tokens"
            )


def is_informative(rewards: Sequence[float]) -> bool:
    """Whether a group has any advantage: rewards that differ."""
    return len(rewards) > 1 and max(rewards) > min(rewards)


def check_informative(rewards: Sequence[float]) -> None:
    """Rule 10: a group whose completions all scored alike teaches nothing; keep it for statistics only."""
    if not is_informative(rewards):
        raise Rejected(Reason.uninformative, f"all {len(rewards)} completions scored {rewards[0] if rewards else 0:g}")


def producer_quota(batch: int, share: float, producers: int) -> int:
    """Rule 12: groups that one producer may fill of `batch` foreign ones, when `producers` have some to give.

    At least 1, and never less than an even split, so that the only other node of a small swarm fills the batch.
    """
    if producers < 1:
        return 0
    return max(1, math.ceil(batch * max(share, 1 / producers)))


def _check_completion_count(count: int, manifest: Manifest) -> None:
    if count > manifest.caps.max_completions:
        raise Rejected(Reason.too_large, f"{count} completions, at most {manifest.caps.max_completions}")
    if count < 2:
        raise Rejected(Reason.malformed, f"{count} completions; a group has at least 2")


def _check_text(where: str, text: str) -> None:
    if found := forbidden_character(text):
        raise Rejected(Reason.malformed, f"{where}: forbidden control character {found}")


def _check_contents(group: RolloutGroup, manifest: Manifest) -> None:
    """Rules 1 and 2 for what a group holds."""
    _check_completion_count(len(group.completions), manifest)
    _check_text("model", group.model)
    for number, completion in enumerate(group.completions):
        _check_completion(number, completion, manifest)


def _check_completion(number: int, completion: Completion, manifest: Manifest) -> None:
    caps, where = manifest.caps, f"completion {number}"
    if len(completion.turns) > caps.max_turns:
        raise Rejected(Reason.too_large, f"{where}: {len(completion.turns)} turns, at most {caps.max_turns}")
    if completion.token_count > caps.max_tokens_per_completion:
        raise Rejected(
            Reason.too_large, f"{where}: {completion.token_count} tokens, at most {caps.max_tokens_per_completion}"
        )
    if not completion.turns or completion.turns[0].role != "assistant":
        raise Rejected(Reason.malformed, f"{where}: does not begin with an assistant turn")
    for turn in completion.turns:
        _check_text(where, turn.text)
    if not math.isfinite(completion.reward):
        raise Rejected(Reason.malformed, f"{where}: reward is {completion.reward}")
    for name, packed, width in (("token_ids", completion.token_ids, 4), ("logprobs", completion.logprobs, 2)):
        if packed and len(packed) != width * completion.token_count:
            raise Rejected(
                Reason.malformed,
                f"{where}: {name} has {len(packed)} bytes for {completion.token_count} tokens of {width} each",
            )
    if not all(-math.inf < value <= 0 for value in unpack_logprobs(completion.logprobs)):
        raise Rejected(Reason.malformed, f"{where}: a log-probability is above 0 or not finite")


def _check_time(opened: Opened, epoch: int, manifest: Manifest, now: float) -> None:
    ttl = manifest.caps.group_ttl_seconds
    # An expiry beyond the manifest's would keep an announcement alive for ever.
    if opened.expires - opened.issued > ttl:
        raise Rejected(Reason.from_future, f"lives for {opened.expires - opened.issued} s, at most {ttl} s")
    current = manifest.epoch_at(now + MAX_CLOCK_SKEW)
    if epoch > current:
        raise Rejected(Reason.from_future, f"from epoch {epoch}, now is epoch {manifest.epoch_at(now)}")
    if manifest.epoch_ends(epoch) + ttl <= now:
        raise Rejected(Reason.stale, f"from epoch {epoch}, now is epoch {current}")


def _check_task(task: TaskRef, epoch: int, producer: str, manifest: Manifest) -> None:
    if not is_assigned(manifest, epoch, producer, task):
        raise Rejected(
            Reason.unassigned_task,
            f"{task.environment} seed {task.seed} index {task.index} is not assigned to {producer} in epoch {epoch}",
        )
    spec = manifest.environment(task.environment)
    if spec is None or task.version != spec.version:
        named = spec.version if spec else "no such environment"
        raise Rejected(Reason.unknown_environment, f"{task.environment} {task.version}: the manifest has {named}")
