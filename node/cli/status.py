"""What the node does: status, peers, groups, steps."""

import json
import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from node.cli.session import Command, Session, with_session

if TYPE_CHECKING:
    from node.client import DaemonUnreachable
    from node.home import Home

WATCH_SECONDS = 2.0


@click.command(cls=Command)
@click.option("--watch", is_flag=True, help="go on, every two seconds (with --json: one value a line)")
@with_session
def status(session: Session, watch: bool) -> None:
    """Say what the node does, why, and what to do about it."""
    from node.cli.output import emit, facts, status_line, tell
    from node.client import DaemonUnreachable

    def ask() -> Any:
        try:
            return session.client().get("status")
        except DaemonUnreachable as unreachable:
            raise DaemonUnreachable(with_last_words(session.node(), str(unreachable))) from unreachable

    now = ask()
    if not watch:
        if session.as_json:
            emit(now)
        else:
            tell(session, status_line(now))
            facts(overview(now))
        return
    terminal = sys.stdout.isatty() and not session.as_json
    while True:
        if isinstance(now, DaemonUnreachable):
            away(session, now, terminal)
        elif session.as_json:
            click.echo(json.dumps(now))
        elif terminal:
            click.clear()
            tell(session, status_line(now))
            facts(overview(now))
        else:
            reward = "-" if now["reward"] is None else f"{now['reward']:.3f}"
            tell(session, f"{status_line(now)}  step {now['step']}  reward {reward}  peers {now['peers']}")
        time.sleep(WATCH_SECONDS)
        try:
            now = ask()
        except DaemonUnreachable as unreachable:  # a node that restarts: just when somebody watches
            now = unreachable


def away(session: Session, unreachable: "DaemonUnreachable", terminal: bool) -> None:
    """In place of a status: what is wrong, and what to do about it where the node does not come back."""
    from node.cli.errors import parted
    from node.cli.output import tell

    what, fix = parted(str(unreachable))
    if session.as_json:
        click.echo(json.dumps({"error": what, "fix": session.hints(fix)}))
        return
    if terminal:
        click.clear()
    tell(session, f"{what}; {fix}")


def with_last_words(home: "Home", what: str) -> str:
    """What there is to say of an unreachable daemon, and why the last one is gone where its home knows that."""
    from node.cli.output import clock
    from node.history import History
    from swarm.database import StoreError

    if home.daemon() is not None or home.holder() is not None or not home.database.exists():
        return what
    try:
        history = History(home.database, time.time)
    except StoreError:
        return what
    # a daemon that failed says so, and then what is saved
    failed = [event for event in history.events(None, 2) if event["kind"] == "failed"]
    history.close()
    if home.daemon_path.exists():
        words = "the last one was killed"
    elif failed:
        words = f"the last one failed at {clock(failed[0]['at'])}: {failed[0]['message'].replace(' ; ', '; ')}"
    else:
        return what
    problem, _, fix = what.partition(" ; ")
    return f"{problem}, {words} ; {fix}"


def overview(now: Mapping[str, Any]) -> dict[str, Any]:
    """The rest of a status for people."""
    groups = now["groups"]
    trained = now["reward"] is not None
    held_out = ""
    if now["held_out_steps"]:
        first, latest = now["held_out_steps"]
        held_out = f"{number(now['held_out'])} at step {latest}"
        held_out += f" ({number(now['held_out_start'])} at step {first})" if latest > first else ""
    parts = ", ".join(f"{kind} {held / 2**20:.0f}" for kind, held in now["memory"].items() if held)
    stage = f"{now['stage']}{counted(now)} for {now['stage_seconds']:.0f} s" if now.get("stage") else None
    rejected = ", ".join(f"{count} {reason}" for reason, count in sorted(groups.get("rejected", {}).items()))
    return {
        "node": f"{now['name']} ({now['peer_id']})",
        "swarm": now["swarm"],
        "model": now["model"],
        "engine": now.get("engine") or None,
        "step": now["step"],
        "policy": None if now.get("policy_version") is None else f"version {now['policy_version']}",
        "stage": stage,
        "reward": f"{number(now['reward'])} (first step {number(now['reward_start'])})" if trained else None,
        "held-out": held_out or None,
        "tokens/s": now["tokens_per_second"] if trained else None,
        "last step": f"{now['own_groups']} own + {now['foreign_groups']} foreign groups" if trained else None,
        "peers": now["peers"],
        "groups": f"{groups.get('published', 0)} published, {groups.get('fetched', 0)} fetched, "
        f"{groups.get('admitted', 0)} admitted since the start; {groups.get('trained_foreign', 0)} trained on in all",
        "rejected": rejected or "none",
        "memory": f"{now['rss_mb']:.0f} MB (peak {now['peak_rss_mb']:.0f} MB{'; ' if parts else ''}{parts})",
    }


