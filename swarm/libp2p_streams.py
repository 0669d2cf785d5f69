"""Requests over streams: serving with bounds, asking over streams that are kept for the next request.

Opening a stream costs a multistream-select negotiation, four times the CPU of a small request itself, so an idle
stream is used again. trio stays in the host: deadlines and the clock are handed in.
"""

import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from libp2p.abc import IHost, INetStream
from libp2p.custom_types import TProtocol
from libp2p.peer.id import ID

from swarm.framing import (
    CHUNK_BYTES,
    FrameClosed,
    FrameRefused,
    FrameTooLarge,
    frame_pieces,
    read_answer,
    read_frame,
    write_frame,
    write_wait,
)
from swarm.throttle import Lane
from swarm.transport import LEAST_WAIT_SECONDS, MAX_STREAMS_PER_PEER, AnswerTooLarge, Busy, RequestFailed

MAX_SERVED_STREAMS = 256
REQUEST_READ_SECONDS = 10.0
"""A requester must have sent its whole request by then, counted from the end of the answer before."""
HANDLER_SECONDS = 30.0
ANSWER_WRITE_SECONDS = 10.0
"""Time for a requester to take the answer, plus one second per 64 KiB; our own limit's waits do not count."""
IDLE_SECONDS = 5.0
"""How long a requester keeps an idle stream: well under REQUEST_READ_SECONDS, so that the server still listens."""
IDLE_STREAMS_PER_PEER = 16

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Runtime:
    """What the host lends of trio."""

    now: Callable[[], float]
    deadline: Callable[[float], AbstractContextManager[object]]
    """Raises one of `errors` inside the block after so many seconds."""
    finish: Callable[[INetStream, bool], Awaitable[None]]
    """Close a stream, or reset it when the flag is False; even when cancelled, and never for long."""
    errors: tuple[type[Exception], ...]
    """What a stream that breaks, or a deadline, raises."""
    up: Lane
    down: Lane
    """How fast bytes may be written and read, over all streams."""


