"""The `shoal` command."""

from node.cli.app import main

__all__ = ["main"]
