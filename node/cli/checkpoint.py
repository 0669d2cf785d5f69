"""`shoal checkpoint`: what was saved, as a model directory for elsewhere, and how good it is."""

import click

from node.cli.session import Group


@click.group(cls=Group)
def checkpoint() -> None:
    """Saved steps of this node's model."""
