"""`shoal model`: the embedded model."""

import click

from node.cli.session import Group, Session, with_session


@click.group(cls=Group)
def model() -> None:
    """The model this machine starts from."""


@model.command()
@with_session
def prepare(session: Session) -> None:
    """Convert the embedded model once, so that the first start does not have to (for images and installers)."""
    from node.cli.output import emit, working
    from node.home import models_dir

    with working(session) as say:
        say("loading torch and transformers")
        from node.models import embedded_directory, embedded_target

        if not embedded_target(models_dir()).is_dir():
            say("converting the embedded model (540 MB, once)")
        directory = embedded_directory(models_dir())
    if session.as_json:
        emit({"model": str(directory)})
    else:
        click.echo(str(directory))


@model.command()
@click.argument("directory", type=click.Path(file_okay=False))
@click.option("--untied", is_flag=True, help="write the output layer apart: for a vLLM server on a CPU")
@with_session
def export(session: Session, directory: str, untied: bool) -> None:
    """Write the node's model (model.path) into DIRECTORY, for a vLLM server to start with."""
    from pathlib import Path

    from node.aside import making_aside
    from node.cli.output import emit, working
    from node.home import models_dir

    settings = session.settings(session.home()).config.model
    target = Path(directory)
    with working(session) as say:
        say("loading torch and transformers")
        from node.engines.choose import export_weights
        from node.models import load_model, writing

        say(f"loading the model ({settings.path})")
        bundle = load_model(settings.path, device="cpu", dtype="bfloat16", models=models_dir())
        say(f"writing into {target}")
        with writing(target):
            target.mkdir(parents=True, exist_ok=True)
            # what else is in the target is none of ours
            with making_aside(target, "export") as aside:
                export_weights(bundle, aside, untied=untied)
                for file in aside.iterdir():
                    file.chmod(0o644)  # the server may run as another user
                    file.replace(target / file.name)
    if session.as_json:
        emit({"model": str(target)})
    else:
        click.echo(str(target))
