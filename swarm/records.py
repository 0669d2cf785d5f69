"""What is remembered of groups and of peers, as values; swarm.experience keeps them on disk."""

from dataclasses import dataclass

from protocol.rollout import TaskRef

ADMITTED = "admitted"
ANNOUNCED = "announced"
"""Verdicts besides the names of `protocol.rules.Reason`."""


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


@dataclass(frozen=True, slots=True)
class PoolEntry:
    """An admitted foreign group that can be trained on."""

    digest: bytes
    producer: str
    rewards: tuple[float, ...]
    """Computed here, one per completion."""
    received_at: float


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
