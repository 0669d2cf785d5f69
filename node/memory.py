"""Gives memory that was freed back to the system, and tells when there is none.

glibc keeps the pages of freed tensors below some MB for later use. Those of the rollouts are of other sizes than those
of an update, so that a node held 0.4 GB of them for nothing just when the update needs the most.
"""

import ctypes

import torch


def give_back() -> None:
    """Return free pages of the C heap to the system. Does nothing where the C library has no such call."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def share_gpu(device: torch.device, share: float) -> None:
    """Let this process take at most that share of the GPU's memory (0: all); beyond it, it is out of memory."""
    if share and device.type == "cuda":
        torch.cuda.set_per_process_memory_fraction(share, device)


def out_of_memory(error: BaseException) -> bool:
    """Whether an error is for want of memory, on a GPU or on a CPU."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    # the CPU allocator has no exception type of its own
    return "DefaultCPUAllocator" in str(error) or "not enough memory" in str(error)
