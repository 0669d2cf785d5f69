"""A home in a temporary directory, and an environment without SHOAL_* variables of whoever runs the tests."""

import os
from pathlib import Path

import pytest

from node.home import Home


@pytest.fixture
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("SHOAL_") and name != "SHOAL_CACHE"]:
        monkeypatch.delenv(name)


@pytest.fixture
def home(tmp_path: Path, no_variables: None) -> Home:
    made = Home(tmp_path / "home")
    made.init()
    return made
