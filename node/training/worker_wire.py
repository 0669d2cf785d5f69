"""What the node and a worker of its sharded trainer say to each other: msgpack structs, each behind its length.

Over a socket pair that nobody else has an end of. The node: Setup once, then one command after another, the same ones
to every worker. A worker: Beat again and again; Done or Failed for each command, Done once it is set up.
"""

import socket
import struct
from collections.abc import Callable
from typing import Any, Literal

import msgspec

from node.interfaces import Batch, TrainGroup, UpdateStats

LENGTH = struct.Struct(">I")
MAX_FRAME = 1 << 30
"""What a journal record may hold, which a batch goes into as well."""
READ_BYTES = 1 << 20


class Setup(msgspec.Struct, frozen=True, array_like=True):
    rank: int
    count: int
    store: str
    """Where the workers find each other: an `init_method` of torch.distributed."""
    device: Literal["cpu", "cuda"]
    dtype: Literal["float32", "bfloat16"]
    """Compute type."""
    model: str
    models: str
    train: dict[str, Any]
    """`train.*` settings."""
    threads: int
    gpu_memory_share: float
    dumps: str
    seconds: float
    """Deadline of one exchange between workers."""


class Configure(msgspec.Struct, frozen=True, array_like=True, tag=True):
    train: dict[str, Any]


class Update(msgspec.Struct, frozen=True, array_like=True, tag=True):
    batch: Batch


class Logprobs(msgspec.Struct, frozen=True, array_like=True, tag=True):
    groups: tuple[TrainGroup, ...]


class Files(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """`hand_over`: write the weights in the compute type, for the node's own model."""

    do: Literal["save", "load", "export", "hand_over"]
    directory: str


class Memory(msgspec.Struct, frozen=True, array_like=True, tag=True):
    pass


Command = Configure | Update | Logprobs | Files | Memory


class Beat(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The process is there; whether it gets on, deadlines tell."""


class Done(msgspec.Struct, frozen=True, array_like=True, tag=True):
    step: int
    """Updates done."""
    stats: UpdateStats | None = None
    logprobs: list[list[tuple[float, ...]]] = []
    memory: dict[str, int] = {}
    sums: dict[str, str] = {}
    """SHA-256 of the files that were handed over, by name."""


class Failed(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """`skipped`, `checkpoint`, `disk`: the worker goes on. `model`, `memory`, `error`: it has ended."""

    kind: Literal["skipped", "checkpoint", "disk", "model", "memory", "error"]
    why: str
    advice: str = ""


Reply = Beat | Done | Failed


class WireError(Exception):
    """The other side is gone, or says what it may not."""


def frame(message: msgspec.Struct) -> bytes:
    """The bytes of one message. Raises WireError for one that is too long."""
    body = msgspec.msgpack.encode(message)
    if len(body) > MAX_FRAME:
        raise WireError(f"a message of {len(body) >> 20} MB is too long: at most {MAX_FRAME >> 20} MB")
    return LENGTH.pack(len(body)) + body


class Frames:
    """Cuts what comes over a socket into messages."""

    def __init__(self, decode: Callable[[bytes], Any]) -> None:
        self._decode, self._unread = decode, bytearray()

    def read(self, connection: socket.socket) -> list[Any]:
        """What is whole after one read. Raises WireError at the end of the stream, and for what is no message."""
        try:
            more = connection.recv(READ_BYTES)
        except ConnectionError as error:
            raise WireError(str(error)) from error
        if not more:
            raise WireError("the other side has ended")
        self._unread += more
        found = []
        while len(self._unread) >= LENGTH.size:
            (length,) = LENGTH.unpack_from(self._unread)
            if length > MAX_FRAME:
                raise WireError(f"a message of {length} bytes")
            end = LENGTH.size + length
            if len(self._unread) < end:
                break
            try:
                found.append(self._decode(bytes(self._unread[LENGTH.size : end])))
            except msgspec.DecodeError as error:
                raise WireError(f"no message: {error}") from error
            del self._unread[:end]
        return found
