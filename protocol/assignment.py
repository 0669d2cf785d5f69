"""Which tasks a node may publish in an epoch. Derived from manifest, epoch and peer id, so nobody picks prompts.

A task is (seed, index). The seed is a hash of what assigns it; the index is a slot below a bound of the manifest;
the environment follows from both. Checking an assignment therefore takes a hash or two, whatever the slot count.
"""

import hashlib
import struct

from protocol.manifest import Manifest
from protocol.rollout import TaskRef


def _hash64(*parts: bytes) -> int:
    """First 8 bytes, big-endian, of SHA-256 over the parts. Each part but the last has a fixed length."""
    return int.from_bytes(hashlib.sha256(b"".join(parts)).digest()[:8], "big")


def _own_seed(manifest: Manifest, epoch: int, peer_id: str) -> int:
    return _hash64(b"shoal/1/own\n", manifest.digest, struct.pack(">Q", epoch), peer_id.encode()) >> 1


def _shared_seed(manifest: Manifest, epoch: int) -> int:
    return _hash64(b"shoal/1/shared\n", manifest.digest, struct.pack(">Q", epoch)) >> 1


def _task(manifest: Manifest, seed: int, index: int) -> TaskRef:
    """Environment by weight from the hash of (seed, index)."""
    draw = _hash64(b"shoal/1/environment\n", struct.pack(">QQ", seed, index)) % manifest.total_weight
    for spec in manifest.environments:
        if draw < spec.weight:
            break
        draw -= spec.weight
    return TaskRef(spec.name, spec.version, seed, index)


def own_task(manifest: Manifest, epoch: int, peer_id: str, slot: int) -> TaskRef:
    """The task in one of a node's own slots, 0 <= slot < slots_per_epoch. Raises ValueError outside."""
    if not 0 <= slot < manifest.slots_per_epoch:
        raise ValueError(f"slot {slot} is not in [0, {manifest.slots_per_epoch}) (slots_per_epoch)")
    return _task(manifest, _own_seed(manifest, epoch, peer_id), slot)


def shared_task(manifest: Manifest, epoch: int, slot: int) -> TaskRef:
    """The task in a slot that everybody has, 0 <= slot < shared_slots. Raises ValueError outside."""
    if not 0 <= slot < manifest.shared_slots:
        raise ValueError(f"slot {slot} is not in [0, {manifest.shared_slots}) (shared_slots)")
    return _task(manifest, _shared_seed(manifest, epoch), slot)


def is_shared(manifest: Manifest, epoch: int, task: TaskRef) -> bool:
    """Whether the task is one that every node has in this epoch, if it is assigned at all."""
    return task.seed == _shared_seed(manifest, epoch)


def is_assigned(manifest: Manifest, epoch: int, producer: str, task: TaskRef) -> bool:
    """Whether `producer` may publish `task` in `epoch`. Constant time. The version is not looked at (rule 6 does)."""
    if task.seed == _own_seed(manifest, epoch, producer):
        slots = manifest.slots_per_epoch
    elif task.seed == _shared_seed(manifest, epoch):
        slots = manifest.shared_slots
    else:
        return False
    return task.index < slots and task.environment == _task(manifest, task.seed, task.index).environment


def held_out_task(manifest: Manifest, environment: str, index: int) -> TaskRef:
    """A task for evaluation. Its seed is in a domain of its own, so no node is ever assigned it, in any epoch.

    Raises ValueError when the manifest has no such environment.
    """
    spec = manifest.environment(environment)
    if spec is None:
        known = ", ".join(spec.name for spec in manifest.environments)
        raise ValueError(f"no environment {environment!r} in the manifest; it has {known}")
    seed = _hash64(b"shoal/1/held-out\n", manifest.digest, environment.encode()) >> 1
    return TaskRef(spec.name, spec.version, seed, index)


def round_task(manifest: Manifest, seed: bytes, environment: str, index: int) -> TaskRef:
    """A held-out task of a coordinator's round: nobody knows it before the round's 32-byte `seed` is told.

    Raises ValueError when the manifest has no such environment.
    """
    spec = manifest.environment(environment)
    if spec is None:
        raise ValueError(f"no environment {environment!r} in the manifest")
    hashed = _hash64(b"shoal/1/round\n", manifest.digest, seed, environment.encode()) >> 1
    return TaskRef(spec.name, spec.version, hashed, index)
