"""`shoal doctor`."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from node.cli.errors import FAILURE
from node.cli.session import Command, Session, with_session

if TYPE_CHECKING:
    from node.doctor.finding import Finding

MARKS = {"ok": "green", "warn": "yellow", "fail": "red"}


@click.command(cls=Command)
@click.option(
    "--bundle",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE.zip",
    help="write a support bundle too: this report, status, settings, versions, end of the log; secrets left out",
)
@with_session
def doctor(session: Session, bundle: Path | None) -> int:
    """Check machine, home and network: ok, warn or fail, with the fix. Exit 0 when nothing fails."""
    from dataclasses import asdict

    from node.cli.output import emit, working
    from node.doctor.examination import examine, subject

    home = session.home()
    node = subject(home, session.overrides)
    findings = []

    with working(session, only_terminal=True) as say:
        for finding in examine(node, begins=lambda check: say(f"...   {check}")):
            say("")
            findings.append(finding)
            if not session.as_json:
                show(session, finding)
    failures = sum(finding.verdict == "fail" for finding in findings)
    warnings = sum(finding.verdict == "warn" for finding in findings)
    if session.as_json:
        emit({"failed": failures, "warned": warnings, "checks": [asdict(finding) for finding in findings]})
    else:
        click.echo(f"\n{failures} failed, {warnings} to look at, {len(findings) - failures - warnings} well")
    if bundle is not None:
        from node.doctor.bundle import write_bundle

        members = write_bundle(bundle, node, findings)
        click.echo(f"The support bundle is {bundle} ({members} files); look into it before you send it", err=True)
    return FAILURE if failures else 0


def show(session: Session, finding: "Finding") -> None:
    """One finding, and below it what to do."""
    from node.logs import printable

    mark = f"{finding.verdict:<4}"
    if not session.no_color:
        mark = click.style(mark, fg=MARKS[finding.verdict], bold=finding.verdict != "ok")
    click.echo(f"{mark}  {finding.check:<12}  {printable(session.hints(finding.said))}")
    if finding.fix:
        click.echo(f"{'':>20}-> {printable(session.hints(finding.fix))}")
