"""Commands that ask the running daemon to do something: down, pause, resume, open, health."""

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from node.cli.session import Command, Session, with_session

if TYPE_CHECKING:
    from node.client import Client
    from node.home import Home

STOP_SECONDS = 30.0


class DaemonStuck(Exception):
    """The daemon was asked to stop and did not."""


class NodeSupervised(Exception):
    """The daemon would not stay stopped."""


@click.command(cls=Command)
@with_session
def down(session: Session) -> None:
    """Stop the daemon in good order and wait until it is gone."""
    from node.cli.output import emit, working
    from node.supervised import how_to_end, supervisor

    home, client = session.node(), session.client()
    info = home.daemon()
    if info is not None and (supervising := supervisor(info.pid)) is not None:
        raise NodeSupervised(
            f"process {supervising} runs this node in a local swarm and would start it again ; "
            f"{how_to_end(supervising)}, or hold this one with `shoal pause`"
        )
    client.post("stop")
    started = time.monotonic()
    with working(session, only_terminal=True) as say:
        while (now := home.daemon()) is not None and info is not None and now.pid == info.pid:
            waited = time.monotonic() - started
            if waited > STOP_SECONDS:
                raise DaemonStuck(f"process {info.pid} still runs after {STOP_SECONDS:.0f} s ; see `shoal logs`")
            say(f"process {info.pid} is stopping ({waited:.0f} s)")
            time.sleep(0.1)
    said = farewell(home) or "what was saved before is untouched"
    if session.as_json:
        emit({"state": "STOPPED", "reason": said})
    else:
        click.echo(f"STOPPED  {said}; run {home.starting()} to go on")


def farewell(home: "Home") -> str | None:
    """What the last daemon said was saved when it stopped."""
    from node.history import History
    from swarm.database import StoreError

    try:
        history = History(home.database, time.time)
    except StoreError:  # a full disk, say: the node has stopped all the same
        return None
    try:
        return next((event["message"] for event in history.events(None, 1) if event["kind"] == "stop"), None)
    finally:
        history.close()


@click.command(cls=Command)
@click.option("--reason", default="asked for on the command line", help="shown in the status")
@with_session
def pause(session: Session, reason: str) -> None:
    """Stop training after the step in progress; the node stays in touch with its peers."""
    answer(session, session.client().post("pause", body={"reason": reason}))


@click.command(cls=Command)
@with_session
def resume(session: Session) -> None:
    """Train on after a pause; where quiet hours or the day's hours hold the node, in spite of them until they end."""
    answer(session, session.client().post("resume"))


def answer(session: Session, status: Mapping[str, Any]) -> None:
    """What has become of the node: one that has done its steps, say, cannot be paused."""
    from node.cli.output import emit, status_line, tell

    done = {name: status[name] for name in ("state", "reason", "next")}
    if session.as_json:
        emit(done)
    else:
        tell(session, status_line(done))


@click.command(name="open", cls=Command)
@click.option("--no-browser", is_flag=True, help="only print the link")
@with_session
def open_page(session: Session, no_browser: bool) -> None:
    """Open the dashboard in a browser, signed in by a one-time link (also printed)."""
    from node.cli.output import emit

    link = sign_in(session.client(), browser=not no_browser and not session.as_json)
    if session.as_json:
        emit({"url": link})
    else:
        click.echo(link)


def sign_in(client: "Client", browser: bool) -> str:
    """A link that signs one browser in, once; opened if asked for and there is a browser."""
    import webbrowser

    link: str = client.url + client.post("login")["path"]
    if browser:
        webbrowser.open(link)
    return link


@click.command(cls=Command)
@with_session
def health(session: Session) -> int:
    """Exit 0 if the daemon is ready and its last step is not too old, 1 if not. For health checks."""
    from node.cli.output import emit

    ready, reasons = session.client().ready()
    if session.as_json:
        emit({"ready": ready, "reasons": reasons})
    else:
        click.echo("ready" if ready else "not ready: " + "; ".join(reasons))
    return 0 if ready else 1
