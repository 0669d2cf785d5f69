import ctypes

import psutil
import pytest
import torch

from node.memory import give_back, share_gpu


def test_freed_tensors_are_given_back() -> None:
    if not hasattr(ctypes.CDLL(None), "malloc_trim"):
        pytest.skip("this C library keeps or gives back memory by itself")
    resident = psutil.Process().memory_info
    tensors = [torch.ones(16 << 10) for _ in range(3200)]  # 64 KB each, below any threshold for mmap
    kept = tensors[::100]  # holes between what is in use are what the heap cannot shrink over by itself
    full = resident().rss
    del tensors
    give_back()
    assert full - resident().rss > 150 << 20
    assert all(float(tensor.sum()) == 16 << 10 for tensor in kept)


def test_a_share_of_the_gpu_is_set_on_a_gpu_only(monkeypatch: pytest.MonkeyPatch) -> None:
    told = []
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda *given: told.append(given))
    share_gpu(torch.device("cpu"), 0.5)
    share_gpu(torch.device("cuda", 1), 0.0)
    assert told == []
    share_gpu(torch.device("cuda", 1), 0.5)
    assert told == [(0.5, torch.device("cuda", 1))]
