"""Batches that gave a non-finite update, kept for inspection."""

from pathlib import Path

import msgspec

from node.interfaces import Batch

KEPT = 8
"""The oldest make room."""


def dump_batch(batch: Batch, directory: Path) -> str:
    """Write a batch; says where it is, or why it is not: a full disk must not make of a skipped step a failed node."""
    path = directory / f"step-{batch.step}.msgpack"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        older = sorted(directory.glob("step-*.msgpack"), key=lambda dump: dump.stat().st_mtime)
        for dump in older[: max(0, len(older) + 1 - KEPT)]:
            dump.unlink()
        path.write_bytes(msgspec.msgpack.encode(batch))
    except OSError as error:
        return f"and the batch could not be written to {path} ({error.strerror}); free some disk"
    return f"the batch is in {path}"
