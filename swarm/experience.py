"""What a node knows of a swarm, on disk: groups with their verdicts, announcements, peers. Part of node.db.

Every write is a transaction of its own, or part of a short one, so that a killed process loses nothing and none stays
open in the way of node.history, which writes to the same file. Used from the asyncio thread only.

Rows outlive their groups' expiry as the history that people look at, until `max_bytes` or `keep_seconds` is reached.
"""

import json
import struct
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from protocol.envelope import Domain, unseal
from protocol.rejection import Rejected
from protocol.rollout import RolloutGroup, TaskRef
from swarm import announcements, peer_records
from swarm.announcements import Announcements
from swarm.database import Database, StoreError, StoreFull
from swarm.peer_records import PeerRecords
from swarm.records import ADMITTED, ANNOUNCED, FOLLOWED, TRAINED, GroupRecord, PeerRecord, PoolEntry

__all__ = [
    "ADMITTED",
    "ANNOUNCED",
    "FOLLOWED",
    "TRAINED",
    "ExperienceStore",
    "GroupRecord",
    "PeerRecord",
    "PoolEntry",
    "StoreError",
    "StoreFull",
    "UnknownGroup",
]

SCHEMA_VERSION = 3
ROW_BYTES = 640
"""What a row is taken to cost besides its body, indexes included."""
CHOSEN_BY = frozenset({"origin", "verdict", "environment", "producer"})
MAX_REJECTED_BODY = 64 * 1024
"""A rejected group's body is kept for people to look at, unless it is longer than this."""
LARGE_TABLES = ("groups", "announcements")
"""Those that hold what was exchanged; the others are small."""
MAX_BODY_BYTES = 64 * 2**20
"""The largest group that any manifest can allow."""

_group_decoder = msgspec.msgpack.Decoder(RolloutGroup)

_GROUPS = """
CREATE TABLE groups (
    row INTEGER PRIMARY KEY, digest BLOB NOT NULL UNIQUE, body BLOB NOT NULL, size INTEGER NOT NULL,
    origin TEXT NOT NULL, producer TEXT NOT NULL, epoch INTEGER NOT NULL,
    environment TEXT NOT NULL, version TEXT NOT NULL, seed INTEGER NOT NULL, slot INTEGER NOT NULL,
    model TEXT NOT NULL, claimed BLOB NOT NULL, local BLOB NOT NULL, verdict TEXT NOT NULL, detail TEXT NOT NULL,
    received_at REAL NOT NULL, expires_at REAL NOT NULL, uses INTEGER NOT NULL DEFAULT 0,
    parts TEXT NOT NULL DEFAULT '');
CREATE INDEX groups_task ON groups (producer, epoch, environment, seed, slot);
CREATE INDEX groups_expiry ON groups (expires_at);
CREATE INDEX groups_pool ON groups (expires_at, uses, producer) WHERE origin = 'foreign' AND verdict = 'admitted';
"""
_SHOWN = """
CREATE INDEX groups_shown ON groups (row, origin, verdict, environment, producer);
CREATE INDEX groups_same_task ON groups (seed, slot);
"""
"""The first one has all that groups are chosen by: they lie behind the bodies, which nobody wants to read past."""
# Announcements live half an hour and come again by healing.
_UPGRADES = {
    1: "DROP TABLE announcements;\n" + announcements.SCHEMA,
    2: "ALTER TABLE groups ADD COLUMN parts TEXT NOT NULL DEFAULT '';\n"
    + _SHOWN
    + "INSERT INTO verdicts SELECT producer, 'trained', SUM(uses) FROM groups"
    " WHERE origin = 'foreign' AND verdict = 'admitted' GROUP BY producer HAVING SUM(uses) > 0",
}

_COLUMNS = (
    "row, digest, size, origin, producer, epoch, environment, version, seed, slot, model, claimed, local, verdict,"
    " detail, received_at, expires_at, uses, parts"
)
_POOL = "origin = 'foreign' AND verdict = 'admitted' AND expires_at > ? AND LENGTH(body) > 0"


class UnknownGroup(LookupError):
    """No group, or more than one, has this digest or prefix; or its body is no longer held."""


