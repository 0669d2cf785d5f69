"""A whole swarm on this machine: processes with a home each, joined through an invite of the first one.

This process only supervises: it starts the nodes, restarts one that dies (with back-off, saying so), shows what
their APIs say, and stops them. Nothing of a node runs here.
"""

import json
import signal
import time
from collections.abc import Callable, Mapping, Sequence

from node.home import Home
from node.local.member import Member, start, stop, tend
from node.local.prepare import Swarm, prepare
from node.local.report import report_of
from node.local.table import LiveTable
from node.settings import ConfigError, Settings

OWN_OF_EACH = frozenset({"network.listen", "web.port", "node.name"})


def run(
    home: Home, settings: Settings, swarm: Swarm, *, steps: int | None, as_json: bool, overrides: Mapping[str, str]
) -> bool:
    """`shoal local`: returns whether it went on for as long as was asked.

    Homes are in `home`, whose settings are `settings`; the nodes get `overrides`, the flags. Raises ConfigError and
    LocalSwarmFailed.
    """
    _refuse_what_nodes_would_not_see(home, settings, swarm)
    members = prepare(home.path, swarm, overrides)
    flags = [f"{key}={value}" for key, value in overrides.items()]
    if as_json:
        supervise(members, steps, flags, show=lambda members: None)
        print(json.dumps(report_of(members)))  # noqa: T201 - the answer of the command
    else:
        with LiveTable() as table:
            supervise(members, steps, flags, show=table.show)
    return steps is None or _is_over(members)


def _refuse_what_nodes_would_not_see(home: Home, settings: Settings, swarm: Swarm) -> None:
    """Raises ConfigError for a setting that would be ignored, or that all nodes cannot share."""
    for key, source in settings.sources.items():
        if source == "config.toml":
            raise ConfigError(
                f"{home.config_path} sets {key}, but each node of `shoal local` reads the config.toml of its home ; "
                f"move it to {home.path / 'node-1' / home.config_path.name} and so on, or pass --set {key}=..."
            )
        if source != "default" and key == "swarm.join":
            raise ConfigError(
                f"{source} sets {key}, and the nodes of `shoal local` make a swarm of their own ; leave it out, or "
                "join with `shoal up`"
            )
        if source != "default" and key in OWN_OF_EACH and swarm.processes > 1:
            raise ConfigError(
                f"{source} sets {key}, which {swarm.processes} nodes on one machine cannot share ; leave it out: "
                "`shoal local` chooses it for each node and shows the address of its page"
            )


def supervise(
    members: Sequence[Member], steps: int | None, settings: Sequence[str], *, show: Callable[[Sequence[Member]], None]
) -> None:
    """Run the swarm until Ctrl-C or until every node that trains has done `steps`.

    `settings` are `section.key=value` for all of them. Raises LocalSwarmFailed.
    """
    count = len(members)
    # either way of asking is a KeyboardInterrupt, also where a shell started this in the background, SIGINT ignored
    before = {number: signal.signal(number, signal.default_int_handler) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        for member in members:
            start(member, count, steps, settings)
        while steps is None or not _is_over(members):
            for member in members:
                tend(member, count, steps, settings, time.monotonic())
            show(members)
            time.sleep(1.0)
    except KeyboardInterrupt:
        pass  # the usual way to end; what follows is the same as after the last step
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)  # an impatient second Ctrl-C must not leave nodes behind
        stop(members)
        for number, handler in before.items():
            signal.signal(number, handler)
    show(members)


def _is_over(members: Sequence[Member]) -> bool:
    """Whether all that have steps to do have done them."""
    return all(member.has_ended for member in members if member.trains)
