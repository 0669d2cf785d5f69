"""What `shoal local` shows: a live table in a terminal, a line a node now and then elsewhere."""

import time
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from node.local.member import Member

PLAIN_SECONDS = 15.0
NARROW = 110
"""Columns below which a terminal gets a smaller table, and what does not fit into it as lines."""
COLUMNS = ("node", "state", "step", "reward", "since start", "held-out", "tokens/s", "own + foreign", "peers", "page")


class LiveTable:
    """A context manager; `show` may be called as often as one likes."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console()
        self._live = Live(console=self._console, auto_refresh=False) if self._console.is_terminal else None
        self._plain: dict[str, tuple[str, float]] = {}

    def __enter__(self) -> "LiveTable":
        if self._live:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._live:
            self._live.stop()

    def show(self, members: Sequence["Member"]) -> None:
        if self._live is None:
            self._show_plain(members)
            return
        sign_in = Text(f"sign in to a page: {members[0].home.command('open')}")
        if self._console.width < NARROW:
            self._live.update(Group(*narrow(members), sign_in, Text("Ctrl-C stops; make run goes on")), refresh=True)
            return
        table = Table(*COLUMNS[:-1], title="Shoal: a swarm on this machine", caption="Ctrl-C stops; make run goes on")
        for member in members:
            table.add_row(*(Text(cell) for cell in row(member)[:-1]))  # Text: what an error quotes is no markup
        # under the table, where no narrow column cuts an address or a path off
        pages = [Text(f"{member.name}  {page(member)}  {member.note}".rstrip()) for member in members]
        self._live.update(Group(table, *pages, sign_in), refresh=True)

    def _show_plain(self, members: Sequence["Member"]) -> None:
        """A line when a node's state, step or note changed, at most every PLAIN_SECONDS for steps."""
        now = time.monotonic()
        for member in members:
            cells = row(member)
            change, since = self._plain.get(member.name, ("", 0.0))
            sign = cells[1]
            if sign != change or now - since >= PLAIN_SECONDS:
                self._plain[member.name] = (sign, now)
                self._console.print(
                    in_words(cells),
                    soft_wrap=True,
                    highlight=False,
                    markup=False,
                )


SMALL = ("node", "state", "step", "reward", "held-out", "own + foreign", "peers")


def narrow(members: Sequence["Member"]) -> list[Table | Text]:
    """A table of numbers that fits 80 columns, and a line of words for each node."""
    table, lines = Table(*SMALL, box=None, pad_edge=False), list[Table | Text]()
    for member in members:
        cells = dict(zip(COLUMNS, row(member), strict=True))
        state, _, words = cells["state"].partition("  ")
        if member.note:
            state, words = str(member.status.get("state", "")), cells["state"]
        table.add_row(*(Text(state if name == "state" else cells[name]) for name in SMALL))
        speed = f"{cells['since start']} since start, {cells['tokens/s']} tokens/s" if member.status else ""
        lines.append(Text("  ".join(filter(None, (member.name, page(member), words, speed)))))
    return [table, *lines]


def in_words(cells: Sequence[str]) -> str:
    return "  ".join(f"{name} {cell}" for name, cell in zip(COLUMNS, cells, strict=True) if cell)


def row(member: "Member") -> tuple[str, ...]:
    """The cells of one node."""
    status = member.status
    if not status:
        return (member.name, member.note or "starting", *("" for _ in COLUMNS[2:]))
    state = status["state"]
    words = (
        f"{state}  {status['stage']} {status['stage_seconds']:.0f} s"
        if state == "TRAINING"
        else f"{state}  {status['reason']}"
    )
    return (
        member.name,
        member.note or words,
        str(status["step"]),
        number(status["reward"]),
        change(status["reward_start"], status["reward"]),
        f"{number(status['held_out_start'])} -> {number(status['held_out'])}",
        f"{status['tokens_per_second']:.0f}",
        f"{status['own_groups']} + {status['foreign_groups']}",
        str(status["peers"]),
        page(member),
    )


def page(member: "Member") -> str:
    """The address of the node's dashboard."""
    return f"http://127.0.0.1:{member.web_port}"


def number(value: Any) -> str:
    return "-" if value is None else f"{value:.2f}"


def change(start: float | None, now: float | None) -> str:
    return "-" if start is None or now is None else f"{now - start:+.2f}"
