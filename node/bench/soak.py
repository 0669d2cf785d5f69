"""`shoal bench soak`: a swarm of two left on, with a node ended every few minutes, and what it holds meanwhile.

`shoal local --nodes 2` runs as users run it. Every `restart_every` seconds one node, in turn, is ended: with kill -9 at
its first turn, with SIGTERM at its second, and so on; `shoal local` starts it again. Twice a minute each node is looked
at from outside: resident memory and open descriptors of its process and its children, bytes of its home.
"""

import asyncio
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from node.bench.side import BenchError
from node.history import History
from node.home import Home

NODES = 2
MINUTES = 120.0
RESTART_EVERY = 600.0
SAMPLE_EVERY = 30.0
FIRST_STEP_SECONDS = 1800.0
STOP_SECONDS = 30.0
WINDOWS = 6
SETTINGS = ("eval.every=50",)


@dataclass(frozen=True, slots=True)
class Sample:
    """What one node held at one time."""

    node: int
    at: float
    """Seconds since the swarm was started."""
    pid: int
    rss_mb: float
    descriptors: int
    home_mb: float
    step: int


async def compare(threads: int, machine: dict[str, Any], *, minutes: float = MINUTES) -> dict[str, Any]:
    """Rows of `windows` equal parts of the time and node; `restarts` as they were done. Raises BenchError."""
    with tempfile.TemporaryDirectory(prefix="shoal-soak-") as root:
        return await asyncio.to_thread(soak, Path(root), threads, minutes * 60)


def soak(
    root: Path, threads: int, seconds: float, restart_every: float = RESTART_EVERY, settings: Sequence[str] = SETTINGS
) -> dict[str, Any]:
    """Run the swarm in `root` for `seconds` from its first step on. Raises BenchError when it does not get on."""
    log = root / "local.log"
    flags = [word for setting in (*settings, f"node.threads={threads}") for word in ("--set", setting)]
    command = [sys.executable, "-m", "node", "--home", str(root), "local", "--nodes", str(NODES), "--json", *flags]
    with log.open("wb") as out:
        swarm = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=out)
    try:
        samples, restarts = _watch(root, swarm, seconds, restart_every)
    finally:
        swarm.send_signal(signal.SIGINT)
        try:
            said, _ = swarm.communicate(timeout=STOP_SECONDS)
        except subprocess.TimeoutExpired:
            swarm.kill()
            said, _ = swarm.communicate()
    if swarm.returncode not in (0, 130):
        raise BenchError(f"shoal local ended with code {swarm.returncode}: {log.read_text(errors='replace')[-2000:]}")
    report = json.loads(said)
    return {
        "seconds": seconds,
        "restarts": restarts,
        "nodes": [
            {name: node[name] for name in ("steps", "restarts", "ended_by", "held_out", "groups")}
            for node in report["nodes"]
        ],
        "rows": windows(samples, WINDOWS),
    }


def _watch(
    root: Path, swarm: subprocess.Popen[bytes], seconds: float, restart_every: float
) -> tuple[list[Sample], list[dict[str, Any]]]:
    homes = [Home(root / f"node-{number}") for number in range(1, NODES + 1)]
    samples: list[Sample] = []
    restarts: list[dict[str, Any]] = []
    began = time.monotonic()
    first_step: float | None = None
    while first_step is None or time.monotonic() - began < first_step + seconds:
        time.sleep(SAMPLE_EVERY)
        if swarm.poll() is not None:
            raise BenchError(f"shoal local ended by itself with code {swarm.returncode} ; read its log: {root}")
        at = time.monotonic() - began
        looked = [found for number, home in enumerate(homes, 1) if (found := look(number, home, at)) is not None]
        samples += looked
        if first_step is None:
            if len(looked) == NODES and all(sample.step for sample in looked):
                first_step = at
            elif at > FIRST_STEP_SECONDS:
                raise BenchError(f"no first step of all nodes within {FIRST_STEP_SECONDS:.0f} s")
        elif at - first_step > (len(restarts) + 1) * restart_every:
            turn = len(restarts)
            how = signal.SIGTERM if (turn // NODES) % 2 else signal.SIGKILL
            victim = next((sample for sample in looked if sample.node == 1 + turn % NODES), None)
            if victim is None:
                continue  # it starts: it is ended at the next look that finds it
            os.kill(victim.pid, how)
            restarts.append({"at": round(at), "node": victim.node, "signal": how.name, "step": victim.step})
    return samples, restarts


def look(number: int, home: Home, at: float) -> Sample | None:
    """The node as it is now; None while there is none."""
    daemon = home.daemon() if home.path.exists() else None
    if daemon is None:
        return None
    try:
        process = psutil.Process(daemon.pid)
        family = [process, *process.children(recursive=True)]
        rss = sum(one.memory_info().rss for one in family)
        descriptors = sum(one.num_fds() for one in family)
    except psutil.Error:  # it, or a child of it, has just ended
        return None
    size = sum(_size(path) for path in home.path.rglob("*"))
    return Sample(number, at, daemon.pid, rss / 2**20, descriptors, size / 2**20, _step(home))


def windows(samples: Sequence[Sample], parts: int) -> list[Mapping[str, Any]]:
    """A row for every node and each of `parts` equal parts of the time: medians, and the largest resident size."""
    if not samples:
        return []
    begin, end = samples[0].at, samples[-1].at
    width = (end - begin) / parts or 1.0
    rows: list[Mapping[str, Any]] = []
    for node in sorted({sample.node for sample in samples}):
        for part in range(parts):
            inside = [
                sample
                for sample in samples
                if sample.node == node and min(parts - 1, int((sample.at - begin) / width)) == part
            ]
            if inside:
                rows.append(
                    {
                        "node": node,
                        "until_minute": round((begin + (part + 1) * width) / 60),
                        "step": inside[-1].step,
                        "rss_mb": round(statistics.median(sample.rss_mb for sample in inside)),
                        "peak_rss_mb": round(max(sample.rss_mb for sample in inside)),
                        "descriptors": round(statistics.median(sample.descriptors for sample in inside)),
                        "home_mb": round(statistics.median(sample.home_mb for sample in inside)),
                    }
                )
    return rows


def _size(path: Path) -> int:
    try:
        return path.lstat().st_size
    except FileNotFoundError:  # a checkpoint that has just been replaced
        return 0


def _step(home: Home) -> int:
    history = History(home.database, time.time)
    try:
        last = history.last_step()
    finally:
        history.close()
    return int(last["step"]) if last else 0
