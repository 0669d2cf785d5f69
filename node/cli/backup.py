"""`shoal backup` and `shoal restore`."""

import time
from pathlib import Path

import click

from node.cli.session import Command, Session, with_session


@click.command(cls=Command)
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--with-checkpoint", "checkpoint", is_flag=True, help="the newest checkpoint and its journal too (large)")
@click.option("--with-history", "history", is_flag=True, help="steps, experience and reputations too (node.db)")
@with_session
def backup(session: Session, file: Path, checkpoint: bool, history: bool) -> None:
    """Write identity, settings and swarm into a new FILE. The node may run meanwhile."""
    from node.backup import backup as write
    from node.cli.output import clock, emit, warn, working

    home = session.node()
    with working(session) as say:
        contents = write(home, file, checkpoint=checkpoint, history=history, clock=time.time, say=say)
    if session.as_json:
        emit({"file": str(file.absolute()), "peer_id": contents.peer_id, "members": sorted(contents.members)})
        return
    click.echo(f"Node {contents.peer_id} as of {clock(contents.made)} is in {file} ({file.stat().st_size >> 10} KB)")
    if not home.identity_is_sealed():
        warn(
            session,
            "its key is in there unencrypted: whoever has the file can be this node ; keep it as you keep passwords",
        )


@click.command(cls=Command)
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--force", is_flag=True, help="where there is a node already: move its files aside (never deleted)")
@with_session
def restore(session: Session, file: Path, force: bool) -> None:
    """Make this home the node that a backup FILE has. The node must be down."""
    from node.backup import restore as put_back
    from node.cli.output import clock, emit, warn, working

    home = session.home()
    with working(session) as say:
        contents, old = put_back(home, file, force=force, clock=time.time, say=say)
    if session.as_json:
        emit(
            {
                "home": str(home.path),
                "peer_id": contents.peer_id,
                "checkpoint": contents.checkpoint,
                "before": None if old is None else str(old),
            }
        )
        return
    what = "" if contents.checkpoint is None else f", with the checkpoint of step {contents.checkpoint}"
    click.echo(f"Node {contents.peer_id} as of {clock(contents.made)} is in {home.path}{what}")
    if old is not None:
        click.echo(f"What was there before is in {old}; delete it when you are sure")
    if home.coordinates():
        log = "" if "node.db" in contents.members else ", and its log is not in it"
        warn(
            session,
            f"this is a coordinator{log}: what it signed after the backup was made and what it signs now would prove "
            "it false ; start it only if there is no such thing",
        )
    click.echo(f"Never run two nodes with this identity at once. Next: {home.starting()}")
