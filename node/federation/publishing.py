"""The leader's side of weights out: each version of the policy, as what changed and now and then as a whole.

The model thread only copies the weights; everything else happens beside the loop, in a thread. A version that comes
while the one before is being written is left out. The last weights and the changes that led to them stay on disk, so
the version that a follower's group claims can be made again.

    policies/<own peer id>/index.bin                what is offered, with the digest of each version's weights
    policies/<own peer id>/weights-N.safetensors    the last version
"""

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import torch

from node.device import Device
from node.disk import write_atomic
from node.federation.changes import BadChanges, Changes, changes_between
from node.federation.weights_file import BadWeights, Tensor, WeightsFile, Words, digest_of, write_weights
from node.interfaces import Trainer
from protocol.envelope import Domain, seal
from protocol.identity import Identity
from protocol.policy import (
    PolicyHead,
    PolicyItem,
    PolicyRecord,
    Weights,
    check_record,
    kept_items,
    piece_bytes_for,
)
from protocol.rejection import Rejected
from swarm.policies import PIECES_RATE, PolicyStore

log = logging.getLogger(__name__)

HEAD_SECONDS = 3600.0
"""How long a head holds. It is signed anew in good time, so one that is older is of a leader that is gone."""
SIGN_SECONDS = 600.0
READ_BYTES = 4 << 20
MAX_TOLD = 64
NEW = ".aside-new.safetensors"
"""A version that is being written: it takes no room of the home's limit (node/home.py)."""


class _Entry(msgspec.Struct, frozen=True, array_like=True):
    item: PolicyItem
    state: bytes


@dataclass(frozen=True, slots=True)
class Published:
    """What one version cost."""

    version: int
    change_bytes: int | None
    """None: it was published as a whole only."""
    whole_bytes: int | None
    copy_seconds: float
    """In which the model thread did nothing else."""
    encode_seconds: float


class UnknownVersion(LookupError):
    """The version's weights cannot be made again."""


