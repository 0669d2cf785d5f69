"""What the global options say, and click classes that take them before and after the subcommand.

Only click and the standard library here: `shoal --help` must not wait for pydantic or torch.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from node.cli.errors import Reporting

if TYPE_CHECKING:
    from collections.abc import Callable

    from node.client import Client
    from node.home import Home
    from node.settings import Settings


@dataclass(slots=True)
class Session:
    """Global options of one call of `shoal`."""

    home_path: str | None = None
    as_json: bool = False
    no_color: bool = False
    verbose: bool = False
    log_format: str = "text"
    overrides: dict[str, str] = field(default_factory=dict)
    """Flags that are settings: 'section.key' -> text."""

    def home(self) -> Home:
        from node.home import Home

        return Home(self.home_path)

    def hints(self, text: str) -> str:
        """Words for a person, in which every command is one for this home."""
        return text if self.home_path is None else self.home().hints(text)

    def node(self) -> Home:
        """The home, initialised. Raises NotInitialised."""
        home = self.home()
        home.require()
        return home

    def unlocked(self) -> Home:
        """The home with the passphrase of its identity, asked for where there is a person to ask."""
        home = self.node()
        if home.passphrase is None and home.identity_is_sealed() and sys.stdin.isatty():
            home.passphrase = click.prompt("Passphrase of the identity", hide_input=True, err=True)
        return home

    def settings(self, home: Home) -> Settings:
        from node.settings import load

        return load(home, self.overrides)

    def client(self) -> Client:
        from node.client import connect

        return connect(self.node())

    def start_logging(self, file: Path | None) -> None:
        from node.logs import set_up

        set_up("json" if self.log_format == "json" else "text", self.verbose, file)


def remember(ctx: click.Context, param: click.Parameter, value: Any) -> None:
    session = ctx.ensure_object(Session)
    if value not in (None, False, ()):
        setattr(session, str(param.name), value)


def remember_settings(ctx: click.Context, param: click.Parameter, value: tuple[str, ...]) -> None:
    session = ctx.ensure_object(Session)
    for pair in value:
        key, sign, text = pair.partition("=")
        if not sign:
            raise click.BadParameter(f"{pair!r} is not section.key=value", ctx, param)
        session.overrides[key.strip()] = text


def global_options(hidden: bool) -> list[click.Parameter]:
    def option(*names: str, hidden: bool = hidden, **attributes: Any) -> click.Option:
        attributes.setdefault("callback", remember)
        return click.Option(names, expose_value=False, hidden=hidden, **attributes)

    return [
        option("--home", "home_path", metavar="DIR", help="the node's directory [SHOAL_HOME]"),
        option("--json", "as_json", is_flag=True, hidden=False, help="print one JSON value"),
        option("--set", "overrides", multiple=True, metavar="KEY=VALUE", callback=remember_settings,
               help="a setting for this call, as section.key=value; repeatable"),
        option("--no-color", "no_color", is_flag=True, help="no colours"),
        option("-v", "--verbose", "verbose", is_flag=True, help="debug logs, and tracebacks of errors"),
        option("--log-format", "log_format", type=click.Choice(["text", "json"]), envvar="SHOAL_LOG_FORMAT",
               help="form of the log on stderr [SHOAL_LOG_FORMAT]"),
    ]  # fmt: skip


class Command(click.Command):
    def __init__(self, *args: Any, **attributes: Any) -> None:
        super().__init__(*args, **attributes)
        self.params += global_options(hidden=True)

    def get_short_help_str(self, limit: int = 88) -> str:
        return super().get_short_help_str(limit)


class Group(click.Group):
    """Commands in the order they were added; `main` turns every error into one line and an exit code."""

    command_class = Command

    def __init__(self, *args: Any, **attributes: Any) -> None:
        super().__init__(*args, **attributes)
        self.params += global_options(hidden=True)

    def get_short_help_str(self, limit: int = 88) -> str:
        return super().get_short_help_str(limit)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def main(self, args: Any = None, prog_name: str | None = None, **extra: Any) -> Any:  # type: ignore[override]
        args = sys.argv[1:] if args is None else list(args)
        extra.pop("standalone_mode", None)
        session = extra.setdefault("obj", Session())
        with Reporting("--json" in args, bool({"-v", "--verbose"} & set(args)), session.hints):
            code = super().main(args, prog_name or "shoal", standalone_mode=False, **extra)
            sys.exit(code if isinstance(code, int) else 0)


Group.group_class = Group

with_session = click.make_pass_decorator(Session, ensure=True)


def swarm_name(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    """Callback of a new swarm's name, if there is one."""
    from protocol.manifest import MAX_NAME

    if value is None:
        return None
    if not 1 <= len(value) <= MAX_NAME or not value.isprintable():
        given = f"{value[:20]!r} of {len(value)} characters" if value else "it is empty"
        raise click.BadParameter(f"{given}; give a swarm 1 to {MAX_NAME} printable characters", context, parameter)
    return value


def new_swarm(command: Callable[..., Any]) -> Callable[..., Any]:
    """The swarm that a command begins: `name` and `file`, its manifest or None."""
    named = click.argument("name", callback=swarm_name)
    described = click.option(
        "--manifest",
        "file",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        help="TOML with environments, caps and epochs; without it: the embedded curriculum",
    )
    return named(described(command))


def not_empty(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    """Callback of an invite's option: an empty one is a variable that was not set, and no wish to do without."""
    if value == "":
        raise click.BadParameter("is empty; give an invite (shoal:...), or leave the option out", context, parameter)
    return value
