"""What a node remembers of its peers, on disk: reputations and how often each verdict fell. Part of node.db."""

from collections.abc import Collection
from typing import Any

from swarm.database import Database
from swarm.records import ADMITTED, ANNOUNCED, FOLLOWED, TRAINED, PeerRecord

MAX_PEERS = 10_000
PROVEN = 0.5
"""Sum of admitted groups from which a peer is remembered before strangers and banned ones."""

SCHEMA = """
CREATE TABLE peers (
    peer TEXT PRIMARY KEY, accepted REAL NOT NULL, penalty REAL NOT NULL, updated_at REAL NOT NULL,
    banned INTEGER NOT NULL, model TEXT NOT NULL, first_seen REAL NOT NULL, last_seen REAL NOT NULL) WITHOUT ROWID;
CREATE TABLE verdicts (
    peer TEXT NOT NULL, verdict TEXT NOT NULL, count INTEGER NOT NULL, PRIMARY KEY (peer, verdict)) WITHOUT ROWID;
"""

_COLUMNS = "peer, accepted, penalty, updated_at, banned, model, first_seen, last_seen"


class PeerRecords:
    """Raises StoreError. Whoever adds many peers also calls `forget` for as many: see `swarm.reputation`."""

    def __init__(self, database: Database) -> None:
        self._db = database

    def all(self) -> list[PeerRecord]:
        return [_record(row) for row in self._db.all(f"SELECT {_COLUMNS} FROM peers ORDER BY peer")]

    def standings(self) -> list[tuple[PeerRecord, int, int]]:
        """All of them, at most MAX_PEERS, with how many of their groups were admitted and how many refused."""
        rows = self._db.all(
            f"SELECT {_COLUMNS}, COALESCE(admitted, 0), COALESCE(refused, 0) FROM peers LEFT JOIN"
            f" (SELECT peer AS judged, SUM(CASE verdict WHEN '{ADMITTED}' THEN count ELSE 0 END) AS admitted,"
            f" SUM(CASE WHEN verdict IN ('{ADMITTED}', '{ANNOUNCED}', '{TRAINED}', '{FOLLOWED}') THEN 0 ELSE count END)"
            f" AS refused"
            f" FROM verdicts GROUP BY peer) ON judged = peer ORDER BY peer"
        )
        return [(_record(row[:-2]), row[-2], row[-1]) for row in rows]

    def save(self, record: PeerRecord, verdict: str | None = None) -> None:
        """Write a peer's record and, with `verdict`, count one more of it."""
        with self._db.transaction():
            self._db.execute(
                "INSERT OR REPLACE INTO peers VALUES (?,?,?,?,?,?,?,?)",
                record.peer, record.accepted, record.penalty, record.updated_at, record.banned, record.model,
                record.first_seen, record.last_seen,
            )  # fmt: skip
            if verdict is not None:
                self._db.execute(
                    "INSERT INTO verdicts VALUES (?,?,1) ON CONFLICT DO UPDATE SET count = count + 1",
                    record.peer,
                    verdict,
                )

    def forget(self, peer: str) -> None:
        with self._db.transaction():
            self._db.execute("DELETE FROM peers WHERE peer = ?", peer)
            self._db.execute("DELETE FROM verdicts WHERE peer = ?", peer)

    def verdicts(self, peers: Collection[str]) -> dict[str, dict[str, int]]:
        """How often each verdict fell on these peers since this home was made: 'announced', 'admitted', 'trained' (uses
        in updates), 'followed' (those of them that were sampled with this node's policy), and reasons."""
        found: dict[str, dict[str, int]] = {}
        for peer in peers:
            rows = self._db.all("SELECT verdict, count FROM verdicts WHERE peer = ?", peer)
            if rows:
                found[peer] = dict(rows)
        return found

    def credited(self) -> int:
        """Uses in updates of groups that were sampled with this node's policy, of all peers known."""
        row = self._db.one("SELECT COALESCE(SUM(count), 0) FROM verdicts WHERE verdict = ?", FOLLOWED)
        return int(row[0]) if row else 0

    def tidy(self) -> None:
        """Keep MAX_PEERS: a home may be older than this bound."""
        self._db.execute(
            "DELETE FROM peers WHERE peer NOT IN (SELECT peer FROM peers"
            " ORDER BY accepted >= ? DESC, banned DESC, last_seen DESC LIMIT ?)",
            PROVEN,
            MAX_PEERS,
        )
        self._db.execute("DELETE FROM verdicts WHERE peer NOT IN (SELECT peer FROM peers)")


def _record(row: tuple[Any, ...]) -> PeerRecord:
    peer, accepted, penalty, updated_at, banned, model, first_seen, last_seen = row
    return PeerRecord(peer, accepted, penalty, updated_at, bool(banned), model, first_seen, last_seen)
