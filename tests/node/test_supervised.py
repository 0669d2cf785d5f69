"""Who runs a node's process."""

import subprocess
import sys

import pytest

from node.home import Home, HomeLocked
from node.supervised import supervisor

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
