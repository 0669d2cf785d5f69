"""Weights on their way to a server as files: whole directories under names never used twice, old ones removed.

The server opens them itself, so they must lie where it sees the same path: its own machine, or a shared volume.
"""

import hashlib
import json
import re
import secrets
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from node.disk import failed_write

SUMS = "sha256.json"
NAME = re.compile(r"\.?v\d+-[0-9a-f]{8}")
KEPT = 2
"""Directories kept of whole weights: the newest, and the one before it, which a server may still be reading."""


class WeightFilesError(Exception):
    """Weights cannot be written, or are not what was written; the message names the directory and the fix."""


@dataclass(frozen=True, slots=True)
class Published:
    """One version of the weights on disk."""

    directory: Path
    version: int
    sums: tuple[tuple[str, str], ...]
    """SHA-256 of each file with weights, by name."""
    bytes: int


class WeightFiles:
    """Owns a directory. Its methods do disk work: call them on a thread."""

    def __init__(self, root: Path, export: Callable[[Path], object], keep: int = KEPT) -> None:
        """`export` writes all that `from_pretrained` needs into an empty directory; the newest `keep` are kept."""
        self.root, self.export, self.keep = root, export, keep
        self.latest: Published | None = None

    def publish(self, version: int) -> Published:
        """Write the weights as they are now, whole or not at all. Raises WeightFilesError.

        Not fsynced: what is here is of use only while this process and its server live.
        """
        name = f"v{version}-{secrets.token_hex(4)}"
        aside = self.root / f".{name}"
        try:
            if self.latest is None:
                self._sweep(keep=0)  # of a process that was killed
            aside.mkdir(parents=True)
            self.export(aside)
            sums = {file.name: digest(file) for file in sorted(aside.glob("*.safetensors"))}
            (aside / SUMS).write_text(json.dumps(sums))
            # a server that runs as another user reads them too
            for file in aside.iterdir():
                file.chmod(0o644)
            aside.chmod(0o755)
            size = sum(file.stat().st_size for file in aside.iterdir())
            directory = aside.rename(self.root / name)
        except Exception as error:
            shutil.rmtree(aside, ignore_errors=True)
            if not failed_write(error):
                raise
            raise WeightFilesError(
                f"{self.root}: the weights of version {version} cannot be written ({error}); "
                "free some disk, or set engine.weights_dir to another one"
            ) from error
        self.latest = Published(directory, version, tuple(sums.items()), size)
        self._sweep(keep=self.keep)
        return self.latest

    def verify(self, published: Published) -> None:
        """Compare files with what was written, before they are loaded a second time. Raises WeightFilesError."""
        for name, wanted in published.sums:
            try:
                found = digest(published.directory / name)
            except OSError as error:
                raise WeightFilesError(
                    f"{published.directory / name} cannot be read ({error}); restart the node to have it written anew"
                ) from error
            if found != wanted:
                raise WeightFilesError(
                    f"{published.directory / name} is not what was written (SHA-256 {found[:16]}, was {wanted[:16]}); "
                    "check the disk, and restart the node to have it written anew"
                )

    def _sweep(self, keep: int) -> None:
        """Remove all but the `keep` newest directories, and what was left unfinished."""
        if not self.root.is_dir():
            return
        found = sorted(self.root.iterdir(), key=lambda path: path.stat().st_mtime_ns, reverse=True)
        ours = [path for path in found if path.is_dir() and NAME.fullmatch(path.name)]
        whole = [path for path in ours if not path.name.startswith(".")]
        for path in {*ours} - {*whole[:keep]}:
            shutil.rmtree(path, ignore_errors=True)

    def close(self) -> None:
        self._sweep(keep=0)


def digest(path: Path) -> str:
    """SHA-256 of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
