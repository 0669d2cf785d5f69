"""One SQLite connection with typed errors and short transactions. Used from the thread that opened it only."""

import sqlite3
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

BUSY_SECONDS = 5.0
INCREMENTAL = 2
"""SQLite's auto_vacuum mode in which room is given back when asked, a few pages at a time."""
PAGES_AT_ONCE = 1024


class StoreError(Exception):
    """The database cannot be read or written; the message names the file."""


class StoreFull(StoreError):
    """The disk is full: nothing was stored."""


class Database:
    """Every statement commits by itself unless inside `transaction`. Raises StoreError and StoreFull.

    In WAL mode with synchronous=NORMAL a commit is one write() and no fsync, so it costs about 0.1 ms, and what was
    committed outlives the process; only a power cut can take the last of it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        with self._errors():
            self._connection = sqlite3.connect(path, isolation_level=None, timeout=BUSY_SECONDS)
            self._connection.execute(f"PRAGMA auto_vacuum={INCREMENTAL}")  # of a file that has no table yet
            self._connection.execute("PRAGMA journal_mode=WAL")
            self._connection.execute("PRAGMA synchronous=NORMAL")

    def close(self) -> None:
        self._connection.close()

    def migrate(self, name: str, version: int, schema: str, upgrades: Mapping[int, str] | None = None) -> None:
        """Make the tables of `schema` unless there; `name` is the table that keeps their version.

        `upgrades` has the statements that make tables of an older version into those of the one after it.
        """
        with self.transaction():
            self.execute(f"CREATE TABLE IF NOT EXISTS {name} (version INTEGER NOT NULL)")
            found = self.one(f"SELECT version FROM {name}")
            if found is None:
                self._execute_all(schema)
                self.execute(f"INSERT INTO {name} VALUES (?)", version)
                return
            (present,) = found
            while upgrades and present in upgrades:
                self._execute_all(upgrades[present])
                present += 1
                self.execute(f"UPDATE {name} SET version = ?", present)
            if present != version:
                raise StoreError(
                    f"{self._path}: {name} is of version {present}, this Shoal reads version {version};"
                    " use the Shoal that wrote it, or another --home"
                )

    def keep_for(self, swarm: bytes, name: str, tables: Sequence[str]) -> None:
        """Empty `tables` where they are another swarm's; `name` is the table that keeps whose they are."""
        with self.transaction():
            self.execute(f"CREATE TABLE IF NOT EXISTS {name} (swarm BLOB NOT NULL)")
            if self.one(f"SELECT swarm FROM {name}") == (swarm,):
                return
            for table in (name, *tables):
                self.execute(f"DELETE FROM {table}")
            self.execute(f"INSERT INTO {name} VALUES (?)", swarm)

    def _execute_all(self, statements: str) -> None:
        for statement in statements.split(";\n"):
            self.execute(statement)

    def execute(self, statement: str, *values: object) -> int:
        """Run a statement; the number of rows it changed."""
        with self._errors():
            return self._connection.execute(statement, values).rowcount

    def execute_many(self, statement: str, rows: Iterable[tuple[object, ...]]) -> None:
        with self.transaction(), self._errors():
            self._connection.executemany(statement, rows)

    def one(self, query: str, *values: object) -> tuple[Any, ...] | None:
        """The first row of a query, or None."""
        with self._errors():
            row: tuple[Any, ...] | None = self._connection.execute(query, values).fetchone()
            return row

    def all(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        with self._errors():
            return self._connection.execute(query, values).fetchall()

    def each(self, query: str, *values: object) -> Iterator[tuple[Any, ...]]:
        """Rows one by one, for a reader that stops early. Nothing may be written before it is done."""
        with self._errors():
            yield from self._connection.execute(query, values)

    def define(self, name: str, function: Callable[..., Any]) -> None:
        """A function of numbers for SQL; the same ones must always give the same."""
        with self._errors():
            self._connection.create_function(name, -1, function, deterministic=True)

    def freed(self) -> int:
        """Bytes of pages that hold nothing."""
        (pages,), (size,) = self.all("PRAGMA freelist_count") + self.all("PRAGMA page_size")
        return int(pages * size)

    def compact(self) -> bool:
        """Give some of the room of what was deleted back to the disk; whether there is more of it.

        Some milliseconds, but for a file of Shoal 0.1, which is written anew at the first time.
        """
        with self._errors():
            ((mode,),) = self.all("PRAGMA auto_vacuum")
            if mode == INCREMENTAL:
                self.all(f"PRAGMA incremental_vacuum({PAGES_AT_ONCE})")
            else:
                self.execute(f"PRAGMA auto_vacuum={INCREMENTAL}")
                self.execute("VACUUM")
            more = self.freed() > 0
            if not more:
                self.all("PRAGMA wal_checkpoint(TRUNCATE)")
            return more

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """All writes inside happen or none; one inside another is part of it. Never await inside."""
        nested = self._connection.in_transaction
        if nested:
            yield
            return
        with self._errors():
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._connection.execute("COMMIT")
            except BaseException:
                if self._connection.in_transaction:  # a full disk may have rolled it back already
                    self._connection.execute("ROLLBACK")
                raise

    @contextmanager
    def _errors(self) -> Iterator[None]:
        with errors_of(self._path):
            yield


@contextmanager
def errors_of(path: Path) -> Iterator[None]:
    """SQLite's errors as StoreError and StoreFull that name the file."""
    try:
        yield
    except sqlite3.Error as error:
        code = getattr(error, "sqlite_errorcode", None)  # none where SQLite itself was not asked
        if code == sqlite3.SQLITE_FULL:
            raise StoreFull(f"no room for {path}: free some disk, or lower limits.store_mb") from error
        if code in (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT):
            raise StoreError(
                f"{path} is damaged ({error}) ; move it away: history, experience and reputation begin anew, "
                "the model goes on"
            ) from error
        io = getattr(error, "sqlite_errorname", "").startswith("SQLITE_IOERR")
        fix = " ; see whether its disk is full or failing" if io else ""
        raise StoreError(f"{path}: {error}{fix}") from error


@contextmanager
def read_only(path: Path) -> Iterator[sqlite3.Connection]:
    """A database that may be in use, to read from: nothing of it is created, migrated or locked. Raises StoreError."""
    with errors_of(path), closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as source:
        source.execute(f"PRAGMA busy_timeout = {BUSY_SECONDS * 1000:.0f}")
        yield source


def copy_tables(source: Path, target: Path, *, leave: Collection[str]) -> None:
    """Copy all tables but some into a new database, as of one instant, without indexes. Raises StoreError."""
    with read_only(source) as database:
        database.execute("ATTACH DATABASE ? AS target", (str(target),))
        database.execute("BEGIN")
        found = database.execute("SELECT name, sql FROM main.sqlite_master WHERE type = 'table'").fetchall()
        for name, schema in found:
            if name not in leave and not name.startswith("sqlite_"):
                database.execute(schema.replace("CREATE TABLE ", "CREATE TABLE target.", 1))
                database.execute(f'INSERT INTO target."{name}" SELECT * FROM main."{name}"')
        database.execute("COMMIT")


def copy_database(source: Path, target: Path) -> None:
    """Copy a whole database, in use or not, as of one instant. Raises StoreError, StoreFull."""
    with read_only(source) as database, errors_of(target), closing(sqlite3.connect(target)) as copied:
        database.backup(copied)
