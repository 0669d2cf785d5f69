"""The numbers of every step for charts, at several widths: a chart of 100,000 steps reads a few thousand rows.

A row holds the means of `width` steps that begin at `first`, a multiple of it. Rows of one step are written as steps
are done; each wider row is made anew from the ones of the next smaller width below it.
"""

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from swarm.database import Database
from web.schemas import STEP_NUMBERS

WIDTHS: Final = (1, 4, 16, 64, 256, 1024)
COLUMNS: Final = ("reward", *STEP_NUMBERS)
FILLED_AT_ONCE: Final = 1_000
_PER_GROUP: Final = {"own_reward": "own_groups", "foreign_reward": "foreign_groups"}
"""Means over groups, of which a step may have none; the others are means over steps."""

SCHEMA: Final = f"""
CREATE TABLE series (
    width INTEGER NOT NULL, first INTEGER NOT NULL, last INTEGER NOT NULL, steps INTEGER NOT NULL,
    low REAL, high REAL, {", ".join(f"{name} REAL" for name in COLUMNS)}, PRIMARY KEY (width, first)) WITHOUT ROWID;
CREATE TABLE series_rewards (
    width INTEGER NOT NULL, first INTEGER NOT NULL, environment TEXT NOT NULL, steps INTEGER NOT NULL,
    reward REAL NOT NULL, PRIMARY KEY (width, first, environment)) WITHOUT ROWID"""


def _mean(name: str) -> str:
    """SQL of a column's mean over rows that are means themselves."""
    weight = f"steps * {_PER_GROUP[name]}" if name in _PER_GROUP else "steps"
    return f"SUM({name} * {weight}) / SUM(CASE WHEN {name} IS NOT NULL THEN {weight} END)"


_FOLDED = (
    f"MAX(last), SUM(steps), MIN(low), MAX(high), {', '.join(map(_mean, COLUMNS))} FROM series "
    "WHERE width = ? AND first BETWEEN ? AND ?"
)
_FOLDED_REWARDS = (
    "environment, SUM(steps), SUM(reward * steps) / SUM(steps) FROM series_rewards "
    "WHERE width = ? AND first BETWEEN ? AND ?"
)


class Series:
    """Part of node.history, in the same database. Raises StoreError."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def add(self, step: int, record: Mapping[str, Any]) -> None:
        """Keep the numbers of a step, also of one that is done again."""
        with self._database.transaction():
            self._database.execute("DELETE FROM series_rewards WHERE width = 1 AND first = ?", step)
            self._insert([(step, record)])
            self._fold(step, step)

    def fill(self, records: Iterable[tuple[int, str]]) -> None:
        """Take over steps that were recorded before there was a series, oldest first: numbers and records in JSON."""
        last = 0
        read = iter(records)
        with self._database.transaction():
            while some := [(step, json.loads(record)) for step, record in itertools.islice(read, FILLED_AT_ONCE)]:
                self._insert(some)
                last = some[-1][0]
            self._fold(0, last)

    def forget_after(self, step: int) -> None:
        with self._database.transaction():
            for table in ("series", "series_rewards"):
                self._database.execute(f"DELETE FROM {table} WHERE first + width - 1 > ?", step)
            self._fold(step, step)

    def is_empty(self) -> bool:
        return self._database.one("SELECT 1 FROM series LIMIT 1") is None

    def _insert(self, steps: Sequence[tuple[int, Mapping[str, Any]]]) -> None:
        rows, rewards = [], []
        for step, record in steps:
            numbers = {name: record.get(name) for name in COLUMNS}
            if "prepare_seconds" in record and "update_seconds" in record:
                numbers["seconds"] = record["prepare_seconds"] + record["update_seconds"]
            rows.append((step, step, numbers["reward"], numbers["reward"], *numbers.values()))
            rewards += [(step, name, mean) for name, mean in record.get("rewards", {}).items()]
        self._database.execute_many(
            f"INSERT OR REPLACE INTO series VALUES (1, ?, ?, 1, ?, ?{', ?' * len(COLUMNS)})", rows
        )
        self._database.execute_many("INSERT INTO series_rewards VALUES (1, ?, ?, 1, ?)", rewards)

    def _fold(self, first: int, last: int) -> None:
        """Make the wider rows anew that steps `first` to `last` fall into."""
        for smaller, width in itertools.pairwise(WIDTHS):
            begin, end = first // width * width, last // width * width + width - 1
            bucket = f"{width}, first / {width} * {width} AS bucket"
            self._database.execute(
                f"INSERT OR REPLACE INTO series SELECT {bucket}, {_FOLDED} GROUP BY bucket", smaller, begin, end
            )
            self._database.execute(
                "DELETE FROM series_rewards WHERE width = ? AND first BETWEEN ? AND ?", width, begin, end
            )
            self._database.execute(
                f"INSERT INTO series_rewards SELECT {bucket}, {_FOLDED_REWARDS} GROUP BY bucket, environment",
                smaller,
                begin,
                end,
            )

    # -- reading ---------------------------------------------------------------------------------------------

    def range(self) -> tuple[int, int] | None:
        """The first and the last step there is."""
        first, last = (  # two questions, because each is one look-up and both at once are a scan
            self._database.one(f"SELECT first FROM series WHERE width = 1 ORDER BY first {order} LIMIT 1")
            for order in ("ASC", "DESC")
        )
        return None if first is None or last is None else (int(first[0]), int(last[0]))

    def read(self, first: int, last: int, points: int) -> dict[str, Any]:
        """Steps `first` to `last` in at most about `points` buckets; see `NodeView.series` for what they hold.

        Buckets begin at multiples of their width, so that they stay as they are while steps are added.
        """
        width = max(1, -(-(last - first + 1) // points))
        level = max(known for known in WIDTHS if known <= width)
        width = -(-width // level) * level
        where = (level, first // level * level, last)
        rows = self._database.all(
            f"SELECT first / {width} AS bucket, {_FOLDED} GROUP BY bucket ORDER BY bucket", *where
        )
        place = {row[0]: number for number, row in enumerate(rows)}
        environments: dict[str, list[float | None]] = {}
        for bucket, name, _, mean in self._database.all(
            f"SELECT first / {width} AS bucket, {_FOLDED_REWARDS} GROUP BY bucket, environment", *where
        ):
            environments.setdefault(name, [None] * len(rows))[place[bucket]] = mean
        names = ("step", "steps", "reward_low", "reward_high", *COLUMNS)
        columns = dict(zip(names, zip(*(row[1:] for row in rows), strict=True), strict=False)) if rows else {}
        return {
            "width": width,
            **{name: list(columns.get(name, ())) for name in names if name != "steps"},
            "environments": dict(sorted(environments.items())),
        }
