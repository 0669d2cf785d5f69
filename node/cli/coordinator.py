"""`shoal coordinator`: begin a coordinated swarm, run its coordinator, invite and kick members, see how they stand."""

import re
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from node.cli.session import Group, Session, new_swarm, not_empty, swarm_name, with_session

if TYPE_CHECKING:
    from node.home import Home
    from protocol.manifest import Manifest

UNITS = {"m": 60, "h": 3600, "d": 86400}


class NotCoordinated(Exception):
    """The swarm of this home has no coordinator, or its manifest is not here yet."""


class NotLeading(Exception):
    """Another coordinator leads, and what is done here would not count."""


class PeerId(click.ParamType):
    """A peer id on the command line, whole: a wrong digit would name nobody, or nobody that can sign."""

    name = "peer id"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        from protocol.identity import IdentityError, public_key_of

        try:
            public_key_of(value)
        except IdentityError as error:
            self.fail(str(error), param, ctx)
        return str(value)


@click.group(cls=Group)
def coordinator() -> None:
    """Pace and evaluate a swarm, and say who takes part in it."""


@coordinator.command()
@new_swarm
@click.option(
    "--public",
    is_flag=True,
    help="no key, listed in the public directory, and whoever asks becomes a member; else by invite only",
)
@click.option(
    "--standby", "standbys", type=PeerId(), multiple=True, metavar="PEER_ID", help="takes over when this one is silent"
)
@click.option(
    "--allow",
    "allowed",
    type=PeerId(),
    multiple=True,
    metavar="PEER_ID",
    help="a member from the beginning: gets in by `shoal swarm invite`, without an invite of its own",
)
@with_session
def init(
    session: Session, name: str, file: Path | None, public: bool, standbys: tuple[str, ...], allowed: tuple[str, ...]
) -> None:
    """Begin a swarm that this home coordinates: identity where there is none, manifest, key."""
    from node.cli.output import emit, tell
    from node.coordinator.at_rest import begin

    home = session.home()
    home.init()
    peer_id = session.unlocked().identity().peer_id
    with home.lock():
        manifest = begin(home, peer_id, name, file, public=public, standbys=standbys, allowed=allowed)
    if session.as_json:
        emit({"name": name, "digest": manifest.digest.hex(), "peer_id": peer_id, "coordinators": manifest.coordinators})
        return
    click.echo(f"Swarm {name} ({manifest.digest.hex()[:12]}), coordinated by {peer_id}")
    tell(session, "Next: shoal coordinator up, then shoal coordinator invite")


@coordinator.command()
@click.option(
    "--join", "invite", metavar="INVITE", callback=not_empty, help="a standby: join this swarm first (shoal:...)"
)
@click.option(
    "--begin",
    "name",
    metavar="NAME",
    callback=swarm_name,
    help="where the home is in no swarm: init one of this name first",
)
@with_session
def up(session: Session, invite: str | None, name: str | None) -> None:
    """Coordinate the swarm of this home until Ctrl-C."""
    from node.cli.up import enter_swarm, leave_at_once
    from node.settings import load
    from protocol.invite import Invite

    home = session.home()
    settings = load(home, session.overrides)
    home.init()
    session.start_logging(home.log_path)
    home = session.unlocked()
    link = invite or settings.config.swarm.join
    if link:
        enter_swarm(home, Invite.parse(link))
    elif name and not home.invite_path.exists():
        from node.coordinator.at_rest import begin

        with home.lock():
            begin(home, home.identity().peer_id, name, public=False)
    home.swarm()  # raises where there is none: a coordinator begins no swarm of its own accord
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, leave_at_once)
    with home.lock():
        from node.coordinator.process import run

        run(home, settings, as_json=session.as_json)


@coordinator.command()
@click.option("--uses", type=click.IntRange(1, 4096), default=1, show_default=True, help="how many peers it lets in")
@click.option("--expires", default="7d", show_default=True, metavar="TIME", help="30m, 12h, 7d")
@click.option("--role", type=click.Choice(["member", "observer"]), default="member", show_default=True)
@with_session
def invite(session: Session, uses: int, expires: str, role: Any) -> None:
    """Print a link that lets others in. It is a secret; this is the only time that it is shown."""
    from node.cli.output import emit
    from node.cli.swarm import own_addresses
    from node.coordinator.at_rest import members_of
    from protocol.invite import MAX_BOOTSTRAP, Invite

    found = re.fullmatch(r"([1-9]\d{0,5})([mhd])", expires)
    if found is None:
        raise click.BadParameter(f"{expires!r} is no time like 30m, 12h or 7d", param_hint="--expires")
    home = session.node()
    manifest = coordinated(home)
    require_lead(session, home, manifest)
    settings = session.settings(home)
    addresses = (*own_addresses(home, session), *settings.config.network.bootstrap)[:MAX_BOOTSTRAP]
    until = time.time() + int(found[1]) * UNITS[found[2]]
    membership = members_of(home, manifest)
    token = membership.invite(uses=uses, expires=until, role=role)
    link = Invite(manifest.digest, addresses, home.swarm().psk, manifest.name, token).to_uri()
    if session.as_json:
        emit({"invite": link, "uses": uses, "expires": until, "role": role, "bootstrap": addresses})
    else:
        click.echo(link)


