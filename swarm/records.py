"""What is remembered of groups and of peers, as values; swarm.experience keeps them on disk."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from protocol.rollout import TaskRef

ADMITTED = "admitted"
ANNOUNCED = "announced"
TRAINED = "trained"
FOLLOWED = "followed"
"""Verdicts besides the names of `protocol.rules.Reason`."""


@dataclass(frozen=True, slots=True)
class Scored:
    """What this node's scorer made of one completion."""

    reward: float
    parts: Mapping[str, float] = field(default_factory=dict)
    """What the reward is made of, by name, where the scorer says so."""


@dataclass(frozen=True, slots=True)
class GroupRecord:
    """A group as it is remembered: own, admitted, or rejected with why. The sealed body is read apart."""

    digest: bytes
    origin: str
    """'own' or 'foreign'."""
    producer: str
    epoch: int
    task: TaskRef
    model: str
    claimed: tuple[float, ...]
    local: tuple[float, ...]
    """Rewards computed here; empty when the group was rejected before it was scored."""
    verdict: str
    """'admitted', or the name of a `protocol.rules.Reason`."""
    detail: str
    received_at: float
    expires_at: float
    size: int = 0
    """Length of the sealed body, whether or not it is still held."""
    row: int = 0
    uses: int = 0
    """How many updates it went into."""
    parts: tuple[Mapping[str, float], ...] = ()
    """Of the rewards in `local`, where the scorer gave any."""


@dataclass(frozen=True, slots=True)
class PoolEntry:
    """An admitted foreign group that can be trained on."""

    digest: bytes
    producer: str
    rewards: tuple[float, ...]
    """Computed here, one per completion."""
    received_at: float
    model: str = ""
    """As announced; it may claim a version of this node's policy (protocol/policy.py)."""


@dataclass(frozen=True, slots=True)
class PeerRecord:
    """What is remembered of a peer; see `swarm.reputation` for the meaning of the sums."""

    peer: str
    accepted: float
    penalty: float
    updated_at: float
    banned: bool
    model: str
    first_seen: float
    last_seen: float
