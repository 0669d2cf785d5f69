"""What holds training up and lets it go on: a person and each limit apart, over restarts and clocks that are set."""

import asyncio
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from zoneinfo import ZoneInfo

import pytest

from node import holding
from node.checkpoint import CheckpointStore
from node.config import LimitsConfig
from node.device import Device
from node.federation.publishing import NEW
from node.history import History
from node.holding import Holding, measure
from node.progress import Progress
from node.trained import TrainedDays
from protocol.rollout import TaskRef
from swarm.child import LOG_BYTES
from swarm.experience import ADMITTED, ExperienceStore, GroupRecord
from tests.node.test_limits import at

BERLIN = ZoneInfo("Europe/Berlin")
NIGHT, MORNING = at("2026-11-30T23:00:00"), at("2026-12-01T08:00:00")
QUIET = LimitsConfig(quiet_hours="22:00-08:00")


class Node:
    """A home, its databases and a clock; `start` is a process that begins."""

    def __init__(self, path: Path) -> None:
        self.path, self.now = path, NIGHT
        self.history, self.trained = History(path / "node.db", self.clock), TrainedDays(path / "node.db")
        self.store = ExperienceStore(path / "node.db", 64 << 20, self.clock)
        self.checkpoints, self.device = CheckpointStore(path / "checkpoints", 2), Device()
        self.loop: Any = SimpleNamespace(parts=SimpleNamespace(checkpoints=self.checkpoints, device=self.device))

    def clock(self) -> float:
        return self.now

    def start(self, limits: LimitsConfig) -> Holding:
        self.progress = Progress(self.clock, 60.0, state="TRAINING", stage="step")
        made = self.holding = Holding(
            self.path,
            limits,
            progress=self.progress,
            history=self.history,
            store=self.store,
            trained=self.trained,
            clock=self.clock,
            zone=BERLIN,
        )
        made.steer(self.loop)
        return made

    @property
    def held_by(self) -> str | None:
        assert self.holding.unpaused.is_set() == (self.progress.hold is None)
        return self.progress.hold.by if self.progress.hold else None

    def told(self) -> list[str]:
        return [event["message"] for event in self.history.events(None, 100)]


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    made = Node(tmp_path)
    made.checkpoints.latest()
    yield made
    made.device.close()
    made.store.close()
    made.trained.close()
    made.history.close()


def test_a_start_in_quiet_hours_is_held_and_goes_on_by_itself(node: Node) -> None:
    held = node.start(QUIET)
    assert node.held_by == "quiet_hours"
    assert node.progress.told() == (
        "PAUSED",
        "quiet hours until 08:00 CET (after the step in progress)",
        "shoal resume trains now",
    )
    node.now = MORNING - 1
    held.tick()
    assert node.held_by == "quiet_hours"
    node.now = MORNING
    held.tick()
    assert node.held_by is None
    assert node.told() == ["training is held: quiet hours until 08:00 CET", "training goes on"]
    node.now = at("2026-12-01T22:00:00")
    held.tick()
    assert node.held_by == "quiet_hours"
    node.now = NIGHT - 12 * 3600  # the clock was set
    held.tick()
    assert node.held_by is None


def test_resume_ends_the_pause_first_and_then_passes_over_quiet_hours(node: Node) -> None:
    held = node.start(QUIET)
    held.pause("a game")
    assert (node.held_by, node.progress.told()[1:]) == (
        "person",
        ("a game (after the step in progress)", "run shoal resume to go on"),
    )
    held.resume()
    assert node.held_by == "quiet_hours"
    held.resume()
    assert node.held_by is None
    held.pause("another")  # a pause in hours that are passed over ends with its own resume
    held.resume()
    assert node.held_by is None
    node.now = at("2026-12-01T23:00:00")  # the next night is another one
    held.tick()
    assert node.held_by == "quiet_hours"


def test_a_pause_outlives_the_process(node: Node) -> None:
    held = node.start(QUIET)
    held.pause("a game\x00 of chess")
    node.now = MORNING
    held = node.start(QUIET)
    assert node.held_by == "person"
    assert "a game\x00 of chess" in node.progress.told()[1]
    held.resume()
    node.start(QUIET)
    assert node.held_by is None


