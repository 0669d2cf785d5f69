"""What a node remembers of its peers, on disk: reputations and how often each verdict fell. Part of node.db."""

import json
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final

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
_KNOWN = """WITH here AS (SELECT value AS peer FROM json_each(?1)), known AS (
    SELECT peer, accepted, penalty, updated_at, banned, model, first_seen,
        CASE WHEN peer IN here THEN ?2 ELSE last_seen END AS last_seen FROM peers
    UNION ALL SELECT peer, 0.0, 0.0, ?2, 0, '', ?2, ?2 FROM here WHERE peer NOT IN (SELECT peer FROM peers)) """
"""All peers known and connected (?1, in JSON); the latter are seen now (?2), whenever they last did anything."""
_ADMITTED = f"COALESCE((SELECT count FROM verdicts AS v WHERE v.peer = known.peer AND verdict = '{ADMITTED}'), 0)"
ORDERS: Final[Mapping[str, str]] = {
    "last_seen": "last_seen",
    "reputation": "weigh(accepted, penalty, updated_at, banned)",
    "admitted": _ADMITTED,
    "rejected": "COALESCE((SELECT SUM(count) FROM verdicts AS v WHERE v.peer = known.peer"
    f" AND verdict NOT IN ('{ADMITTED}', '{ANNOUNCED}', '{TRAINED}', '{FOLLOWED}')), 0)",
    "peer_id": "peer",
}
"""SQL of what a list of peers is sorted by."""


class PeerRecords:
    """Raises StoreError. Whoever adds many peers also calls `forget` for as many: see `swarm.reputation`."""

    def __init__(self, database: Database) -> None:
        self._db = database

    def all(self) -> list[PeerRecord]:
        return [_record(row) for row in self._db.all(f"SELECT {_COLUMNS} FROM peers ORDER BY peer")]

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

    # -- for people, of the peers known and `connected` as of `now`; ordered and cut here: there may be MAX_PEERS -----

    def page(
        self,
        connected: Collection[str],
        now: float,
        *,
        search: str,
        sort: str,
        descending: bool,
        offset: int,
        limit: int,
        weigh: Callable[[float, float, float, int], float],
    ) -> tuple[int, list[PeerRecord]]:
        """How many have `search` in id or model, and a page of them sorted by one of ORDERS; of equals the smaller id
        comes first. `weigh` makes a reputation of accepted, penalty, updated_at and banned."""
        self._db.define("weigh", weigh)
        here = json.dumps(list(connected))
        found = "FROM known WHERE INSTR(LOWER(peer), LOWER(?3)) OR INSTR(LOWER(model), LOWER(?3))"
        (total,) = self._db.one(f"{_KNOWN} SELECT COUNT(*) {found}", here, now, search) or (0,)
        way = "DESC" if descending else "ASC"
        rows = self._db.all(
            f"{_KNOWN} SELECT {_COLUMNS} {found} ORDER BY {ORDERS[sort]} {way}, peer LIMIT ?4 OFFSET ?5",
            here, now, search, limit, offset,
        )  # fmt: skip
        return total, [_record(row) for row in rows]

    def nearest(self, connected: Collection[str], now: float, limit: int) -> list[tuple[PeerRecord, int]]:
        """Those connected, then those with groups admitted, each with how many: the most first."""
        rows = self._db.all(
            f"{_KNOWN} SELECT {_COLUMNS}, {_ADMITTED} AS admitted, peer IN here AS near FROM known"
            " WHERE near OR admitted > 0 ORDER BY near DESC, admitted DESC, peer LIMIT ?3",
            json.dumps(list(connected)),
            now,
            limit,
        )
        return [(_record(row[:-2]), row[-2]) for row in rows]

    def seen_since(self, connected: Collection[str], now: float, since: float) -> int:
        """How many that have published something were seen since then: others may only have asked the way."""
        row = self._db.one(
            f"{_KNOWN} SELECT COUNT(*) FROM known WHERE last_seen >= ?3 AND model != ''",
            json.dumps(list(connected)),
            now,
            since,
        )
        assert row is not None  # an aggregate always has one
        return int(row[0])

    def tidy(self) -> None:
        """Keep MAX_PEERS that have done something: a home may be older than this rule and this bound."""
        self._db.execute(
            "DELETE FROM peers WHERE accepted = 0 AND penalty = 0 AND model = ''"
            " AND peer NOT IN (SELECT peer FROM verdicts)"
        )
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
