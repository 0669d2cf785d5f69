"""`shoal report`."""

from pathlib import Path

import click

from node.cli.session import Command, Session, with_session


@click.command(cls=Command)
@click.argument("run", type=click.Path(path_type=Path), required=False)
@click.option(
    "-o", "--output", type=click.Path(dir_okay=False, path_type=Path), default="shoal-report.html", show_default=True
)
@with_session
def report(session: Session, run: Path | None, output: Path) -> None:
    """Write one HTML page about a run: reward, held-out score, loss, exchange, settings, peers.

    RUN is a home, or the directory of a `shoal local` with its nodes; without it, this node's home. The node may run:
    its database is only read. The page loads nothing from elsewhere.
    """
    from node.cli.output import emit, working
    from node.disk import write_atomic
    from node.report import ReportError, read_run
    from node.report_page import page

    with working(session) as say:
        say("reading the history")
        nodes = read_run(run if run is not None else session.node().path)
        say(f"drawing {sum(len(node.steps) for node in nodes)} steps")
        content = page(nodes).encode()
    try:
        write_atomic(output, content)
    except OSError as error:  # which names the file that is written aside
        raise ReportError(f"{output} cannot be written ({error.strerror}) ; give another file: -o FILE") from error
    if session.as_json:
        emit({"file": str(output.absolute()), "nodes": [node.name for node in nodes], "bytes": len(content)})
    else:
        click.echo(
            f"{output} has {', '.join(node.name for node in nodes)} ({len(content) >> 10} KB); open it in a browser"
        )
