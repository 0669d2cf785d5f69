"""What happened: steps, held-out scores and events, in node.db beside the experience (swarm/experience.py)."""

import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from node.series import SCHEMA as SERIES
from node.series import Series
from swarm.database import Database, StoreError

log = logging.getLogger(__name__)

VERSION = 3
MAX_EVENTS = 10_000
KEPT_STEPS = 20_000
"""Of the last so many steps everything is kept (about 1 KB each)."""
THINNED = 100
"""Of older steps every so many-th one is kept, and the first one."""
SCORED = 1_000
"""Of older held-out scores one is kept in so many steps, and the best one."""
TRIM_EVERY = 100
SCHEMA = """
CREATE TABLE steps (step INTEGER PRIMARY KEY, at REAL NOT NULL, record TEXT NOT NULL, trained_foreign INTEGER NOT NULL);
CREATE TABLE evaluations (step INTEGER PRIMARY KEY, at REAL NOT NULL, mean REAL NOT NULL, scores TEXT NOT NULL);
CREATE TABLE events (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    at REAL NOT NULL,
    level TEXT NOT NULL,
    kind TEXT NOT NULL,
    message TEXT NOT NULL
);
""" + SERIES.strip()


UPGRADES = {
    1: """
CREATE TABLE summed AS SELECT step, at, record, SUM(foreign_groups) OVER (ORDER BY step) AS trained_foreign FROM steps;
DROP TABLE steps;
CREATE TABLE steps (step INTEGER PRIMARY KEY, at REAL NOT NULL, record TEXT NOT NULL, trained_foreign INTEGER NOT NULL);
INSERT INTO steps SELECT * FROM summed;
DROP TABLE summed""",
    2: SERIES.strip(),
}
"""From a version to the next one."""


