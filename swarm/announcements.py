"""The announcements that a node knows of, on disk: what it serves to peers that lack them. Part of node.db."""

import math
from collections.abc import Callable, Collection

from protocol.rollout import TaskRef
from swarm.database import Database

MAX_ANNOUNCEMENTS = 8192
MAX_PRODUCER_ANNOUNCEMENTS = 1024
"""Of one producer, the newest by expiry, so that its flood takes no room from others and all nodes keep the same."""

SCHEMA = """
CREATE TABLE announcements (
    row INTEGER PRIMARY KEY, digest BLOB NOT NULL, producer TEXT NOT NULL, epoch INTEGER NOT NULL,
    seed INTEGER NOT NULL, slot INTEGER NOT NULL, sealed BLOB NOT NULL, heard_at REAL NOT NULL,
    expires_at REAL NOT NULL, UNIQUE (digest, producer));
CREATE INDEX announcements_expiry ON announcements (expires_at);
CREATE INDEX announcements_producer ON announcements (producer, expires_at);
CREATE INDEX announcements_task ON announcements (producer, epoch, seed, slot);
"""


class Announcements:
    """Verified announcements. Raises StoreError."""

    def __init__(self, database: Database) -> None:
        self._db = database

    def add(
        self,
        digest: bytes,
        producer: str,
        epoch: int,
        task: TaskRef,
        sealed: bytes,
        *,
        heard_at: float,
        expires_at: float,
    ) -> bool:
        """Remember a verified announcement of group `digest`. False when known, or when its producer has many newer."""
        with self._db.transaction():
            oldest = self._db.one(
                "SELECT expires_at FROM announcements WHERE producer = ? ORDER BY expires_at DESC LIMIT 1 OFFSET ?",
                producer,
                MAX_PRODUCER_ANNOUNCEMENTS - 1,
            )
            if oldest is not None and expires_at <= oldest[0]:
                return False
            added = self._db.execute(
                "INSERT OR IGNORE INTO announcements"
                " (digest, producer, epoch, seed, slot, sealed, heard_at, expires_at) VALUES (?,?,?,?,?,?,?,?)",
                digest, producer, epoch, task.seed, task.index, sealed, heard_at, expires_at,
            )  # fmt: skip
            if added and oldest is not None:
                self._db.execute("DELETE FROM announcements WHERE producer = ? AND expires_at <= ?", producer, *oldest)
            self._db.execute(
                "DELETE FROM announcements WHERE row <= (SELECT MAX(row) FROM announcements) - ?", MAX_ANNOUNCEMENTS
            )
        return bool(added)

    def of_task(self, producer: str, epoch: int, task: TaskRef) -> bytes | None:
        """Digest of the group that this producer announced for a task of an epoch; None: it announced none."""
        row = self._db.one(
            "SELECT digest FROM announcements WHERE producer = ? AND epoch = ? AND seed = ? AND slot = ?",
            producer,
            epoch,
            task.seed,
            task.index,
        )
        return row[0] if row else None

    def live(
        self,
        now: float,
        limit: int,
        *,
        heard_by: float = math.inf,
        without: Collection[bytes] = (),
        banned: Callable[[str], bool] = lambda producer: False,
    ) -> list[bytes]:
        """Unexpired sealed announcements, newest first; not of groups in `without`, nor of `banned` producers, nor
        heard after `heard_by` (unix seconds)."""
        found: list[bytes] = []
        for digest, producer, sealed in self._db.each(
            "SELECT digest, producer, sealed FROM announcements WHERE expires_at > ? AND heard_at <= ?"
            " ORDER BY row DESC",
            now,
            heard_by,
        ):
            if len(found) == limit:
                break
            if digest not in without and not banned(producer):
                found.append(sealed)
        return found

    def digests(self, now: float, limit: int, *, expires_by: float = math.inf) -> dict[bytes, float]:
        """Digests of unexpired announced groups, with when they expire: the last to do so, by `expires_by`, first."""
        rows = self._db.all(
            "SELECT digest, MAX(expires_at) AS expiry, MAX(row) AS newest FROM announcements"
            " WHERE expires_at > ? AND expires_at <= ? GROUP BY digest ORDER BY expiry DESC, newest DESC LIMIT ?",
            now,
            expires_by,
            limit,
        )
        return {digest: expiry for digest, expiry, _ in rows}

    def tidy(self, now: float) -> None:
        """Forget those that have expired."""
        self._db.execute("DELETE FROM announcements WHERE expires_at < ?", now)
