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
from typing import Any, BinaryIO, Literal, TextIO

ROOMS = ("protocol", "swarm", "node", "web")
FILE_BYTES = 10 * 1024 * 1024
"""Also the most that is read from the end of a log: others than ours, as an engine's, have no bound."""
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
        entry = {"at": at, "level": record.levelname, "logger": record.name, "message": record.getMessage()}
        if record.exc_info and self.tracebacks:
            entry["traceback"] = self.formatException(record.exc_info)
        return as_text(entry)


def as_text(entry: Mapping[str, Any]) -> str:
    """A log entry as one line for people, with its traceback indented below. Peers' text may be in both."""
    at = datetime.fromisoformat(str(entry["at"])).astimezone().strftime("%H:%M:%S")
    said = f"{at} {str(entry['level']).lower():<8}{entry['logger']}  {printable(str(entry['message']))}"
    return "\n".join([said, *(f"    {printable(line)}" for line in str(entry.get("traceback", "")).splitlines())])


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
    """The last lines of the log, those of rotated files too, oldest first; none when there is no log yet."""
    try:
        with file.open("rb") as log:
            return last_lines(file, log, lines)
    except FileNotFoundError:
        return []


def follow(file: Path, lines: int, wait: Callable[[float], None] = time.sleep) -> Iterator[str]:
    """The last `lines` lines, then new ones as they come, over rotations, until the caller stops iterating."""
    while not file.exists():
        wait(POLL_SECONDS)
    log = file.open("rb")
    try:
        yield from last_lines(file, log, lines)
        partial = b""
        while True:
            partial += log.readline()
            if partial.endswith(b"\n"):
                yield partial.rstrip(b"\n").decode(errors="replace")
                partial = b""
            elif file.exists() and file.stat().st_ino != os.fstat(log.fileno()).st_ino:
                log.close()
                log = file.open("rb")
            else:
                wait(POLL_SECONDS)
    finally:
        log.close()


def last_lines(file: Path, log: BinaryIO, lines: int) -> list[str]:
    """Of `log`, which is left at its end, and where it has too few of the files that it was rotated to."""
    found, whole = end_of(log, lines)
    for number in range(1, FILES_KEPT + 1):
        if not whole or len(found) >= lines:
            break
        try:
            with file.with_name(f"{file.name}.{number}").open("rb") as older:
                before, whole = end_of(older, lines - len(found))
        except FileNotFoundError:
            break
        found = before + found
    return found


def end_of(log: BinaryIO, lines: int) -> tuple[list[str], bool]:
    """The last lines of a file of any size, which is left at its end, and whether they are looked for in all of it."""
    size = log.seek(0, os.SEEK_END)
    log.seek(max(0, size - FILE_BYTES))
    content = log.read(size - log.tell())
    whole = len(content) == size
    if not whole and b"\n" in content:
        content = content.partition(b"\n")[2]  # its first line lacks its beginning
    return content.decode(errors="replace").splitlines()[-lines:] if lines else [], whole


def parse(line: str) -> dict[str, Any]:
    """A line of the file as an entry; a line that is none (cut by a full disk) becomes a message of its own."""
    try:
        entry = json.loads(line)
    except ValueError:
        entry = None
    if isinstance(entry, dict) and {"at", "level", "logger", "message"} <= entry.keys():
        return entry
    return {"at": datetime.fromtimestamp(0, UTC).isoformat(), "level": "unknown", "logger": "-", "message": line}
