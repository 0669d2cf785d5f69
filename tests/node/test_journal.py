from pathlib import Path

from node import journal
from node.interfaces import Batch, TrainGroup, TrainSequence
from node.journal import JournalRecord

SEQUENCE = TrainSequence((5, 6, 7), (True, False, True), 0.5, (-1.0, -0.25, -0.125))


def test_journal_records_are_framed_and_small(tmp_path: Path) -> None:
    size = journal.append(
        tmp_path / "journal-0.bin",
        JournalRecord(1, Batch(1, (TrainGroup((1, 2, 3), (SEQUENCE,), "own"),)), {"taken": 1}, {"reward": 0.5}),
    )
    assert (tmp_path / "journal-0.bin").stat().st_size == size < 200
    assert (tmp_path / "journal-0.bin").stat().st_mode & 0o777 == 0o600
