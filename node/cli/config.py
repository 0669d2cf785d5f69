"""`shoal config`, `shoal id`, `shoal paths`."""

import click

from node.cli.session import Command, Group, Session, with_session


@click.group(cls=Group)
def config() -> None:
    """Settings: their values, where each comes from, and how to change them."""


@config.command()
@click.argument("key", required=False)
@with_session
def show(session: Session, key: str | None) -> None:
    """List the settings, or one section or key of them."""
    from node.cli.output import emit, table
    from node.settings import ConfigError, nearest, public_values

    values = public_values(session.settings(session.home()))
    if key is not None:
        values = {name: entry for name, entry in values.items() if name == key or name.startswith(f"{key}.")}
        if not values:
            near = nearest(key)
            raise ConfigError(
                f"unknown key {key} ; " + (f"did you mean {near}?" if near else "see `shoal config show`")
            )
    if session.as_json:
        emit(values)
        return
    rows = [(name, entry["value"], entry["source"], entry["help"]) for name, entry in values.items()]
    table(session, ["key", "value", "source", "what it is"], rows, "")


@config.command(name="set")
@click.argument("key")
@click.argument("value")
@with_session
def set_key(session: Session, key: str, value: str) -> None:
    """Write a setting into config.toml (checked first, comments kept). Takes effect at the next start."""
    from node.cli.output import cell, emit
    from node.settings import SECRET, set_value

    home = session.node()
    written = set_value(home, key, value)
    shown = "(hidden)" if key in SECRET else written
    if session.as_json:
        emit({"key": key, "value": shown, "file": str(home.config_path)})
        return
    click.echo(f"{key} = {cell(shown)} in {home.config_path}")
    if home.daemon() is not None:
        click.echo("shoal: the running daemon goes on with what it had ; shoal down, then shoal up", err=True)
    source = session.settings(home).sources[key]
    if source != "config.toml":
        click.echo(f"shoal: {source} overrides it ; unset that for the file to count", err=True)


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
