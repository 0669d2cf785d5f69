"""A worker of the sharded trainer where Megatron-core believes that the CPU is a GPU: `python worker_on_cpu.py FD`.

Megatron-core asks torch for the current GPU, its streams and tensors on "cuda" wherever it computes. Only tests
redirect that; what a worker does is otherwise what it does in a node.
"""

import os
import sys
from contextlib import nullcontext
from typing import Any

os.environ["TORCHDYNAMO_DISABLE"] = "1"
os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"

import torch

from node.training import worker


class Stream:
    """In order with everything else, because all are equal."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream)

    __hash__ = None  # type: ignore[assignment]

    def wait_stream(self, other: "Stream") -> None: ...

    def synchronize(self) -> None: ...

    def record_event(self) -> "Stream":
        return self

    def wait_event(self, event: "Stream") -> None: ...


def redirect() -> None:
    cuda: Any = torch.cuda
    cuda.current_device = lambda: torch.device("cpu")
    cuda.synchronize = lambda *_: None
    cuda.Stream = Stream
    cuda.current_stream = lambda *_: Stream()
    cuda.stream = lambda _: nullcontext()
    torch.Tensor.record_stream = lambda *_: None  # type: ignore[method-assign]
    real = torch.zeros

    def zeros(*sizes: Any, device: Any = None, **options: Any) -> torch.Tensor:
        made: torch.Tensor = real(*sizes, device="cpu" if device == "cuda" else device, **options)
        return made

    torch.zeros = zeros  # type: ignore[assignment]
    from megatron.core.transformer.moe import token_dispatcher

    def moved(tensor: Any, as_numpy: bool = False, **_: Any) -> Any:
        """What it leaves as it is where a tensor is on the CPU already; the exchange wants numbers, as from a GPU."""
        return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor

    token_dispatcher.maybe_move_tensor_to_cpu = moved


if __name__ == "__main__":
    serve = worker._serve

    def redirected(connection: worker.Connection) -> None:
        redirect()  # once the process is heard of: importing Megatron takes a while
        serve(connection)

    worker._serve = redirected
    worker.main(int(sys.argv[1]))