def counted(now: Mapping[str, Any]) -> str:
    """How far the stage is, where it is made of parts."""
    count = now.get("stage_count")
    return f" {count[0]} of {count[1]}" if count else ""


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


@click.command(cls=Command)
@with_session
def peers(session: Session) -> None:
    """List the peers met, those seen last first, with what was thought of their groups."""
    from node.cli.output import clock, emit, table

    found = session.client().get("peers", limit=500)["peers"]
    if session.as_json:
        emit(found)
        return
    rows = [
        (
            peer["peer_id"], peer["connected"], peer["model"], peer["reputation"], peer["published"], peer["admitted"],
            peer["trained"], peer["followed"],
            sum(peer["rejected"].values()) if isinstance(peer["rejected"], dict) else peer["rejected"],
            clock(peer["last_seen"]),
        )
        for peer in found
    ]  # fmt: skip
    columns = [
        "peer",
        "connected",
        "model",
        "reputation",
        "published",
        "admitted",
        "trained on",
        "as follower",
        "rejected",
        "last seen",
    ]
    table(
        session, columns, rows, "No peer met yet; share an invite (shoal swarm invite) or join one (shoal join INVITE)"
    )


@click.command(cls=Command)
@click.argument("group_id", metavar="[ID]", required=False)
@click.option(
    "-n", "--limit", type=click.IntRange(1, 500), default=20, show_default=True, help="how many, newest first"
)
@with_session
def groups(session: Session, group_id: str | None, limit: int) -> None:
    """List rollout groups with their verdicts, or show one whole."""
    from node.cli.output import clock, emit, short, table

    if group_id is not None:
        group = session.client().get("groups", group_id)
        if session.as_json:
            emit(group)
        else:
            show_group(group)
        return
    found = session.client().get("groups", limit=limit)
    if session.as_json:
        emit(found)
        return
    rows = [
        (
            short(group["id"]), group["origin"], short(group["producer"]), group["environment"], group["epoch"],
            mean(group["rewards"]), group["verdict"], group["detail"], clock(group["at"]),
        )
        for group in found
    ]  # fmt: skip
    columns = ["id", "origin", "producer", "environment", "epoch", "reward", "verdict", "detail", "at"]
    table(session, columns, rows, "No groups yet; see shoal status")


def mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def show_group(group: Mapping[str, Any]) -> None:
    """One group for people. Peers' text is shown line by line, with nothing in it that a terminal obeys."""
    from node.cli.output import clock, facts
    from node.logs import printable

    shown = {key: group[key] for key in ("id", "origin", "producer", "environment", "epoch", "verdict", "detail")}
    facts({**shown, "at": clock(group["at"])})
    parts = [(message["role"], message["content"]) for message in group["prompt"]]
    parts = parts or [("prompt", "(the scorer could not regenerate it: see shoal logs)")]
    parts += [
        (
            f"completion {i}  reward {number(answer['reward'])}  {answer['tokens']} tokens, {answer['finish']}",
            answer["text"],
        )
        for i, answer in enumerate(group["completions"])
    ]
    for title, text in parts:
        click.echo(f"\n{printable(title)}")
        for line in text.split("\n"):
            click.echo(f"    {printable(line)}")


@click.command(cls=Command)
@click.option("-n", "--limit", type=click.IntRange(1, 10_000), default=20, show_default=True, help="the last so many")
@with_session
def steps(session: Session, limit: int) -> None:
    """List the last training steps, of a node that is down too."""
    from node.cli.output import emit, table
    from node.client import DaemonUnreachable, connect

    home = session.node()
    try:
        client = connect(home)
        found = client.get("steps", after=max(0, client.get("status")["step"] - limit), limit=limit)
    except DaemonUnreachable:
        if not home.database.exists():
            raise
        found = last_steps(home, limit)
    if session.as_json:
        emit(found)
        return
    columns = ["step", "reward", "loss", "grad_norm", "own_groups", "foreign_groups", "tokens_per_second"]
    columns += ["prepare_seconds", "update_seconds"]
    rows = [[step.get(name) for name in columns] for step in found]
    table(session, [name.replace("_", " ") for name in columns], rows, "No step done yet; see shoal status")


def last_steps(home: "Home", limit: int) -> list[dict[str, Any]]:
    """The last steps as the database has them, oldest first."""
    from node.history import History

    history = History(home.database, time.time)
    try:
        last = history.last_step()
        return [] if last is None else history.steps(max(0, last["step"] - limit), limit)
    finally:
        history.close()
