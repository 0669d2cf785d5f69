"""The coordinators' log as a node keeps it: signed records, the lists they name, and proofs of faults. Part of node.db.

Every node keeps it and serves it, so that the log of a dead coordinator is still to be had.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from protocol.envelope import Opened
from protocol.rounds import Round
from swarm.database import Database

VERSION = 1
MAX_RECORDS = 4096
LATE_RECORDS = 64
"""Kept besides, of those that came last: proofs of faults are of old records, too."""
MAX_LISTS = 16
"""Member lists and boards kept: those that the newest records name."""
LOOK_BACK = 64
"""Records looked through for a list that is here, where the newest one is not."""
SCHEMA = """
CREATE TABLE round_records (
    row INTEGER PRIMARY KEY, digest BLOB NOT NULL UNIQUE, term INTEGER NOT NULL, number INTEGER NOT NULL,
    state INTEGER NOT NULL, revision INTEGER NOT NULL, coordinator TEXT NOT NULL, previous BLOB NOT NULL,
    record BLOB NOT NULL, sealed BLOB NOT NULL, UNIQUE (term, number, state, revision));
CREATE INDEX round_records_previous ON round_records (previous, term);
CREATE TABLE round_lists (row INTEGER PRIMARY KEY, digest BLOB NOT NULL UNIQUE, body BLOB NOT NULL);
CREATE TABLE round_faults (
    coordinator TEXT PRIMARY KEY, reason TEXT NOT NULL, detail TEXT NOT NULL, first BLOB NOT NULL, second BLOB NOT NULL)
