"""Every error of the command line becomes an exit code and two lines: what is wrong, and what to do about it.

An error's own text is `<what> ; <fix>`, in one line.
"""

import json
import logging
import sys
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Literal

import click

FAILURE, USAGE, UNREACHABLE, NOT_INITIALISED, INTERRUPTED = 1, 2, 3, 4, 130

# by name: importing the classes would cost every call the modules they live in
EXIT_CODES = {
    "node.settings.ConfigError": USAGE,
    "node.offline.run.BadOrder": USAGE,
    "node.manifest_file.ManifestFileError": USAGE,
    "protocol.invite.InviteError": USAGE,
    "protocol.manifest.ManifestError": USAGE,
    "swarm.coordination.membership.NoSuchMember": USAGE,
    "node.client.DaemonUnreachable": UNREACHABLE,
    "node.home.NotInitialised": NOT_INITIALISED,
}
ROOMS = ("protocol.", "swarm.", "node.", "web.")


def judge(error: BaseException) -> tuple[int, str]:
    """(exit code, '<what> ; <fix>') of an error."""
    match error:
        case click.UsageError():
            where = error.ctx.command_path if error.ctx else "shoal"
            helps = isinstance(error, click.exceptions.NoArgsIsHelpError)  # its message is all of the help
            said = "no command is given" if helps else error.format_message().rstrip(".")
            return USAGE, f"{said} ; see `{where} --help`"
        case click.ClickException():
            return error.exit_code, error.format_message()
        case click.Abort() | KeyboardInterrupt():
            return INTERRUPTED, "interrupted"
    for kind in type(error).__mro__:
        code = EXIT_CODES.get(f"{kind.__module__}.{kind.__qualname__}")
        if code is not None:
            return code, str(error)
    if type(error).__module__.startswith(ROOMS):
        return FAILURE, str(error) or type(error).__name__
    if isinstance(error, OSError):
        name = f"{error.filename}: " if error.filename else ""
        return FAILURE, f"{name}{error.strerror or error} ; check the path, its owner and the space on its disk"
    return FAILURE, f"unexpected {type(error).__name__}: {error} ; run it again with -v and report the traceback"


def parted(text: str) -> tuple[str, str]:
    """(what is wrong, what to do) of a text."""
    what, _, fix = text.partition(" ; " if " ; " in text else "; ")
    return what, fix


def in_lines(kind: str, what: str, fix: str) -> str:
    """For a person; `kind`: Error or Warning."""
    return f"{kind}: {what}\nFix: {fix}" if fix else f"{kind}: {what}"


def logs_json() -> bool:
    """Whether this process logs JSON on stderr: then its last words are an entry of that log, for who collects it."""
    logs = sys.modules.get("node.logs")  # not imported for this: it would cost every call that fails
    return logs is not None and any(
        isinstance(handler.formatter, logs.JsonFormatter)
        for handler in logging.getLogger().handlers
        if not isinstance(handler, logging.FileHandler)
    )


class Reporting:
    """Around a whole call: prints an error in the form that was asked for and leaves with its exit code."""

    def __init__(self, as_json: bool, verbose: bool, hints: Callable[[str], str]) -> None:
        """`hints`: makes commands in a text those for the home that was named."""
        self.as_json, self.verbose, self._hints = as_json, verbose, hints

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None
    ) -> Literal[False]:
        if error is None or isinstance(error, SystemExit | GeneratorExit):
            return False
        if isinstance(error, click.exceptions.NoArgsIsHelpError) and not self.as_json:
            click.echo(error.format_message(), err=True)
            raise SystemExit(USAGE) from error
        code, text = judge(error)
        what, fix = parted(self._hints(" ".join(text.split())))
        if self.verbose and not isinstance(error, click.ClickException | click.Abort):
            traceback.print_exception(error, file=sys.stderr)
        if not self.as_json and logs_json():
            logging.getLogger("node.cli").error("%s", "; ".join(filter(None, (what, fix))))
        elif self.as_json:
            click.echo(json.dumps({"error": what, "fix": fix, "kind": type(error).__name__, "code": code}), err=True)
        else:
            click.echo(what if code == INTERRUPTED else in_lines("Error", what, fix), err=True)
        raise SystemExit(code) from error
