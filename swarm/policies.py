"""What a node holds of one leader's policy, on disk, and gives to others: its head, records and pieces.

    policies/<leader>/head.bin         the sealed head, the latest that is known
    policies/<leader>/pieces/<hash>    a record or a piece, named by its SHA-256

A piece is there whole or not at all, so a pull that was killed goes on where it was. Pieces are not fsynced one by
one; what a power cut left of them is found by `verify` at the next start.
"""

import asyncio
import hashlib
import logging
import os
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path

from protocol.identity import peer_id_of
from protocol.messages import MAX_REQUEST_BYTES
from protocol.policy import (
    MAX_HEAD_BYTES,
    PIECES_PROTOCOL,
    POLICY_PROTOCOL,
    PieceRequest,
    PolicyRecord,
    PolicyRequest,
)
from protocol.rejection import Reason, Rejected
from swarm.accounts import Accounts
from swarm.allowance import Allowance
from swarm.requests import Request, charge, decoded
from swarm.transport import Transport

log = logging.getLogger(__name__)

PIECES_RATE = 8 * 1024.0 * 1024.0
"""Bytes a second that one peer is answered with in the long run."""
PIECES_BURST = 64 * PIECES_RATE
"""At once after a silence: a whole of some hundred million weights."""


class PolicyStore:
    """Files of one leader's policy. May be used from several threads. Raises OSError."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._pieces, self._head = directory / "pieces", directory / "head.bin"
        self._pieces.mkdir(parents=True, exist_ok=True)

    def head(self) -> bytes:
        """The sealed head; empty: there is none."""
        try:
            with self._head.open("rb") as file:
                return file.read(MAX_HEAD_BYTES + 1)
        except FileNotFoundError:
            return b""

    def keep_head(self, sealed: bytes) -> None:
        self._replace(self._head, sealed, safe=True)

    def has(self, digest: bytes) -> bool:
        return self._path(digest).exists()

    def put(self, piece: bytes) -> bytes:
        """Keep a piece or a record; returns its digest."""
        digest = hashlib.sha256(piece).digest()
        if not self.has(digest):
            self._replace(self._path(digest), piece, safe=False)
        return digest

    def read(self, digest: bytes) -> bytes:
        """Empty: not held. What is damaged is removed: others would blame us."""
        path = self._path(digest)
        try:
            found = path.read_bytes()
        except FileNotFoundError:
            return b""
        if hashlib.sha256(found).digest() != digest:
            path.unlink(missing_ok=True)
            return b""
        return found

    def cut(self, blocks: Iterable[bytes], piece_bytes: int) -> tuple[int, tuple[bytes, ...]]:
        """Keep what comes in `blocks` as pieces; (bytes in all, digests)."""
        size, pieces, waiting = 0, list[bytes](), bytearray()
        for block in blocks:
            waiting += block
            while len(waiting) >= piece_bytes:
                pieces.append(self.put(bytes(waiting[:piece_bytes])))
                del waiting[:piece_bytes]
                size += piece_bytes
        if waiting:
            pieces.append(self.put(bytes(waiting)))
        return size + len(waiting), tuple(pieces)

    def pieces_of(self, record: PolicyRecord) -> Iterator[bytes]:
        """In order. Raises FileNotFoundError for one that is not held."""
        for digest in record.pieces:
            piece = self.read(digest)
            if not piece:
                raise FileNotFoundError(f"piece {digest.hex()[:12]} of version {record.version} is not there any more")
            yield piece

    def open(self, record: PolicyRecord) -> "Joined":
        return Joined(self.pieces_of(record))

    def keep_only(self, digests: Collection[bytes]) -> None:
        """Remove all records and pieces but these."""
        kept = {digest.hex() for digest in digests}
        for path in self._pieces.iterdir():
            if path.name not in kept:
                path.unlink(missing_ok=True)

    def verify(self) -> int:
        """Remove whatever is not what its name says, as after a power cut; how many were."""
        bad = 0
        for path in self._pieces.iterdir():
            try:
                with path.open("rb") as file:
                    if hashlib.file_digest(file, "sha256").hexdigest() == path.name:
                        continue
            except OSError as error:  # a block that the disk cannot read: the piece is had again elsewhere
                log.warning("%s cannot be read: %s", path, error)
            path.unlink(missing_ok=True)  # who asked for it meanwhile may have had it removed
            bad += 1
        return bad

    def _path(self, digest: bytes) -> Path:
        return self._pieces / digest.hex()

    def _replace(self, path: Path, content: bytes, *, safe: bool) -> None:
        aside = path.with_name(f".{path.name}.{os.getpid()}")
        with aside.open("wb") as file:
            file.write(content)
            file.flush()
            if safe:
                os.fsync(file.fileno())
        aside.replace(path)


class Joined:
    """Pieces read as one stream."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces, self._rest = pieces, b""

    def read(self, size: int) -> bytes:
        """So many bytes; fewer: it ends there. Raises OSError."""
        found = bytearray()
        while len(found) < size:
            if not self._rest:
                self._rest = next(self._pieces, b"")
                if not self._rest:
                    break
            taken = self._rest[: size - len(found)]
            self._rest = self._rest[len(taken) :]
            found += taken
        return bytes(found)


class PolicyServing:
    """Answers peers that ask for the head or for pieces, each within its allowance; `refused` ones get nothing."""

    def __init__(
        self,
        store: PolicyStore,
        leader: str,
        accounts: Accounts,
        clock: Callable[[], float],
        *,
        refused: Callable[[str], bool] = lambda peer: False,
    ) -> None:
        self._store, self._leader, self._accounts, self._refused = store, leader, accounts, refused
        self._allowance = Allowance(PIECES_RATE, PIECES_BURST, clock)

    def serve_on(self, transport: Transport) -> None:
        transport.serve(POLICY_PROTOCOL, self.head, max_request=MAX_REQUEST_BYTES)
        transport.serve(PIECES_PROTOCOL, self.piece, max_request=MAX_REQUEST_BYTES)

    async def head(self, peer: str, data: bytes) -> bytes:
        request = self._admitted(peer, data, PolicyRequest)
        return self._store.head() if peer_id_of(request.leader) == self._leader else b""

    async def piece(self, peer: str, data: bytes) -> bytes:
        request = self._admitted(peer, data, PieceRequest)
        piece = await asyncio.to_thread(self._store.read, request.piece)
        # all of it was read and hashed, whatever is sent: an offset near its end must not make that free
        self._allowance.spend(peer, len(piece))
        return piece[request.offset :]

    def _admitted(self, peer: str, data: bytes, kind: type[Request]) -> Request:
        if self._refused(peer):
            raise Rejected(Reason.banned, f"{peer} is not on the coordinator's member list")
        charge(self._allowance, peer)
        return decoded(data, kind, peer, self._accounts.offence)
