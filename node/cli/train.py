"""`shoal train`: training without the swarm, while the node is down."""

from pathlib import Path
from typing import Any, Literal

import click

from node.cli.session import Group, Session, with_session


@click.group(cls=Group)
def train() -> None:
    """Train this node's model outside of the swarm. The node must be down."""


@train.command()
@click.option(
    "--method",
    required=True,
    type=click.Choice(["dpo", "kto", "sft"]),
    help="dpo: best against worst answers; kto: good and bad answers; sft: imitate full scores",
)
@click.option(
    "--from-experience",
    "source",
    flag_value="experience",
    default="experience",
    help="own and admitted foreign groups of this node [default]",
)
@click.option(
    "--from-environments",
    "source",
    flag_value="environments",
    help="gold answers of the swarm's environments (sft only): a warm start for a model that scores 0",
)
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="write the model into this new directory, as transformers and vLLM load it",
)
@click.option(
    "--apply",
    is_flag=True,
    help="make it this node's next checkpoint, unless its held-out score fell; the optimizer starts anew",
)
@click.option("--force", is_flag=True, help="with --apply: also if the held-out score fell")
@click.option("--steps", type=click.IntRange(1, 1_000_000), help="optimizer steps [default: once through the examples]")
@click.option("--minutes", type=click.FloatRange(min=0, min_open=True), help="stop training after this long")
@click.option("--batch", type=click.IntRange(1, 4096), default=8, show_default=True, help="examples of one step")
@click.option("--learning-rate", type=click.FloatRange(0, 1, min_open=True), help="[default: 5e-6; sft 1e-5]")
@click.option(
    "--beta",
    type=click.FloatRange(min=0, min_open=True),
    default=0.1,
    show_default=True,
    help="dpo, kto: how dear it is to move away from the model as it is",
)
@click.option(
    "--threshold",
    type=click.FloatRange(0, 1),
    help="least reward of a chosen, wanted or imitated answer [default: dpo 0, kto 0.5, sft 1]",
)
@click.option(
    "--pairs-per-task", type=click.IntRange(1, 256), default=1, show_default=True, help="dpo: pairs of one task"
)
@click.option(
    "--groups",
    type=click.IntRange(1, 1_000_000),
    default=2000,
    show_default=True,
    help="newest groups of the experience to look at",
)
@click.option(
    "--tasks",
    type=click.IntRange(1, 1_000_000),
    default=512,
    show_default=True,
    help="with --from-environments: tasks to take",
)
@click.option(
    "--max-length",
    type=click.IntRange(16, 1_000_000),
    default=2048,
    show_default=True,
    help="tokens of prompt and answer beyond which an example is left out",
)
@click.option("--seed", type=click.IntRange(0, 2**63 - 1), help="[default: node.seed]")
@with_session
def offline(session: Session, method: Literal["dpo", "kto", "sft"], **asked: Any) -> None:
    """Train on what the node has already, by TRL, and say the held-out score before and after."""
    home = session.unlocked()
    settings = session.settings(home)
    session.start_logging(None)

    from node.cli.output import emit
    from node.offline.run import Order, run

    report = run(home, settings, Order(method=method, **asked))
    if session.as_json:
        emit(report)
    else:
        describe(report)


def describe(report: dict[str, Any]) -> None:
    """The report in words."""
    from node.cli.output import facts

    before, after = report["held_out"]["before"], report["held_out"]["after"]
    facts(
        {
            "model": f"{report['model']} after step {report['step']}",
            "examples": f"{report['examples']}, of {report['tasks']} tasks in {report['groups']} {report['source']}"
            + ("" if report["source"] == "environments" else " groups"),
            **{f"left out: {reason}": count for reason, count in report["left_out"].items()},
            report["method"]: f"{report['steps']} steps in {report['seconds']:.0f} s"
            + (" (stopped by --minutes)" if report["ended"] == "deadline" else ""),
            "loss": f"{report['loss'][0]:.4f} -> {report['loss'][1]:.4f}",
            **{f"held-out {name}": f"{before[name]:.3f} -> {after[name]:.3f}" for name in before},
        }
    )
    if report["output"]:
        click.echo(f"The model is in {report['output']}; shoal config set model.path {report['output']} starts from it")
    if report["checkpoint"]:
        click.echo(f"It is step {report['checkpoint']} of this node now; its optimizer starts anew. Next: shoal up")
