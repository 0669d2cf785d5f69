"""What a coordinator was handed in and heard in a round, in its node.db: a kill in mid round loses none of it."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from protocol.board import Report
from protocol.messages import ReportRequest
from swarm.database import Database

VERSION = 1
SCHEMA = """
CREATE TABLE coordinator_reports (
    number INTEGER NOT NULL, peer TEXT NOT NULL, body BLOB NOT NULL, found BLOB, PRIMARY KEY (number, peer));
CREATE TABLE coordinator_heard (
    number INTEGER NOT NULL, peer TEXT NOT NULL, groups INTEGER NOT NULL, PRIMARY KEY (number, peer))
"""


class Reports:
    """Raises StoreError. What is there of another swarm than `swarm` is removed. One process at a time writes here."""

    def __init__(self, path: Path, swarm: bytes) -> None:
        self._db = Database(path)
        self._db.migrate("reports_version", VERSION, SCHEMA.strip())
        self._db.keep_for(swarm, "reports_swarm", ("coordinator_reports", "coordinator_heard"))
        self._waiting: dict[int, dict[str, int]] = {}
        """By round: bytes of the answers that are not scored yet, as on disk; asked for with every few answers."""
        for number, peer, size in self._db.all(
            "SELECT number, peer, LENGTH(body) FROM coordinator_reports WHERE found IS NULL ORDER BY rowid"
        ):
            self._waiting.setdefault(number, {})[peer] = size
        self.waiting_bytes = sum(map(sum, (those.values() for those in self._waiting.values())))
        """Of all of them."""
        self._heard: dict[int, dict[str, int]] = {}
        """By round: groups by producer, as on disk; asked for twice a second."""
        for number, peer, groups in self._db.all("SELECT number, peer, groups FROM coordinator_heard"):
            self._heard.setdefault(number, {})[peer] = groups

    def close(self) -> None:
        self._db.close()

    def add(self, peer: str, report: ReportRequest, body: bytes) -> bool:
        """Keep a report; the first one of a peer counts. False: there was one."""
        added = self._db.execute(
            "INSERT OR IGNORE INTO coordinator_reports (number, peer, body) VALUES (?,?,?)", report.number, peer, body
        )
        if added:
            self._waiting.setdefault(report.number, {})[peer] = len(body)
            self.waiting_bytes += len(body)
        return bool(added)

    def unscored(self, number: int) -> Sequence[str]:
        """Whose answers wait to be scored, in the order in which they came."""
        return tuple(self._waiting.get(number, ()))

    def report(self, number: int, peer: str) -> ReportRequest:
        """What a peer handed in that is not scored yet."""
        row = self._db.one("SELECT body FROM coordinator_reports WHERE number = ? AND peer = ?", number, peer)
        assert row is not None
        return msgspec.msgpack.decode(row[0], type=ReportRequest)

    def keep_scores(self, number: int, peer: str, report: Report) -> None:
        """What was found in it; the answers are not needed any more."""
        self._db.execute(
            "UPDATE coordinator_reports SET found = ?, body = x'' WHERE number = ? AND peer = ?",
            msgspec.msgpack.encode(report),
            number,
            peer,
        )
        self.waiting_bytes -= self._waiting.get(number, {}).pop(peer, 0)

    def scored(self, number: int) -> dict[str, Report]:
        rows = self._db.all(
            "SELECT peer, found FROM coordinator_reports WHERE number = ? AND found IS NOT NULL", number
        )
        return {peer: msgspec.msgpack.decode(found, type=Report) for peer, found in rows}

    def reporters(self, number: int) -> set[str]:
        return {row[0] for row in self._db.all("SELECT peer FROM coordinator_reports WHERE number = ?", number)}

    def hear(self, number: int, groups: Mapping[str, int]) -> None:
        """Count groups that producers announced in a round."""
        self._db.execute_many(
            "INSERT INTO coordinator_heard VALUES (?,?,?) ON CONFLICT DO UPDATE SET groups = groups + excluded.groups",
            [(number, peer, count) for peer, count in groups.items()],
        )
        heard = self._heard.setdefault(number, {})
        for peer, count in groups.items():
            heard[peer] = heard.get(peer, 0) + count

    def heard(self, first: int, last: int) -> dict[str, int]:
        """Groups by producer in the rounds `first` to `last`."""
        found: Counter[str] = Counter()
        for number, groups in self._heard.items():
            if first <= number <= last:
                found.update(groups)
        return found

    def forget_before(self, number: int, *, heard: int) -> None:
        """Reports of rounds before `number`, and what was heard in rounds before `heard`."""
        with self._db.transaction():
            self._db.execute("DELETE FROM coordinator_reports WHERE number < ?", number)
            self._db.execute("DELETE FROM coordinator_heard WHERE number < ?", heard)
        for old in [one for one in self._waiting if one < number]:
            self.waiting_bytes -= sum(self._waiting.pop(old).values())
        for old in [one for one in self._heard if one < heard]:
            del self._heard[old]
