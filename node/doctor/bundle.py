"""The support bundle: what somebody who helps wants to see, without secrets, in one bounded zip file.

Every member goes through `scrub` in one place. Text of peers may be in it: it is data for whoever reads it.
"""

import io
import json
import platform
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from node.aside import making_aside
from node.disk import write_atomic
from node.doctor.finding import Finding, Subject
from node.history import History
from node.home import HomeError
from node.logs import tail
from node.redaction import scrub, values
from node.settings import ConfigError, load, public_values
from swarm.database import StoreError, copy_tables
from swarm.experience import LARGE_TABLES

LOG_LINES = 2000
LINE_CHARACTERS = 4000
STEPS, EVENTS = 200, 1000
MEMBER_CHARACTERS = 4 << 20
"""Of one member; what is longer loses its beginning."""


class BundleExists(Exception):
    """The file is there already."""


def write_bundle(path: Path, subject: Subject, findings: Sequence[Finding]) -> int:
    """Write the bundle, readable by its owner only; returns how many members it has. Raises BundleExists, OSError."""
    if path.exists():
        raise BundleExists(f"{path} is there already ; give another file name")
    secrets = values(subject.home)
    written = io.BytesIO()
    members = [(name, content) for name, content in collect(subject, findings).items() if content]
    with zipfile.ZipFile(written, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members:
            clean = scrub(content, secrets)  # before any cut, which could leave the first half of a secret
            archive.writestr(name, (cut(clean) if name.endswith(".log") else clean)[-MEMBER_CHARACTERS:])
    write_atomic(path, written.getvalue(), 0o600)
    return len(members)


def collect(subject: Subject, findings: Sequence[Finding]) -> dict[str, str]:
    """Member -> text, secrets still in it. What cannot be read says why instead."""
    home = subject.home
    return {
        "doctor.json": as_json([asdict(finding) for finding in findings]),
        "status.json": as_json(subject.status if subject.status is not None else {"none": subject.silence}),
        "settings.json": tried(lambda: as_json(public_values(load(home)))),
        "swarm.json": tried(lambda: swarm(subject)),
        "versions.txt": versions(),
        **{log.name: "\n".join(tail(log, LOG_LINES)) for log in sorted(home.logs.glob("*.log"))},
        **history(subject),
    }


def as_json(value: Any) -> str:
    return json.dumps(value, indent=1)


def tried(read: Callable[[], str]) -> str:
    try:
        return read()
    except (ConfigError, HomeError, StoreError, OSError) as error:
        return f"not readable: {error}"


def swarm(subject: Subject) -> str:
    """The manifest, without the invite: its link has the key of a private network."""
    manifest, membership = subject.home.manifest(), subject.home.swarm()
    described = {} if manifest is None else manifest.describe()
    digest = membership.manifest_digest.hex()
    return as_json({**described, "digest": digest, "bootstrap": membership.bootstrap, "private": bool(membership.psk)})


def versions() -> str:
    """This machine and all installed packages, as `pip freeze` has them."""
    installed = sorted({f"{found.metadata['Name']}=={found.version}" for found in distributions()}, key=str.lower)
    return "\n".join([f"# Python {platform.python_version()}, {platform.platform()}", *installed])


def cut(log: str) -> str:
    """A log without the ends of its longest lines."""
    return "\n".join(line[:LINE_CHARACTERS] for line in log.split("\n"))


def history(subject: Subject) -> dict[str, str]:
    """Events, the last steps and all held-out scores, of a copy: the node's own file is only read."""
    if not subject.home.database.exists():
        return {}
    with making_aside(Path(tempfile.gettempdir()), "shoal-bundle") as aside:
        try:
            copy_tables(subject.home.database, aside / "node.db", leave=LARGE_TABLES)
            copied = History(aside / "node.db", clock=lambda: 0.0)
        except StoreError as error:
            return {"steps.json": f"not readable: {error}"}
        try:
            last = copied.last_step()
            steps = [] if last is None else copied.steps(max(0, last["step"] - STEPS), STEPS)
            return {
                "events.json": as_json(copied.events(None, EVENTS)),
                "steps.json": as_json(steps),
                "held-out.json": as_json(copied.evaluations(-1, 10 * STEPS)),
            }
        finally:
            copied.close()
