"""Checks of the home: who may read it, and whether its disk has the room that checkpoints need."""

import os
import shutil
import stat
from pathlib import Path

from node.checkpoint import CheckpointStore
from node.disk import home_size
from node.doctor.finding import Finding, Subject, fail, ok, warn
from node.doctor.machine import local_model, shape_of_checkpoint
from node.limits import Disk, disk_hold

GB = 1 << 30


def home(subject: Subject) -> list[Finding]:
    """Whether there is one, and whether its secrets are its owner's alone."""
    node = subject.home
    if not subject.initialised:
        return [warn("home", f"no node in {node.path} yet", "shoal up makes one, or point --home at one")]
    found = []
    owner = node.path.stat().st_uid
    if owner != os.getuid():
        found.append(
            warn(
                "home",
                f"{node.path} belongs to user {owner}, and this is user {os.getuid()}",
                "run it as its owner: what another user writes there, the node may not read",
            )
        )
    for path, most, secret in (
        (node.path, 0o700, False),
        (node.identity_path, 0o600, True),
        (node.token_path, 0o600, True),
        (node.invite_path, 0o600, True),
        (node.daemon_path, 0o600, True),
    ):
        if not path.exists():
            continue
        mode = stat.S_IMODE(path.stat().st_mode)
        if mode & ~most & 0o077:
            said = f"{path} is open to other users (mode {mode:o})"
            found.append(Finding("home", "fail" if secret else "warn", said, f"chmod {most:o} {path}"))
    if not node.token_path.exists():
        found.append(fail("home", f"{node.token_path} is missing", "shoal init makes a new one, and keeps the rest"))
    return found or [ok("home", f"{node.path}: only its owner can read identity and token")]


def disk(subject: Subject) -> list[Finding]:
    """What is free against the next checkpoint, and against all that the settings let the home grow to."""
    node, config = subject.home, subject.config
    free = shutil.disk_usage(existing(node.path)).free
    held = home_size(node.path)
    said = f"{free / GB:.1f} GB free; the home takes {held / GB:.1f} GB"
    one = checkpoint_bytes(subject)
    if one is None:
        return [ok("disk", f"{said}; what a checkpoint takes is not known yet: the model is not here")]
    store = config.limits.store_mb << 20
    # kept ones, the best, and one more while it is written
    most = (config.checkpoint.keep + 2) * one + store
    said += f"; a checkpoint takes {one / GB:.1f} GB, {config.checkpoint.keep} are kept besides the best"
    if (hold := disk_hold(config.limits.disk_mb, Disk(held, free, one))) is not None:
        return [fail("disk", f"{said}. Training is held: {hold.reason}", hold.next)]
    if free + held < most:
        return [
            warn(
                "disk",
                f"{said}; with {store >> 20} MB of experience that grows to {most / GB:.1f} GB",
                "free some disk, or lower checkpoint.keep or limits.store_mb",
            )
        ]
    return [ok("disk", said)]


def checkpoint_bytes(subject: Subject) -> int | None:
    """As those there are, or what the trainer writes for such a model; None: there is no model yet."""
    node, config = subject.home, subject.config
    if node.checkpoints.is_dir():
        entries = CheckpointStore(node.checkpoints, config.checkpoint.keep).entries()
        if there := [entry.size for entry in entries if entry.name != "best"]:
            return max(there)
    from node.models import ModelError

    try:
        directory = local_model(config)
        return None if directory is None else shape_of_checkpoint(config, directory)
    except ModelError:
        return None  # the model's own check says why


def existing(path: Path) -> Path:
    """The path, or the nearest of its parents that there is."""
    return next(parent for parent in (path, *path.parents) if parent.exists())
