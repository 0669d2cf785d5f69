"""What is made aside: gone at the end, and after a kill with the next one; what others make stays."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from node.aside import making_aside

KILLED = """
import os, sys
from pathlib import Path
from node.aside import making_aside

with making_aside(Path(sys.argv[1]), "model") as aside:
    (aside / "weights").write_bytes(b"half")
    os._exit(9)
"""


def test_what_a_killed_maker_left_goes_with_the_next(tmp_path: Path) -> None:
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path)], env={**os.environ, "PYTHONPATH": root}, timeout=60
    )
    assert done.returncode == 9
    (left,) = tmp_path.iterdir()
    with making_aside(tmp_path, "another"):
        assert left.exists()
    with making_aside(tmp_path, "model") as aside:
        assert not left.exists()
        assert list(aside.iterdir()) == []
        assert aside.parent.stat().st_mode & 0o777 == 0o700
    assert list(tmp_path.iterdir()) == []


def test_what_another_makes_or_nobody_locked_stays(tmp_path: Path) -> None:
    theirs = tmp_path / ".model-of-somebody"
    theirs.mkdir()
    with making_aside(tmp_path, "model") as first:
        (first / "weights").write_bytes(b"half")
        with making_aside(tmp_path, "model") as second:
            second.rename(tmp_path / "model")
        assert (first / "weights").exists()
    assert sorted(tmp_path.iterdir()) == [theirs, tmp_path / "model"]


def test_a_disk_without_locks_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(file: object, how: int) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr("node.aside.fcntl.flock", refuse)
    with making_aside(tmp_path, "model") as first, making_aside(tmp_path, "model"):
        assert first.exists()
    assert list(tmp_path.iterdir()) == []
