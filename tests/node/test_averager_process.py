"""What the averager may do before hivemind runs in it: its network and its directory, and nothing of the home."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from node.landlock import fence

TRIES = """
import ctypes, json, os, socket, subprocess, sys
from pathlib import Path
from node.averager_process import confine
from swarm.averaging_wire import Setup

home, port = Path(sys.argv[1]), int(sys.argv[2])
def listen():
    with socket.create_server(("127.0.0.1", 0)) as server: return server.getsockname()[1] > 0
def fork():
    child = os.fork()
    if child == 0:
        try: (home / "identity.key").read_bytes()
        except PermissionError: os._exit(3)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
tries = {
    "key": lambda: (home / "identity.key").read_bytes(),
    "list": lambda: os.listdir(home),
    "remove": lambda: (home / "averaging" / "own.bin").unlink(),
    "write": lambda: (home / "planted").write_text("x"),
    "replace": lambda: (home / "averaging" / "peers" / "peer-0.bin").replace(home / "identity.key"),
    "planted": lambda: (home / "averaging" / "own.bin").write_bytes(b"x"),
    "shell": lambda: subprocess.run(["/bin/sh", "-c", "true"], check=True),
    "environ": lambda: Path(f"/proc/{os.getppid()}/environ").read_bytes(),
    "signal": lambda: os.kill(os.getppid(), 0),
    "memory": lambda: bytearray(3 << 30),
    "fork": fork,
    "own": lambda: (home / "averaging" / "own.bin").read_bytes() == b"weights",
    "theirs": lambda: (home / "averaging" / "peers" / "peer-1.bin").write_bytes(b"theirs"),
    "large": lambda: (home / "averaging" / "peers" / "peer-2.bin").open("wb").truncate(1 << 30),
    "listen": listen,
    "connect": lambda: socket.create_connection(("127.0.0.1", port)).close() is None,
    "python": lambda: subprocess.run([sys.executable, "-c", "import hashlib, ssl"], check=True).returncode == 0,
}
import signal
if sys.argv[3:]: sys.prefix = sys.base_prefix = sys.argv[3]
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
held = confine(Setup("test", "/ip4/127.0.0.1/tcp/0", (), str(home / "averaging" / "peers"), 1 << 20, 2))
results = {}
for name, attempt in tries.items():
    try: results[name] = str(attempt())
    except (OSError, MemoryError, subprocess.SubprocessError) as error: results[name] = type(error).__name__
print(json.dumps([held, results]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="Landlock is Linux's")
@pytest.mark.network
@pytest.mark.parametrize("prefix", ["", "/usr"])  # of a system's Python: there are all the system's programs
def test_an_averager_that_was_taken_over_gets_at_neither_the_keys_nor_the_node(tmp_path: Path, prefix: str) -> None:
    home = tmp_path / "home"
    (home / "averaging" / "peers").mkdir(parents=True)
    (home / "identity.key").write_bytes(b"secret")
    (home / "averaging" / "own.bin").write_bytes(b"weights")
    (home / "averaging" / "peers" / "peer-0.bin").write_bytes(b"theirs")
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    with socket.create_server(("127.0.0.1", 0)) as server:
        run = subprocess.run(
            [sys.executable, "-c", TRIES, str(home), str(server.getsockname()[1]), *filter(None, [prefix])],
            capture_output=True, text=True, timeout=60,
            env={**os.environ, "SHOAL_PASSPHRASE": "of the node", "TMPDIR": str(scratch)},
        )  # fmt: skip
    assert run.returncode == 0, run.stderr
    held, results = json.loads(run.stdout)
    expected = {
        "memory": "MemoryError", "own": "True", "theirs": "6", "large": "OSError", "listen": "True", "connect": "True",
    }  # fmt: skip
    if not prefix:
        expected["python"] = "True"
    version = next((int(name.partition("-")[2]) for name in held if name.startswith("landlock")), 0)
    if version:
        denied = ("key", "list", "write", "replace", "planted", "remove", "shell", "environ")
        expected |= dict.fromkeys(denied, "PermissionError") | {"fork": "3"}
    if version >= 6:
        expected["signal"] = "PermissionError"
    assert {name: results[name] for name in expected} == expected
    assert (home / "identity.key").read_bytes() == b"secret"


def test_without_landlock_nothing_is_claimed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Libc:
        def syscall(self, *arguments: object) -> int:
            return -1  # ENOSYS of a kernel before 5.13, or of one that has it off

    assert fence(Libc(), [(Path("/"), 0)], network=True) == 0  # type: ignore[arg-type]
