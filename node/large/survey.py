"""What a machine of the cluster is, asked by a Ray task on it. Light: it runs in a fresh process of Ray.

GPUs' memory is asked of nvidia-smi, since Ray does not tell it.
"""

import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec
import psutil

SMI = ("nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits")
SMI_SECONDS = 20.0
PROBE = ".shoal-probe-"


class Survey(msgspec.Struct, frozen=True):
    """One machine."""

    shoal: str
    """Its version of Shoal."""
    memory: int
    """Bytes of main memory."""
    gpus: tuple[tuple[str, int], ...]
    """Name and bytes of memory of each."""
    trouble: str
    """Why it does not see what it must; empty: it does."""


def survey(shared: str, token: str, model: str) -> Survey:
    """Look at this machine: whether it sees the node's probe file in `shared`, can answer it, and has the model."""
    return Survey(shoal_version(), psutil.virtual_memory().total, gpus(), _trouble(Path(shared), token, Path(model)))


def _trouble(shared: Path, token: str, model: Path) -> str:
    try:
        if (shared / f"{PROBE}{token}").read_text() != token:
            return f"{shared} there is another directory"
        (shared / f"{PROBE}{token}-answer").write_text(token)
    except OSError as error:
        return f"{shared} is not there, or not to be written ({error.strerror})"
    if not (model / "config.json").is_file():
        return f"the model's directory {model} is not there"
    return ""


def gpus() -> tuple[tuple[str, int], ...]:
    """Of this machine; none where there is no nvidia-smi, or it does not answer."""
    try:
        said = subprocess.run(SMI, capture_output=True, text=True, timeout=SMI_SECONDS, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ()
    return parsed(said)


def parsed(said: str) -> tuple[tuple[str, int], ...]:
    """What nvidia-smi prints: `NVIDIA H200, 143771` (MiB) a line."""
    found = []
    for line in said.splitlines():
        name, _, size = line.rpartition(",")
        if name and size.strip().isdecimal():
            found.append((name.strip(), int(size) << 20))
    return tuple(found)


def shoal_version() -> str:
    try:
        return version("shoal")
    except PackageNotFoundError:  # a checkout that is not installed
        return "not installed"
