"""What the processes that a node starts have in common: what they may know of it, and what they leave on disk."""

import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO

HIDDEN = ("SHOAL_", "SSH_AUTH_SOCK")
"""Beginnings of variables that they have no business with: the passphrase of the identity is one."""
# TOKENIZERS_PARALLELISM and vLLM's *_TOKENS and *_TOKEN_THRESHOLD are none; a word may be run together with another
SECRETS = re.compile(
    r"TOKEN_?\d*$"
    r"|(^|_)((API|ACCESS|TOKEN)?KEYS?|PASS|CREDENTIALS?|[^_]*(SECRETS?|PASSWORDS?|PASSWD|PASSPHRASE))\d*(_|$)",
    re.IGNORECASE,
)
"""Variables whose values are taken for secrets, whoever reads them."""
LOG_BYTES, KEPT_BYTES = 16 << 20, 1 << 20
"""Of the log of a process: how long it may be, and how much of its end is kept when it is longer."""


def scratch_directory(of: Path) -> Path:
    """An empty private directory of a short path, as a socket needs it (107 bytes), below the system's temporary one.

    `of`: a path in the home that stands for the child and its use. It is always the same directory for one, so that
    what a killed node left there goes with the next start. Raises OSError.
    """
    name = hashlib.sha256(os.fsencode(of.absolute())).hexdigest()[:16]
    path = Path(tempfile.gettempdir(), f"shoal-{name}")
    shutil.rmtree(path, ignore_errors=True)
    try:
        path.mkdir(mode=0o700)
    except FileExistsError:  # another user's, or what another user put there
        return Path(tempfile.mkdtemp(prefix="shoal-"))
    return path


def inherited(own: Mapping[str, str]) -> dict[str, str]:
    """The node's variables without secrets and settings."""
    return {name: value for name, value in own.items() if not (name.startswith(HIDDEN) or SECRETS.search(name))}


def open_log(path: Path) -> IO[bytes]:
    """A log to append to, which others may be writing too; cut first where it is too long. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        cut_log(path)
    return path.open("ab")


def cut_log(path: Path) -> None:
    """Have a log that is longer than LOG_BYTES begin anew with its last KEPT_BYTES. Raises OSError.

    Its writers go on: all of them append (`open_log`). What they write in this instant may be lost.
    """
    with path.open("rb") as log:
        if log.seek(0, os.SEEK_END) <= LOG_BYTES:
            return
        log.seek(-KEPT_BYTES, os.SEEK_END)
        log.readline()
        kept = log.read(KEPT_BYTES)
    os.truncate(path, 0)
    with path.open("ab") as log:
        log.write(kept)