class ExperienceStore:
    """Groups, and with them `announcements` and `peers`. Raises StoreError, and StoreFull when the disk is full."""

    def __init__(
        self, path: Path, max_bytes: int, clock: Callable[[], float], *, keep_seconds: float = 7 * 86400
    ) -> None:
        self._path, self._max_bytes, self._clock, self._keep_seconds = path, max_bytes, clock, keep_seconds
        self.evicted = 0
        """Groups whose row or body had to go to keep within `max_bytes`."""
        self._db = Database(path)
        schema = _GROUPS + _SHOWN + announcements.SCHEMA + peer_records.SCHEMA
        self._db.migrate("experience_schema", SCHEMA_VERSION, schema, _UPGRADES)
        self.announcements = Announcements(self._db)
        self.peers = PeerRecords(self._db)
        self._bytes = self._count_bytes()

    def close(self) -> None:
        self._db.close()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """All writes inside happen or none. Never await inside."""
        try:
            with self._db.transaction():
                yield
        except BaseException:
            self._bytes = self._count_bytes()
            raise

    @property
    def size(self) -> int:
        """Bytes held, as counted against `max_bytes`."""
        return self._bytes

    # -- groups ----------------------------------------------------------------------------------------------

    def add(self, record: GroupRecord, body: bytes) -> bool:
        """Remember a group with its sealed body. False (and nothing done) when its digest is known already."""
        kept = body if record.verdict == ADMITTED or len(body) <= MAX_REJECTED_BODY else b""
        task = record.task
        added = self._db.execute(
            "INSERT OR IGNORE INTO groups (digest, body, size, origin, producer, epoch, environment, version, seed,"
            " slot, model, claimed, local, verdict, detail, received_at, expires_at, parts)"
            " VALUES (?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?)",
            record.digest, kept, len(body), record.origin, record.producer, record.epoch,
            task.environment, task.version, task.seed, task.index, record.model,
            _pack(record.claimed), _pack(record.local), record.verdict, record.detail,
            record.received_at, record.expires_at, json.dumps(record.parts) if any(record.parts) else "",
        )  # fmt: skip
        if not added:
            return False
        self._bytes += len(kept) + ROW_BYTES
        if self._bytes > self._max_bytes:
            self._evict()
        return True

    def has_group(self, digest: bytes) -> bool:
        """Whether this digest was judged before, whatever came of it."""
        return self._db.one("SELECT 1 FROM groups WHERE digest = ?", digest) is not None

    def group_of(self, producer: str, epoch: int, task: TaskRef) -> bytes | None:
        """Digest of the group of this producer for a task of an epoch, own ones too: one is all it may send."""
        row = self._db.one(
            "SELECT digest FROM groups WHERE producer = ? AND epoch = ? AND environment = ? AND seed = ? AND slot = ?"
            " ORDER BY row LIMIT 1",
            producer,
            epoch,
            task.environment,
            task.seed,
            task.index,
        )
        return row[0] if row else None

    def body(self, digest: bytes) -> bytes | None:
        """Sealed bytes to serve to others: of own and admitted groups that have not expired."""
        row = self._db.one(
            "SELECT body FROM groups WHERE digest = ? AND verdict = 'admitted' AND expires_at > ?",
            digest,
            self._clock(),
        )
        return row[0] or None if row else None

    def group_body(self, digest: bytes) -> RolloutGroup:
        """A held group, decoded. Raises UnknownGroup when there is none, or no body (any more) that can be decoded."""
        row = self._db.one("SELECT body, received_at FROM groups WHERE digest = ?", digest)
        if row is None or not row[0]:
            raise UnknownGroup(f"the body of group {digest.hex()[:12]} is not held here (any more)")
        body, received_at = row
        # judged when it came, so it is opened as of then: a group may be read after it has expired
        try:
            opened = unseal(body, Domain.group, max_bytes=MAX_BODY_BYTES, now=received_at)
            return _group_decoder.decode(opened.payload)
        except (Rejected, msgspec.DecodeError) as error:
            raise UnknownGroup(f"group {digest.hex()[:12]} was rejected and cannot be shown: {error}") from error

    def find(self, prefix: str) -> GroupRecord:
        """The one group whose hex digest starts with `prefix`. Raises UnknownGroup when none or several do."""
        try:
            low, high = (bytes.fromhex(prefix.ljust(64, fill)) for fill in "0f")
        except ValueError:
            raise UnknownGroup(f"a group id is up to 64 hex digits, got {prefix[:80]!r}") from None
        rows = self._db.all(f"SELECT {_COLUMNS} FROM groups WHERE digest BETWEEN ? AND ? LIMIT 2", low, high)
        if len(rows) != 1:
            count = "more than one group has" if rows else "no group has"
            raise UnknownGroup(f"{count} an id that starts with {prefix!r}; see shoal groups")
        return _record(rows[0])

    def summaries(self, before: int | None, limit: int, where: Mapping[str, str] | None = None) -> list[GroupRecord]:
        """Newest first, with row < `before` (None: from the newest), that have the values of `where`, which names
        columns of CHOSEN_BY."""
        top = 2**63 - 1 if before is None else before
        where = where or {}
        assert CHOSEN_BY.issuperset(where)
        conditions = "".join(f" AND {name} = ?" for name in where)
        rows = self._db.all(
            f"SELECT {_COLUMNS} FROM groups WHERE row IN (SELECT row FROM groups INDEXED BY groups_shown"
            f" WHERE row < ?{conditions} ORDER BY row DESC LIMIT ?) ORDER BY row DESC",
            top,
            *where.values(),
            limit,
        )
        return [_record(row) for row in rows]

    def same_task(self, record: GroupRecord, limit: int) -> list[GroupRecord]:
        """Other groups on the task of this one, own and foreign, newest first."""
        task = record.task
        rows = self._db.all(
            f"SELECT {_COLUMNS} FROM groups WHERE seed = ? AND slot = ? AND environment = ? AND version = ?"
            " AND digest != ? ORDER BY row DESC LIMIT ?",
            task.seed,
            task.index,
            task.environment,
            task.version,
            record.digest,
            limit,
        )
        return [_record(row) for row in rows]

    def pool(self, now: float) -> list[PoolEntry]:
        """Admitted, informative, unexpired foreign groups with a body, oldest first."""
        rows = self._db.all(
            f"SELECT digest, producer, local, received_at, model FROM groups WHERE {_POOL} ORDER BY row", now
        )
        return [PoolEntry(digest, producer, _unpack(local), at, model) for digest, producer, local, at, model in rows]

    def unused(self, now: float) -> dict[str, int]:
        """How many groups of the pool no update has used yet, by producer."""
        rows = self._db.all(f"SELECT producer, COUNT(*) FROM groups WHERE {_POOL} AND uses = 0 GROUP BY producer", now)
        return dict(rows)

    def mark_used(self, digests: Sequence[bytes], followed: Collection[bytes] = ()) -> None:
        """Count one more use of each, on its producer's account too. `followed`: of them, who used our own policy."""
        chosen = [(digest,) for digest in digests]
        with self._db.transaction():
            self._db.execute_many("UPDATE groups SET uses = uses + 1 WHERE digest = ?", chosen)
            for verdict, credited in ((TRAINED, chosen), (FOLLOWED, [(digest,) for digest in followed])):
                self._db.execute_many(
                    f"INSERT INTO verdicts SELECT producer, '{verdict}', 1 FROM groups WHERE digest = ?"
                    " ON CONFLICT DO UPDATE SET count = count + 1",
                    credited,
                )

    def overrule(self, digest: bytes, verdict: str, detail: str) -> None:
        """Another verdict on a group than it was admitted with: it is neither trained on nor served any more."""
        self._db.execute("UPDATE groups SET verdict = ?, detail = ? WHERE digest = ?", verdict, detail, digest)

    def resize(self, max_bytes: int) -> None:
        """Hold at most so much from now on. Raises StoreError."""
        self._max_bytes = max_bytes
        if self._bytes > max_bytes:
            self._evict()

    @property
    def freed(self) -> int:
        """Bytes of the file that hold nothing any more."""
        return self._db.freed()

    def compact(self) -> bool:
        """Give some of the room of what was evicted back to the disk; whether there is more. Raises StoreError."""
        return self._db.compact()

    # -- bounds ----------------------------------------------------------------------------------------------

    def tidy(self) -> None:
        """Drop what is over its age or number: call it from time to time."""
        now = self._clock()
        with self.transaction():
            self._db.execute("DELETE FROM groups WHERE expires_at < ?", now - self._keep_seconds)
            self.announcements.tidy(now)
            self.peers.tidy()
        self._bytes = self._count_bytes()

    def _evict(self) -> None:
        """Get down to nine tenths of `max_bytes`.

        Expired rows go first. Of live groups only the body goes, rejected ones first, because the row is what
        recognises a replay; a row of a live group goes only when the rows alone are too many.
        """
        now, goal = self._clock(), self._max_bytes * 9 // 10
        steps = (
            (f"LENGTH(body) + {ROW_BYTES}", "expires_at <= ?", "DELETE FROM groups"),
            ("LENGTH(body)", "expires_at > ? AND verdict != 'admitted'", "UPDATE groups SET body = x''"),
            ("LENGTH(body)", "expires_at > ?", "UPDATE groups SET body = x''"),
            (f"LENGTH(body) + {ROW_BYTES}", "expires_at > ?", "DELETE FROM groups"),
        )
        left, evicted = self._bytes, 0
        with self.transaction():
            for cost, condition, action in steps:
                chosen = []
                for row, freed in self._db.each(
                    f"SELECT row, {cost} AS cost FROM groups WHERE {condition} AND cost > 0 ORDER BY row", now
                ):
                    if left <= goal:
                        break
                    chosen.append((row,))
                    left -= freed
                self._db.execute_many(f"{action} WHERE row = ?", chosen)
                evicted += len(chosen)
        self._bytes, self.evicted = left, self.evicted + evicted

    def _count_bytes(self) -> int:
        row = self._db.one(f"SELECT COALESCE(SUM(LENGTH(body) + {ROW_BYTES}), 0) FROM groups")
        assert row is not None  # an aggregate always has one
        return int(row[0])


def _pack(values: Sequence[float]) -> bytes:
    return struct.pack(f"<{len(values)}d", *values)


def _unpack(packed: bytes) -> tuple[float, ...]:
    return struct.unpack(f"<{len(packed) // 8}d", packed)


def _record(row: tuple[Any, ...]) -> GroupRecord:
    (number, digest, size, origin, producer, epoch, environment, version, seed, slot, model, claimed, local, verdict,
     detail, received_at, expires_at, uses, parts) = row  # fmt: skip
    return GroupRecord(
        digest, origin, producer, epoch, TaskRef(environment, version, seed, slot), model, _unpack(claimed),
        _unpack(local), verdict, detail, received_at, expires_at, size, number, uses,
        tuple(json.loads(parts)) if parts else (),
    )  # fmt: skip
