"""Where something is made before it is put in its place, and what a killed maker left there is removed by the next."""

import contextlib
import fcntl
import glob
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LOCK = ".shoal-lock"


@contextmanager
def making_aside(directory: Path, name: str) -> Iterator[Path]:
    """An empty private directory below `directory`, gone at the end; first those go that killed makers of `name` left.

    Each maker holds a lock, which the kernel lets go when it dies: its process number would say nothing in another
    container. Raises OSError.
    """
    for left in directory.glob(f".{glob.escape(name)}-*"):
        with contextlib.suppress(OSError), (left / LOCK).open("r+b") as lock:  # its maker lives, or has just ended
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(left)
    with (
        tempfile.TemporaryDirectory(prefix=f".{name}-", dir=directory, ignore_cleanup_errors=True) as made,
        Path(made, "unlocked").open("wb") as lock,
    ):
        # under its name once it is held: until then, or on a disk without locks, nobody may take this for left over
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            Path(lock.name).rename(Path(made, LOCK))
        inner = Path(made, "new")
        inner.mkdir()
        yield inner
