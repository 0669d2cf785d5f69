"""What `make` cannot install itself, it names before it begins: one line, with the command that installs it."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
INSTALL = ROOT / ".ci" / "install"
COMPILER = """#!/bin/sh
read -r line
case $line in *{missing}*) exit 1 ;; esac
"""


def install(tmp_path: Path, compilers: dict[str, str], **variables: str) -> str:
    """What the installer says where these, and no other, programs are."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, missing in compilers.items():
        (programs / name).write_text(COMPILER.format(missing=missing))
        (programs / name).chmod(0o755)
    venv = tmp_path / "venv"
    done = subprocess.run(
        ["/bin/sh", str(INSTALL)],
        capture_output=True,
        text=True,
        timeout=60,
        env={"PATH": str(programs), "PYTHON": sys.executable, "VENV": str(venv), **variables},
    )
    assert (done.returncode, done.stdout, venv.exists()) == (1, "", False)
    assert done.stderr.startswith("shoal: ")
    assert done.stderr.count("\n") == 1
    return done.stderr


@pytest.mark.parametrize(
    ("compilers", "what", "command"),
    [
        ({}, "no C compiler", "apt-get install build-essential"),
        ({"cc": "gmp.h"}, "no GMP headers", "apt-get install libgmp-dev"),
        ({"cc": "Python.h"}, "no Python headers", "apt-get install python3-dev"),
        ({"gcc": "Python.h"}, "no Python headers", "apt-get install python3-dev"),
    ],
)
def test_what_is_missing_is_named_with_its_command(
    tmp_path: Path, compilers: dict[str, str], what: str, command: str
) -> None:
    said = install(tmp_path, compilers)
    assert what in said
    assert said.endswith(f": {command}\n")


def test_python_is_named(tmp_path: Path) -> None:
    said = install(tmp_path, {}, PYTHON=str(tmp_path / "python2"))
    assert "needs Python 3.11 or newer" in said
    assert "apt-get install python3 python3-venv" in said


def test_it_is_built_by_what_is_locked() -> None:
    (builder,) = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    assert builder in (ROOT / "constraints.txt").read_text().splitlines()  # -c does not reach a build
