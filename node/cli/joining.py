"""Joining a swarm by invite or by name, and the directory of those that anybody may join."""

import asyncio
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from node.cli.session import Command, Session, with_session
from node.cli.swarm import swarm

if TYPE_CHECKING:
    from node.home import Home
    from swarm.directory import Found

FIND_SECONDS = 45.0
PREFIX = 4
"""Least digits of a digest that name a swarm."""

via_option = click.option(
    "--via",
    multiple=True,
    metavar="MULTIADDR",
    help="a node to ask, /ip4/HOST/tcp/PORT/p2p/PEER_ID; default: this home's own swarm and network.bootstrap",
)


class NoSuchSwarm(Exception):
    """The directory has no swarm of this name, or several."""


class NobodyToAsk(Exception):
    """No node is known that would tell of public swarms."""


@click.command(cls=Command)
@click.argument("wanted", metavar="INVITE|NAME")
@via_option
@with_session
def join(session: Session, wanted: str, via: Sequence[str]) -> None:
    """Belong to a swarm from the next start on: of an invite (shoal:...), or a public one by its name or digest."""
    from node.cli.output import emit, tell
    from node.own_swarm import LEFT, enter
    from protocol.invite import SCHEME, Invite

    home = session.node()
    if wanted.strip().lower().startswith(SCHEME) or "://" in wanted:  # a page's link is nobody's name for a swarm
        invitation, found = Invite.parse(wanted), None
    else:
        found = choose(wanted, look_up(session, home, via)[0])
        invitation = found.listing.invite()
    with home.lock():
        left = enter(home, invitation)
        if found is not None:
            home.keep_manifest(found.manifest)
    digest = invitation.manifest_digest.hex()
    if session.as_json:
        emit({"swarm": invitation.name, "digest": digest, "left": left})
        return
    if left:
        tell(session, LEFT % left)
    tell(session, f"Joined swarm {invitation.name} ({digest[:12]})\nNext: shoal up")


@swarm.command()
@via_option
@with_session
def discover(session: Session, via: Sequence[str]) -> None:
    """List the public swarms that can be reached from here; `shoal join NAME` joins one."""
    from node.cli.output import emit, table, warn

    found, problems = look_up(session, session.node(), via)
    now = time.time()
    listed = [
        {
            "name": one.manifest.name,
            "digest": one.manifest.digest.hex(),
            "environments": [spec.name for spec in one.manifest.environments],
            "members": one.members,
            "age_days": round(max(0.0, now - one.manifest.genesis) / 86400, 2),
            "coordinator": next(iter(one.manifest.coordinators), None),
            "listed_by": one.listed_by,
        }
        for one in found
    ]
    if session.as_json:
        emit({"swarms": listed, "problems": problems})
        return
    rows = [
        (
            one["name"],
            str(one["digest"])[:12],
            one["members"],
            f"{one['age_days']:g}",
            "yes" if one["coordinator"] else "no",
            one["environments"],
        )
        for one in listed
    ]
    columns = ["name", "digest", "members seen", "age in days", "coordinator", "environments"]
    table(session, columns, rows, "Nobody lists a swarm there. Begin one: shoal swarm create NAME --public")
    for problem in problems[:5]:
        warn(session, problem)


@swarm.command()
@click.option("--off", is_flag=True, help="no longer")
@with_session
def publish(session: Session, off: bool) -> None:
    """Tell the public directory of this swarm from the next start on, so that anybody can find and join it."""
    from node.cli.output import emit

    home = session.node()
    home.list_publicly(not off)
    if session.as_json:
        emit({"swarm": home.swarm().name, "listed": not off})
    else:
        said = "is no longer listed" if off else "is listed"
        click.echo(f"{home.swarm().name} {said} by this node, from its next start on")


def choose(wanted: str, found: Sequence["Found"]) -> "Found":
    """The swarm of this digest, else the one of this name or whose digest begins so. Raises NoSuchSwarm.

    Whoever lists a swarm names it, and can make its digest begin as they like: neither a name nor a few digits are
    taken for somebody's where they fit another swarm, too.
    """
    wanted = wanted.strip()
    digits = wanted.lower()
    meant = [one for one in found if one.manifest.digest.hex() == digits] or [
        one
        for one in found
        if one.manifest.name == wanted or (len(digits) >= PREFIX and one.manifest.digest.hex().startswith(digits))
    ]
    if len(meant) == 1:
        return meant[0]
    if meant:
        digests = ", ".join(f"{one.manifest.digest.hex()} ({one.manifest.name})" for one in meant)
        raise NoSuchSwarm(f"{len(meant)} swarms are called {wanted!r} ; join one by its whole digest: {digests}")
    names = ", ".join(one.manifest.name for one in found[:10])
    known = f"found: {names}" if names else "none was found"
    raise NoSuchSwarm(f"no public swarm is called {wanted!r} ({known}) ; see `shoal swarm discover`")


def look_up(session: Session, home: "Home", via: Sequence[str]) -> tuple[list["Found"], list[str]]:
    """Public swarms that can be reached, and what went wrong. Raises NobodyToAsk, InviteError, TransportError."""
    from node.cli.output import working
    from protocol.invite import check_peer_address

    for address in via:
        check_peer_address(address)
    ways = via or ways_of(session, home)
    if not ways:
        raise NobodyToAsk(
            "this node knows nobody to ask for public swarms ; give a node of one: --via /ip4/HOST/tcp/PORT/p2p/PEER_ID"
        )
    with working(session) as say:
        say("asking for public swarms")
        return asyncio.run(ask(ways))


def ways_of(session: Session, home: "Home") -> tuple[str, ...]:
    """Nodes that this one knows: itself where it runs, those it dials at start."""
    from node.home import NoSwarm

    ways = session.settings(home).config.network.bootstrap
    try:
        membership = home.swarm()
    except NoSwarm:
        return ways
    if membership.psk is not None:  # whoever is there cannot be reached without the key, nor be in the directory
        return ways
    daemon = home.daemon()
    return (*(daemon.addresses if daemon is not None else ()), *membership.bootstrap, *ways)


async def ask(ways: Sequence[str]) -> tuple[list["Found"], list[str]]:
    """By a host of its own with a key for this once, whether a daemon runs or not."""
    from protocol.identity import Identity
    from swarm.directory import discover as find
    from swarm.libp2p_transport import Libp2pTransport

    transport = Libp2pTransport(Identity.generate(), [])  # with an address, those asked would dial it when it is gone
    await transport.start()
    try:
        return await find(transport, ways, clock=time.time, timeout=FIND_SECONDS)
    finally:
        await transport.stop()
