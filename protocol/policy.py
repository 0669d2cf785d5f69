"""Policies of a leader, as its followers get them: a signed head, records named by it, and pieces named by those.

The head says which versions there are and is all that is signed: a record is named in it by its hash, and a piece in
a record by its own. So records and pieces may come from anybody. What they are made of is docs/protocol.md, section 12.
"""

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec

from protocol.envelope import Domain, unseal
from protocol.identity import public_key_of
from protocol.messages import Digest
from protocol.rejection import Reason, Rejected
from protocol.rollout import UInt63
from protocol.text import forbidden_character

POLICY_PROTOCOL = "/shoal/policy/1.0.0"
"""PolicyRequest -> the leader's sealed head, or an empty answer: not held."""
PIECES_PROTOCOL = "/shoal/pieces/1.0.0"
"""PieceRequest -> the bytes of a record or a piece from `offset`, or an empty answer: not held."""

MAX_HEAD_BYTES = 2048
MAX_ITEMS = 24
"""Versions of a head: 24 are some 1.6 KB."""
MAX_RECORD_BYTES = 2 * 1024 * 1024
MAX_PIECES = 32768
LEAST_PIECE_BYTES, MOST_PIECE_BYTES = 64 * 1024, 8 * 1024 * 1024
PIECE_BYTES = 512 * 1024
"""As long as MAX_PIECES of them are enough."""

Leader = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
Weights = Literal["float32", "bfloat16"]


