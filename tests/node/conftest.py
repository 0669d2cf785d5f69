"""A home in a temporary directory."""

from pathlib import Path

import pytest

from node.home import Home


@pytest.fixture
def home(tmp_path: Path, no_variables: None) -> Home:
    made = Home(tmp_path / "home")
    made.init()
    return made