def test_a_pause_that_cannot_be_kept_is_one_until_the_restart(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(holding, "write_atomic", full)
    node.start(QUIET).pause("a game")
    assert node.held_by == "person"
    assert "cannot be kept" in node.told()[-1]


def test_a_pause_is_not_ended_by_the_end_of_quiet_hours(node: Node) -> None:
    held = node.start(QUIET)
    held.pause("a game")
    node.now = MORNING
    held.tick()
    assert node.held_by == "person"
    held.resume()
    assert node.held_by is None


def test_a_change_of_the_limits_holds_and_frees_at_once(node: Node) -> None:
    held = node.start(LimitsConfig())
    held.change(QUIET)
    assert node.held_by == "quiet_hours"
    held.resume()
    held.change(LimitsConfig(quiet_hours="21:00-08:00"))  # what was passed over was not this
    assert node.held_by == "quiet_hours"
    held.change(LimitsConfig())
    assert node.held_by is None


def test_hours_a_day_are_counted_over_restarts_and_only_while_training(node: Node) -> None:
    node.now = at("2026-11-30T12:00:00")
    limits = LimitsConfig(hours_per_day=0.01)  # 36 s

    def pass_time(held: Holding, seconds: int) -> None:
        for _ in range(seconds // 5):
            node.now += 5
            held.tick()

    held = node.start(limits)
    pass_time(held, 20)
    node.progress.enter("paused")
    pass_time(held, 500)
    node.progress.enter("step")
    assert held.trained_today == 20
    again = node.start(limits)
    node.now += 10_000  # the machine slept: no training
    again.tick()
    assert again.trained_today == 30
    assert node.held_by is None
    pass_time(again, 10)
    assert (node.held_by, again.trained_today) == ("hours_per_day", 40)
    third = node.start(limits)
    assert node.held_by == "hours_per_day"
    assert node.progress.hold is not None
    assert node.progress.hold.resumes_at == at("2026-12-01T00:00:00")
    third.resume()
    assert node.held_by is None
    node.now = at("2026-12-01T00:00:01")
    third.tick()
    assert (node.held_by, third.trained_today) == (None, 10)


def write_checkpoint(node: Node, step: int, size: int) -> None:
    node.checkpoints.save(step, lambda aside: (aside / "model").write_bytes(bytes(size)) and None, {})


@pytest.fixture
def run_once(node: Node, monkeypatch: pytest.MonkeyPatch) -> Callable[[Holding], Any]:
    async def once(held: Holding) -> None:
        services = [asyncio.create_task(service) for service in (held.run(), held.watch_disk())]
        async with asyncio.timeout(60):
            while held.measured_at < node.now:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        await asyncio.sleep(0.2)
        for service in services:
            service.cancel()

    monkeypatch.setattr(holding, "TICK_SECONDS", 0.05)
    return once


async def test_a_home_over_its_limit_is_pruned_and_then_held(node: Node, run_once: Callable[[Holding], Any]) -> None:
    (node.path / "identity.key").write_bytes(b"key")
    for step in (1, 2):
        write_checkpoint(node, step, 8 << 20)
    node.checkpoints.save_best(1, 0.5, lambda aside: (aside / "model").write_bytes(bytes(1 << 20)) and None)
    held = node.start(LimitsConfig(disk_mb=12))
    await run_once(held)
    assert node.held_by == "disk"  # two are kept: nothing may go
    assert "the home takes 17 MB of disk, the limit is 12" in node.progress.told()[1]
    assert "checkpoint.keep" in node.progress.told()[2]
    held.resume()
    await run_once(held)
    assert node.held_by == "disk"  # nothing passes over a disk
    node.checkpoints.keep = 1
    held.resume()
    await run_once(held)
    assert node.held_by is None
    assert sorted(path.name for path in node.checkpoints.directory.iterdir()) == ["best", "step-2"]
    assert (node.path / "identity.key").exists()
    assert node.told()[0].startswith("training is held: the home takes 17 MB")


async def test_experience_goes_before_training_is_held(
    node: Node, run_once: Callable[[Holding], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(holding, "LEAST_STORE", 1 << 20)
    fill(node.store, groups=120, size=60_000)
    before = measure(node.path, None, 0).used
    assert before > 7 << 20
    held = node.start(LimitsConfig(disk_mb=5))
    await run_once(held)
    assert measure(node.path, None, 0).used < 5 << 20
    assert node.held_by is None
    assert node.store.size > 1 << 20
    assert any("experience is cut to" in message for message in node.told())
    node.history.event("info", "test", "the database is whole")
    assert node.told()[-1] == "the database is whole"


async def test_experience_stays_where_its_room_would_not_be_enough(
    node: Node, run_once: Callable[[Holding], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(holding, "LEAST_STORE", 1 << 20)
    fill(node.store, groups=120, size=60_000)
    (node.path / "model").write_bytes(bytes(8 << 20))
    before = node.store.size
    await run_once(node.start(LimitsConfig(disk_mb=5)))
    assert node.held_by == "disk"
    assert node.store.size == before


def fill(store: ExperienceStore, *, groups: int, size: int) -> None:
    """Bodies that no peer made: their room is what counts here."""
    for number in range(groups):
        record = GroupRecord(
            digest=number.to_bytes(32, "big"),
            origin="foreign",
            producer="p",
            epoch=0,
            task=TaskRef("chain_sum", "1", 0, number),
            model="m",
            claimed=(1.0,),
            local=(1.0,),
            verdict=ADMITTED,
            detail="",
            received_at=NIGHT,
            expires_at=NIGHT + 1e6,
        )
        store.add(record, number.to_bytes(2, "big") * (size // 2))


async def test_logs_of_processes_are_kept_short(node: Node, run_once: Callable[[Holding], Any]) -> None:
    logs = node.path / "logs"
    logs.mkdir()
    for name in ("vllm-1.log", "console.log", "node.log"):
        (logs / name).write_bytes(b"a line\n" * (LOG_BYTES // 7 + 1))
    (logs / "gone.log").symlink_to(logs / "nowhere")
    await run_once(node.start(LimitsConfig()))
    assert [path.name for path in logs.iterdir() if path.exists() and path.stat().st_size > LOG_BYTES] == ["node.log"]
    node.now += 61
    (logs / "vllm-1.log").write_bytes(bytes(LOG_BYTES + 1))
    await run_once(node.holding)
    assert (logs / "vllm-1.log").stat().st_size <= LOG_BYTES


async def test_a_disk_without_room_for_a_checkpoint_holds(
    node: Node, run_once: Callable[[Holding], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    free = 1 << 40
    monkeypatch.setattr("node.holding.shutil.disk_usage", lambda path: SimpleNamespace(free=free))
    write_checkpoint(node, 1, 8 << 20)
    held = node.start(LimitsConfig())
    await run_once(held)
    assert node.held_by is None
    free = 63 << 20
    node.now += 61
    await run_once(held)
    assert node.held_by == "disk"
    assert "free some disk" in node.progress.told()[2]
    free = 1 << 40
    node.now += 61
    await run_once(held)
    assert node.held_by is None


async def test_training_goes_on_as_soon_as_the_disk_is_freed(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    free = 63 << 20
    monkeypatch.setattr("node.holding.shutil.disk_usage", lambda path: SimpleNamespace(free=free))
    monkeypatch.setattr(holding, "FULL_SECONDS", 0.01)
    held = node.start(LimitsConfig())
    watching = asyncio.create_task(held.watch_disk())
    async with asyncio.timeout(10):
        while node.held_by is None:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        free = 1 << 40
        before = time.monotonic()
        await held.unpaused.wait()
    watching.cancel()
    assert time.monotonic() - before < holding.TICK_SECONDS / 2
    assert node.progress.told()[0] == "TRAINING"


def test_what_a_home_takes(node: Node) -> None:
    write_checkpoint(node, 3, 4 << 20)
    aside = node.checkpoints.directory / ".aside-step-4"
    aside.mkdir()
    (node.path / "policies" / "leader").mkdir(parents=True)
    (node.path / "policies" / "averaging").write_bytes(b"is no round's")
    (node.path / "averaging" / "peers").mkdir(parents=True)
    passing = [
        aside / "model",
        node.path / "policies" / "leader" / NEW,
        node.path / "averaging" / "own.bin",
        node.path / "averaging" / "peers" / "peer-0.bin",
    ]
    for path in passing:
        path.write_bytes(bytes(9 << 20))
    found = measure(node.path, node.checkpoints, 5)
    files = [path for path in node.path.rglob("*") if path.is_file() and path not in passing]
    assert found.used == sum(path.stat().st_size for path in files)
    assert 4 << 20 <= found.checkpoint < 5 << 20
    assert found.free > 0
    before_the_first = measure(node.path, None, 7)
    assert (before_the_first.used, before_the_first.checkpoint) == (found.used, 7)
