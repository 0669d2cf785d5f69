"""Answers what peers ask on streams: bodies of groups, live announcements, the manifest.

A request that does not decode, or is about another swarm, is counted against its sender, and closes its stream. A
peer that has had its share of bytes is asked to wait: a request of 2 KB may ask for 1 MiB, on 32 streams at once.
"""

from collections.abc import Callable

import msgspec

from protocol.manifest import Manifest
from protocol.messages import (
    BATCH_PROTOCOL,
    GROUPS_PROTOCOL,
    LIVE_PROTOCOL,
    MANIFEST_PROTOCOL,
    MAX_BATCH_BYTES,
    MAX_LIVE,
    MAX_REQUEST_BYTES,
    BatchRequest,
    GroupRequest,
    LiveRequest,
    LiveResponse,
    ManifestRequest,
)
from protocol.rules import Reason, Rejected
from swarm.accounts import Accounts
from swarm.allowance import Allowance
from swarm.experience import ExperienceStore
from swarm.requests import Request, charge, decoded
from swarm.transport import Transport

ANSWER_RATE = 1024.0 * 1024.0
"""Bytes a second that one peer is answered with in the long run: what some thousand groups of short answers take."""
ANSWER_BURST = 16 * ANSWER_RATE
"""Bytes at once after a silence: all that a node pulls to fill its pool, with long answers too."""
LIVE_COST = 32 * 1024.0
"""What one for announcements counts for besides: to find those that a peer lacks takes milliseconds of the database."""


class Serving:
    """The handlers of one node. `refused` peers get nothing but the manifest; nobody is told of `banned` producers."""

    def __init__(
        self,
        store: ExperienceStore,
        manifest: Manifest,
        accounts: Accounts,
        clock: Callable[[], float],
        *,
        refused: Callable[[str], bool],
        banned: Callable[[str], bool],
    ) -> None:
        self._store, self._manifest, self._accounts, self._clock = store, manifest, accounts, clock
        self._refused, self._banned = refused, banned
        self._allowance = Allowance(ANSWER_RATE, ANSWER_BURST, clock)

    @property
    def turned_away(self) -> int:
        """Requests that were answered with `wait`."""
        return self._allowance.refused

    def serve_on(self, transport: Transport) -> None:
        transport.serve(GROUPS_PROTOCOL, self.group, max_request=MAX_REQUEST_BYTES)
        transport.serve(BATCH_PROTOCOL, self.batch, max_request=MAX_REQUEST_BYTES)
        transport.serve(LIVE_PROTOCOL, self.live, max_request=MAX_REQUEST_BYTES)
        _serve_manifest(transport, self._manifest, self._allowance, self._accounts.offence)

    async def group(self, peer: str, data: bytes) -> bytes:
        request = self._admitted(peer, data, GroupRequest)
        answer = (self._store.body(request.group) or b"")[request.offset :]
        self._accounts.counters.served += bool(answer)
        return self._counted(peer, answer)

    async def batch(self, peer: str, data: bytes) -> bytes:
        request = self._admitted(peer, data, BatchRequest)
        answer = bytearray()
        for digest in request.groups:
            body = self._store.body(digest)
            if body is None or len(answer) + len(body) > MAX_BATCH_BYTES:
                break
            answer += body
            self._accounts.counters.served += 1
        return self._counted(peer, bytes(answer))

    async def live(self, peer: str, data: bytes) -> bytes:
        request = self._admitted(peer, data, LiveRequest)
        if request.swarm != self._manifest.digest:
            rejected = Rejected(Reason.wrong_swarm, f"asked about swarm {request.swarm.hex()[:12]}")
            self._accounts.offence(rejected, peer)
            raise rejected
        now = self._clock()
        live = self._store.announcements.live(
            now,
            MAX_LIVE,
            heard_by=now - request.settled,
            without=set(request.have),
            banned=self._banned,
        )
        answer = msgspec.msgpack.encode(LiveResponse(tuple(live)))
        self._allowance.spend(peer, LIVE_COST + len(answer))
        return answer

    def _admitted(self, peer: str, data: bytes, kind: type[Request]) -> Request:
        """The request, if the peer may be answered now. Raises Busy, or Rejected when it does not decode or may not."""
        if self._refused(peer):
            raise Rejected(Reason.banned, f"{peer} is not on the coordinator's member list")
        charge(self._allowance, peer)
        return decoded(data, kind, peer, self._accounts.offence)

    def _counted(self, peer: str, answer: bytes) -> bytes:
        self._allowance.spend(peer, len(answer))
        self._accounts.counters.bytes_out += len(answer)
        return answer


def serve_manifest(transport: Transport, manifest: Manifest, clock: Callable[[], float]) -> None:
    """Hand the manifest to joiners; a node does this as soon as it knows it, long before its model is loaded."""
    _serve_manifest(transport, manifest, Allowance(ANSWER_RATE, ANSWER_BURST, clock), lambda rejected, peer: None)


def _serve_manifest(
    transport: Transport, manifest: Manifest, allowance: Allowance, on_offence: Callable[[Rejected, str], object]
) -> None:
    raw = manifest.to_bytes()

    async def answer(peer: str, data: bytes) -> bytes:
        charge(allowance, peer)
        request = decoded(data, ManifestRequest, peer, on_offence)
        found = raw if request.digest == manifest.digest else b""
        allowance.spend(peer, len(found))
        return found

    transport.serve(MANIFEST_PROTOCOL, answer, max_request=MAX_REQUEST_BYTES)
