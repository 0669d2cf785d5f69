"""`shoal init` and `shoal up`."""

import logging
import os
import signal
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import click

from node.cli.errors import INTERRUPTED
from node.cli.session import Command, Session, not_empty, with_session

if TYPE_CHECKING:
    from node.config import Config
    from node.home import Home
    from node.large.cluster_file import Cluster
    from node.large.planner import Placement
    from protocol.invite import Invite

log = logging.getLogger(__name__)

BROWSER_WAIT_SECONDS = 60.0


@click.command(cls=Command)
@click.option("--passphrase", is_flag=True, help="encrypt the identity; asks, or takes SHOAL_PASSPHRASE")
@with_session
def init(session: Session, passphrase: bool) -> None:
    """Make a node: identity, settings, API token. Keeps what is there."""
    from node.cli.output import emit, tell

    home = session.home()
    if passphrase and home.passphrase is None:
        home.passphrase = click.prompt("Passphrase", hide_input=True, confirmation_prompt=True, err=True)
    created = home.init()
    peer_id = session.unlocked().identity().peer_id if not created else home.identity().peer_id
    if session.as_json:
        emit({"created": created, "home": str(home.path), "peer_id": peer_id})
    elif created:
        tell(session, f"Node {peer_id} made in {home.path}\nNext: shoal up, or shoal up --join INVITE")
    else:
        click.echo(f"Node {peer_id} is in {home.path} already; nothing changed")


@click.command(cls=Command)
@click.option("--join", "invite", metavar="INVITE", callback=not_empty, help="join this swarm first (shoal:...)")
@click.option("--open", "open_browser", is_flag=True, help="open the dashboard in a browser")
@click.option("--steps", type=click.IntRange(min=1), help="stop when the model has done this many steps")
@click.option("--stay", is_flag=True, help="with --steps: keep serving peers afterwards")
@click.option(
    "--large",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="have Ray place trainer, engines and scorers as this cluster file says",
)
@click.option("--plan", is_flag=True, help="with --large: say where everything would go, and why; start nothing")
@with_session
def up(
    session: Session,
    invite: str | None,
    open_browser: bool,
    steps: int | None,
    stay: bool,
    large: Path | None,
    plan: bool,
) -> None:
    """Run the node here until Ctrl-C. A home that is empty is initialised first."""
    from node.home import NotInitialised
    from node.settings import load
    from protocol.invite import Invite

    if plan and large is None:
        raise click.UsageError("--plan is of a cluster file, and there is none; give --large FILE")
    cluster = None
    if large is not None:
        from node.large.cluster_file import overrides, read_cluster

        cluster = read_cluster(large)
        session.overrides |= overrides(cluster, session.overrides)
    if invite is not None:
        session.overrides["swarm.join"] = invite
    home = session.home()
    settings = load(home, session.overrides)
    link = settings.config.swarm.join
    invitation = Invite.parse(link) if link else None  # before anything is made for it
    fresh = False
    try:
        home.require()
    except NotInitialised:
        # no questions on the first start; `init` itself refuses where an identity has gone missing
        home.init()
        fresh = True
    session.start_logging(home.log_path)
    if fresh:
        log.info("New node %s in %s", home.identity().peer_id, home.path)
    home = session.unlocked()
    if cluster is not None and plan:
        show_plan(session, home, settings.config, cluster)
        return
    enter_swarm(home, invitation)
    if open_browser:
        threading.Thread(target=open_when_up, args=(home,), daemon=True).start()
    log.info("starting the node of %s", home.path)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, leave_at_once)  # until the daemon has handlers of its own

    with home.lock():  # before the imports, which take seconds: `shoal status` sees that a node is starting
        from web.server import check_port

        check_port(settings.config.web.host, settings.config.web.port)
        from node.daemon import run

        run(home, settings, steps=steps, stay=stay, as_json=session.as_json, cluster=cluster)


def show_plan(session: Session, home: "Home", config: "Config", cluster: "Cluster") -> None:
    """Where Ray would put the parts of a large node, and why. Raises RayFailed, ClusterFileError."""
    import asyncio
    from dataclasses import asdict

    from node.cli.output import emit, working
    from node.large.node import plan_large
    from node.large.ray_cluster import RayCluster

    async def planned() -> "Placement":
        ray = RayCluster(cluster)
        try:
            return (await plan_large(ray, config, home)).placement
        finally:
            await ray.close()

    with working(session) as say:
        say("asking Ray what machines there are")
        placement = asyncio.run(planned())
    if session.as_json:
        emit(asdict(placement))
        return
    click.echo(placement)
    for bundle in placement.bundles:
        shares = f", shares the GPUs of workers {', '.join(str(n + 1) for n in bundle.shares)}" if bundle.shares else ""
        click.echo(
            f"  {bundle.kind} {bundle.number + 1}: {bundle.host}, {bundle.cpus:g} CPUs, {bundle.gpus} GPUs{shares}"
        )


def leave_at_once(number: int, frame: object) -> NoReturn:
    """End the process before there is a daemon. Not by KeyboardInterrupt: raised amid an import it may be ignored."""
    os.write(2, b"shoal: stopped before training began; what was saved before is untouched\n")
    os._exit(INTERRUPTED)


def enter_swarm(home: "Home", invitation: "Invite | None") -> None:
    """Join the swarm of the invite, if one is given; else see that the home is in one, if need be of its own."""
    from node.home import NoSwarm
    from node.own_swarm import LEFT, enter, own_manifest

    if invitation is not None:
        with home.lock():
            left = enter(home, invitation)
        if left:
            log.warning(LEFT, left)
        return
    try:
        home.swarm()
    except NoSwarm:
        with home.lock():
            home.found(own_manifest(home, time.time()))


def open_when_up(home: "Home") -> None:
    """Wait for the daemon of this process to serve its page, then open it."""
    from node.cli.control import sign_in
    from node.client import DaemonUnreachable, connect

    deadline = time.monotonic() + BROWSER_WAIT_SECONDS
    while time.monotonic() < deadline:
        try:
            sign_in(connect(home), browser=True)
        except DaemonUnreachable:
            time.sleep(0.5)
        else:
            return
