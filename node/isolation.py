"""What takes a process's powers away before it sees text of strangers; the result says which measures hold.

Linux: resource limits, no_new_privs, seccomp (no network, processes, signals or writing), Landlock (reads only below
the interpreter and its packages, so neither keys nor other processes' memory). Elsewhere: resource limits.
"""

import ctypes
import math
import os
import resource
import signal
import struct
import sys
from collections.abc import Iterable
from pathlib import Path

from node import seccomp

_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS = 1, 38
_LANDLOCK_CREATE_RULESET, _LANDLOCK_ADD_RULE, _LANDLOCK_RESTRICT_SELF = 444, 445, 446
_LANDLOCK_VERSION, _LANDLOCK_PATH_BENEATH = 1, 1
_READ_FILE, _READ_DIRECTORY = 1 << 2, 1 << 3
_FILE_RIGHTS_BY_ABI = {1: 13, 2: 14, 3: 15, 4: 15}
"""How many file rights each version of Landlock knows; 16 from version 5 on (`landlock(7)`)."""
_NO_TCP, _NO_SIGNALS_OR_SOCKETS_OUT = 0b11, 0b11

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
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0:
        held.append("no_new_privs")
    if version := _landlock(libc, readable):
        held.append(f"landlock-{version}")
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


def _landlock(libc: ctypes.CDLL, readable: Iterable[Path]) -> int:
    """Deny every file access but reading below `readable`. Returns the kernel's Landlock version, 0 without one."""
    version = int(libc.syscall(_LANDLOCK_CREATE_RULESET, None, 0, _LANDLOCK_VERSION))
    if version < 1:
        return 0
    rights = (1 << _FILE_RIGHTS_BY_ABI.get(version, 16)) - 1
    attributes = struct.pack("=QQQ", rights, _NO_TCP, _NO_SIGNALS_OR_SOCKETS_OUT)
    known = 8 if version < 4 else 16 if version < 6 else 24
    ruleset = libc.syscall(_LANDLOCK_CREATE_RULESET, attributes, known, 0)
    if ruleset < 0:
        return 0
    for path in {Path(sys.prefix), Path(sys.base_prefix), *map(Path, SYSTEM_PATHS), *readable}:
        if not path.exists():
            continue
        allowed = _READ_FILE | _READ_DIRECTORY if path.is_dir() else _READ_FILE
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
        rule = struct.pack("=Qi", allowed, descriptor)
        libc.syscall(_LANDLOCK_ADD_RULE, ruleset, _LANDLOCK_PATH_BENEATH, rule, 0)
        os.close(descriptor)
    held = libc.syscall(_LANDLOCK_RESTRICT_SELF, ruleset, 0) == 0
    os.close(ruleset)
    return version if held else 0