class PolicyItem(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One way to come by a version: as a whole, or as what changed since another one."""

    version: UInt63
    """Updates done."""
    base: UInt63 | None
    """The version it changes, below its own; None: it is a whole."""
    record: Digest
    record_size: Annotated[int, msgspec.Meta(ge=1, le=MAX_RECORD_BYTES)]
    size: UInt63
    """Bytes of all its pieces."""


class PolicyHead(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Which versions a leader has, oldest first; the last one is its present policy. Travels sealed, at most 2 KiB."""

    swarm: Digest
    model: Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
    """Mark of the base model: who has another one cannot follow."""
    items: Annotated[tuple[PolicyItem, ...], msgspec.Meta(min_length=1, max_length=MAX_ITEMS)]

    @property
    def version(self) -> int:
        return self.items[-1].version


class PolicyRecord(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """How the bytes of an item are cut into pieces, and what comes of them. Named by its SHA-256."""

    version: UInt63
    base: UInt63 | None
    base_state: Annotated[bytes, msgspec.Meta(max_length=32)]
    """Digest of all weights that it changes; empty for a whole."""
    dtype: Weights
    state: Digest
    """Digest of all weights of this version."""
    size: UInt63
    piece_bytes: Annotated[int, msgspec.Meta(ge=LEAST_PIECE_BYTES, le=MOST_PIECE_BYTES)]
    """Of every piece but the last one."""
    pieces: Annotated[tuple[Digest, ...], msgspec.Meta(min_length=1, max_length=MAX_PIECES)]

    def piece_size(self, number: int) -> int:
        """Bytes of a piece, counted from 0."""
        return min(self.piece_bytes, self.size - number * self.piece_bytes)


class PolicyRequest(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    leader: Leader
    """Its public key."""


class PieceRequest(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The fields of a GroupRequest: what is asked for is named by its hash in both."""

    piece: Digest
    offset: UInt63 = 0


_head_decoder = msgspec.msgpack.Decoder(PolicyHead)
_record_decoder = msgspec.msgpack.Decoder(PolicyRecord)


@dataclass(frozen=True, slots=True)
class KnownHead:
    """A head that was checked."""

    head: PolicyHead
    issued: int
    """Unix seconds; of two heads of a leader, the one issued later counts."""
    expires: int
    sealed: bytes


def piece_bytes_for(size: int) -> int:
    """How long the pieces of so many bytes are to be. Raises ValueError when there are too many whatever their size."""
    length = PIECE_BYTES
    while length * MAX_PIECES < size:
        length *= 2
    if length > MOST_PIECE_BYTES:
        raise ValueError(f"{size} bytes do not fit into {MAX_PIECES} pieces of {MOST_PIECE_BYTES} bytes")
    return length


def rendezvous(swarm: bytes, leader: str) -> bytes:
    """Where in the DHT those meet that hold pieces of this leader's policy. Raises IdentityError."""
    return hashlib.sha256(b"shoal/1/policy\n" + swarm + public_key_of(leader)).digest()


def check_head(sealed: bytes, *, leader: str, swarm: bytes, now: float) -> KnownHead:
    """A head that came from anybody. `now` in unix seconds.

    Raises Rejected: what `unseal` raises, malformed, wrong_producer, wrong_swarm.
    """
    opened = unseal(sealed, Domain.policy, max_bytes=MAX_HEAD_BYTES, now=now)
    try:
        head = _head_decoder.decode(opened.payload)
    except (msgspec.DecodeError, RecursionError) as error:
        raise Rejected(Reason.malformed, f"policy head: {error}") from error
    if opened.producer != leader:
        raise Rejected(Reason.wrong_producer, f"a policy head of {opened.producer}, asked for that of {leader}")
    if found := forbidden_character(head.model):
        raise Rejected(Reason.malformed, f"policy head: forbidden control character {found}")
    before = head.items[0].version
    for item in head.items:
        if item.version < before or (item.base is not None and item.base >= item.version) or not item.size:
            raise Rejected(Reason.malformed, "policy head: versions out of order, or an item without bytes")
        before = item.version
    if head.swarm != swarm:
        raise Rejected(Reason.wrong_swarm, f"a policy of swarm {head.swarm.hex()[:16]}")
    return KnownHead(head, opened.issued, opened.expires, sealed)


def check_record(raw: bytes, item: PolicyItem) -> PolicyRecord:
    """The record that an item of a head names. Raises Rejected: hash_mismatch, malformed."""
    if hashlib.sha256(raw).digest() != item.record:
        raise Rejected(Reason.hash_mismatch, "a policy record of another hash than the head names")
    try:
        record = _record_decoder.decode(raw)
    except (msgspec.DecodeError, RecursionError) as error:
        raise Rejected(Reason.malformed, f"policy record: {error}") from error
    if msgspec.msgpack.encode(record) != raw:
        raise Rejected(Reason.malformed, "policy record is not in canonical msgpack")
    if (record.version, record.base, record.size) != (item.version, item.base, item.size):
        raise Rejected(Reason.malformed, "policy record: version, base or size differ from the head")
    if len(record.base_state) != (0 if record.base is None else 32):
        raise Rejected(Reason.malformed, "policy record: a base without its state, or a state without a base")
    if len(record.pieces) != -(-record.size // record.piece_bytes):
        raise Rejected(
            Reason.malformed,
            f"policy record: {len(record.pieces)} pieces of {record.piece_bytes} bytes for {record.size} bytes",
        )
    return record


def is_newer(found: KnownHead, known: KnownHead, *, by_leader: bool) -> bool:
    """Of the same second, what the leader itself says now counts, or else the higher version."""
    if found.issued != known.issued:
        return found.issued > known.issued
    return found.sealed != known.sealed and (by_leader or found.head.version > known.head.version)


def leads(records: Sequence[PolicyRecord], state: bytes) -> bool:
    """Whether each record starts from the weights that the one before leads to."""
    for record in records:
        if record.base is not None and record.base_state != state:
            return False
        state = record.state
    return True


def way_to(items: Sequence[PolicyItem], have: int | None) -> list[PolicyItem] | None:
    """The items to apply, in order, to come from version `have` (None: from nothing) to the last one of `items` for
    the fewest bytes; an empty list: it is there already; None: there is no way."""
    best: dict[int, tuple[int, list[PolicyItem]]] = {} if have is None else {have: (0, [])}
    # by version: an item's base is below its own, so the way there is known when its turn comes
    for item in items:
        start = (0, []) if item.base is None else best.get(item.base)
        if start is None:
            continue
        cost = start[0] + item.size + item.record_size
        if item.version not in best or cost < best[item.version][0]:
            best[item.version] = (cost, [*start[1], item])
    way = best.get(items[-1].version)
    return None if way is None else way[1]


def kept_items(items: Sequence[PolicyItem], staleness: int) -> list[PolicyItem]:
    """What a leader still offers of `items`, oldest first: the last whole, and of the changes those of the last
    `staleness` versions and more as far as they are at most MAX_CHANGE_SHARE of the whole and fit the head."""
    wholes = [item for item in items if item.base is None]
    changes = [item for item in items if item.base is not None]
    room = MAX_CHANGE_SHARE * wholes[-1].size if wholes else 0
    kept: list[PolicyItem] = []
    for item in reversed(changes[-(MAX_ITEMS - 1) :]):
        room -= item.size
        if room < 0 and len(kept) >= staleness:
            break
        kept.append(item)
    return sorted([*wholes[-1:], *kept], key=lambda item: (item.version, item.base is None))


MAX_CHANGE_SHARE = 4
"""Of a whole's bytes: how much a leader keeps of changes that nobody needs any more who is not late."""


# -- what a follower says of its groups ------------------------------------------------------------------------

_CLAIM = re.compile(r"@([1-9A-HJ-NP-Za-km-z]{8})\.([0-9a-f]{16})\Z")
MAX_MODEL = 64


@dataclass(frozen=True, slots=True)
class Claim:
    """A group's `model` says that a version of a leader's policy sampled it."""

    leader: str
    """Last 8 characters of its peer id."""
    state: str
    """First 16 hex digits of the digest of the weights."""


def claiming(model: str, leader: str, state: bytes) -> str:
    """A group's `model` with the claim that it was sampled with those weights of this leader."""
    claim = f"@{leader[-8:]}.{state.hex()[:16]}"
    return model[: MAX_MODEL - len(claim)] + claim


def claim_of(model: str) -> Claim | None:
    """The claim in a group's `model`, if there is one."""
    found = _CLAIM.search(model)
    return Claim(found[1], found[2]) if found else None


def claimed_version(model: str, leader: str, versions: Mapping[str, int]) -> int | None:
    """Which of the leader's versions (first 16 hex digits of the state -> version) a group claims; -1: one that is
    not among them; None: no claim to this leader's policy."""
    claim = claim_of(model)
    if claim is None or claim.leader != leader[-8:]:
        return None
    return versions.get(claim.state, -1)