class Streams:
    """Both ends of requests. Counters may be read from any thread."""

    def __init__(
        self,
        host: IHost,
        runtime: Runtime,
        answer: Callable[[str, str, bytes], Awaitable[bytes]],
        refuses: Callable[[str], bool],
        oversize: Callable[[str, str], None],
    ) -> None:
        """`answer`: runs the handler of (protocol, peer, request), raises RequestFailed, of which Busy is passed on.
        `oversize`: told of the (peer, protocol) of a request over its cap.
        """
        self._host = host
        self._runtime = runtime
        self._answer = answer
        self._refuses = refuses
        self._oversize = oversize
        self._serving: Counter[str] = Counter()
        self._idle: dict[str, list[tuple[float, str, INetStream]]] = {}
        self.bytes_in = 0
        self.bytes_out = 0

    def serve(self, protocol: str, max_request: int) -> None:
        expected: tuple[type[Exception], ...] = (*self._runtime.errors, RequestFailed)

        async def handle(stream: INetStream) -> None:
            peer = str(stream.muxed_conn.peer_id)
            busy = self._serving[peer] >= MAX_STREAMS_PER_PEER or self._serving.total() >= MAX_SERVED_STREAMS
            if busy or self._refuses(peer):
                await self._runtime.finish(stream, False)
                return
            self._serving[peer] += 1
            whole = False
            try:
                while True:
                    await self._serve_one(stream, peer, protocol, max_request)
            except FrameClosed:
                whole = True
            except FrameTooLarge:
                self._oversize(peer, protocol)
            except expected as error:
                log.debug("stream of %s on %s reset: %r", peer, protocol, error)
            except Exception:
                # Whatever the library raises over one peer must not end the host for all of them.
                log.exception("stream of %s on %s failed", peer, protocol)
            finally:
                self._serving[peer] -= 1
                if not self._serving[peer]:
                    del self._serving[peer]
                await self._runtime.finish(stream, whole)

        self._host.set_stream_handler(TProtocol(protocol), handle)

    async def _serve_one(self, stream: INetStream, peer: str, protocol: str, max_request: int) -> None:
        request = bytearray()
        with self._runtime.deadline(REQUEST_READ_SECONDS):
            await read_frame(stream, max_request, request.extend)
        self.bytes_in += len(request)
        await self._runtime.down.passed(len(request))
        try:
            self._runtime.up.check()
            with self._runtime.deadline(HANDLER_SECONDS):
                answer = await self._answer(protocol, peer, bytes(request))
            with self._runtime.up.answering(len(answer)):
                await self._write_answer(stream, answer)
        except Busy as busy:
            with self._runtime.deadline(ANSWER_WRITE_SECONDS):
                await write_wait(stream, busy.seconds)

    async def _write_answer(self, stream: INetStream, answer: bytes) -> None:
        up, now = self._runtime.up, self._runtime.now
        left = ANSWER_WRITE_SECONDS + len(answer) / CHUNK_BYTES
        for piece in frame_pieces(answer, up.piece):
            began = now()
            with self._runtime.deadline(left):
                await stream.write(piece)
            left = max(0.0, left - (now() - began))
            self.bytes_out += len(piece)
            await up.passed(len(piece))

    async def request(
        self, peer: str, protocol: str, data: bytes, max_bytes: int, arrived: Callable[[bytes], None]
    ) -> None:
        """One request to a connected peer; see Transport.request. The caller holds the deadline."""
        self._runtime.down.check()
        began = False

        def count(piece: bytes) -> None:
            nonlocal began
            began = True
            self.bytes_in += len(piece)
            arrived(piece)

        idle = self._take_idle(peer, protocol)
        if idle is not None:
            try:
                await self._ask(idle, peer, protocol, data, max_bytes, count)
                return
            except self._runtime.errors as error:
                if began or isinstance(error, FrameTooLarge | FrameRefused):
                    raise _failed(peer, protocol, error) from error
                # The server may have given the stream up before it saw the request: a fresh one will tell.
                log.debug("idle stream of %s to %s: %r", protocol, peer, error)
        try:
            fresh = await self._host.new_stream(ID.from_base58(peer), [TProtocol(protocol)])
            await self._ask(fresh, peer, protocol, data, max_bytes, count)
        except self._runtime.errors as error:
            raise _failed(peer, protocol, error) from error

    async def _ask(
        self,
        stream: INetStream,
        peer: str,
        protocol: str,
        data: bytes,
        max_bytes: int,
        arrived: Callable[[bytes], None],
    ) -> None:
        whole = False
        try:
            await write_frame(stream, data)
            self.bytes_out += len(data)
            await self._runtime.up.passed(len(data))
            await read_answer(stream, max_bytes, arrived, self._runtime.down)
            whole = True
        except FrameRefused:
            whole = True
            raise
        finally:
            idle = self._idle.setdefault(peer, [])
            if whole and len(idle) < IDLE_STREAMS_PER_PEER:
                idle.append((self._runtime.now(), protocol, stream))
            else:
                await self._runtime.finish(stream, whole)

    def _take_idle(self, peer: str, protocol: str) -> INetStream | None:
        idle, oldest = self._idle.get(peer, []), self._runtime.now() - IDLE_SECONDS
        for number in range(len(idle) - 1, -1, -1):
            since, served, stream = idle[number]
            if served == protocol and since >= oldest:
                del idle[number]
                return stream
        return None

    async def close_idle(self) -> None:
        """Give back streams that were not used again. To be called every few seconds."""
        oldest = self._runtime.now() - IDLE_SECONDS
        for peer, idle in tuple(self._idle.items()):
            self._idle[peer] = [entry for entry in idle if entry[0] >= oldest]
            if not self._idle[peer]:
                del self._idle[peer]
            for since, _, stream in idle:
                if since < oldest:
                    await self._runtime.finish(stream, True)

    def forget(self, peer: str) -> None:
        """A peer is gone, and its streams with it."""
        self._idle.pop(peer, None)


def _failed(peer: str, protocol: str, error: Exception) -> RequestFailed:
    if isinstance(error, FrameRefused):
        return Busy(max(error.seconds, LEAST_WAIT_SECONDS))
    kind = AnswerTooLarge if isinstance(error, FrameTooLarge) else RequestFailed
    return kind(f"{protocol} to {peer}: {str(error) or type(error).__name__}")
