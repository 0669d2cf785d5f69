"""The swarm that a node founds where it was told of none, and leaves by itself for the first one that it is told of."""

from typing import TYPE_CHECKING

from node.home import Home, NoSwarm
from protocol.manifest import Manifest, embedded_manifest

if TYPE_CHECKING:
    from protocol.invite import Invite

LEFT = "Left swarm %s, which this node had founded for itself and was alone in"
"""What the person has to be told after `enter`."""


def own_manifest(home: Home, genesis: float) -> Manifest:
    return embedded_manifest(f"{home.path.name.strip('.')[:32] or 'home'}-swarm", genesis)


def enter(home: Home, invite: "Invite") -> str:
    """`Home.join`, after leaving a swarm that nobody else can be in; the name of that one, or ''.

    Raises HomeError, StoreError.
    """
    left = ""
    try:
        present = home.swarm()
    except NoSwarm:
        pass
    else:
        if present.manifest_digest != invite.manifest_digest and is_alone(home):
            left = home.leave()
    home.join(invite)
    return left


def is_alone(home: Home) -> bool:
    """Whether this home was put in its swarm by `up` without being asked, and has met nobody since."""
    manifest, invite = home.manifest(), home.swarm()
    return (
        manifest is not None
        and manifest.digest == own_manifest(home, manifest.genesis).digest
        and not invite.bootstrap
        and invite.psk is None
        and not home.is_listed()
        and not has_met_peers(home)
    )


def has_met_peers(home: Home) -> bool:
    """Raises StoreError."""
    from swarm.database import read_only  # only here: most calls never need it

    if not home.database.exists():
        return False
    with read_only(home.database) as database:
        made = database.execute("SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = 'peers'").fetchone()
        return made is not None and database.execute("SELECT 1 FROM peers LIMIT 1").fetchone() is not None