"""

_TABLES = ("round_records", "round_lists", "round_faults")
_COLUMNS = "digest, coordinator, record, sealed"
_ORDER = "term DESC, number DESC, state DESC, revision DESC"
_HONEST = "coordinator NOT IN (SELECT coordinator FROM round_faults)"


@dataclass(frozen=True, slots=True)
class Kept:
    """One record as it was verified."""

    digest: bytes
    coordinator: str
    record: Round
    sealed: bytes


@dataclass(frozen=True, slots=True)
class Fault:
    """What a coordinator signed and must not have."""

    coordinator: str
    reason: str
    detail: str
    first: bytes
    second: bytes
    """Sealed records; the second one is empty where the first one proves it alone."""


class RoundLog:
    """Raises StoreError. `durable`: for who signs, whose last record must not be lost in a power cut either.

    A home is in one swarm at a time: what is there of another one than `swarm` is removed.
    """

    def __init__(self, path: Path, swarm: bytes, *, durable: bool = False) -> None:
        self._db = Database(path)
        self._db.migrate("rounds_version", VERSION, SCHEMA.strip())
        self._db.keep_for(swarm, "rounds_swarm", _TABLES)
        if durable:
            self._db.execute("PRAGMA synchronous=FULL")

    def close(self) -> None:
        self._db.close()

    def add(self, opened: Opened, record: Round, sealed: bytes) -> None:
        """Keep a verified record that is not there yet."""
        with self._db.transaction():
            self._db.execute(
                "INSERT INTO round_records"
                " (digest, term, number, state, revision, coordinator, previous, record, sealed)"
                " VALUES (?,?,?,?,?,?,?,?,?)",
                opened.digest, *record.position, opened.producer, record.previous, opened.payload, sealed,
            )  # fmt: skip
            # by place in the log: whoever tells old records again must not push the newest ones out
            self._db.execute(
                "DELETE FROM round_records WHERE row <= (SELECT MAX(row) FROM round_records) - ?"
                " AND (term, number, state, revision) <"
                f" (SELECT term, number, state, revision FROM round_records ORDER BY {_ORDER} LIMIT 1 OFFSET ?)",
                LATE_RECORDS,
                MAX_RECORDS - 1,
            )

    def last(self, *, honest: bool = True) -> Kept | None:
        """The latest record; with `honest`, of coordinators that no fault is proven of."""
        return self._one(f"{_HONEST if honest else 'TRUE'} ORDER BY {_ORDER} LIMIT 1")

    def find(self, digest: bytes) -> Kept | None:
        return self._one("digest = ?", digest)

    def rival(self, record: Round, coordinator: str) -> Kept | None:
        """A record that `coordinator` cannot have signed besides this one: of the same place in the log, or after the
        same record, in whatever term of its own."""
        place = "term = ? AND number = ? AND state = ? AND revision = ?"
        return self._one(
            f"{place} OR (previous = ? AND coordinator = ?)", *record.position, record.previous, coordinator
        )

    def naming(self, digest: bytes) -> list[Kept]:
        """Records that name this one as the one before: at most one of a term."""
        rows = self._db.all(f"SELECT {_COLUMNS} FROM round_records WHERE previous = ?", digest)
        return [_kept(row) for row in rows]

    def after(self, digest: bytes, limit: int) -> list[bytes]:
        """Sealed records after that of `digest`, oldest first; the last `limit` where it is not known."""
        known = self.find(digest)
        if known is None:
            rows = self._db.all(f"SELECT sealed FROM round_records WHERE {_HONEST} ORDER BY {_ORDER} LIMIT ?", limit)
            return [row[0] for row in reversed(rows)]
        rows = self._db.all(
            f"SELECT sealed FROM round_records WHERE {_HONEST} AND (term, number, state, revision) > (?, ?, ?, ?)"
            f" ORDER BY {_ORDER.replace('DESC', 'ASC')} LIMIT ?",
            *known.record.position,
            limit,
        )
        return [row[0] for row in rows]

    def _one(self, where: str, *values: object) -> Kept | None:
        row = self._db.one(f"SELECT {_COLUMNS} FROM round_records WHERE {where}", *values)
        return None if row is None else _kept(row)

    # -- lists -----------------------------------------------------------------------------------------------

    def add_list(self, digest: bytes, body: bytes, named: Sequence[bytes]) -> None:
        """Keep a member list or a board. `named`: digests that must stay, however old."""
        with self._db.transaction():
            self._db.execute("INSERT OR IGNORE INTO round_lists (digest, body) VALUES (?, ?)", digest, body)
            marks = ",".join("?" * len(named))
            self._db.execute(
                f"DELETE FROM round_lists WHERE digest NOT IN ({marks}) AND row <="
                " (SELECT MAX(row) FROM round_lists) - ?",
                *named,
                MAX_LISTS,
            )

    def list_body(self, digest: bytes) -> bytes | None:
        row = self._db.one("SELECT body FROM round_lists WHERE digest = ?", digest)
        return row[0] if row else None

    def newest_board(self) -> bytes | None:
        """Digest of the last board of an honest coordinator's log."""
        row = self._db.one(f"SELECT record FROM round_records WHERE {_HONEST} AND state = 3 ORDER BY {_ORDER} LIMIT 1")
        return msgspec.msgpack.decode(row[0], type=Round).board if row else None

    def newest_held(self, name: Literal["members", "board"]) -> bytes | None:
        """Digest of the last list that is here: a board of an honest coordinator's log; a member list of any log where
        there is no honest one."""
        which = "TRUE" if name == "members" else f"{_HONEST} AND state = 3"
        rows = self._db.all(
            f"SELECT record FROM round_records WHERE {which} ORDER BY {_HONEST} DESC, {_ORDER} LIMIT ?", LOOK_BACK
        )
        named = (getattr(msgspec.msgpack.decode(row[0], type=Round), name) for row in rows)
        return next((digest for digest in named if self.list_body(digest) is not None), None)

    # -- faults ----------------------------------------------------------------------------------------------

    def add_fault(self, fault: Fault) -> bool:
        """Keep the first proof against a coordinator. True: there was none."""
        return bool(
            self._db.execute(
                "INSERT OR IGNORE INTO round_faults VALUES (?,?,?,?,?)",
                fault.coordinator, fault.reason, fault.detail, fault.first, fault.second,
            )
        )  # fmt: skip

    def faults(self) -> list[Fault]:
        rows = self._db.all("SELECT coordinator, reason, detail, first, second FROM round_faults ORDER BY coordinator")
        return [Fault(*row) for row in rows]


def _kept(row: tuple[bytes, str, bytes, bytes]) -> Kept:
    digest, coordinator, record, sealed = row
    return Kept(digest, coordinator, msgspec.msgpack.decode(record, type=Round), sealed)
