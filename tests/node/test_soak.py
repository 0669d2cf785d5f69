"""`shoal bench soak`: what it makes of samples, and a short one of a real swarm."""

import dataclasses
import os
import time
from pathlib import Path

import psutil
import pytest

from node.bench.soak import SETTINGS, Sample, look, soak, windows
from node.home import DaemonInfo, Home

SAMPLE = Sample(node=1, at=0.0, pid=1, rss_mb=100.0, descriptors=40, home_mb=10.0, step=1)


def sample(**changes: float) -> Sample:
    return dataclasses.replace(SAMPLE, **changes)  # type: ignore[arg-type]


def test_a_row_for_each_node_and_part_of_the_time() -> None:
    samples = [
        sample(at=0.0, rss_mb=100.0),
        sample(at=0.0, node=2, rss_mb=7.0),
        sample(at=20.0, rss_mb=300.0, step=2),
        sample(at=50.0, rss_mb=110.0, descriptors=41, step=3),
        sample(at=60.0, rss_mb=130.0, step=4),
        sample(at=120.0, rss_mb=120.0, home_mb=30.0, step=5),
    ]

    rows = windows(samples, 2)

    assert rows == [
        {"node": 1, "until_minute": 1, "step": 3, "rss_mb": 110, "peak_rss_mb": 300, "descriptors": 40, "home_mb": 10},
        {"node": 1, "until_minute": 2, "step": 5, "rss_mb": 125, "peak_rss_mb": 130, "descriptors": 40, "home_mb": 20},
        {"node": 2, "until_minute": 1, "step": 1, "rss_mb": 7, "peak_rss_mb": 7, "descriptors": 40, "home_mb": 10},
    ]
    assert windows([], 2) == []


def test_a_home_without_a_daemon_is_no_sample(tmp_path: Path) -> None:
    assert look(1, Home(tmp_path / "none"), 0.0) is None


def test_a_node_is_measured_from_outside(tmp_path: Path) -> None:
    home = Home(tmp_path)
    home.init()
    home.write_daemon(DaemonInfo(os.getpid(), "http://127.0.0.1:1", time.time()))
    (tmp_path / "large").write_bytes(bytes(3 << 20))

    seen = look(2, home, 9.0)

    assert seen is not None
    assert (seen.node, seen.at, seen.pid, seen.step) == (2, 9.0, os.getpid(), 0)
    assert seen.rss_mb >= psutil.Process().memory_info().rss / 2**20 * 0.8
    assert seen.descriptors >= 3
    assert 3.0 <= seen.home_mb < 4.0


@pytest.mark.interop
@pytest.mark.model
def test_both_nodes_train_on_after_being_ended(tmp_path: Path) -> None:
    # with checkpoints every other step there is little to repeat, and so time for steps on a busy machine too
    settings = (*SETTINGS, "checkpoint.every=2")
    found = soak(tmp_path, threads=1, seconds=350.0, restart_every=90.0, settings=settings)

    # a node repeats what was journalled first, and a third one is ended before the time is over
    ended = [(one["node"], one["signal"]) for one in found["restarts"]]
    assert ended[:2] == [(1, "SIGKILL"), (2, "SIGKILL")]
    for number, node in enumerate(found["nodes"], 1):
        assert node["restarts"] == len(node["ended_by"])
        assert "SIGKILL" in node["ended_by"]
        assert node["steps"] > found["restarts"][number - 1]["step"]
