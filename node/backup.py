"""A node in one file: identity, settings and swarm; its newest checkpoint and its history where they are asked for.

A zip archive, readable by its owner only, written aside and renamed. `backup.json` lists every member with its size and
SHA-256. A restore takes nothing but these names: no path of an archive is ever followed. It unpacks and checks all of
it beside the home's own files, and only then moves them in, the identity last: a home is a node once it has one, so
one whose restore was killed is no node, and `Home.init` refuses it until the restore is repeated.
"""

import hashlib
import json
import os
import re
import secrets
import shutil
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import IO, Any

from node.aside import making_aside
from node.checkpoint import CheckpointStore, damage
from node.disk import sync
from node.home import Home
from protocol.identity import Identity, IdentityError
from swarm.database import copy_database

FORMAT = 2
"""1, of Shoal before federation, has no following.json; nothing else is different."""
INDEX = "backup.json"
SMALL = (
    "identity.key", "config.toml", "manifest.bin", "invite", "listen.port", "listed", "paused", "following.json"
)  # fmt: skip
HISTORY = "node.db"
CHECKPOINT = re.compile(r"checkpoints/(step-\d{1,12}/[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}|journal-\d{1,12}\.bin)")
SCRATCH = "backup"
MAX_SMALL, MAX_INDEX = 1 << 20, 4 << 20
MAX_MEMBERS = 4096
MAX_TOTAL = 1 << 40
"""Bytes of all members together; what the disk has room for bounds it besides."""
CHUNK = 1 << 20

Say = Callable[[str], None]


class BackupError(Exception):
    """A backup cannot be written or used; the message names the file, what is wrong and the fix."""


@dataclass(frozen=True, slots=True)
class Contents:
    """What an archive has, as `backup.json` says and its members confirm."""

    peer_id: str
    made: float
    shoal: str
    members: Mapping[str, tuple[int, str]]
    """Name -> (bytes, SHA-256 in hex)."""

    @property
    def checkpoint(self) -> int | None:
        """Step of the checkpoint in it."""
        steps = [int(name.split("/")[1][5:]) for name in self.members if name.startswith("checkpoints/step-")]
        return max(steps, default=None)


# -- writing -------------------------------------------------------------------------------------------------


def backup(
    home: Home, file: Path, *, checkpoint: bool, history: bool, clock: Callable[[], float], say: Say
) -> Contents:
    """Write a home into a new archive; a running node is not disturbed. Raises BackupError, StoreError, OSError.

    A coordinator's history is always in it: without its log it would sign anew, and be found to equivocate.
    """
    home.require()
    history = history or home.coordinates()
    if file.exists():
        raise BackupError(f"{file} is there already ; give another file name")
    if not file.parent.is_dir():
        raise BackupError(f"{file.parent} is no directory ; make it first")
    peer_id = json.loads(home.identity_path.read_bytes())["peer_id"]
    members: dict[str, tuple[int, str]] = {}
    with making_aside(home.path, SCRATCH) as scratch, making_aside(file.parent, file.name) as beside:
        aside = beside / INDEX
        with os.fdopen(os.open(aside, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600), "w+b") as written:
            with zipfile.ZipFile(written, "w") as archive:
                for name in SMALL:
                    if (home.path / name).exists():
                        members[name] = _add(archive, name, home.path / name)
                if history and home.database.exists():
                    say(f"copying the history ({home.database.stat().st_size >> 20} MB)")
                    copied = scratch / HISTORY
                    copy_database(home.database, copied)
                    members[HISTORY] = _add(archive, HISTORY, copied)
                if checkpoint:
                    members |= _add_checkpoint(archive, home, say)
                contents = Contents(peer_id, clock(), version("shoal"), members)
                archive.writestr(_entry(INDEX), _index(contents))
            written.flush()
            os.fsync(written.fileno())
        aside.replace(file)
    return contents


def _index(contents: Contents) -> bytes:
    told = {"format": FORMAT, "shoal": contents.shoal, "made": contents.made, "peer_id": contents.peer_id}
    return json.dumps({**told, "members": contents.members}).encode()


def _entry(name: str) -> zipfile.ZipInfo:
    entry = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))
    entry.external_attr = 0o600 << 16
    # weights do not get smaller, and the rest is small
    entry.compress_type = zipfile.ZIP_DEFLATED if name == HISTORY else zipfile.ZIP_STORED
    return entry


def _add(archive: zipfile.ZipFile, name: str, source: Path) -> tuple[int, str]:
    digest, size = hashlib.sha256(), 0
    with source.open("rb") as content, archive.open(_entry(name), "w", force_zip64=True) as member:
        for chunk in _chunks(content):
            digest.update(chunk)
            size += len(chunk)
            member.write(chunk)
    return size, digest.hexdigest()


