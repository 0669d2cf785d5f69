"""How long this node trained on each calendar day, in node.db, so that a restart does not begin the day anew."""

import logging
from pathlib import Path

from swarm.database import Database, StoreError

log = logging.getLogger(__name__)

VERSION = 1
SCHEMA = "CREATE TABLE trained_days (day TEXT PRIMARY KEY, seconds REAL NOT NULL)"


class TrainedDays:
    """Seconds by day (2026-11-30). Used from the asyncio thread."""

    def __init__(self, path: Path) -> None:
        self._database = Database(path)
        self._database.migrate("trained_days_version", VERSION, SCHEMA)
        self._day, self._seconds = "", 0.0

    def on(self, day: str) -> float:
        """Seconds trained on that day."""
        if day != self._day:
            row = None
            try:
                row = self._database.one("SELECT seconds FROM trained_days WHERE day = ?", day)
            except StoreError as error:
                log.error("how long this node trained on %s cannot be read, counting from 0: %s", day, error)
            self._day, self._seconds = day, 0.0 if row is None else float(row[0])
        return self._seconds

    def add(self, day: str, seconds: float) -> None:
        """Count some more. With a full disk it is counted in memory only."""
        self._seconds = self.on(day) + seconds
        try:
            self._database.execute("INSERT OR REPLACE INTO trained_days VALUES (?, ?)", day, self._seconds)
        except StoreError as error:
            log.error("the hours trained today are counted in memory only: %s", error)

    def close(self) -> None:
        self._database.close()
