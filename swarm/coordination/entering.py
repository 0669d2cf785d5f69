"""Becomes a member: asks the coordinators, with the invite's token, until one lets this node in."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

import msgspec

from protocol.board import Role
from protocol.messages import (
    ENTER_PROTOCOL,
    REPORT_PROTOCOL,
    EnterRequest,
    EnterResponse,
    ReportRequest,
    ReportResponse,
)
from swarm.coordination.log_sync import LogSync
from swarm.database import StoreError
from swarm.transport import Busy, Transport, TransportError

RETRY_SECONDS = 10.0
MAX_ANSWER_BYTES = 2048

Answer = TypeVar("Answer", EnterResponse, ReportResponse)


class Entering:
    """`run` until cancelled. `said` is what a coordinator last answered, for people; empty while it is not asked."""

    def __init__(
        self,
        transport: Transport,
        sync: LogSync,
        token: bytes | None,
        *,
        request_timeout: float = 20.0,
        retry_seconds: float = RETRY_SECONDS,
        on_event: Callable[[str, str], None] = lambda kind, message: None,
    ) -> None:
        self._transport, self._chain, self._sync, self._token = transport, sync.chain, sync, token
        self._timeout, self._retry_seconds, self._on_event = request_timeout, retry_seconds, on_event
        self.said = ""

    @property
    def listed(self) -> bool:
        """Whether this node is on the newest list it knows."""
        return self.role is not None

    @property
    def role(self) -> Role | None:
        """What this node is on the newest list it knows; None: not on it."""
        members = self._chain.members.members if self._chain.members else ()
        return next((one.role for one in members if one.peer == self._transport.peer_id), None)

    async def run(self) -> None:
        while True:
            if not self.listed:
                await self.ask()
            await asyncio.sleep(self._retry_seconds)

    async def ask(self) -> None:
        """Ask whoever leads, then the other coordinators, until one answers."""
        chain = self._chain
        first = [chain.leader] if chain.leader else []
        for coordinator in dict.fromkeys((*first, *chain.manifest.coordinators)):
            if coordinator == self._transport.peer_id:
                continue
            request = EnterRequest(chain.manifest.digest, self._token or b"")
            try:
                answer = await _ask(self._transport, coordinator, ENTER_PROTOCOL, request, EnterResponse, self._timeout)
                if answer.role:
                    await self._sync.ask(coordinator)
            except (TransportError, msgspec.DecodeError):
                continue
            except StoreError as error:
                self._on_event("store", str(error))
                return
            said = "" if answer.role else answer.detail
            if said and said != self.said:
                self._on_event("coordinator", f"{coordinator[-8:]} does not let this node in: {said}")
            self.said = said
            return


async def send_report(transport: Transport, coordinator: str, report: ReportRequest, timeout: float) -> ReportResponse:
    """Hand in answers. Raises TransportError; an answer that cannot be read is one that was not taken."""
    try:
        return await _ask(transport, coordinator, REPORT_PROTOCOL, report, ReportResponse, timeout)
    except msgspec.DecodeError as error:
        return ReportResponse(False, f"its answer cannot be read: {error}"[:256])


async def _ask(
    transport: Transport, peer: str, protocol: str, request: msgspec.Struct, kind: type[Answer], timeout: float
) -> Answer:
    """One request, asked again while the peer asks to wait, within `timeout` seconds in all."""
    raw = msgspec.msgpack.encode(request)
    loop = asyncio.get_running_loop()
    end = loop.time() + timeout
    while True:
        left = max(0.1, end - loop.time())
        try:
            answer = await transport.request(peer, protocol, raw, max_bytes=MAX_ANSWER_BYTES, timeout=left)
        except Busy as busy:
            if loop.time() + busy.seconds >= end:
                raise
            await asyncio.sleep(busy.seconds)
            continue
        return msgspec.msgpack.decode(answer, type=kind)
