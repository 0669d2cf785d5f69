"""How far a peer is trusted: by what its groups turned out to be, fading with time, kept over restarts.

Identities are free, so a new one starts low and earns its weight with admitted groups; what only a faulty or hostile
node does costs many of them, and enough of it is a ban. Weights steer which groups are pulled and drawn, they never
admit one: every group passes the whole admission chain whoever sent it.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace

from protocol.rules import Reason
from swarm.experience import ExperienceStore
from swarm.peer_records import MAX_PEERS, PROVEN
from swarm.records import ADMITTED, PeerRecord

HALF_LIFE = 86400.0
"""Seconds after which what a peer did counts half."""
DOUBT = 4.0
"""A newcomer's weight is 1/DOUBT; it takes about as many admitted groups to come to a half."""
BAN_AT = 18.0
"""Penalty from which a peer is banned, if it also outweighs what it did well: four grave offences within a few hours.
The ban is lifted once the penalty has faded below half of this."""

PENALTIES: dict[str, float] = {
    Reason.too_large: 5.0,
    Reason.malformed: 5.0,
    Reason.bad_signature: 5.0,
    Reason.wrong_producer: 5.0,
    Reason.unassigned_task: 5.0,
    Reason.reward_mismatch: 5.0,
    Reason.hash_mismatch: 5.0,
    Reason.logprob_mismatch: 5.0,
    Reason.over_budget: 1.0,
    Reason.replayed: 0.5,
}
"""What an offence costs. The other reasons happen to honest nodes too: a slow clock, another version, no luck, a power
cut or a lost database that makes a node answer its tasks again (`equivocation`).
"""


def faded(record: PeerRecord, now: float) -> PeerRecord:
    """The record as it counts at time `now` (unix seconds): sums halve every HALF_LIFE, and with them a ban ends."""
    keep = 0.5 ** (max(0.0, now - record.updated_at) / HALF_LIFE)
    penalty = record.penalty * keep
    return replace(
        record,
        accepted=record.accepted * keep,
        penalty=penalty,
        updated_at=max(now, record.updated_at),
        banned=record.banned and penalty >= BAN_AT / 2,
    )


def judged(record: PeerRecord, verdict: str) -> PeerRecord:
    """The record after one more verdict: 'admitted' or the name of a Reason."""
    accepted = record.accepted + (verdict == ADMITTED)
    penalty = record.penalty + PENALTIES.get(verdict, 0.0)
    # found out after the group was admitted: what others of its kind have earned must not outweigh it
    outweighed = penalty <= accepted and verdict != Reason.logprob_mismatch
    return replace(
        record,
        accepted=accepted,
        penalty=penalty,
        banned=record.banned or (penalty >= BAN_AT and not outweighed),
    )


def weight(record: PeerRecord) -> float:
    """In [0, 1): 0 when banned, 1/DOUBT for a newcomer, near 1 for a peer with many admitted groups."""
    return 0.0 if record.banned else (record.accepted + 1) / (record.accepted + record.penalty + DOUBT)


def weight_at(now: float, accepted: float, penalty: float, updated_at: float, banned: int) -> float:
    """`weight` of the `faded` record with these numbers, for lists of thousands."""
    keep = 0.5 ** (max(0.0, now - updated_at) / HALF_LIFE)
    if banned and penalty * keep >= BAN_AT / 2:
        return 0.0
    return (accepted * keep + 1) / ((accepted + penalty) * keep + DOUBT)


class Reputation:
    """The records of all known peers, read from the store once and written through to it.

    `is_banned` may be asked from another thread: it reads, and the records it reads are immutable.
    """

    def __init__(self, store: ExperienceStore, clock: Callable[[], float]) -> None:
        self._store, self._clock = store, clock
        self._records = OrderedDict(
            (record.peer, record) for record in sorted(store.peers.all(), key=lambda peer: peer.last_seen)
        )
        """In the order in which they were seen last."""

    def of(self, peer: str) -> PeerRecord:
        """The peer's record as of now; a fresh one for a stranger."""
        now = self._clock()
        known = self._records.get(peer)
        return faded(known, now) if known else PeerRecord(peer, 0.0, 0.0, now, False, "", now, now)

    def record(self, peer: str, verdict: str, model: str = "") -> bool:
        """Count one verdict on a peer ('admitted', 'announced' or a Reason); True when it is banned by it.

        `model`, when given, is remembered as the peer's. Raises StoreError.
        """
        before = self.of(peer)
        after = judged(before, verdict)
        self._save(replace(after, model=model or after.model), verdict)
        return after.banned and not before.banned

    def seen(self, peer: str) -> None:
        """The peer is connected now. Raises StoreError.

        A stranger is not written down for that: it may only ask for a public swarm, and never come again.
        """
        if peer in self._records:
            self._save(self.of(peer), None)

    def weight(self, peer: str) -> float:
        return weight(self.of(peer))

    def is_banned(self, peer: str) -> bool:
        return peer in self._records and self.of(peer).banned

    def banned(self) -> list[str]:
        return [peer for peer in self._records if self.is_banned(peer)]

    def _save(self, record: PeerRecord, verdict: str | None) -> None:
        record = replace(record, last_seen=record.updated_at)
        self._store.peers.save(record, verdict)
        if record.peer not in self._records and len(self._records) >= MAX_PEERS:
            forgotten = self._least_missed()
            del self._records[forgotten]
            self._store.peers.forget(forgotten)
        self._records[record.peer] = record
        self._records.move_to_end(record.peer)

    def _least_missed(self) -> str:
        """Whom to forget, as `PeerRecords.tidy` does: who was seen longest ago, of those that neither earned anything
        nor are banned if there are any.

        Identities are free, so a flood of them must push out neither what others earned nor bans.
        """
        for proven, banned in ((False, False), (False, True), (True, False)):
            for peer, record in self._records.items():
                if (record.accepted >= PROVEN, record.banned) == (proven, banned):
                    return peer
        return next(iter(self._records))
