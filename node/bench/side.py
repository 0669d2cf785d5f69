"""One side of a benchmark: a process of its own that takes a spec and says results, both as lines of JSON.

A side's own standard output stays free for those lines: whatever libraries print goes to standard error.
"""

import asyncio
import json
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

from node.isolation import die_with_parent

STOP_SECONDS = 10.0
LINE_BYTES = 16 << 20
TAIL_BYTES = 4000

Say = Callable[[Mapping[str, Any]], None]
Work = Callable[[Mapping[str, Any], Say, Path], Coroutine[Any, Any, None] | None]
"""A plain function where what is measured runs loops of its own."""


class BenchError(Exception):
    """A benchmark cannot be run; the message names the side, what it said last and the fix."""


class SideTimeout(BenchError):
    """A side did not say its next line in time."""


class Side:
    """A running side, which does not outlive this process.

    Use as `async with Side(module, spec) as side`; it is killed at the end if it still runs.
    """

    def __init__(self, module: str, spec: Mapping[str, Any]) -> None:
        self.module, self.spec = module, spec
        self._process: asyncio.subprocess.Process | None = None
        self._errors: asyncio.Task[bytes] | None = None

    async def __aenter__(self) -> "Side":
        threads = str(self.spec["threads"])
        quiet = {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
        same_tasks = {"PYTHONHASHSEED": "0"}  # as in the scorer's process
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",
            "-m",
            self.module,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            limit=LINE_BYTES,
            preexec_fn=die_with_parent,
            env={**os.environ, "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, **quiet, **same_tasks},
        )
        assert self._process.stderr is not None
        self._errors = asyncio.create_task(_tail(self._process.stderr))
        await self.tell(self.spec)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            await asyncio.wait_for(self._process.wait(), STOP_SECONDS)
        except TimeoutError:
            self._process.kill()
            await self._process.wait()

    async def tell(self, line: Mapping[str, Any]) -> None:
        """Say something to the side."""
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(line).encode() + b"\n")
        await self._process.stdin.drain()

    async def line(self, deadline: float) -> dict[str, Any]:
        """The next line it says. Raises SideTimeout after `deadline` seconds, BenchError when it ends instead."""
        assert self._process is not None
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(deadline):
                raw = await self._process.stdout.readline()
        except TimeoutError:
            self._process.kill()
            raise SideTimeout(f"{self.module} said nothing for {deadline:.0f} s and was ended") from None
        if not raw:
            assert self._errors is not None
            code, said = await self._process.wait(), (await self._errors).decode(errors="replace")
            raise BenchError(f"{self.module} ended with code {code}; it said last:\n{said}")
        answer: dict[str, Any] = json.loads(raw)
        return answer


async def run_side(module: str, spec: Mapping[str, Any], deadline: float) -> dict[str, Any]:
    """Start a side, take the one line it says, end it. Raises BenchError."""
    async with Side(module, spec) as side:
        return await side.line(deadline)


async def _tail(stream: asyncio.StreamReader) -> bytes:
    """Read to the end and keep the last bytes, so that a side never waits for a full pipe."""
    kept = b""
    while piece := await stream.read(65536):
        kept = (kept + piece)[-TAIL_BYTES:]
    return kept


# -- inside the process --------------------------------------------------------------------------------------


def serve(work: Work) -> None:
    """Main function of a side: read the spec and do `work(spec, say, directory)`; the directory goes afterwards."""
    lines = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def say(line: Mapping[str, Any]) -> None:
        lines.write(json.dumps(line) + "\n")
        lines.flush()

    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as directory:
        running = work(json.loads(sys.stdin.readline()), say, Path(directory))
        if running is not None:
            asyncio.run(running)


def peak_rss() -> int:
    """Peak resident bytes of this process.

    Not `getrusage` where there is better: on Linux its maximum includes what the parent held at the fork.
    """
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) << 10
    scale = 1 if sys.platform == "darwin" else 1 << 10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale


class Stopwatch:
    """Wall and CPU seconds of one piece of work, all threads of this process counted."""

    def __init__(self) -> None:
        self.wall, self.cpu = time.perf_counter(), time.process_time()

    def lap(self) -> dict[str, float]:
        """Seconds since the last lap."""
        wall, cpu = time.perf_counter(), time.process_time()
        passed = {"seconds": wall - self.wall, "cpu_seconds": cpu - self.cpu}
        self.wall, self.cpu = wall, cpu
        return passed
