"""Completion by click's own machinery, as a shell calls it."""

import os
import subprocess
import sys
from collections.abc import Callable

import pytest
from click.testing import Result


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_scripts_call_shoal(run: Callable[..., Result], shell: str) -> None:
    result = run("completion", shell)
    assert result.exit_code == 0
    assert f"_SHOAL_COMPLETE={shell}_complete" in result.stdout
    assert " shoal" in result.stdout


def test_an_unknown_shell_is_a_usage_error(run: Callable[..., Result]) -> None:
    assert run("completion", "tcsh").exit_code == 2


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["shoal", "sta"], {"status"}),
        (["shoal", "checkpoint", "e"], {"export", "eval"}),
        (["shoal", "status", "--wa"], {"--watch"}),
        (["shoal", "--log-format", "j"], {"json"}),
        (["shoal", "completion", ""], {"bash", "zsh", "fish"}),
    ],
)
def test_what_a_shell_gets(words: list[str], found: set[str]) -> None:
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("SHOAL_")},
        "_SHOAL_COMPLETE": "bash_complete",
        "COMP_WORDS": " ".join(words),
        "COMP_CWORD": str(len(words) - 1),
    }
    done = subprocess.run(
        [sys.executable, "-m", "node"], capture_output=True, text=True, timeout=60, env=environment, check=False
    )
    assert done.stderr == ""
    assert {line.partition(",")[2] for line in done.stdout.splitlines()} == found
