"""`shoal bench`: measure this machine against the peers of the field."""

from collections.abc import Iterator, Mapping
from typing import Any

import click

from node.cli.session import Command, Session, with_session

NAMES = (
    "step",
    "rollout",
    "exchange",
    "scorer",
    "train",
    "memory",
    "routing",
    "scheduler",
    "drafting",
    "coordinator",
    "members",
    "policy",
    "soak",
)


@click.command(cls=Command)
@click.argument("name", type=click.Choice(NAMES))
@click.option(
    "--threads", type=click.IntRange(1, 1024), default=1, show_default=True, help="torch threads of each side"
)
@click.option("--minutes", type=click.FloatRange(1, 10_000), help="how long; only of soak (default 120)")
@with_session
def bench(session: Session, name: str, threads: int, minutes: float | None) -> None:
    """Run a benchmark.

    `step` against TRL, `rollout` against HF generate, `exchange` over libp2p, `scorer`: isolated scoring, `train`:
    prefix merging against plain packing, `memory`: training all weights or adapters, `routing`: rollout and training of
    a mixture of experts, with routing replay and without, `scheduler`: rollout policies on simulated engines,
    `drafting`: sampling with guesses at next tokens and without, `coordinator`: what a member costs a coordinator, with
    1,000 of them simulated, `members`: the same with 32 as processes, `policy`: versions of a policy from a leader to a
    follower, `soak`: two nodes left on, one ended every 10 minutes.
    """
    if minutes is not None and name != "soak":
        raise click.UsageError(f"--minutes is for soak; {name} ends by itself")
    session.start_logging(None)

    from node.bench import run
    from node.cli.output import emit, facts, table

    result = run(name, threads=threads, **({} if minutes is None else {"minutes": minutes}))
    if session.as_json:
        emit(result)
        return
    facts(dict(_flat(result)))
    for rows in result.values():
        if isinstance(rows, list):  # what the benchmark compares, case by case
            click.echo()
            table(session, list(rows[0]), [list(row.values()) for row in rows], "")


def _flat(result: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys and plain values; lists of single laps are left to --json."""
    for key, value in result.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{above}{key}.")
        elif not isinstance(value, list):
            yield above + key, value
