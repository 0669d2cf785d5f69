"""The child process: started, watched, started again and ended with all that it started."""

import asyncio
import dataclasses
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from uuid import uuid4

import psutil
import pytest
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from node.engines.vllm_client import VllmClient
from node.engines.vllm_server import ServerPlan, VllmServer, environment, log_tail

PROGRAM = '''#!{python}
"""Stands for `vllm`: answers /health on its socket, and has a child of its own."""
import os, subprocess, sys, time
from aiohttp import web

TRACKER = """
import signal, sys, time
from pathlib import Path
signal.signal(signal.SIGTERM, signal.SIG_IGN)
Path(sys.argv[1]).touch()
sys.stdin.read()
time.sleep(0.2)
Path(sys.argv[1]).unlink()
"""
assert sys.argv[1] == "serve" and sys.argv[3] == "--uds", sys.argv
if "--broken" in sys.argv:
    print("loading")
    print("ValueError: no such architecture")
    sys.exit(3)
child = subprocess.Popen(["sleep", "600"])
if tracks := [word for word in sys.argv if word.startswith("--track=")]:
    # like Python's tracker of shared memory: it passes over SIGTERM, and tidies once nobody holds its pipe any more
    tracker = subprocess.Popen([sys.executable, "-c", TRACKER, tracks[0].partition("=")[2]], stdin=subprocess.PIPE)
print("child", child.pid, os.environ.get("SHOAL_PASSPHRASE"), os.environ["VLLM_SERVER_DEV_MODE"], flush=True)


async def health(request):
    return web.Response(text="ok")


app = web.Application()
app.router.add_get("/health", health)
web.run_app(app, path=sys.argv[4], print=None)
'''


@pytest.fixture
def plan(tmp_path: Path) -> ServerPlan:
    program = tmp_path / "vllm"
    program.write_text(PROGRAM.format(python=sys.executable))
    program.chmod(0o755)
    return ServerPlan(str(program), (), (), tmp_path / "logs" / "vllm.log")


async def healthy(server: VllmServer) -> None:
    client = VllmClient(server.address)
    async with asyncio.timeout(60):
        while True:
            try:
                await client.get("/health")
                break
            except Exception:  # noqa: BLE001 - not up yet
                await asyncio.sleep(0.05)
    await client.close()


def child_of(plan: ServerPlan) -> psutil.Process:
    line = [line for line in plan.log_path.read_text().splitlines() if line.startswith("child")][-1]
    return psutil.Process(int(line.split()[1]))


