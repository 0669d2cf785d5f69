"""`shoal env`: the tasks this node can practise."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from node.cli.session import Group, Session, with_session

if TYPE_CHECKING:
    from node.interfaces import Environment
    from protocol.manifest import EnvironmentSpec


@click.group(cls=Group)
def env() -> None:
    """Environments: verifiable tasks with their scorers."""


@env.command(name="list")
@click.option("--swarm", "only_swarm", is_flag=True, help="only those of this node's swarm")
@with_session
def list_all(session: Session, only_swarm: bool) -> None:
    """List the environments this node has, and which of them its swarm practises."""
    from node.cli.output import emit, table
    from node.environments.known import available

    chosen = {(spec.name, spec.version): spec for spec in specs(session)}
    have = set(available())
    found = [
        {
            "name": name,
            "version": version,
            "installed": (name, version) in have,
            "weight": chosen[name, version].weight if (name, version) in chosen else 0,
        }
        for name, version in sorted(have | set(chosen))
        if not only_swarm or (name, version) in chosen
    ]
    if session.as_json:
        emit(found)
        return
    rows = [(entry["name"], entry["version"], entry["installed"], entry["weight"] or None) for entry in found]
    table(session, ["environment", "version", "installed", "weight in swarm"], rows, "None; see shoal swarm show")


@env.command()
@click.argument("name")
@click.option("--index", type=click.IntRange(min=0), default=0, show_default=True, help="which task to show")
@with_session
def show(session: Session, name: str, index: int) -> None:
    """Show an environment's settings and one of its tasks, as the model gets it."""
    from node.cli.output import emit, facts
    from node.logs import printable

    spec = spec_of(session, name)
    task = built(spec).task(0, index)
    if session.as_json:
        prompt = [{"role": message.role, "content": message.content} for message in task.messages]
        found = {"name": spec.name, "version": spec.version, "settings": spec.settings, "weight": spec.weight}
        emit({**found, "task": {"index": index, "prompt": prompt, "max_tokens": task.max_tokens}})
        return
    facts({"environment": spec.name, "version": spec.version, **spec.settings})
    for message in task.messages:
        click.echo(f"\n{message.role}")
        for line in message.content.split("\n"):
            click.echo(f"    {printable(line)}")


@env.command()
@click.argument("names", nargs=-1)
@with_session
def check(session: Session, names: tuple[str, ...]) -> int:
    """Check environments (default: the swarm's): gold answers score 1, prompts are in budget. Exit 1 on a problem."""
    from node.cli.output import emit
    from node.environments.known import EnvironmentUnknown, SettingsRefused

    problems: dict[str, list[str]] = {}
    for spec in [spec_of(session, name) for name in names] or specs(session):
        try:
            problems[spec.name] = list(built(spec).self_check())
        except (EnvironmentUnknown, SettingsRefused) as error:
            problems[spec.name] = [str(error)]
    if session.as_json:
        emit({"ok": not any(problems.values()), "problems": problems})
    else:
        for name, found in problems.items():
            click.echo(f"{name}: {'good' if not found else '; '.join(found)}")
    return 1 if any(problems.values()) else 0


def specs(session: Session) -> list[EnvironmentSpec]:
    """What this node's swarm practises; the embedded curriculum where there is no swarm yet."""
    from protocol.manifest import embedded_manifest

    manifest = session.home().manifest() or embedded_manifest("embedded", 0)
    return list(manifest.environments)


def spec_of(session: Session, name: str) -> EnvironmentSpec:
    """The swarm's settings of an environment, or the environment with its own defaults. Raises EnvironmentUnknown."""
    import difflib

    from node.environments.known import EnvironmentUnknown, available
    from protocol.manifest import EnvironmentSpec

    for spec in specs(session):
        if spec.name == name:
            return spec
    versions = dict(available().keys())
    if name not in versions:
        near = difflib.get_close_matches(name, versions, 1)
        hint = f"did you mean {near[0]}?" if near else "`shoal env list` shows what it has"
        raise EnvironmentUnknown(f"environment {name!r} is not installed ; {hint}")
    return EnvironmentSpec(name, versions[name], 1, {})


def built(spec: EnvironmentSpec) -> Environment:
    from node.environments.known import build

    return build(spec.name, spec.version, spec.settings)
