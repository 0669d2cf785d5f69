"""Gives memory that was freed back to the system.

glibc keeps the pages of freed tensors below some MB for later use. Those of the rollouts are of other sizes than those
of an update, so that a node held 0.4 GB of them for nothing just when the update needs the most.
"""

import ctypes


def give_back() -> None:
    """Return free pages of the C heap to the system. Does nothing where the C library has no such call."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
