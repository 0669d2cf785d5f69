import io
import json
import logging
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest

from node.logs import as_text, follow, parse, printable, set_up, tail


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    for handler in root.handlers[:]:
        if handler not in handlers:
            handler.close()
    root.handlers[:], root.level = handlers, level
    for room in ("protocol", "swarm", "node", "web"):
        logging.getLogger(room).setLevel(logging.NOTSET)


def fail() -> None:
    try:
        raise ValueError("inner")
    except ValueError:
        logging.getLogger("node.loop").exception("it failed")


def test_text_for_people_and_json_in_the_file(tmp_path: Path) -> None:
    stream, file = io.StringIO(), tmp_path / "logs" / "node.log"
    set_up("text", verbose=False, file=file, stream=stream)
    logging.getLogger("node.loop").info("step %d done", 3)
    logging.getLogger("node.loop").debug("not shown")
    logging.getLogger("library").info("not shown")
    logging.getLogger("library").warning("shown")
    fail()
    lines = stream.getvalue().splitlines()
    assert [line[9:] for line in lines] == [
        "info    node.loop  step 3 done",
        "warning library  shown",
        "error   node.loop  it failed",
    ]
    entries = [json.loads(line) for line in file.read_text().splitlines()]
    assert [entry["message"] for entry in entries] == ["step 3 done", "shown", "it failed"]
    assert "ValueError: inner" in entries[2]["traceback"]


def test_verbose_and_json() -> None:
    stream = io.StringIO()
    set_up("json", verbose=True, file=None, stream=stream)
    logging.getLogger("swarm.exchange").debug("seen")
    assert {key: json.loads(stream.getvalue())[key] for key in ("level", "logger", "message")} == {
        "level": "debug", "logger": "swarm.exchange", "message": "seen",
    }  # fmt: skip
    stream = io.StringIO()
    set_up("text", verbose=True, file=None, stream=stream)
    fail()
    assert "ValueError: inner" in stream.getvalue()


def test_peers_text_cannot_drive_the_terminal() -> None:
    assert printable("a\x1b[2Jb\u202ec\nd\x00 ü") == "a\\x1b[2Jb\\u202ec\\nd\\x00 ü"
    stream = io.StringIO()
    set_up("text", verbose=False, file=None, stream=stream)
    logging.getLogger("node").info("peer says %s", "x\n12:00:00 error forged")
    assert len(stream.getvalue().splitlines()) == 1


def test_tail(tmp_path: Path) -> None:
    file = tmp_path / "node.log"
    assert tail(file, 5) == []
    file.write_text("1\n2\n3\n")
    assert tail(file, 2) == ["2", "3"]
    assert tail(file, 0) == []


def test_tail_reads_on_in_rotated_files_and_only_the_end_of_a_large_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "node.log"
    file.write_text("5\n6\n")
    (tmp_path / "node.log.1").write_text("3\n4\n")
    (tmp_path / "node.log.2").write_text("1\n2\n")
    assert tail(file, 3) == ["4", "5", "6"]
    assert tail(file, 99) == ["1", "2", "3", "4", "5", "6"]

    monkeypatch.setattr("node.logs.FILE_BYTES", 100)
    file.write_text("".join(f"line {i}\n" for i in range(1000)))
    assert tail(file, 2) == ["line 998", "line 999"]
    # no older file: there would be a hole between
    assert tail(file, 99) == [f"line {i}" for i in range(989, 1000)]


def test_follow_without_old_lines_begins_with_the_next_one(tmp_path: Path) -> None:
    file = tmp_path / "node.log"
    file.write_text("1\n2\n")

    def happen(_seconds: float) -> None:
        with file.open("a") as log:
            log.write("3\n")

    assert list(islice(follow(file, 0, wait=happen), 1)) == ["3"]


def test_a_traceback_is_shown_and_cannot_pose_as_entries() -> None:
    stream = io.StringIO()
    set_up("json", verbose=False, file=None, stream=stream)
    try:
        raise ValueError("peer says \x1b[2J\n12:00:00 error forged")
    except ValueError:
        logging.getLogger("node.loop").exception("it failed")
    head, *trace = as_text(parse(stream.getvalue())).splitlines()
    assert head.endswith("it failed")
    assert trace[-2:] == ["    ValueError: peer says \\x1b[2J", "    12:00:00 error forged"]


def test_follow_goes_on_over_a_rotation_and_half_lines(tmp_path: Path) -> None:
    file = tmp_path / "node.log"

    def append(text: str) -> None:
        with file.open("a") as log:
            log.write(text)

    def rotate() -> None:
        append("5\n")
        file.rename(tmp_path / "node.log.1")
        append("6\n")

    happenings = iter(
        [lambda: append("1\n2\n3\n"), lambda: append("4 ha"), lambda: append("lf\n"), rotate, lambda: append("7\n")]
    )
    lines = list(islice(follow(file, 2, wait=lambda seconds: next(happenings)()), 6))
    assert lines == ["2", "3", "4 half", "5", "6", "7"]


def test_a_line_that_is_no_entry_is_still_shown() -> None:
    assert parse('{"at": "2026-01-01T00:00:00+00:00", "le')["message"] == '{"at": "2026-01-01T00:00:00+00:00", "le'
    assert parse("[1]")["level"] == "unknown"
    assert as_text(parse("cut")).endswith("unknown -  cut")


def test_the_file_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("node.logs.FILE_BYTES", 2000)
    monkeypatch.setattr("node.logs.FILES_KEPT", 3)
    set_up("json", verbose=False, file=tmp_path / "node.log", stream=io.StringIO())
    for i in range(300):
        logging.getLogger("node.loop").info("step %d done", i)
    files = sorted(path.name for path in tmp_path.iterdir())
    assert files == ["node.log", "node.log.1", "node.log.2", "node.log.3"]
    assert all(path.stat().st_size <= 2000 for path in tmp_path.iterdir())
    assert parse(tail(tmp_path / "node.log", 1)[0])["message"] == "step 299 done"
