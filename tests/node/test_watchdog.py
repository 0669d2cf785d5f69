"""A stage that hangs: it is ended by name, and the stacks of all threads say where."""

import asyncio
import logging
import threading
import time
from pathlib import Path

import pytest

from node.progress import Progress, StageTimeout
from node.watchdog import MAX_BYTES, watch
from tests.conftest import Clock


async def test_a_stage_that_outlives_its_deadline_is_named(clock: Clock) -> None:
    progress = Progress(clock, 0.05)
    with pytest.raises(
        StageTimeout, match=r"^stage 'update' took longer than .* \(limits.stage_seconds\); raise the limit"
    ):
        async with progress.during("update"):
            await asyncio.sleep(60)
    async with progress.during("mix"):
        clock.now += 2
    assert progress.stages["mix"] == 2


@pytest.mark.parametrize(
    ("state", "stage", "age", "told"),
    [
        ("TRAINING", "update", 95, True),
        ("STARTING", "load", 95, True),
        ("TRAINING", "update", 80, False),
        ("TRAINING", "paused", 95, False),
        ("IDLE", "step", 95, False),
    ],
)
async def test_stacks_of_a_stage_that_hangs_are_written_once(
    clock: Clock, tmp_path: Path, caplog: pytest.LogCaptureFixture, state: str, stage: str, age: int, told: bool
) -> None:
    progress = Progress(clock, 100.0, state=state, stage=stage, since=clock() - age)  # type: ignore[arg-type]
    stacks, over = tmp_path / "stacks.log", threading.Event()

    def stuck() -> None:
        over.wait(30)

    thread = threading.Thread(target=stuck)
    thread.start()
    with caplog.at_level(logging.ERROR):
        watcher = asyncio.create_task(watch(progress, stacks, every=0.001))
        await asyncio.sleep(0.1)
        watcher.cancel()
    over.set()
    thread.join()
    assert stacks.exists() is told
    assert len(caplog.messages) == told
    if told:
        assert caplog.messages == [f"stage '{stage}' has taken {age} s; stacks are in {stacks}"]
        assert stacks.read_text().count(f"stage '{stage}' has taken {age} s\n") == 1
        assert "in stuck\n" in stacks.read_text()


async def test_stacks_are_bounded(clock: Clock, tmp_path: Path) -> None:
    stacks = tmp_path / "stacks.log"
    stacks.write_bytes(b"old" * (MAX_BYTES // 3 + 1))
    progress = Progress(clock, 100.0, state="TRAINING", stage="update", since=clock() - 95)
    watcher = asyncio.create_task(watch(progress, stacks, every=0.001))
    await asyncio.sleep(0.1)
    watcher.cancel()
    text = await asyncio.to_thread(stacks.read_text)
    assert text.startswith("stage 'update' has taken 95 s")
    assert "watchdog.py" in text  # the stacks, after it


async def test_a_loop_that_does_not_turn_ends_the_process(tmp_path: Path) -> None:
    stacks, ended = tmp_path / "stacks.log", list[int]()
    watcher = asyncio.create_task(watch(Progress(time.time, 0.2), stacks, every=0.01, end=ended.append))
    await asyncio.sleep(0.5)  # it turns
    assert not ended
    time.sleep(0.5)  # noqa: ASYNC251 - this is what is to be noticed
    assert ended == [1]
    watcher.cancel()
    text = await asyncio.to_thread(stacks.read_text)
    assert "the event loop has not turned for 0 s; the process ends\n" in text
    assert "test_watchdog.py" in text


async def test_nobody_watches_once_the_watch_is_over(tmp_path: Path) -> None:
    ended = list[int]()
    watcher = asyncio.create_task(
        watch(Progress(time.time, 0.1), tmp_path / "stacks.log", every=0.01, end=ended.append)
    )
    await asyncio.sleep(0.05)
    watcher.cancel()
    await asyncio.sleep(0.3)
    assert not ended
    assert "pulse" not in {thread.name for thread in threading.enumerate()}