def gone(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not true():  # noqa: ASYNC110 - it watches another process
            await asyncio.sleep(0.02)


async def test_it_answers_on_a_private_socket_and_ends_with_its_children(
    plan: ServerPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOAL_PASSPHRASE", "secret")
    server = VllmServer(plan)
    await server.start(Path("/models/x"))
    await healthy(server)
    assert server.directory.stat().st_mode & 0o777 == 0o700
    assert os.getpgid(server.pid or 0) == server.pid
    assert "None 1" in plan.log_path.read_text()  # no passphrase, but development mode
    child = child_of(plan)
    await server.close()
    assert not server.alive
    await until(lambda: gone(child))
    assert not server.directory.exists()


async def test_the_last_of_its_children_may_tidy(plan: ServerPlan, tmp_path: Path) -> None:
    shared = tmp_path / "psm_1"
    server = VllmServer(dataclasses.replace(plan, arguments=(f"--track={shared}",)))
    await server.start(Path("/models/x"))
    await healthy(server)
    await until(shared.exists)
    await server.close()
    assert not shared.exists()


async def test_it_starts_again_after_a_kill_and_waits_longer_each_time(
    plan: ServerPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    sleep = asyncio.sleep

    async def note(seconds: float) -> None:
        if seconds >= 1.0:
            slept.append(seconds)
        else:
            await sleep(seconds)

    server = VllmServer(plan)
    await server.start(Path("/models/x"))
    await healthy(server)
    child = child_of(plan)
    monkeypatch.setattr(asyncio, "sleep", note)
    for _ in range(4):
        os.kill(server.pid or 0, signal.SIGKILL)
        assert "was ended by SIGKILL" in await server.died()
        await server.start(Path("/models/x"))
    assert slept == [1.0, 2.0, 4.0]
    await healthy(server)
    assert gone(child)  # the first server's child went when the second one was started
    await server.close()


async def test_one_that_ends_at_once_says_why(plan: ServerPlan) -> None:
    server = VllmServer(ServerPlan(plan.command, ("--broken",), (), plan.log_path))
    await server.start(Path("/models/x"))
    said = await server.died()
    assert "ended with code 3" in said
    assert "ValueError: no such architecture" in said
    assert str(plan.log_path) in said
    await server.close()


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel ends children of a dead process on Linux only")
def test_it_goes_when_the_node_is_killed(plan: ServerPlan, tmp_path: Path) -> None:
    node = tmp_path / "parent.py"
    node.write_text(
        "import asyncio, os, sys\n"
        "from pathlib import Path\n"
        "from node.engines.vllm_server import ServerPlan, VllmServer\n"
        "async def main():\n"
        f"    server = VllmServer(ServerPlan({plan.command!r}, (), (), Path({str(plan.log_path)!r})))\n"
        "    await server.start(Path('/models/x'))\n"
        f"    while 'child' not in Path({str(plan.log_path)!r}).read_text(): await asyncio.sleep(0.05)\n"
        "    print(server.pid, flush=True)\n"
        "    await asyncio.sleep(600)\n"
        "asyncio.run(main())\n"
    )
    root = str(Path(__file__).parents[3])
    process = subprocess.Popen(
        [sys.executable, str(node)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": root, "TMPDIR": str(tmp_path)},
    )
    assert process.stdout is not None
    server = psutil.Process(int(process.stdout.readline()))
    process.kill()
    process.wait()
    deadline = time.monotonic() + 20
    while not gone(server):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    child_of(plan).kill()  # vLLM's own children watch their parent; `sleep` does not


def test_secrets_stay_here() -> None:
    own = {"PATH": "/bin", "SHOAL_PASSPHRASE": "x", "HF_TOKEN": "y", "CUDA_HOME": "/cuda"}
    own |= {"AWS_SECRET_ACCESS_KEY": "z", "SSH_AUTH_SOCK": "/agent", "TOKENIZERS_PARALLELISM": "false"}
    variables = environment(own, Path("/tmp/scratch"), [("OMP_NUM_THREADS", "2")])
    assert variables["PATH"] == "/bin"
    assert variables["CUDA_HOME"] == "/cuda"
    assert variables["OMP_NUM_THREADS"] == "2"
    assert not [name for name in variables if name.startswith(("SHOAL", "HF_TOKEN", "AWS", "SSH"))]
    assert variables["TOKENIZERS_PARALLELISM"] == "false"


def test_what_it_makes_goes_with_it_and_what_it_compiled_stays(
    plan: ServerPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/tmp")
    scratch = VllmServer(plan).directory
    variables = environment({"TMPDIR": "/tmp"}, scratch, [])
    assert variables["TMPDIR"] == str(scratch)
    assert variables["TORCHINDUCTOR_CACHE_DIR"] == default_cache_dir()
    assert len(f"{scratch}/{uuid4()}") < 107  # vllm/utils/network_utils.py
    scratch.rmdir()
    own = {"TORCHINDUCTOR_CACHE_DIR": "/cache", "TMPDIR": "/tmp"}
    assert environment(own, scratch, [])["TORCHINDUCTOR_CACHE_DIR"] == "/cache"


def test_the_log_is_shown_where_it_tells(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("\n".join(["line"] * 100 + ["RuntimeError: out of memory"] + ["goodbye"] * 30))
    assert log_tail(log) == "RuntimeError: out of memory"
    log.write_text("\n".join(f"line {i}" for i in range(100)))
    assert log_tail(log).splitlines()[-1] == "line 99"
    assert "cannot be read" in log_tail(tmp_path / "none")
