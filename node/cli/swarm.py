"""The swarm of a node: create, show, invite, leave. Joining one: node.cli.joining."""

import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from node.cli.session import Command, Group, Session, new_swarm, with_session

if TYPE_CHECKING:
    from node.home import Home
    from node.settings import Settings


class InvitesElsewhere(Exception):
    """Only the coordinator's invites let anybody into this swarm."""


class NoAddress(Exception):
    """This node cannot say where it can be reached."""


@click.group(cls=Group)
def swarm() -> None:
    """The swarm this node belongs to, or a new one."""


@swarm.command()
@new_swarm
@click.option("--private", is_flag=True, help="only nodes with the invite's key can connect")
@click.option("--public", is_flag=True, help="list it in the public directory: see `shoal swarm discover`")
@with_session
def create(session: Session, name: str, file: Path | None, private: bool, public: bool) -> None:
    """Begin a swarm: write its manifest into this home."""
    import secrets

    from node.cli.output import emit, tell
    from node.manifest_file import read_manifest
    from protocol.manifest import embedded_manifest

    if private and public:
        raise click.UsageError("a swarm is --private or --public, not both.")
    home = session.node()
    now = time.time()
    manifest = embedded_manifest(name, now) if file is None else read_manifest(file, name, now)
    with home.lock():
        home.found(manifest, secrets.token_bytes(32) if private else None, listed=public)
    if session.as_json:
        emit({"name": name, "digest": manifest.digest.hex(), "private": private, "public": public})
    else:
        tell(session, f"Swarm {name} ({manifest.digest.hex()[:12]}) made\nNext: shoal up, then shoal swarm invite")
        if public:
            click.echo("Others find it through any node of a public swarm (swarm discover --via MULTIADDR), which")
            tell(session, "may be an address of this node (shoal swarm invite --json names them under bootstrap)")


@swarm.command()
@with_session
def show(session: Session) -> None:
    """Print the swarm's manifest: environments, caps, epochs."""
    from node.cli.output import emit, facts, table, tell

    home = session.node()
    membership, manifest = home.swarm(), home.manifest()
    if session.as_json:
        known = manifest.describe() if manifest else {"name": membership.name}
        emit({**known, "digest": membership.manifest_digest.hex(), "private": membership.psk is not None})
        return
    facts(
        {
            "swarm": membership.name,
            "digest": membership.manifest_digest.hex(),
            "private": membership.psk is not None,
            "bootstrap": membership.bootstrap,
        }
    )
    if manifest is None:
        tell(session, "The manifest is not here yet; shoal up fetches it from a peer")
        return
    epoch = manifest.epoch_at(time.time())
    facts({"epoch": f"{epoch}, of {manifest.epoch_seconds} s each", "shards": manifest.shards})
    rows = [
        (spec.name, spec.version, spec.weight, ", ".join(f"{key}={value}" for key, value in spec.settings.items()))
        for spec in manifest.environments
    ]
    table(session, ["environment", "version", "weight", "settings"], rows, "")


@swarm.command()
@with_session
def invite(session: Session) -> None:
    """Print a link with which others join this swarm through this node."""
    from node.addresses import caution
    from node.cli.output import emit, warn
    from protocol.invite import Invite

    home = session.node()
    membership, manifest = home.swarm(), home.manifest()
    if manifest is not None and manifest.listed_only:
        raise InvitesElsewhere(
            f"members of {manifest.name!r} are let in by its coordinator {manifest.coordinators[0]} ; "
            "make an invite there (coordinator invite)"
        )
    addresses = own_addresses(home, session)
    link = Invite(membership.manifest_digest, addresses, membership.psk, membership.name).to_uri()
    if session.as_json:
        emit({"invite": link, "swarm": membership.name, "bootstrap": addresses, "private": membership.psk is not None})
    else:
        click.echo(link)
    if warning := caution(addresses, session.settings(home).config.network.announce):
        warn(session, warning)


def own_addresses(home: "Home", session: Session) -> tuple[str, ...]:
    """Where others reach this node: announced addresses, those of the daemon, or the listen address with its port.

    Raises NoAddress where the port is only known once the daemon has run.
    """
    from node.addresses import reachable
    from protocol.invite import MAX_BOOTSTRAP

    settings: Settings = session.settings(home)
    network = settings.config.network
    info = home.daemon()
    if not network.announce and info is not None and info.addresses:
        return reachable(info.addresses)[:MAX_BOOTSTRAP]
    peer_id = session.unlocked().identity().peer_id
    bare = network.announce
    if not bare:
        prefix, _, port = network.listen.rpartition("/")
        known = int(port) or home.listen_port()
        if not known:
            raise NoAddress(
                "this node's port is chosen at its first start ; run `shoal up` once, or "
                "`shoal config set network.listen /ip4/0.0.0.0/tcp/7946`"
            )
        bare = (f"{prefix}/{known}",)
    full = [address if "/p2p/" in address else f"{address}/p2p/{peer_id}" for address in bare]
    return reachable(full)[:MAX_BOOTSTRAP]


@click.command(cls=Command)
@with_session
def leave(session: Session) -> None:
    """Belong to no swarm; identity, model and history stay."""
    from node.cli.output import emit

    home = session.node()
    with home.lock():
        name = home.leave()
    if session.as_json:
        emit({"left": name})
    else:
        click.echo(f"Left swarm {name}")
