"""Files on disk: whole or not at all, how much there is of them, and what a failed write means."""

import errno
import os
import re
import secrets
from pathlib import Path

from safetensors import SafetensorError

PASSING = (".aside-", ".backup-")
"""What directories and files begin with that go again: checkpoints and weights that are written aside, backups."""
AVERAGING = "averaging"
"""Directory of the home with the weights of a round, which asks for its room itself."""


def write_atomic(path: Path, content: bytes, mode: int = 0o644) -> None:
    """Replace `path` by `content` whole or not at all, on disk when this returns. Raises OSError."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        # created with its final mode: a secret is never readable by others, not even for a moment
        with os.fdopen(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            os.fchmod(file.fileno(), mode)
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    except OSError:
        aside.unlink(missing_ok=True)
        raise
    sync(path.parent)


def sync(path: Path) -> None:
    """Have what was written to a file, or renamed in a directory, on disk when this returns. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def home_size(home: Path) -> int:
    """Bytes of all files in a home, without what is there in passing."""
    total = 0
    for directory, names, files in os.walk(home):
        names[:] = [
            name for name in names if not name.startswith(PASSING) and Path(directory) / name != home / AVERAGING
        ]
        for name in files:
            if name.startswith(PASSING):
                continue
            try:
                total += (Path(directory) / name).lstat().st_size
            except OSError:  # gone since it was listed
                continue
    return total


def failed_write(error: Exception) -> bool:
    """Whether it is what a full or failing disk has a model's files end in."""
    # the tokenizers library has no type for a failed write: a plain Exception ending in (os error 28)
    return isinstance(error, OSError | SafetensorError) or "(os error " in str(error)


def advice(error: Exception, directory: Path) -> str:
    """What to do about a write that failed."""
    told = re.search(r"os error (\d+)", str(error))
    number = error.errno if isinstance(error, OSError) and error.errno else int(told[1]) if told else None
    if number in (errno.EACCES, errno.EPERM, errno.EROFS):
        return f"let this user write to {directory}"
    return "free some disk" if number in (errno.ENOSPC, errno.EDQUOT, None) else "see to that disk"
