"""What this machine can do: the facts that a time without a machine means nothing without."""

import platform
import time
from pathlib import Path
from typing import Any

import psutil
import torch

SHAPE = (1024, 576, 1536)
"""Rows, inner width and columns of the product measured: an MLP of the embedded model over a micro-batch."""
SECONDS = 1.0


def machine(threads: int) -> dict[str, Any]:
    """CPU, cores, threads used, memory (bytes), and GFLOP/s of a matrix product with those threads by type."""
    torch.set_num_threads(threads)
    return {
        "cpu": _cpu_name(),
        "cores": psutil.cpu_count(logical=False) or psutil.cpu_count() or 1,
        "threads": threads,
        "memory": psutil.virtual_memory().total,
        "load": psutil.getloadavg()[0],
        "torch": torch.__version__,
        "gemm_gflops_f32": round(gemm_rate(torch.float32) / 1e9, 1),
        "gemm_gflops_bf16": round(gemm_rate(torch.bfloat16) / 1e9, 1),
    }


def gemm_rate(dtype: torch.dtype) -> float:
    """FLOP/s of a product of SHAPE on the CPU: the best of as many as fit into SECONDS, three at least.

    The best, not the mean: it is the rate of the floor, and what else runs here must not lower it.
    """
    rows, inner, columns = SHAPE
    a, b = torch.ones(rows, inner, dtype=dtype), torch.ones(columns, inner, dtype=dtype)
    best, began, tries = float("inf"), time.perf_counter(), 0
    while tries < 3 or time.perf_counter() - began < SECONDS:
        started = time.perf_counter()
        torch.nn.functional.linear(a, b)
        best = min(best, time.perf_counter() - started)
        tries += 1
    return 2 * rows * inner * columns / best


def _cpu_name() -> str:
    """The CPU's name and, where the system tells, what it can multiply fast."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    facts = dict(line.split(":", 1) for line in lines if ":" in line)
    facts = {key.strip(): value.strip() for key, value in facts.items()}
    flags = [flag for flag in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if flag in facts.get("flags", "").split()]
    return f"{facts.get('model name', platform.machine())} ({', '.join(flags)})"