def _chunks(content: IO[bytes]) -> Iterator[bytes]:
    while chunk := content.read(CHUNK):
        yield chunk


def _add_checkpoint(archive: zipfile.ZipFile, home: Home, say: Say) -> dict[str, tuple[int, str]]:
    """The newest checkpoint and the journal that goes on from it; before the first one, the journal alone."""
    entries = [entry for entry in CheckpointStore(home.checkpoints, 1).entries() if entry.name != "best"]
    step = entries[-1].step if entries else 0
    with making_aside(home.path, SCRATCH) as scratch:
        files: dict[str, Path] = {}
        if entries:
            say(f"checkpoint of step {step} ({entries[-1].size >> 20} MB)")
            # by hard links: a running node may remove the checkpoint meanwhile, and these stay
            try:
                for source in sorted(entries[-1].path.iterdir()):
                    link = scratch / source.name
                    os.link(source, link)
                    files[f"checkpoints/step-{step}/{source.name}"] = link
            except FileNotFoundError:
                raise BackupError(f"the node has just removed {entries[-1].path} ; try again") from None
            if fault := damage(scratch):
                raise BackupError(f"{entries[-1].path} is damaged: {fault} ; leave out --with-checkpoint") from None
        journal = home.checkpoints / f"journal-{step}.bin"
        if journal.exists():
            files[f"checkpoints/{journal.name}"] = journal
        return {name: _add(archive, name, path) for name, path in files.items()}


# -- reading -------------------------------------------------------------------------------------------------


def restore(
    home: Home, file: Path, *, force: bool, clock: Callable[[], float], say: Say
) -> tuple[Contents, Path | None]:
    """Make a home what an archive says; returns that and where what was there before has gone, if anything was.

    `force`: move what is there aside; it is never deleted. Raises BackupError and, while a node runs there, HomeLocked.
    """
    interrupted = home.restore_interrupted()
    with ExitStack() as held:
        if home.identity_path.exists():
            held.enter_context(home.lock())
        there = _present(home)
        if there and not force and not interrupted:
            raise BackupError(
                f"{home.path} has {', '.join(sorted(path.name for path in there))} already ; give another --home, or "
                "--force, which moves what is there aside"
            )
        home.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        shutil.rmtree(home.restoring, ignore_errors=True)
        staged = home.restoring / "new"
        staged.mkdir(mode=0o700, parents=True)
        try:
            with _opened(file) as archive:
                contents = _check(archive, file, home)
                _unpack(archive, contents, staged, file, say)
            _check_identity(staged / "identity.key", contents, file)
        except BaseException:
            if not interrupted:
                shutil.rmtree(home.restoring, ignore_errors=True)
            raise
        say("moving the files in")
        old = _move_aside(home, clock) if there else None
        _move_in(home, staged)
    return contents, old


def _present(home: Home) -> list[Path]:
    """What a restore would write over, or leave beside files it does not belong to."""
    names = (*SMALL, HISTORY, f"{HISTORY}-wal", f"{HISTORY}-shm", "api.token", "weights", "dumps", "policies")
    found = [home.path / name for name in names if (home.path / name).exists()]
    if home.checkpoints.is_dir() and any(home.checkpoints.iterdir()):
        found.append(home.checkpoints)
    return found


def _opened(file: Path) -> zipfile.ZipFile:
    try:
        return zipfile.ZipFile(file)
    except FileNotFoundError:
        raise BackupError(f"{file} is not there ; give the file that `shoal backup` wrote") from None
    except (zipfile.BadZipFile, OSError) as error:
        raise BackupError(f"{file} is no backup, or cut off ({error}) ; copy it again, whole") from error


