"""A coordinated swarm as the files of a home have it, whether a process runs there or not."""

import secrets
import time
from contextlib import closing
from pathlib import Path

from node.home import Home
from node.manifest_file import read_manifest
from protocol.manifest import Coordination, Manifest, embedded_manifest
from swarm.coordination.chain import Chain
from swarm.coordination.membership import Membership
from swarm.coordination.round_log import RoundLog


def begin(
    home: Home,
    peer_id: str,
    name: str,
    file: Path | None = None,
    *,
    public: bool,
    standbys: tuple[str, ...] = (),
    allowed: tuple[str, ...] = (),
) -> Manifest:
    """Found a swarm of this name in the home, coordinated by `peer_id`. The caller holds the home's lock.

    `allowed`: members without an invite.
    """
    named = Coordination((peer_id, *standbys), listed_only=not public)
    now = time.time()
    manifest = embedded_manifest(name, now, named) if file is None else read_manifest(file, name, now, named)
    home.refuse_another(manifest.digest)  # whose members are in the same database
    if allowed:
        with closing(members_of(home, manifest)) as members:
            members.allow(allowed)
    home.found(manifest, None if public else secrets.token_bytes(32), listed=public)
    return manifest


def members_of(home: Home, manifest: Manifest) -> Membership:
    """The list of members, as this home's database has it."""
    return Membership(home.database, manifest.digest, time.time, listed_only=manifest.listed_only)


def chain_of(home: Home, manifest: Manifest) -> Chain:
    """The log of rounds, as this home's database has it."""
    return Chain(RoundLog(home.database, manifest.digest), manifest, time.time)
