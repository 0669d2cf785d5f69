"""Landlock (`landlock(7)`): a process names the files that it needs, and the kernel denies it all others."""

import ctypes
import os
import struct
from collections.abc import Iterable
from pathlib import Path

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_VERSION, _PATH_BENEATH = 1, 1
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIRECTORY = (1 << bit for bit in range(4))
_REMOVE_DIRECTORY, _REMOVE_FILE, _MAKE_DIRECTORY, _MAKE_FILE, _MAKE_SOCKET = (1 << bit for bit in (4, 5, 7, 8, 9))
_TRUNCATE = 1 << 14
_OF_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE
"""Rights that a rule may give on something that is no directory."""
_RIGHTS_BY_VERSION = {1: 13, 2: 14, 3: 15, 4: 15}
"""How many file rights each version of Landlock knows; 16 from version 5 on."""
_NO_TCP, _NO_SIGNALS_OR_SOCKETS_OUT = 0b11, 0b11

READ = _READ_FILE | _READ_DIRECTORY
RUN = READ | _EXECUTE
WRITE = READ | _WRITE_FILE | _TRUNCATE | _REMOVE_DIRECTORY | _REMOVE_FILE | _MAKE_DIRECTORY | _MAKE_FILE | _MAKE_SOCKET


def fence(libc: ctypes.CDLL, allowed: Iterable[tuple[Path, int]], *, network: bool) -> int:
    """Deny this process, for good, every file but those at or below `allowed` paths, each with its rights.

    `network`: TCP stays allowed. Signals and abstract sockets reach this process's own children only (version 6 on).
    What does not exist is left out. On Linux only: the numbers of the calls are its. Returns the kernel's version of
    Landlock, 0 where there is none.
    """
    version = int(libc.syscall(_CREATE_RULESET, None, 0, _VERSION))
    if version < 1:
        return 0
    rights = (1 << _RIGHTS_BY_VERSION.get(version, 16)) - 1
    attributes = struct.pack("=QQQ", rights, 0 if network else _NO_TCP, _NO_SIGNALS_OR_SOCKETS_OUT)
    known = 8 if version < 4 else 16 if version < 6 else 24
    ruleset = libc.syscall(_CREATE_RULESET, attributes, known, 0)
    if ruleset < 0:
        return 0
    for path, wanted in allowed:
        if not path.exists():
            continue
        given = rights & (wanted if path.is_dir() else wanted & _OF_FILES)
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
        rule = struct.pack("=Qi", given, descriptor)
        libc.syscall(_ADD_RULE, ruleset, _PATH_BENEATH, rule, 0)
        os.close(descriptor)
    held = libc.syscall(_RESTRICT_SELF, ruleset, 0) == 0
    os.close(ruleset)
    return version if held else 0
