"""`shoal model`: the embedded model."""

import click

from node.cli.session import Group, Session, with_session


@click.group(cls=Group)
def model() -> None:
    """The model this machine starts from."""


@model.command()
@with_session
def prepare(session: Session) -> None:
    """Convert the embedded model once, so that the first start does not have to (for images and installers)."""
    from node.cli.output import emit
    from node.home import models_dir
    from node.models import embedded_directory

    directory = embedded_directory(models_dir())
    if session.as_json:
        emit({"model": str(directory)})
    else:
        click.echo(str(directory))
