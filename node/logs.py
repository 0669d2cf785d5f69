"""Logging: people's lines or JSON on stderr, and always JSON lines in a rotating file under the home.

The file is what `shoal logs` reads, so its form does not depend on flags.
"""

import json
import logging
import logging.handlers
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, TextIO

ROOMS = ("protocol", "swarm", "node", "web")
FILE_BYTES = 10 * 1024 * 1024
FILES_KEPT = 5
POLL_SECONDS = 0.25

LogFormat = Literal["text", "json"]


class JsonFormatter(logging.Formatter):
    """One JSON object a line: at, level, logger, message, and the traceback if any."""

    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "at": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        return json.dumps(entry)


class TextFormatter(logging.Formatter):
    """`12:03:44 info    node.loop  step 3 done`; tracebacks only when asked for (they are in the file)."""

    def __init__(self, tracebacks: bool) -> None:
        super().__init__()
        self.tracebacks = tracebacks

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created, UTC).astimezone().isoformat()
        line = as_text({"at": at, "level": record.levelname, "logger": record.name, "message": record.getMessage()})
        if record.exc_info and self.tracebacks:
            line += "\n" + self.formatException(record.exc_info)
        return line


def as_text(entry: Mapping[str, Any]) -> str:
    """A log entry as one line for people. Peers' text may be in it."""
    at = datetime.fromisoformat(str(entry["at"])).astimezone().strftime("%H:%M:%S")
    return f"{at} {str(entry['level']).lower():<8}{entry['logger']}  {printable(str(entry['message']))}"


def printable(text: str) -> str:
    """Text that a terminal shows and does not obey: control and bidi characters are spelled out."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def set_up(format: LogFormat, verbose: bool, file: Path | None, stream: TextIO | None = None) -> None:
    """Send this process's logs to stderr and, if given, to a rotating file. Libraries only from warnings on."""
    console = logging.StreamHandler(stream or sys.stderr)
    console.setFormatter(JsonFormatter() if format == "json" else TextFormatter(tracebacks=verbose))
    handlers: list[logging.Handler] = [console]
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        rotating = logging.handlers.RotatingFileHandler(
            file, maxBytes=FILE_BYTES, backupCount=FILES_KEPT, encoding="utf-8"
        )
        rotating.setFormatter(JsonFormatter())
        handlers.append(rotating)
    root = logging.getLogger()
    for old in root.handlers[:]:
        root.removeHandler(old)
        old.close()
    for handler in handlers:
        root.addHandler(handler)
    root.setLevel(logging.WARNING)
    for room in ROOMS:
        logging.getLogger(room).setLevel(logging.DEBUG if verbose else logging.INFO)


def tail(file: Path, lines: int) -> list[str]:
    """The last lines of the log, oldest first; none when there is no log yet."""
    try:
        with file.open(encoding="utf-8", errors="replace") as log:
            # one file is at most FILE_BYTES, so reading it whole is bounded
            return log.read().splitlines()[-lines:] if lines else []
    except FileNotFoundError:
        return []


def follow(file: Path, lines: int, wait: Callable[[float], None] = time.sleep) -> Iterator[str]:
    """The last `lines` lines, then new ones as they come, over rotations, until the caller stops iterating."""
    while not file.exists():
        wait(POLL_SECONDS)
    log = file.open(encoding="utf-8", errors="replace")
    try:
        yield from log.read().splitlines()[-lines:] if lines else []
        partial = ""
        while True:
            partial += log.readline()
            if partial.endswith("\n"):
                yield partial.rstrip("\n")
                partial = ""
            elif file.exists() and file.stat().st_ino != log_inode(log):
                log.close()
                log = file.open(encoding="utf-8", errors="replace")
            else:
                wait(POLL_SECONDS)
    finally:
        log.close()


def log_inode(log: TextIO) -> int:
    return os.fstat(log.fileno()).st_ino


def parse(line: str) -> dict[str, Any]:
    """A line of the file as an entry; a line that is none (cut by a full disk) becomes a message of its own."""
    try:
        entry = json.loads(line)
    except ValueError:
        entry = None
    if isinstance(entry, dict) and {"at", "level", "logger", "message"} <= entry.keys():
        return entry
    return {"at": datetime.fromtimestamp(0, UTC).isoformat(), "level": "unknown", "logger": "-", "message": line}