@coordinator.command()
@with_session
def members(session: Session) -> None:
    """List who takes part, and who was kicked."""
    from node.cli.output import clock, emit, table
    from node.coordinator.at_rest import members_of

    home = session.node()
    membership = members_of(home, coordinated(home))
    listed, kicked = membership.members(), membership.kicked()
    if session.as_json:
        emit(
            {
                "members": [{"peer": one.peer, "role": one.role, "since": one.since} for one in listed],
                "kicked": [{"peer": peer, "at": at, "reason": reason} for peer, at, reason in kicked],
            }
        )
        return
    rows: list[tuple[Any, ...]] = [(one.peer, one.role, clock(one.since), "") for one in listed]
    rows += [(peer, "kicked", clock(at), reason) for peer, at, reason in kicked]
    table(session, ["peer", "role", "since", "why"], rows, "Nobody yet; let others in: shoal coordinator invite")


@coordinator.command()
@click.argument("peer", type=PeerId(), metavar="PEER_ID")
@click.option("--reason", default="", help="for yourself; members are not told")
@click.option("--undo", is_flag=True, help="take a kick back: the peer may come in again, with a new invite")
@with_session
def kick(session: Session, peer: str, reason: str, undo: bool) -> None:
    """Take a member off the list; all members refuse it from then on, and the invite that it has lets nobody in."""
    from node.cli.output import emit
    from node.coordinator.at_rest import members_of

    home = session.node()
    manifest = coordinated(home)
    require_lead(session, home, manifest)
    membership, uses = members_of(home, manifest), 0
    if undo:
        membership.forgive(peer)
    else:
        uses = membership.kick(peer, reason.encode(errors="replace").decode()[:200])
    if session.as_json:
        emit({"peer": peer, "kicked": not undo, "uses_taken": uses})
        return
    said = "may come in again, with a new invite" if undo else "is kicked"
    if uses:
        said += f"; the invite that it came in by had {uses} uses left and has none now: make others a new one"
    click.echo(f"{peer} {said}")


@coordinator.command()
@with_session
def board(session: Session) -> None:
    """Print how members stand, by the coordinator's own scores. On any node of the swarm."""
    from node.cli.output import emit, table

    home = session.node()
    shown = shown_part(home, coordinated(home))["board"]
    if session.as_json:
        emit(shown)
        return
    standings = shown["standings"] if shown else []
    rows = [(one["peer"], one["mean"], one["best"], one["credit"]) for one in standings]
    table(
        session, ["peer", "held-out", "best", "credit"], rows, "No round is evaluated yet; see shoal coordinator epoch"
    )


@coordinator.command()
@with_session
def epoch(session: Session) -> None:
    """Print the present round (what it is, until when, its mix) and who leads. On any node of the swarm."""
    from node.cli.output import clock, emit, facts

    home = session.node()
    shown = shown_part(home, coordinated(home))
    if session.as_json:
        emit({name: shown[name] for name in ("leader", "coordinators", "members", "round", "faults")})
        return
    record = shown["round"] or {}
    told = {name: clock(record.get(name)) for name in ("opened", "closes", "answers_by")}
    facts(
        {
            "leader": shown["leader"],
            "members": shown["members"],
            "round": record.get("number"),
            "state": record.get("state"),
            **told,
            "mix": ", ".join(f"{name} {share:.0%}" for name, share in record.get("mix", {}).items()),
        }
    )
    for fault in shown["faults"]:
        click.echo(f"not followed: {fault['coordinator']}: {fault['reason']}: {fault['detail']}")


def coordinated(home: "Home") -> "Manifest":
    """The manifest of this home's swarm. Raises NotCoordinated."""
    manifest = home.manifest()
    if manifest is None:
        home.swarm()
        raise NotCoordinated("the manifest is not here yet ; run `shoal coordinator up` until it has come")
    if not manifest.coordinators:
        raise NotCoordinated(
            f"swarm {manifest.name!r} has no coordinator ; begin another one in a home of its own: "
            "shoal --home DIR coordinator init NAME"
        )
    return manifest


def shown_part(home: "Home", manifest: "Manifest") -> dict[str, Any]:
    from node.coordinator.at_rest import chain_of
    from node.view_coordinator import coordination

    return coordination(chain_of(home, manifest), most=None)


def require_lead(session: Session, home: "Home", manifest: "Manifest") -> None:
    """Raises NotLeading: members follow the list of whoever leads, and that is not this home."""
    from node.coordinator.at_rest import chain_of

    me, leader = session.unlocked().identity().peer_id, chain_of(home, manifest).leader
    if leader != me:
        raise NotLeading(f"{leader or 'nobody'} leads this swarm now, not this home's {me} ; do it there")
