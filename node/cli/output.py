"""How answers look: one JSON value, a rich table on a terminal, or aligned plain lines."""

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import Any

import click

from node.cli.errors import in_lines, parted
from node.cli.session import Session
from node.logs import printable


@contextmanager
def working(session: Session, *, only_terminal: bool = False) -> Iterator[Callable[[str], None]]:
    """Gives what says on stderr what takes its time: one line that changes on a terminal, lines elsewhere (unless
    `only_terminal`), nothing with --json.
    """
    terminal = sys.stderr.isatty()

    def say(text: str) -> None:
        if terminal:
            click.echo(f"\r\x1b[K{printable(text)}", err=True, nl=False)
        elif text and not only_terminal:
            click.echo(printable(text), err=True)

    if session.as_json:
        yield lambda text: None
        return
    try:
        yield say
    finally:
        say("")


def tell(session: Session, text: str) -> None:
    """Print words for a person, in which commands may be named."""
    click.echo(session.hints(text))


def warn(session: Session, text: str) -> None:
    """Print `<what> ; <fix>` on stderr."""
    click.echo(in_lines("Warning", *parted(session.hints(text))), err=True)


def emit(value: Any) -> None:
    """Print one JSON value."""
    click.echo(json.dumps(value, indent=2 if sys.stdout.isatty() else None))


def table(session: Session, columns: Sequence[str], rows: Sequence[Sequence[Any]], empty: str) -> None:
    """Print rows under column names, or `empty`, which says why there are none and what to do."""
    if not rows:
        tell(session, empty)
        return
    cells = [[cell(value) for value in row] for row in rows]
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        drawn = Table(*columns, box=None, pad_edge=False, header_style="bold")
        for row in cells:
            drawn.add_row(*(Text(text) for text in row))  # Text: peers' words are no markup
        Console(no_color=session.no_color or None, highlight=False).print(drawn)
        return
    widths = [max(len(line[i]) for line in [list(columns), *cells]) for i in range(len(columns))]
    for line in [list(columns), *cells]:
        click.echo("  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip())


def facts(pairs: Mapping[str, Any]) -> None:
    """Print names and values, one a line."""
    width = max(map(len, pairs), default=0)
    for name, value in pairs.items():
        click.echo(f"{name.ljust(width)}  {cell(value)}")


def cell(value: Any) -> str:
    if value is None or value in ("", (), []):
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list | tuple):
        return ", ".join(map(cell, value))
    return printable(str(value))


def clock(at: float | None) -> str:
    """Unix seconds as local time."""
    return "-" if at is None else datetime.fromtimestamp(at).astimezone().strftime("%m-%d %H:%M:%S")


def status_line(status: Mapping[str, Any]) -> str:
    """`WAITING  no peer reachable (3 tried), training alone; run ...`: state, reason, next action."""
    parts = [str(status[key]) for key in ("reason", "next") if status.get(key)]
    return printable(f"{status['state']}  {'; '.join(parts)}".rstrip())


def short(identifier: str | None) -> str:
    """A peer id or digest, as long as it takes to tell them apart."""
    if not identifier:
        return "-"
    return identifier[-8:] if identifier.startswith("12D3KooW") else identifier[:12]