class Publisher:
    """A service of a node with `federation.publish`. `offer` is called between steps."""

    def __init__(
        self,
        store: PolicyStore,
        identity: Identity,
        *,
        swarm: bytes,
        model: str,
        dtype: Weights,
        every: int,
        whole_every: int,
        staleness: Callable[[], int],
        clock: Callable[[], float],
        tell: Callable[[str, str], None],
    ) -> None:
        """`model`: mark of the base model. `tell(level, message)` is told what people should see."""
        self._store, self._identity, self._swarm, self._model = store, identity, swarm, model
        self.dtype, self._every, self._whole_every = dtype, every, whole_every
        self._staleness, self._clock, self._tell = staleness, clock, tell
        self._index = store.directory / "index.bin"
        self._entries = self._read_index()
        self._last: WeightsFile | None = None
        """The newest version's, once this process has seen that they are as they should be."""
        self._swapping = threading.Lock()
        self._waiting: asyncio.Queue[tuple[int, Mapping[str, torch.Tensor], float]] = asyncio.Queue(1)
        self._busy = False
        self.skipped = 0
        """Versions that were left out because the one before was not written yet."""
        self.last: Published | None = None
        self._told: deque[Published] = deque(maxlen=MAX_TOLD)
        self._whole_at: float | None = None
        """When this process published the last whole."""
        self._too_fast = False
        """Whether it was told that nobody can pull one in time."""

    @property
    def leader(self) -> str:
        return self._identity.peer_id

    @property
    def version(self) -> int | None:
        """The newest version that is offered."""
        return self._entries[-1].item.version if self._entries else None

    @property
    def versions(self) -> dict[str, int]:
        """The versions that can be made again: first 16 hex digits of the state -> version."""
        found, lowest = {}, self.version
        for entry in reversed(self._entries):
            if entry.item.version == lowest:
                found[entry.state.hex()[:16]] = entry.item.version
                lowest = lowest if entry.item.base is None else entry.item.base
        return found

    async def offer(self, trainer: Trainer, device: Device) -> None:
        """Take a copy of the present weights to publish, if it is their turn and the last ones are written."""
        if trainer.step % self._every:
            return
        if self._busy or self._waiting.full():
            self.skipped += 1
            return
        started = self._clock()
        copy = await device.run(trainer.snapshot, self.dtype)
        self._waiting.put_nowait((trainer.step, copy, self._clock() - started))

    async def run(self) -> None:
        """Write and sign what is offered, until cancelled."""
        await asyncio.to_thread(self._store.verify)
        self._sign_again()  # the last process's head may have expired, and the next version be long in coming
        while True:
            try:
                async with asyncio.timeout(SIGN_SECONDS):
                    version, weights, copied = await self._waiting.get()
            except TimeoutError:
                self._sign_again()
                continue
            self._busy = True
            try:
                await self._publish(version, weights, copied)
            finally:
                self._busy = False
                del weights

    def published(self) -> list[Published]:
        """What was published since the last call."""
        told = list(self._told)
        self._told.clear()
        return told

    def _sign_again(self) -> None:
        try:
            self._sign()
        except OSError as error:  # the one before holds for a while
            self._tell("error", f"the head of the policy is not signed anew: {error}")

    async def _publish(self, version: int, weights: Mapping[str, torch.Tensor], copied: float) -> None:
        started = self._clock()
        try:
            made = await asyncio.to_thread(self._write, version, weights)
            self._sign()
        except (OSError, ValueError, Rejected, BadWeights) as error:  # a full disk, or damaged: training goes on
            self._last = None  # what is there is looked at before it is built on
            await asyncio.to_thread(self._clear)
            self._tell("error", f"version {version} of the policy is not published: {error}")
            return
        sizes = {item.base is None: item.size for item in made}
        self.last = Published(version, sizes.get(False), sizes.get(True), copied, self._clock() - started)
        if self.last.whole_bytes is not None:
            self._see_whole(self.last.whole_bytes)
        if made:
            self._told.append(self.last)
            log.info(
                "version %d of the policy is published: %s bytes of changes, %s as a whole, in %.1f s",
                version,
                self.last.change_bytes,
                self.last.whole_bytes,
                self.last.encode_seconds,
            )

    def _see_whole(self, size: int) -> None:
        """Tell a person, once, that a whole is replaced before a new follower can have pulled it."""
        now, before = self._clock(), self._whole_at
        self._whole_at = now
        if before is None or size / PIECES_RATE <= now - before or self._too_fast:
            return
        self._too_fast = True
        self._tell(
            "warning",
            f"a whole takes a new follower {size / PIECES_RATE:.0f} s at least, and is replaced after "
            f"{now - before:.0f} s ; raise federation.publish_every or federation.whole_every, "
            "or nobody can begin to follow",
        )

    # -- in a thread -----------------------------------------------------------------------------------------

    def _write(self, version: int, weights: Mapping[str, torch.Tensor]) -> list[PolicyItem]:
        """Have a version on disk and in the index; the new items of it. Raises OSError, ValueError."""
        path = self._path(version)
        before = self._last or self._last_weights(weights)
        new = write_weights(weights, path.with_name(NEW), self.dtype)
        state = new.digest()
        entries = list(self._entries)
        if before is not None and (entries[-1].item.version, entries[-1].state) == (version, state):
            new.path.unlink()
            self._last = before
            return []
        made = []
        if before is None or version <= entries[-1].item.version:
            entries = []  # it went back, or began anew: nothing leads here from what was
        else:
            made.append(self._record_of(version, entries[-1], state, _changes(before, new), new.path))
        if _whole_is_due([*(entry.item for entry in entries), *made], self._whole_every):
            made.append(self._record_of(version, None, state, _bytes(new.path), new.path))
        kept = kept_items([*(entry.item for entry in entries), *made], self._staleness() + 1)
        states = {entry.item: entry.state for entry in entries}
        entries = [_Entry(item, states.get(item, state)) for item in kept]
        with self._swapping:
            new.path.replace(path)
            write_atomic(self._index, msgspec.msgpack.encode(entries))
            self._entries, self._last = entries, WeightsFile(path, _shapes(weights), self.dtype)
            for old in self._store.directory.glob("weights-*.safetensors"):
                if old != path:
                    old.unlink(missing_ok=True)
            self._keep_only(kept)
        return made

    def _clear(self) -> None:
        """Remove what there is of a version that was not published: nothing else would, while the disk is full."""
        try:
            (self._store.directory / NEW).unlink(missing_ok=True)
            self._keep_only(entry.item for entry in self._entries)
        except (OSError, Rejected) as problem:  # damaged: the next version is published anew, as a whole
            log.warning("what is left of a version stays: %s", problem)

    def _keep_only(self, items: Iterable[PolicyItem]) -> None:
        """Remove all records and pieces but those of `items`. Raises OSError, Rejected."""
        self._store.keep_only({digest for item in items for digest in (item.record, *self._record(item).pieces)})

    def _record_of(
        self, version: int, base: _Entry | None, state: bytes, blocks: Iterator[bytes], file: Path
    ) -> PolicyItem:
        """Keep the pieces and the record of one item."""
        piece_bytes = piece_bytes_for(2 * file.stat().st_size)  # changes of all words take more than the words
        size, pieces = self._store.cut(blocks, piece_bytes)
        number = None if base is None else base.item.version
        base_state = b"" if base is None else base.state
        record = PolicyRecord(version, number, base_state, self.dtype, state, size, piece_bytes, pieces)
        raw = msgspec.msgpack.encode(record)
        return PolicyItem(version, number, self._store.put(raw), len(raw), size)

    def _last_weights(self, like: Mapping[str, torch.Tensor]) -> WeightsFile | None:
        """The file of the newest version in the index, if it is as it should be and all that is offered is there."""
        if not self._entries:
            return None
        entry = self._entries[-1]
        try:
            file = WeightsFile(self._path(entry.item.version), _shapes(like), self.dtype)
            whole = file.digest() == entry.state and all(
                self._store.has(piece) for one in self._entries for piece in self._record(one.item).pieces
            )
        except (BadWeights, Rejected, FileNotFoundError) as problem:
            log.warning("the policy is published anew, as a whole: %s", problem)
            return None
        return file if whole else None

    def _record(self, item: PolicyItem) -> PolicyRecord:
        return check_record(self._store.read(item.record), item)

    def _read_index(self) -> list[_Entry]:
        try:
            return msgspec.msgpack.decode(self._index.read_bytes(), type=list[_Entry])
        except FileNotFoundError:
            return []
        except (msgspec.DecodeError, OSError) as error:
            log.warning("%s cannot be read (%s): the policy is published anew, as a whole", self._index, error)
            return []

    def _sign(self) -> None:
        """A head of what is offered, from now on. Raises OSError."""
        if not self._entries:
            return
        head = PolicyHead(self._swarm, self._model, tuple(entry.item for entry in self._entries))
        now = self._clock()
        payload = msgspec.msgpack.encode(head)
        self._store.keep_head(seal(self._identity, Domain.policy, payload, issued=now, expires=now + HEAD_SECONDS))

    # -- a version again -------------------------------------------------------------------------------------

    def load(self, version: int, into: Mapping[str, torch.Tensor]) -> None:
        """The weights of a version of `versions` into these tensors, by name: the last ones, with later changes taken
        back. May be called from any thread. Raises UnknownVersion, and then some of them are loaded."""
        with self._swapping:
            entries = list(self._entries)
            if not entries:
                raise UnknownVersion("nothing is published yet")
            newest = lowest = entries[-1].item.version
            changes, state = list[Changes](), entries[-1].state
            try:
                for entry in reversed(entries):
                    if entry.item.base is not None and entry.item.version == lowest > version:
                        record = self._record(entry.item)
                        changes.append(Changes(self._store.open(record)))
                        lowest, state = entry.item.base, record.base_state
                if lowest != version:
                    raise UnknownVersion(f"version {version} is no longer kept")
                file = WeightsFile(self._path(newest), _shapes(into), self.dtype)
                found = digest_of(self.dtype, _copying(file.changed(changes), self.dtype, into))
            except (OSError, Rejected, BadWeights, BadChanges) as error:
                raise UnknownVersion(f"version {version} cannot be made again: {error}") from error
        if found != state:
            raise UnknownVersion(f"version {version} cannot be made again: other weights come out")

    def _path(self, version: int) -> Path:
        return self._store.directory / f"weights-{version}.safetensors"


def _whole_is_due(items: Sequence[PolicyItem], every: int) -> bool:
    """After so many versions, or when the changes since the last whole take more than another one."""
    wholes = [item for item in items if item.base is None]
    if not wholes:
        return True
    since = [item.size for item in items if item.base is not None and item.version > wholes[-1].version]
    return len(since) >= every or sum(since) > wholes[-1].size


def _shapes(weights: Mapping[str, torch.Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in weights.items()}


def _copying(
    tensors: Iterator[tuple[Tensor, Words]], dtype: Weights, into: Mapping[str, torch.Tensor]
) -> Iterator[tuple[Tensor, Words]]:
    signed, kind = (np.int16, torch.bfloat16) if dtype == "bfloat16" else (np.int32, torch.float32)
    for tensor, words in tensors:
        into[tensor.name].detach().copy_(torch.from_numpy(words.view(signed)).view(kind).reshape(tensor.shape))
        yield tensor, words


def _changes(old: WeightsFile, new: WeightsFile) -> Iterator[bytes]:
    for before, after in zip(old.tensors, new.tensors, strict=True):
        yield from changes_between(old.words(before), new.words(after))


def _bytes(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while block := file.read(READ_BYTES):
            yield block
