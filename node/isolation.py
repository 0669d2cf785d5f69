"""What takes a process's powers away before it sees text of strangers; the result says which measures hold.

Linux: resource limits, no_new_privs, seccomp (no network, processes, signals or writing), Landlock (reads only below
the interpreter and its packages, so neither keys nor other processes' memory). Elsewhere: resource limits.
"""

import ctypes
import math
import resource
import signal
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from node import landlock, seccomp

CONFINING = ("seccomp", "landlock")
"""Beginnings of the measures that keep code from doing harm; resource limits alone do not."""
_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS = 1, 38

SYSTEM_PATHS = (
    "/usr/lib",
    "/usr/lib64",
    "/lib",
    "/lib64",
    "/usr/share/zoneinfo",
    "/etc/localtime",
    "/dev/null",
    "/dev/urandom",
)
NETWORK_PATHS = (
    "/etc/resolv.conf",
    "/etc/hosts",
    "/etc/nsswitch.conf",
    "/etc/gai.conf",
    "/etc/services",
    "/etc/ssl",
    "/proc/cpuinfo",  # all of /proc would have the node's variables, and with them its passphrase
    "/proc/stat",
)


def die_with_parent(by: signal.Signals = signal.SIGKILL) -> None:
    """Ask the kernel for this signal when the parent ends. Does nothing where there is no such thing."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, by, 0, 0, 0)


def isolate(memory_mb: int, readable: Iterable[Path], cpu_seconds: int | None = None) -> tuple[str, ...]:
    """Confine this process for good; returns the measures in force. Call from a process with one thread.

    `readable`: directories and files that may still be read, besides the interpreter's own and the system's libraries;
    `cpu_seconds`: processor time it may take, None for any.
    """
    held = ["rlimits"]
    bound_memory(memory_mb)
    if cpu_seconds is not None:
        _limit(resource.RLIMIT_CPU, cpu_seconds)
    for limit, value in (
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_NPROC, 0),
    ):
        _limit(limit, value)
    if sys.platform != "linux":
        return tuple(held)
    held += _fence([(path, landlock.READ) for path in (*_of_python(), *readable)], network=False)
    if seccomp.confine():
        held.append("seccomp")
    return tuple(held)


def bound_memory(memory_mb: int) -> None:
    """Hold this process and its children to an address space of so much, for good."""
    _limit(resource.RLIMIT_AS, memory_mb * 1024 * 1024)


def bound_cpu(seconds: int) -> tuple[int, int]:
    """End this process once it has taken so much more processor time; returns what undoes it (`setrlimit`)."""
    before = resource.getrlimit(resource.RLIMIT_CPU)
    used = resource.getrusage(resource.RUSAGE_SELF)
    soft = math.ceil(used.ru_utime + used.ru_stime) + seconds
    hard = before[1]
    resource.setrlimit(resource.RLIMIT_CPU, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))
    return before


def _limit(limit: int, value: int) -> None:
    _, hard = resource.getrlimit(limit)
    allowed = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(limit, (allowed, allowed))


def isolate_averager(memory_mb: int, file_bytes: int, readable: Path, writable: Path) -> tuple[str, ...]:
    """Confine this process and its children, which need a network and programs of their own; the measures in force.

    `memory_mb`: of each of them, without what they map of files; `file_bytes`: the largest file that one may write;
    `readable`: a directory that may be read, and `writable` one in which files may be made, of the home nothing else.
    """
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_FSIZE, file_bytes)
    _limit(resource.RLIMIT_DATA, memory_mb * 1024 * 1024)
    if sys.platform != "linux":
        return ("rlimits",)
    own = Path(__file__).parents[1]
    code = [Path(entry) for entry in sys.path if entry and Path(entry) != own]  # a home may be below it
    loaders = (loader for room in ("/lib", "/lib64") for loader in Path(room).glob("ld-*.so*"))
    # libraries need no more than to be read. Below the prefix of a system's Python are all of its programs, which the
    # loader would run if it could read them; what Python needs of it is named without
    allowed = [(path, landlock.READ) for path in _of_python() if path != Path("/usr")]
    allowed += [(path, landlock.RUN) for path in (Path(sys.executable), *loaders, *code)]
    allowed += [(own / room, landlock.READ) for room in ("node", "protocol", "swarm")]
    allowed += [(Path(path), landlock.READ) for path in NETWORK_PATHS]
    allowed += [(Path("/dev/shm"), landlock.WRITE), (Path("/dev/null"), landlock.WRITE)]
    allowed += [(Path(tempfile.gettempdir()), landlock.WRITE), (readable, landlock.READ), (writable, landlock.WRITE)]
    return ("rlimits", *_fence(allowed, network=True))


def _of_python() -> list[Path]:
    return list({Path(sys.prefix), Path(sys.base_prefix), *map(Path, SYSTEM_PATHS)})


def _fence(allowed: list[tuple[Path, int]], *, network: bool) -> list[str]:
    libc, held = ctypes.CDLL(None, use_errno=True), []
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0:
        held.append("no_new_privs")
    if version := landlock.fence(libc, allowed, network=network):
        held.append(f"landlock-{version}")
    return held
