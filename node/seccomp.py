"""A system call filter for the scorer process: it may compute, read files and write to what is open, nothing else.

Classic BPF, installed with prctl; needs no privilege but no_new_privs (Linux, `seccomp(2)`). An allow list, so what
is not named here (sockets, fork, exec, kill, ptrace, unlink, mount, io_uring, ...) fails with EPERM.
"""

import ctypes
import os
import platform
import struct

_ALLOWED: dict[str, tuple[int, int]] = {
    # name: (x86-64, aarch64), -1 where the architecture lacks it
    "read": (0, 63),
    "write": (1, 64),
    "readv": (19, 65),
    "writev": (20, 66),
    "pread64": (17, 67),
    "lseek": (8, 62),
    "close": (3, 57),
    "stat": (4, -1),
    "fstat": (5, 80),
    "lstat": (6, -1),
    "newfstatat": (262, 79),
    "statx": (332, 291),
    "access": (21, -1),
    "faccessat": (269, 48),
    "faccessat2": (439, 439),
    "readlink": (89, -1),
    "readlinkat": (267, 78),
    "getdents64": (217, 61),
    "getcwd": (79, 17),
    "poll": (7, -1),
    "ppoll": (271, 73),
    "mmap": (9, 222),
    "mprotect": (10, 226),
    "munmap": (11, 215),
    "mremap": (25, 216),
    "madvise": (28, 233),
    "brk": (12, 214),
    "futex": (202, 98),
    "sched_yield": (24, 124),
    "sched_getaffinity": (204, 123),
    "rt_sigaction": (13, 134),
    "rt_sigprocmask": (14, 135),
    "rt_sigreturn": (15, 139),
    "sigaltstack": (131, 132),
    "setitimer": (38, 103),
    "restart_syscall": (219, 128),
    "nanosleep": (35, 101),
    "clock_nanosleep": (230, 115),
    "clock_gettime": (228, 113),
    "clock_getres": (229, 114),
    "gettimeofday": (96, 169),
    "time": (201, -1),
    "getrandom": (318, 278),
    "getrusage": (98, 165),
    "sysinfo": (99, 179),
    "uname": (63, 160),
    "getpid": (39, 172),
    "getppid": (110, 173),
    "gettid": (186, 178),
    "getuid": (102, 174),
    "geteuid": (107, 175),
    "getgid": (104, 176),
    "getegid": (108, 177),
    "exit": (60, 93),
    "exit_group": (231, 94),
}
_OPENS: dict[str, tuple[int, int, int]] = {"open": (2, -1, 1), "openat": (257, 56, 2)}
"""(x86-64, aarch64, position of the flags)."""

_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
_OPEN_FOR_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC

_LOAD, _EQUAL, _ANY_BIT, _RETURN = 0x20, 0x15, 0x45, 0x06
_ALLOW, _KILL, _EPERM = 0x7FFF0000, 0x80000000, 0x00050001
_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 22, 2


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def confine() -> bool:
    """Install the filter in this process, for good. False where the kernel or the architecture has none.

    Needs no_new_privs to be set. The process must have one thread.
    """
    if platform.machine() not in _ARCHITECTURES:
        return False
    instructions = _compile(*_ARCHITECTURES[platform.machine()])
    program = _Program(len(instructions) // 8, instructions)
    libc = ctypes.CDLL(None, use_errno=True)
    return bool(libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0) == 0)


def _compile(column: int, audit_architecture: int) -> bytes:
    def step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
        return struct.pack("=HBBI", code, if_true, if_false, value)

    # struct seccomp_data: nr at 0, arch at 4, args (64 bits each) at 16
    program = step(_LOAD, 4) + step(_EQUAL, audit_architecture, 1, 0) + step(_RETURN, _KILL) + step(_LOAD, 0)
    for numbers in _ALLOWED.values():
        if numbers[column] >= 0:
            program += step(_EQUAL, numbers[column], 0, 1) + step(_RETURN, _ALLOW)
    for *numbers_of_open, flags in _OPENS.values():
        if numbers_of_open[column] >= 0:
            program += step(_EQUAL, numbers_of_open[column], 0, 4) + step(_LOAD, 16 + 8 * flags)
            program += step(_ANY_BIT, _OPEN_FOR_WRITING, 0, 1) + step(_RETURN, _EPERM) + step(_RETURN, _ALLOW)
    return program + step(_RETURN, _EPERM)
