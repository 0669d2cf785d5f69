"""`shoal checkpoint`: what was saved, as a model directory for elsewhere, and how good it is."""

import shutil
from collections.abc import Collection
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING

import click

from node.cli.session import Group, Session, with_session

if TYPE_CHECKING:
    from node.checkpoint import CheckpointStore

TRAINER_FILES = ("exp_avg.safetensors", "exp_avg_sq.safetensors", "moments8.safetensors", "trainer.json")
"""The optimizer's, of no use elsewhere. Those of node/training/files.py, whose import would cost torch's seconds."""
ROWS = "exp_avg*-of-*.safetensors"
"""What workers of train.shards wrote in their place, each its rows."""

COUNTED = 16
"""Held-out tasks from one line about them to the next."""
ADAPTER_SETTINGS = "adapter_config.json"
"""Where there are adapters and no whole weights (node/training/lora.py)."""


class ExportRefused(Exception):
    """The target of an export is taken, or what should be exported is damaged."""


@click.group(cls=Group)
def checkpoint() -> None:
    """Saved steps of this node's model. NAME is a step, `latest` or `best` (by held-out score)."""


@checkpoint.command(name="list")
@with_session
def list_all(session: Session) -> None:
    """List the checkpoints. The steps between them are in a journal that a start repeats."""
    from node.cli.output import clock, emit, table

    entries = store(session).entries()
    if session.as_json:
        emit(
            [
                {
                    "name": entry.name,
                    "step": entry.step,
                    "path": str(entry.path),
                    "bytes": entry.size,
                    "at": entry.at,
                    "held_out": entry.score,
                }
                for entry in entries
            ]
        )
        return
    rows = [
        (entry.name, entry.step, entry.score, f"{entry.size / 2**20:.0f} MB", clock(entry.at), entry.path)
        for entry in entries
    ]
    table(
        session,
        ["name", "step", "held-out", "size", "at", "path"],
        rows,
        "No checkpoint yet: shoal up trains, and writes one every checkpoint.every steps or checkpoint.seconds; "
        "until then its steps are in the journal",
    )


@checkpoint.command()
@click.argument("name")
@click.argument("directory", type=click.Path(path_type=Path))
@click.option("--adapters", is_flag=True, help="adapters (train.lora_rank) by themselves, as peft and vLLM load them")
@with_session
def export(session: Session, name: str, directory: Path, adapters: bool) -> None:
    """Copy a checkpoint's model into a new DIRECTORY that `from_pretrained` and vLLM load: no optimizer, no state.

    Adapters are added to the weights of the model that they were trained on (model.path), unless asked for alone.
    """
    from node.checkpoint import BEST, FILES, STATE, damage
    from node.cli.output import emit, working

    entry = store(session).find(name)
    if directory.exists():
        raise ExportRefused(f"{directory} is there already ; give a new directory")
    with working(session) as say:
        say(f"checking step {entry.step} ({entry.size >> 20} MB)")
        fault = damage(entry.path)
    if fault:
        raise ExportRefused(f"{entry.path} is damaged: {fault} ; export another one (shoal checkpoint list)")
    adapted = (entry.path / ADAPTER_SETTINGS).exists()
    if adapters and not adapted:
        raise ExportRefused(f"{entry.path} has whole weights and no adapters ; export it without --adapters")
    with working(session) as say:
        say("loading torch and transformers")
        from node.models import make_once

        def fill(aside: Path) -> None:
            if adapted and not adapters:
                say("adding the adapters to the model that they are of")
                merge_into_base(session, entry.path, aside)
            else:
                say(f"copying into {directory}")
                copy(entry.path, aside, leave=(BEST, FILES, STATE, *TRAINER_FILES))

        if not make_once(directory, fill):
            raise ExportRefused(f"{directory} is there already ; give a new directory")
    if session.as_json:
        emit({"step": entry.step, "path": str(directory.absolute())})
    elif adapters:
        click.echo(f"The adapters of step {entry.step} are in {directory}; peft and vllm serve --enable-lora load them")
    else:
        click.echo(
            f"Step {entry.step} is in {directory}; shoal config set model.path {directory.absolute()} starts from it"
        )


def copy(source: Path, target: Path, leave: Collection[str]) -> None:
    """Copy files, but not their modes: the home's are its owner's alone."""
    for file in source.iterdir():
        if file.name not in leave and not fnmatch(file.name, ROWS):
            shutil.copyfile(file, target / file.name)


def merge_into_base(session: Session, adapters: Path, target: Path) -> None:
    """Write the model with its adapters added."""
    from node.home import models_dir
    from node.models import model_directory
    from node.training.lora import merge

    path = session.settings(session.node()).config.model.path
    merge(model_directory(path, models_dir()), adapters, target)


@checkpoint.command()
@click.argument("name")
@with_session
def rollback(session: Session, name: str) -> None:
    """Go on from checkpoint NAME: its weights become the next step. The node must be down.

    Nothing is thrown away: the steps in between stay in the history, and are kept as checkpoint.keep says.
    """
    import time

    from node.checkpoint import CheckpointError, CheckpointStore
    from node.cli.output import emit, tell, working
    from node.history import History
    from node.rollback import roll_back

    home = session.node()
    config = session.settings(home).config
    with home.lock(), working(session) as say:
        checkpoints = CheckpointStore(home.checkpoints, config.checkpoint.keep)
        say("checking the checkpoints")
        newest = checkpoints.latest()
        entry = checkpoints.find(name)
        state = newest.records[-1].state if newest.records else newest.state
        if state is None:
            raise CheckpointError(f"{home.checkpoints} has no step yet ; shoal up trains")
        step = 1 + (newest.records[-1].step if newest.records else newest.step)
        say(f"copying step {entry.step} ({entry.size >> 20} MB)")
        roll_back(checkpoints, entry, step, config.train.optimizer, state)
        history = History(home.database, time.time)
        history.event("info", "rollback", f"step {step} is {entry.name} of step {entry.step} again, by hand")
        history.close()
    if session.as_json:
        emit({"step": step, "from": entry.step})
    else:
        tell(session, f"Step {step} of this node has the weights of step {entry.step} now. Next: shoal up")


@checkpoint.command(name="eval")
@click.argument("name", default="latest")
@with_session
def evaluate(session: Session, name: str) -> None:
    """Score a checkpoint on the swarm's held-out tasks, the same ones every time (eval.tasks, eval.samples)."""
    from dataclasses import asdict

    from node.cli.output import emit, facts, working

    home = session.node()
    settings = session.settings(home)
    session.start_logging(None)

    with working(session) as say:
        say("loading torch, the model and the scorer")
        from node.evaluate import evaluate_checkpoint

        def count(tasks: int, sampled: int) -> None:
            if sampled in (0, tasks) or sampled % COUNTED == 0:
                say(f"{sampled} of {tasks} held-out tasks")

        found = evaluate_checkpoint(home, settings, name, count)
    if session.as_json:
        emit(asdict(found))
    else:
        facts({"checkpoint": found.checkpoint, "step": found.step, **found.scores, "mean": found.mean})


def store(session: Session) -> "CheckpointStore":
    from node.checkpoint import CheckpointStore

    home = session.node()
    return CheckpointStore(home.checkpoints, session.settings(home).config.checkpoint.keep)
