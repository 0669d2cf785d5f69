"""Answers what peers ask on streams: bodies of groups, live announcements, the manifest.

A request that does not decode, or is about another swarm, is counted against its sender, and closes its stream.
"""

from collections.abc import Callable
from typing import TypeVar

import msgspec

from protocol.manifest import Manifest
from protocol.messages import (
    BATCH_PROTOCOL,
    GROUPS_PROTOCOL,
    LIVE_PROTOCOL,
    MANIFEST_PROTOCOL,
    MAX_BATCH_BYTES,
    MAX_REQUEST_BYTES,
    BatchRequest,
    GroupRequest,
    LiveRequest,
    LiveResponse,
    ManifestRequest,
)
from protocol.rules import Reason, Rejected
from swarm.accounts import Accounts
from swarm.experience import ExperienceStore
from swarm.healing import MAX_LIVE
from swarm.transport import Transport

Request = TypeVar("Request", GroupRequest, BatchRequest, LiveRequest)


class Serving:
    """The handlers of one node."""

    def __init__(
        self, store: ExperienceStore, manifest: Manifest, accounts: Accounts, clock: Callable[[], float]
    ) -> None:
        self._store, self._manifest, self._accounts, self._clock = store, manifest, accounts, clock

    def serve_on(self, transport: Transport) -> None:
        transport.serve(GROUPS_PROTOCOL, self.group, max_request=MAX_REQUEST_BYTES)
        transport.serve(BATCH_PROTOCOL, self.batch, max_request=MAX_REQUEST_BYTES)
        transport.serve(LIVE_PROTOCOL, self.live, max_request=MAX_REQUEST_BYTES)
        serve_manifest(transport, self._manifest)

    async def group(self, peer: str, data: bytes) -> bytes:
        request = self._decoded(peer, data, GroupRequest)
        answer = (self._store.body(request.group) or b"")[request.offset :]
        counters = self._accounts.counters
        counters.served += bool(answer)
        counters.bytes_out += len(answer)
        return answer

    async def batch(self, peer: str, data: bytes) -> bytes:
        request = self._decoded(peer, data, BatchRequest)
        answer = bytearray()
        for digest in request.groups:
            body = self._store.body(digest)
            if body is None or len(answer) + len(body) > MAX_BATCH_BYTES:
                break
            answer += body
            self._accounts.counters.served += 1
        self._accounts.counters.bytes_out += len(answer)
        return bytes(answer)

    async def live(self, peer: str, data: bytes) -> bytes:
        request = self._decoded(peer, data, LiveRequest)
        if request.swarm != self._manifest.digest:
            raise self._offence(peer, Rejected(Reason.wrong_swarm, f"asked about swarm {request.swarm.hex()[:12]}"))
        banned = self._accounts.reputation.is_banned
        live = self._store.announcements(self._clock(), MAX_LIVE, without=set(request.have), banned=banned)
        return msgspec.msgpack.encode(LiveResponse(tuple(sealed for _, sealed in live)))

    def _decoded(self, peer: str, data: bytes, kind: type[Request]) -> Request:
        try:
            return msgspec.msgpack.decode(data, type=kind)
        except (msgspec.DecodeError, RecursionError) as error:
            raise self._offence(peer, Rejected(Reason.malformed, f"{kind.__name__}: {error}")) from error

    def _offence(self, peer: str, rejected: Rejected) -> Rejected:
        self._accounts.offence(peer, rejected)
        return rejected


def serve_manifest(transport: Transport, manifest: Manifest) -> None:
    """Hand the manifest to joiners; a node does this as soon as it knows it, long before its model is loaded."""

    async def answer(peer: str, data: bytes) -> bytes:
        request = msgspec.msgpack.decode(data, type=ManifestRequest)
        return manifest.to_bytes() if request.digest == manifest.digest else b""

    transport.serve(MANIFEST_PROTOCOL, answer, max_request=MAX_REQUEST_BYTES)
