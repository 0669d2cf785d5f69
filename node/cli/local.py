"""`shoal local`: a whole swarm on this machine."""

import click

from node.cli.errors import INTERRUPTED
from node.cli.session import Command, Session, with_session


@click.command(cls=Command)
@click.option("--nodes", type=click.IntRange(1, 64), default=2, show_default=True, help="node processes")
@click.option("--steps", type=click.IntRange(min=1), help="end when every node has done this many steps")
@with_session
def local(session: Session, nodes: int, steps: int | None) -> int:
    """Run a swarm of several node processes here, each with its own home, joined over loopback."""
    home = session.home()
    settings = session.settings(home)  # a wrong setting is told here once, and not by every node
    session.start_logging(None)

    from node.local import run

    done = run(home, settings, nodes=nodes, steps=steps, as_json=session.as_json, overrides=session.overrides)
    return 0 if done else INTERRUPTED
