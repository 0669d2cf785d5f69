"""A swarm of one manifest and two known identities, and sealed groups and announcements in it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
from hypothesis import settings

from protocol.assignment import own_task
from protocol.envelope import Domain, Opened, digest_of, seal
from protocol.identity import Identity
from protocol.manifest import Manifest, embedded_manifest
from protocol.messages import Announcement
from protocol.rollout import Completion, RolloutGroup, Turn, pack_logprobs, pack_token_ids
from protocol.rules import check_announcement, check_group

# The same examples every time, and no deadline: the machines that run this are shared.
settings.register_profile("protocol", derandomize=True, deadline=None)
settings.load_profile("protocol")

GENESIS = 1_800_000_000


@dataclass
class Swarm:
    manifest: Manifest = field(default_factory=lambda: embedded_manifest("test", GENESIS))
    me: Identity = field(default_factory=lambda: Identity.from_seed(bytes(range(32))))
    other: Identity = field(default_factory=lambda: Identity.from_seed(bytes(range(1, 33))))
    now: float = GENESIS + 605.0

    def group(self, slot: int = 0, **changes: Any) -> RolloutGroup:
        """8 completions of 12 tokens by `me` in epoch 1, alternately right and wrong."""
        completions = tuple(
            Completion(
                turns=(Turn("assistant", f"The answer is {number}, and that is all."),),
                finish="stop",
                token_count=12,
                reward=float(number % 2),
                token_ids=pack_token_ids([(number * 977 + position * 31) % 49152 for position in range(12)]),
                logprobs=pack_logprobs([-0.1 * position - 0.01 * number for position in range(12)]),
            )
            for number in range(8)
        )
        group = RolloutGroup(
            epoch=1,
            task=own_task(self.manifest, 1, self.me.peer_id, slot),
            model="SmolLM2-135M-Instruct",
            tokenizer=bytes(16),
            policy_version=7,
            completions=completions,
        )
        return msgspec.structs.replace(group, **changes)

    def with_completion(self, **changes: Any) -> RolloutGroup:
        """The group with its first completion changed."""
        group = self.group()
        first = msgspec.structs.replace(group.completions[0], **changes)
        return msgspec.structs.replace(group, completions=(first, *group.completions[1:]))

    def seal(self, message: Any, domain: Domain = Domain.group, by: Identity | None = None, **times: float) -> bytes:
        payload = message if isinstance(message, bytes) else msgspec.msgpack.encode(message)
        times = {"issued": self.now - 5, "expires": self.now + 1000} | times
        return seal(by or self.me, domain, payload, **times)

    def announcement(self, group: RolloutGroup, raw: bytes, **changes: Any) -> Announcement:
        announcement = Announcement(
            swarm=self.manifest.digest,
            group=digest_of(raw),
            size=len(raw),
            epoch=group.epoch,
            task=group.task,
            model=group.model,
            completions=len(group.completions),
            reward_mean=0.5,
            reward_std=0.5,
            tokens=sum(completion.token_count for completion in group.completions),
        )
        return msgspec.structs.replace(announcement, **changes)

    def hear(self, raw: bytes, banned: Callable[[str], bool] = lambda _: False) -> tuple[Opened, Announcement]:
        """`check_announcement` as this swarm's node would call it."""
        return check_announcement(raw, self.manifest, self.now, banned=banned)

    def admit(self, raw: bytes, announced: Announcement, **changes: Any) -> tuple[Opened, RolloutGroup]:
        """`check_group` as this swarm's node would call it."""
        facts: dict[str, Any] = {
            "producer": self.me.peer_id,
            "announced": announced,
            "seen": lambda _: False,
            "banned": lambda _: False,
        }
        return check_group(raw, self.manifest, self.now, **(facts | changes))


@pytest.fixture(scope="session")
def swarm() -> Swarm:
    return Swarm()
