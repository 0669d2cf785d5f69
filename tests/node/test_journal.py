"""The journal's own format; torn and damaged files are in tests/node/checkpoint."""

import struct
import zlib
from pathlib import Path

import msgspec
import pytest

from node import journal
from node.checkpoint import CheckpointError, CheckpointStore
from node.interfaces import Batch, TrainGroup, TrainSequence
from node.journal import JournalRecord, OtherFormat, RecordTooLarge


def record(step: int) -> JournalRecord:
    sequence = TrainSequence((5, 6), (True, False), 0.5, (-1.0, -0.25), None, {"parsed": 1.0})
    return JournalRecord(step, Batch(step, (TrainGroup((1, 2), (sequence,), "own"),)), {"taken": 3}, {"reward": 0.5})


def framed(content: object) -> bytes:
    body = msgspec.msgpack.encode(content)
    return struct.pack("<II", len(body), zlib.crc32(body)) + body


def test_records_come_back_as_they_were(tmp_path: Path) -> None:
    path = tmp_path / "journal-0.bin"
    length = sum(journal.append(path, record(step)) for step in (1, 2))
    assert journal.read(path) == ([record(1), record(2)], length)


def test_records_are_framed_and_small(tmp_path: Path) -> None:
    size = journal.append(tmp_path / "journal-0.bin", record(1))
    assert (tmp_path / "journal-0.bin").stat().st_size == size < 200
    assert (tmp_path / "journal-0.bin").stat().st_mode & 0o777 == 0o600


def test_a_record_that_no_reader_would_believe_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    store.append(record(1))
    monkeypatch.setattr(journal, "MAX_RECORD_BYTES", 10)
    with pytest.raises(RecordTooLarge, match=r"record of step 2 .* rollout\.over_provision"):
        store.append(record(2))
    monkeypatch.undo()
    store.append(record(2))
    assert [one.step for one in store.latest().records] == [1, 2]


@pytest.mark.parametrize(
    "content",
    [
        # Shoal 0.1: no format number, and an advantage where the reward is now
        [1, [1, [[[1, 2], [[[5, 6], [True, True], -0.7, None]], "own"]]], {}, {}],
        [journal.FORMAT + 1, record(1)],
    ],
    ids=["earlier", "later"],
)
def test_updates_of_another_version_are_not_taken_for_damage(tmp_path: Path, content: object) -> None:
    path = tmp_path / "journal-0.bin"
    path.write_bytes(framed(content))
    with pytest.raises(OtherFormat, match="not of format 2"):
        journal.read(path)
    with pytest.raises(CheckpointError, match=r"journal-0\.bin: its records are not of format 2 .* move the file away"):
        CheckpointStore(tmp_path, 2).latest()
    assert path.read_bytes() == framed(content), "nothing is cut off"