class History:
    """Used from the asyncio thread. Raises swarm.database.StoreError, and StoreFull when the disk is full.

    A step replayed after a restart is written again under its own number, so no step is in here twice.
    """

    def __init__(self, path: Path, clock: Callable[[], float]) -> None:
        self._database, self._clock = Database(path), clock
        self._database.migrate("history_version", VERSION, SCHEMA, UPGRADES)
        self._series = Series(self._database)
        if self._series.is_empty():  # of a home from before there was one
            self._series.fill(self._database.all("SELECT step, record FROM steps"))

    def close(self) -> None:
        self._database.close()

    # -- steps -----------------------------------------------------------------------------------------------

    def record_step(self, step: int, record: Mapping[str, Any]) -> None:
        """Keep what a step did; `record` is JSON values with at least `foreign_groups`. Old steps are thinned out."""
        before = self._database.one(
            "SELECT trained_foreign FROM steps WHERE step < ? ORDER BY step DESC LIMIT 1", step
        ) or (0,)
        total = before[0] + record["foreign_groups"]
        with self._database.transaction():
            self._database.execute(
                "INSERT OR REPLACE INTO steps VALUES (?, ?, ?, ?)", step, self._clock(), json.dumps(record), total
            )
            self._series.add(step, record)
        if step % TRIM_EVERY == 0:
            self._thin(step - KEPT_STEPS)

    def forget_after(self, step: int) -> None:
        """Drop what is known of later steps: they were lost with a damaged checkpoint, and will be done anew."""
        try:
            for table in ("steps", "evaluations"):
                self._database.execute(f"DELETE FROM {table} WHERE step > ?", step)
            self._series.forget_after(step)
        except StoreError as error:
            log.error("steps after %d stay in the history until they are done anew: %s", step, error)

    def _thin(self, last: int) -> None:
        """Of steps and held-out scores up to step `last`, keep a few."""
        self._database.execute(
            "DELETE FROM steps WHERE step <= ? AND step % ? != 0 AND step != (SELECT MIN(step) FROM steps)",
            last,
            THINNED,
        )
        self._database.execute(
            "DELETE FROM evaluations WHERE step <= ? "
            "AND step NOT IN (SELECT MIN(step) FROM evaluations GROUP BY step / ?) "
            "AND step != (SELECT step FROM evaluations ORDER BY mean DESC, step LIMIT 1)",
            last,
            SCORED,
        )

    def steps(self, after: int, limit: int) -> list[dict[str, Any]]:
        """Records of steps > `after`, oldest first, each with `step` and `at` (unix seconds)."""
        rows = self._database.all("SELECT * FROM steps WHERE step > ? ORDER BY step LIMIT ?", after, limit)
        return [_step(row) for row in rows]

    def series(self, points: int, first: int | None, last: int | None) -> dict[str, Any]:
        """Steps and held-out scores for charts, as `web.view.NodeView.series` says."""
        known = self._series.range()
        begin, end = known or (0, 0)
        low, high = max(begin, first or begin), end if last is None else min(end, last)
        found = self._series.read(low, high, points)
        return {
            "first": known and begin,
            "last": known and end,
            **found,
            "evaluations": self._evaluations_in(first or 0, high if last is None else last, found["width"]),
        }

    def _evaluations_in(self, first: int, last: int, width: int) -> dict[str, Any]:
        """The last held-out scores of each `width` steps, in columns."""
        rows = self._database.all(
            "SELECT MAX(step), mean, scores FROM evaluations WHERE step BETWEEN ? AND ? GROUP BY step / ? ORDER BY 1",
            first,
            last,
            width,
        )
        scores = [json.loads(row[2]) for row in rows]
        return {
            "step": [row[0] for row in rows],
            "mean": [row[1] for row in rows],
            "scores": {
                name: [one.get(name) for one in scores] for name in sorted({name for one in scores for name in one})
            },
        }

    def first_step(self) -> dict[str, Any] | None:
        row = self._database.one("SELECT * FROM steps ORDER BY step LIMIT 1")
        return None if row is None else _step(row)

    def last_step(self) -> dict[str, Any] | None:
        row = self._database.one("SELECT * FROM steps ORDER BY step DESC LIMIT 1")
        return None if row is None else _step(row)

    def trained_foreign(self) -> int:
        """Foreign groups that went into updates, each use counted."""
        row = self._database.one("SELECT trained_foreign FROM steps ORDER BY step DESC LIMIT 1")
        return 0 if row is None else int(row[0])

    # -- held-out scores -------------------------------------------------------------------------------------

    def record_evaluation(self, step: int, scores: Mapping[str, float]) -> None:
        """Keep the held-out mean reward of each environment."""
        mean = sum(scores.values()) / len(scores)
        self._database.execute(
            "INSERT OR REPLACE INTO evaluations VALUES (?, ?, ?, ?)", step, self._clock(), mean, json.dumps(scores)
        )

    def evaluations(self, after: int, limit: int) -> list[dict[str, Any]]:
        """Those of steps > `after`, oldest first: `step`, `at`, `mean` and `scores` by environment."""
        rows = self._database.all(
            "SELECT step, at, mean, scores FROM evaluations WHERE step > ? ORDER BY step LIMIT ?", after, limit
        )
        return [{"step": step, "at": at, "mean": mean, "scores": json.loads(s)} for step, at, mean, s in rows]

    def held_out_start(self) -> float | None:
        return self._mean("ORDER BY step LIMIT 1")

    def held_out_latest(self) -> float | None:
        return self._mean("ORDER BY step DESC LIMIT 1")

    def held_out_steps(self) -> tuple[int, int] | None:
        """Steps that the first and the latest score are of; the first one is 0 unless its evaluation failed."""
        row = self._database.one("SELECT MIN(step), MAX(step) FROM evaluations")
        return None if row is None or row[0] is None else (int(row[0]), int(row[1]))

    def best_held_out(self) -> float | None:
        return self._mean("ORDER BY mean DESC LIMIT 1")

    def _mean(self, which: str) -> float | None:
        row = self._database.one(f"SELECT mean FROM evaluations {which}")
        return None if row is None else float(row[0])

    # -- events ----------------------------------------------------------------------------------------------

    def event(self, level: str, kind: str, message: str) -> None:
        """Keep something a person should see, and log it; the latest MAX_EVENTS are kept.

        Never raises: a full disk is what some events are about, and then the log alone has them.
        """
        message = message.replace(" ; ", "; ")  # an error's text, maybe
        log.log(getattr(logging, level.upper()), "%s: %s", kind, message)
        try:
            self._database.execute(
                "INSERT INTO events (at, level, kind, message) VALUES (?, ?, ?, ?)", self._clock(), level, kind, message
            )
            (newest,) = self._database.one("SELECT MAX(id) FROM events") or (0,)
            if newest % TRIM_EVERY == 0:
                self._database.execute("DELETE FROM events WHERE id <= ?", newest - MAX_EVENTS)
        except StoreError as error:
            log.error("the event is in this log only: %s", error)

    def event_range(self) -> tuple[int, int]:
        """Ids of the oldest and of the newest event kept; (1, 0) where there is none."""
        row = self._database.one("SELECT (SELECT MIN(id) FROM events), (SELECT MAX(id) FROM events)")
        return (1, 0) if row is None or row[0] is None else (int(row[0]), int(row[1]))

    def events(self, after: int | None, limit: int) -> list[dict[str, Any]]:
        """Events with id > `after`, oldest first; None: the newest `limit` ones."""
        if after is None:
            rows = self._database.all("SELECT * FROM events ORDER BY id DESC LIMIT ?", limit)[::-1]
        else:
            rows = self._database.all("SELECT * FROM events WHERE id > ? ORDER BY id LIMIT ?", after, limit)
        return [dict(zip(("id", "at", "level", "kind", "message"), row, strict=True)) for row in rows]


def _step(row: tuple[Any, ...]) -> dict[str, Any]:
    step, at, record, _ = row
    return {"step": step, "at": at, **json.loads(record)}
