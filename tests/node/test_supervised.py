"""Who runs a node's process."""

import subprocess
import sys
from pathlib import Path

import pytest

from node import addresses, supervised
from node.home import Home, HomeLocked
from node.supervised import how_to_restart, supervisor

RUNS_A_NODE = """
import subprocess, sys
node = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
print(node.pid, flush=True)
input()
"""


@pytest.mark.parametrize("command", ["local", "up"])
def test_only_a_shoal_local_starts_a_node_again(home: Home, command: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", RUNS_A_NODE, command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        node = int(parent.stdout.readline())
        said = str(HomeLocked(home, node))
        if command == "local":
            assert supervisor(node) == parent.pid
            assert said.endswith(f"Ctrl-C there, or `kill {parent.pid}`, or give another --home")
        else:
            assert supervisor(node) is None
            assert said.endswith(f"stop it with `shoal --home {home.path} down`, or give another --home")
        parent.kill()
    assert supervisor(node) is None
    assert supervisor(None) is None


def test_a_restart_is_asked_of_who_starts_it_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mark = tmp_path / "mark"
    monkeypatch.setattr(addresses, "CONTAINER_MARKS", (str(mark),))
    assert how_to_restart(None) == "shoal down, then shoal up"
    monkeypatch.setattr(supervised, "supervisor", lambda pid: 77)
    assert how_to_restart(1) == "end all nodes of that swarm with Ctrl-C there, or `kill 77`, then start it again"
    mark.touch()
    assert "kill 77" in how_to_restart(1234)  # started by hand in a container
    monkeypatch.setattr(supervised, "_parent", lambda pid: 1)
    assert how_to_restart(1) == "docker compose restart, outside of the container"
