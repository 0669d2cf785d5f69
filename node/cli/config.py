"""`shoal config`, `shoal id`, `shoal paths`."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from node.cli.session import Command, Group, Session, with_session

if TYPE_CHECKING:
    from node.home import Home


@click.group(cls=Group)
def config() -> None:
    """Settings: their values, where each comes from, and how to change them."""


@config.command()
@click.argument("key", required=False)
@with_session
def show(session: Session, key: str | None) -> None:
    """List the settings, or one section or key of them."""
    from node.cli.output import emit, table
    from node.config import Config
    from node.settings import ConfigError, nearest, public_values

    values = public_values(session.settings(session.home()))
    if key is not None:
        values = {name: entry for name, entry in values.items() if name == key or name.startswith(f"{key}.")}
        if not values:
            near = nearest(key)
            meant = f"did you mean {near}? " if near else ""
            raise ConfigError(
                f"there is no setting or section {key} ; {meant}Sections: {', '.join(Config.model_fields)}"
            )
    if session.as_json:
        emit(values)
        return
    rows = [(name, entry["value"], entry["source"], explained(entry)) for name, entry in values.items()]
    table(session, ["key", "value", "source", "what it is"], rows, "")


def explained(entry: Mapping[str, Any]) -> str:
    """What a setting is, and what there is to choose from."""
    return f"{entry['help']} ({' | '.join(entry['choices'])})" if entry["choices"] else str(entry["help"])


@config.command(name="set", context_settings={"ignore_unknown_options": True})  # a value may be -5
@click.argument("key")
@click.argument("value")
@with_session
def set_key(session: Session, key: str, value: str) -> None:
    """Write a setting into config.toml (checked first, comments kept). A running node takes it up where it can."""
    from node.cli.output import cell, emit, warn
    from node.settings import set_value, shown

    home = session.node()
    done, trouble = by_daemon(session, home, key, value) if home.daemon() is not None else (None, "")
    if done is None:
        written = shown(key, set_value(home, key, value))
    else:
        entry = done["config"][key]
        written = entry.get("pending", entry["value"])
        if done["restart"]:
            held = ", ".join(done["restart"])
            trouble = f"the running node takes up {held} at its next start ; {done['restart_by']}"
    if session.as_json:
        running = {name: done[name] for name in ("applied", "restart", "restart_by")} if done is not None else {}
        emit({"key": key, "value": written, "file": str(home.config_path), **running})
    else:
        now = ", in force now" if done is not None and key in done["applied"] else ""
        click.echo(f"{key} = {cell(written)} in {home.config_path}{now}")
    source = session.settings(home).sources[key]
    if not trouble and source != "config.toml":
        trouble = f"{source} overrides it ; unset that for the file to count"
    if trouble:
        warn(session, trouble)


def by_daemon(session: Session, home: "Home", key: str, value: str) -> tuple[Mapping[str, Any] | None, str]:
    """What the running daemon made of a change; None and what to tell where it is left to write the file.

    Raises ConfigError.
    """
    from node.client import DaemonUnreachable, RequestRefused, connect
    from node.settings import ConfigError, check_keys
    from node.supervised import how_to_restart

    check_keys([key], "argument KEY")
    try:
        return connect(home).post("config", body={key: value}), ""
    except RequestRefused as refused:
        if refused.status == 400:
            raise ConfigError(str(refused)) from refused
        if refused.status == 409:
            return None, str(refused)
    except DaemonUnreachable:
        pass  # the file is what the next start reads in any case
    info = home.daemon()
    return None, f"the running daemon goes on with what it had ; {how_to_restart(info.pid if info else None)}"


@click.command(name="id", cls=Command)
@with_session
def show_id(session: Session) -> None:
    """Print this node's peer id."""
    from node.cli.output import emit

    peer_id = session.unlocked().identity().peer_id
    if session.as_json:
        emit({"peer_id": peer_id})
    else:
        click.echo(peer_id)


@click.command(name="paths", cls=Command)
@with_session
def show_paths(session: Session) -> None:
    """Print where this node keeps its files."""
    from node.cli.output import emit, facts
    from node.home import models_dir

    home = session.home()
    found = {
        "home": home.path,
        "config": home.config_path,
        "identity": home.identity_path,
        "database": home.database,
        "checkpoints": home.checkpoints,
        "log": home.log_path,
        "models": models_dir(),
    }
    if session.as_json:
        emit({name: str(path) for name, path in found.items()})
    else:
        facts(found)
