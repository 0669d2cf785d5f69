"""`shoal completion`: what makes a shell complete commands and options."""

import click

from node.cli.session import Command

SHELLS = ("bash", "zsh", "fish")
VARIABLE = "_SHOAL_COMPLETE"
"""click's own name for it: the shell's function calls `shoal` with this variable."""


@click.command(cls=Command)
@click.argument("shell", type=click.Choice(SHELLS))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print the completion script of a shell, to be read by it at its start.

    \b
    bash:  echo 'eval "$(shoal completion bash)"' >> ~/.bashrc
    zsh:   echo 'eval "$(shoal completion zsh)"' >> ~/.zshrc
    fish:  shoal completion fish > ~/.config/fish/completions/shoal.fish
    """
    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell)
    assert kind is not None
    click.echo(kind(ctx.find_root().command, {}, "shoal", VARIABLE).source())
