"""The engine that the tests of this directory need; nothing of an earlier run is left when they begin."""

import shutil
import subprocess

import pytest

from tests.docker.project import CALL_SECONDS, PROJECTS


@pytest.fixture(scope="session")
def engine() -> None:
    """Skips where no Docker answers. Takes away what a run that was killed left: it holds ports and subnets."""
    if shutil.which("docker") is None or subprocess.run(["docker", "version"], capture_output=True).returncode:
        pytest.skip("no container engine answers; see `make test-docker`")
    for name in PROJECTS:
        # without files: by the labels of what is there
        subprocess.run(
            ["docker", "compose", "-p", name, "down", "--volumes", "--remove-orphans"],
            cwd="/",
            check=True,
            capture_output=True,
            timeout=CALL_SECONDS,
        )