def _check(archive: zipfile.ZipFile, file: Path, home: Home) -> Contents:
    """Names, sizes and room, before anything is unpacked. Raises BackupError."""
    bad = f"{file} is no backup of Shoal: {{}} ; give the file that `shoal backup` wrote"
    entries = archive.infolist()
    if len(entries) > MAX_MEMBERS:
        raise BackupError(bad.format(f"{len(entries)} members, at most {MAX_MEMBERS}"))
    by_name = {entry.filename: entry for entry in entries}
    if len(by_name) < len(entries) or INDEX not in by_name:
        raise BackupError(bad.format(f"no {INDEX}" if INDEX not in by_name else "a name is there twice"))
    if by_name[INDEX].file_size > MAX_INDEX:
        raise BackupError(bad.format(f"{INDEX} has {by_name[INDEX].file_size} bytes, at most {MAX_INDEX}"))
    try:
        told: dict[str, Any] = json.loads(_read(archive, INDEX, MAX_INDEX))
        form = told["format"]
        if type(form) is not int or form < 1:
            raise BackupError(bad.format(f"format {str(form)[:20]!r}"))
        if form > FORMAT:
            raise BackupError(
                f"{file} is of format {form}, this Shoal reads 1 to {FORMAT} ; restore it with a newer Shoal"
            )
        members = {str(name): (int(size), str(digest)) for name, (size, digest) in told["members"].items()}
        contents = Contents(str(told["peer_id"]), float(told["made"]), str(told["shoal"]), members)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, zipfile.BadZipFile) as error:
        raise BackupError(bad.format(f"{INDEX} cannot be read ({error!r})")) from error
    if set(members) != set(by_name) - {INDEX} or "identity.key" not in members:
        raise BackupError(bad.format(f"{INDEX} does not list its members, an identity.key among them"))
    for name, (size, _) in members.items():
        if name not in SMALL and name != HISTORY and not CHECKPOINT.fullmatch(name):
            raise BackupError(bad.format(f"member {name[:80]!r} is none of a node"))
        entry = by_name[name]
        if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED) or entry.flag_bits & 1:
            raise BackupError(bad.format(f"member {name} is packed in another way"))
        if size < 0 or entry.file_size != size or (name in SMALL and size > MAX_SMALL):
            raise BackupError(bad.format(f"member {name} has {entry.file_size} bytes"))
    total = sum(size for size, _ in members.values())
    room = shutil.disk_usage(home.path).free
    if total > min(room, MAX_TOTAL):
        raise BackupError(f"{file} takes {total >> 20} MB unpacked, {room >> 20} MB are free ; free some disk")
    return contents


def _read(archive: zipfile.ZipFile, name: str, most: int) -> bytes:
    with archive.open(name) as member:
        return member.read(most + 1)


def _unpack(archive: zipfile.ZipFile, contents: Contents, staged: Path, file: Path, say: Say) -> None:
    """Write every member, each on disk when this returns. Raises BackupError where one is not as it was written."""
    for name, (size, digest) in contents.members.items():
        if size > MAX_SMALL:
            say(f"unpacking {name} ({size >> 20} MB)")
        target = staged / name
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        found, left = hashlib.sha256(), size
        with os.fdopen(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as written:
            try:
                with archive.open(name) as member:
                    for chunk in _chunks(member):
                        left -= len(chunk)
                        if left < 0:
                            break
                        found.update(chunk)
                        written.write(chunk)
            except (zipfile.BadZipFile, EOFError, zlib.error) as error:
                raise BackupError(f"{file}: {name} is damaged ({error}) ; copy the backup again") from error
            written.flush()
            os.fsync(written.fileno())
        if left or found.hexdigest() != digest:
            raise BackupError(f"{file}: {name} is not as it was written ; copy the backup again")


def _check_identity(path: Path, contents: Contents, file: Path) -> None:
    """The key file must be one, though it may be sealed. Raises BackupError."""
    try:
        if json.loads(path.read_bytes())["protection"] == "none":
            found = Identity.open_bytes(path.read_bytes(), None).peer_id
        else:
            found = json.loads(path.read_bytes())["peer_id"]
    except (ValueError, KeyError, TypeError, IdentityError) as error:
        raise BackupError(f"{file}: identity.key is damaged ({error}) ; use another backup") from error
    if found != contents.peer_id:
        raise BackupError(f"{file}: identity.key is not that of {contents.peer_id} ; use another backup")


def _move_aside(home: Home, clock: Callable[[], float]) -> Path:
    """Everything of the node that is there, the identity first: from then on it is none."""
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime(clock()))
    old = home.path / f"before-restore-{stamp}"
    number = 1
    while old.exists():
        number += 1
        old = home.path / f"before-restore-{stamp}-{number}"
    old.mkdir(mode=0o700)
    for path in _present(home):
        path.replace(old / path.name)
    return old


def _move_in(home: Home, staged: Path) -> None:
    """The new files, the identity last: from then on it is a node."""
    (staged / "api.token").write_text(secrets.token_urlsafe(32))
    (staged / "api.token").chmod(0o600)
    names = sorted(path.name for path in staged.iterdir() if path.name != "identity.key")
    for name in (*names, "identity.key"):
        if name == "checkpoints" and home.checkpoints.is_dir():
            home.checkpoints.rmdir()  # an empty one: `_present` counts any other
        (staged / name).replace(home.path / name)
        sync(home.path)
    shutil.rmtree(home.restoring)
