"""`shoal`: every command, in the order a person meets them."""

import contextlib
import logging
import os
import sys
from typing import NoReturn

import click

from node.cli.backup import backup, restore
from node.cli.bench import bench
from node.cli.checkpoint import checkpoint
from node.cli.completion import completion
from node.cli.config import config, show_id, show_paths
from node.cli.control import down, health, open_page, pause, resume
from node.cli.coordinator import coordinator
from node.cli.doctor import doctor
from node.cli.environments import env
from node.cli.errors import FAILURE
from node.cli.joining import join
from node.cli.local import local
from node.cli.logs import logs
from node.cli.models import model
from node.cli.report import report
from node.cli.session import Group, Session, global_options, with_session
from node.cli.status import groups, peers, status, steps
from node.cli.swarm import leave, swarm
from node.cli.train import train
from node.cli.up import init, up


@click.group(
    cls=Group,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Exit codes: 0 ok, 1 failure, 2 usage or settings, 3 no daemon, 4 not initialised, 130 interrupted.",
)
def shoal() -> None:
    """A node of a training swarm: your model learns from what it tries and from what its peers tried."""


# subcommands take the global options too, but only the root lists them
shoal.params = [*global_options(hidden=False)]


@shoal.command()
@with_session
def version(session: Session) -> None:
    """Print the versions of Shoal and of what it stands on."""
    import platform
    from importlib.metadata import version as installed

    from node.cli.output import emit, facts

    found = {"shoal": installed("shoal"), "python": platform.python_version()}
    found |= {name: installed(name) for name in ("torch", "transformers", "libp2p")}
    if session.as_json:
        emit(found)
    else:
        facts(found)


for command in (
    init, up, local, status, doctor, peers, groups, steps, pause, resume, down, open_page, logs,
    swarm, join, leave, coordinator, env, checkpoint, train, report, model, backup, restore, config, show_id,
    show_paths, health, bench, completion,
):  # fmt: skip
    shoal.add_command(command)
shoal.commands["version"] = shoal.commands.pop("version")  # last in the list


def main() -> NoReturn:
    """Entry point of the `shoal` script: runs the command and ends the process.

    At once, because taking apart what a command has imported (torch) takes seconds, and Ctrl-C should not.
    """
    try:
        shoal.main()
    except SystemExit as ending:
        code = ending.code if isinstance(ending.code, int) else FAILURE
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # whoever read it has gone
            stream.flush()
    os._exit(code)
