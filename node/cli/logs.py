"""`shoal logs`."""

import click

from node.cli.session import Command, Session, with_session


@click.command(cls=Command)
@click.option("-f", "--follow", "following", is_flag=True, help="go on as new lines come")
@click.option(
    "-n", "--lines", type=click.IntRange(0, 100_000), default=100, show_default=True, help="how many to begin with"
)
@with_session
def logs(session: Session, following: bool, lines: int) -> None:
    """Print the node's log. With --json a list of entries; with -f too, one entry a line."""
    import json

    from node.cli.output import emit
    from node.logs import as_text, follow, parse, tail

    file = session.node().log_path
    if not following:
        entries = [parse(line) for line in tail(file, lines)]
        if session.as_json:
            emit(entries)
        else:
            for entry in entries:
                click.echo(as_text(entry))
        return
    for line in follow(file, lines):
        click.echo(json.dumps(parse(line)) if session.as_json else as_text(parse(line)))
