"""`shoal local`: a whole swarm on this machine."""

from pathlib import Path

import click

from node.cli.errors import INTERRUPTED
from node.cli.session import Command, Session, with_session


@click.command(cls=Command)
@click.option("--nodes", type=click.IntRange(0, 64), default=2, show_default=True, help="node processes")
@click.option("--steps", type=click.IntRange(min=1), help="end when every node that trains has done this many steps")
@click.option("--coordinator", is_flag=True, help="a coordinator founds the swarm, lets the nodes in and scores them")
@click.option(
    "--large",
    type=click.IntRange(0, 8),
    default=0,
    show_default=True,
    help="nodes besides, each with a trainer of two processes; the others follow their policy",
)
@click.option(
    "--others",
    type=click.IntRange(0, 64),
    help="of the nodes, the last so many train another model; by default 1 with --large, where --nodes is 2 or more",
)
@click.option(
    "--other-model",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    metavar="DIR",
    help="which; without it: the embedded one without two of its layers",
)
@with_session
def local(
    session: Session,
    nodes: int,
    steps: int | None,
    coordinator: bool,
    large: int,
    others: int | None,
    other_model: Path | None,
) -> int:
    """Run a swarm of several node processes here, each with its own home, joined over loopback."""
    if others is None:
        others = 1 if large and nodes >= 2 else 0
    if nodes + large < 1:
        raise click.UsageError("--nodes 0 leaves nobody to train; give --large 1, or --nodes 1 and more")
    if others > nodes:
        raise click.UsageError(f"--others {others} is more than --nodes {nodes}; give at most {nodes}")
    if other_model is not None and not others:
        raise click.UsageError("--other-model is for --others; give --others 1")
    home = session.home()
    settings = session.settings(home)  # a wrong setting is told here once, and not by every node
    session.start_logging(None)

    from node.local.prepare import Swarm
    from node.local.supervise import run

    model = str(other_model.resolve()) if other_model else ""
    swarm = Swarm(nodes, coordinator, large, others, model)
    done = run(home, settings, swarm, steps=steps, as_json=session.as_json, overrides=session.overrides)
    return 0 if done else INTERRUPTED
