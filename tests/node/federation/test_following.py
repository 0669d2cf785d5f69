"""A follower takes up exactly what the leader published, keeps it over a kill, and says what it waits for."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from node.assign import DataPosition
from node.config import Config
from node.config_train import TrainConfig
from node.device import Device
from node.federation.followed import FollowedPolicy
from node.federation.following import Following, Version
from node.federation.weights_file import write_weights
from node.interfaces import Batch, StepSkipped
from node.models import ModelBundle
from node.progress import Progress
from protocol.policy import LEAST_PIECE_BYTES, claim_of
from swarm.accounts import Accounts
from swarm.experience import ExperienceStore
from swarm.memory import MemoryHub
from swarm.policies import PolicyServing, PolicyStore
from swarm.policy_pulling import PolicyPuller, Pulled
from swarm.reputation import Reputation
from tests.node.federation.conftest import LEADER, SWARM, Lead

MakeLead = Callable[..., Lead]


class Engine:
    version = -1

    async def update_weights(self, version: int) -> None:
        self.version = version


class Own:
    """Own groups that are not sampled."""

    def __init__(self) -> None:
        self.position, self.rounds = DataPosition(), list[int]()

    async def roll_out(self, number: int, count: int) -> list[Any]:
        self.rounds.append(number)
        self.position.epoch, self.position.taken = 7, self.position.taken + count
        return []


class Follow:
    """One process's life of a follower."""

    def __init__(self, hub: MemoryHub, path: Path, bundle: ModelBundle, dtype: Any = "bfloat16") -> None:
        self.bundle, self.own, self.engine = bundle, Own(), Engine()
        self.transport = hub.transport("follower")
        self.experience = ExperienceStore(path / "follower.db", 1 << 20, time.time)
        accounts = Accounts(self.transport, Reputation(self.experience, time.time), time.time, lambda kind, said: None)
        self.unpaused, self.asked_room, self.lacks = asyncio.Event(), list[int](), ""
        self.unpaused.set()
        store, self.trainer = PolicyStore(path / "follower"), FollowedPolicy(bundle, TrainConfig())
        self.following = Following(
            store, self.trainer, dtype, path / "following.json",
            lambda arrived, may_take: PolicyPuller(
                self.transport, store, accounts, time.time, leader=LEADER.peer_id, swarm=SWARM, model="mark",
                dtype=dtype, max_bytes=64 << 20, request_timeout=2.0, poll_seconds=0.1, arrived=arrived,
                may_take=may_take,
            ), self.unpaused, self.no_room,
        )  # fmt: skip
        self.puller = self.following.puller
        self.directory, self.device = store.directory, Device()
        self.recorded: list[int] = []
        history = SimpleNamespace(record_step=lambda step, record: self.recorded.append(step), last_step=lambda: None)
        self.parts: Any = SimpleNamespace(
            config=Config(), bundle=bundle, trainer=self.trainer, engine=self.engine, device=self.device,
            progress=Progress(time.time, 60.0), clock=time.time, history=history,
        )  # fmt: skip
        self.running: asyncio.Task[None] | None = None

    async def start(self) -> "Follow":
        await self.transport.start()
        self.said = await self.following.recover(self.parts, self.own)  # type: ignore[arg-type]
        self.running = asyncio.create_task(self.following.run())
        return self

    async def no_room(self, size: int) -> str:
        self.asked_room.append(size)
        return self.lacks

    async def step(self) -> None:
        await self.following.step(self.parts, self.own, lambda rollouts: None)  # type: ignore[arg-type]

    async def at(self, version: int) -> None:
        deadline = time.monotonic() + 20
        while self.trainer.step != version:
            assert time.monotonic() < deadline, (self.trainer.step, self.puller.problem)
            await self.following._take_up(self.parts)
            await asyncio.sleep(0.02)

    def same(self, lead: Lead) -> bool:
        """Whether the model has the weights that the leader published last."""
        there = lead.trainer.snapshot(self.following._dtype)
        return all(p.equal(there[name].float()) for name, p in self.bundle.model.named_parameters())

    async def kill(self) -> None:
        if self.running is not None:
            assert not self.running.done(), self.running
            self.running.cancel()
            await asyncio.gather(self.running, return_exceptions=True)
        await self.transport.stop()
        self.experience.close()
        self.device.close()


class Place:
    def __init__(self, path: Path, model: Callable[[], ModelBundle]) -> None:
        self.path, self.model, self.hub = path, model, MemoryHub()
        self.all: list[Follow] = []

    async def serve(self, lead: Lead) -> None:
        self.leader = self.hub.transport(LEADER)
        await self.leader.start()
        self.experience = ExperienceStore(self.path / "leader.db", 1 << 20, time.time)
        accounts = Accounts(self.leader, Reputation(self.experience, time.time), time.time, lambda kind, said: None)
        self.serving = PolicyServing(lead.store, LEADER.peer_id, accounts, time.time)
        self.serving.serve_on(self.leader)

    async def follow(self, **options: Any) -> Follow:
        self.all.append(Follow(self.hub, self.path, self.model(), **options))
        return await self.all[-1].start()

    async def restart(self, follower: Follow) -> Follow:
        self.all.remove(follower)
        await follower.kill()
        return await self.follow()


@pytest.fixture
async def place(tmp_path: Path, model: Callable[[], ModelBundle]) -> AsyncIterator[Place]:
    place = Place(tmp_path, model)
    yield place
    for follower in place.all:
        await follower.kill()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
async def test_a_follower_has_every_version_bit_for_bit(place: Place, make_lead: MakeLead, dtype: Any) -> None:
    lead = make_lead(dtype)
    await lead.publish()
    await place.serve(lead)
    follower = await place.follow(dtype=dtype)
    assert follower.said == f"follows {LEADER.peer_id}, at version 0 of its policy"
    for version in (1, 2, 3):
        lead.update(version)
        await lead.publish()
        await follower.at(version)
        assert follower.engine.version == version
        assert follower.same(lead)
    facts = follower.following.facts()
    assert (facts["leader"], facts["newest"], facts["problem"]) == (LEADER.peer_id, 3, "")
    assert time.time() - 60 < facts["issued"] <= facts["answered"] + 1
    # it began with the same base model, so a whole was never pulled
    whole = (lead.store.directory / "weights-3.safetensors").stat().st_size
    assert follower.following.last is not None
    assert follower.following.last.bytes_in < whole / 2
    assert [path.name for path in follower.directory.glob("weights-*")] == [
        f"weights-3-{follower.puller.have[1].hex()[:16]}.safetensors"  # type: ignore[index]
    ]


async def test_another_base_of_the_same_shape_takes_the_whole(place: Place, make_lead: MakeLead) -> None:
    lead = make_lead()
    lead.update(0)
    await lead.publish()
    await place.serve(lead)
    follower = await place.follow()
    deadline = time.monotonic() + 20
    while not follower.same(lead):
        assert time.monotonic() < deadline
        await follower.following._take_up(follower.parts)
        await asyncio.sleep(0.02)
    assert follower.trainer.step == 0


async def test_a_kill_loses_neither_weights_nor_position_nor_version(place: Place, make_lead: MakeLead) -> None:
    lead = make_lead()
    lead.update(4)
    await lead.publish()
    await place.serve(lead)
    follower = await place.follow()
    await follower.at(4)
    await follower.step()
    await follower.step()
    state = follower.following._present.state  # type: ignore[union-attr]
    assert claim_of(follower.following.model_name("tiny")).state == state.hex()[:16]  # type: ignore[union-attr]
    await place.leader.stop()
    again = await place.restart(follower)
    assert again.said.endswith("at version 4 of its policy")
    assert again.trainer.step == again.engine.version == 4
    assert again.same(lead)
    assert (again.own.position.epoch, again.own.position.taken) == (7, 16)
    await again.step()
    assert again.own.rounds == [3]
    state_now, reason, _ = again.parts.progress.told()
    assert (state_now, reason) == (
        "WAITING",
        f"the leader …{LEADER.peer_id[-8:]} does not answer; practising with version 4 of its policy",
    )


async def test_damaged_files_are_left_out_at_the_next_start(place: Place, make_lead: MakeLead) -> None:
    lead = make_lead()
    lead.update(4)
    await lead.publish()
    await place.serve(lead)
    follower = await place.follow()
    await follower.at(4)
    (file,) = follower.directory.glob("weights-4-*")
    file.write_bytes(file.read_bytes()[:-1] + b"\x01")
    (place.path / "following.json").write_text("{")
    again = await place.restart(follower)
    assert again.said.endswith("at version 0 of its policy")
    await again.at(4)
    assert again.same(lead)


async def test_a_file_that_cannot_be_loaded_is_left_out_at_the_next_start(place: Place, make_lead: MakeLead) -> None:
    lead = make_lead()
    lead.update(4)
    await lead.publish()
    await place.serve(lead)
    follower = await place.follow()
    await follower.at(4)
    (file,) = follower.directory.glob("weights-4-*")
    raw = file.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    loose = raw[8 : 8 + length].replace(b'{"format":"pt"}', b"3")  # the weights are those of the digest still
    assert len(loose) < length
    file.write_bytes(len(loose).to_bytes(8, "little") + loose + raw[8 + length :])
    again = await place.restart(follower)
    assert again.said.endswith("at version 0 of its policy")
    await again.at(4)
    assert again.same(lead)


async def test_bytes_that_nobody_thought_of_are_refused_and_end_nothing(
    place: Place, make_lead: MakeLead, monkeypatch: pytest.MonkeyPatch
) -> None:
    lead = make_lead()
    await lead.publish()
    await place.serve(lead)
    follower = await place.follow()

    def overflowing(pulled: Pulled) -> Version:
        raise OverflowError("cannot convert float infinity to integer")

    with monkeypatch.context() as patch:
        patch.setattr(follower.following, "_write", overflowing)
        lead.update(1)
        await lead.publish()
        await until(lambda: follower.puller.have is None)  # refused: the next pull is of a whole
    lead.update(2)
    await lead.publish()
    await follower.at(2)
    assert follower.same(lead)


async def test_weights_that_are_not_finite_are_not_taken_up(place: Place, make_lead: MakeLead) -> None:
    lead = make_lead()
    await lead.publish()
    await place.serve(lead)
    follower = await place.follow()
    lead.update(1)
    await lead.publish()
    await follower.at(1)
    good = {name: p.detach().clone() for name, p in follower.bundle.model.named_parameters()}
    next(iter(lead.bundle.model.parameters())).data[0, 0] = float("nan")
    lead.trainer.step = 2
    await lead.publish()
    deadline = time.monotonic() + 20
    while not follower.puller.problem:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)
    await follower.step()
    assert follower.trainer.step == 1
    assert all(p.equal(good[name]) for name, p in follower.bundle.model.named_parameters())
    assert follower.parts.progress.state == "WAITING"
    assert "practising with version 1" in follower.parts.progress.reason
    with torch.no_grad():
        next(iter(lead.bundle.model.parameters()))[0, 0] = 0.5
    lead.update(3)
    await lead.publish()
    await follower.at(3)
    assert follower.same(lead)


async def test_a_version_that_comes_while_another_is_loaded_takes_nothing_away(
    place: Place, make_lead: MakeLead, monkeypatch: pytest.MonkeyPatch
) -> None:
    lead = make_lead()
    await lead.publish()
    await place.serve(lead)
    follower = await place.follow()
    adopt, paths = follower.trainer.adopt, list[Path]()

    def slowly(version: int, path: Path) -> None:
        deadline = time.monotonic() + 20
        while version == 1 and follower.puller.have[0] != 2:  # type: ignore[index]
            assert time.monotonic() < deadline
            time.sleep(0.01)
        paths.append(path)
        adopt(version, path)

    monkeypatch.setattr(follower.trainer, "adopt", slowly)
    lead.update(1)
    await lead.publish()
    deadline = time.monotonic() + 20
    while follower.puller.have[0] != 1:  # type: ignore[index]
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)
    lead.update(2)
    await lead.publish()
    await follower.at(2)
    assert [path.name.split("-")[1] for path in paths] == ["1", "2"]
    assert follower.same(lead)


async def until(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not done():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)


async def test_a_pause_stops_the_pull_between_two_pieces_and_its_end_goes_on_there(
    place: Place, make_lead: MakeLead, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("node.federation.publishing.piece_bytes_for", lambda size: LEAST_PIECE_BYTES)
    monkeypatch.setattr("swarm.policy_pulling.AT_ONCE", 1)
    lead = make_lead()
    lead.update(4)
    await lead.publish()
    await place.serve(lead)
    follower = await place.follow()
    pieces = follower.directory / "pieces"
    put = PolicyStore.put

    def pausing(store: PolicyStore, piece: bytes) -> bytes:
        if store.directory == follower.directory and len(list(pieces.iterdir())) == 1:  # the record is there
            loop.call_soon_threadsafe(follower.unpaused.clear)
        return put(store, piece)

    loop = asyncio.get_running_loop()
    monkeypatch.setattr(PolicyStore, "put", pausing)
    await until(lambda: not follower.unpaused.is_set())
    await asyncio.sleep(0.3)
    there = {path.name for path in pieces.iterdir()}
    wanted = len(list((lead.store.directory / "pieces").iterdir()))
    assert (len(there), wanted) == (2, 3)
    await asyncio.sleep(0.5)
    assert {path.name for path in pieces.iterdir()} == there
    assert follower.following.staged.number == 0  # type: ignore[union-attr]
    assert follower.puller.answered_at is not None  # what is asked of the leader is two kilobytes
    monkeypatch.undo()
    follower.unpaused.set()
    await follower.at(4)
    assert follower.same(lead)


async def test_a_version_without_room_is_not_pulled_and_taken_up_once_there_is(
    place: Place, make_lead: MakeLead
) -> None:
    lead = make_lead()
    lead.update(4)
    await lead.publish()
    await place.serve(lead)
    follower = await place.follow()
    await until(lambda: not follower.puller.problem and follower.trainer.step == 0)
    await follower.at(4)
    whole = (lead.store.directory / "weights-4.safetensors").stat().st_size
    assert follower.asked_room == [pytest.approx(2 * whole, rel=0.05)]  # its pieces, and a file made of them
    follower.lacks = "it takes 9 MB of disk, and limits.disk_mb leaves 0; raise it"
    before = {path.name for path in (follower.directory / "pieces").iterdir()}
    lead.update(5)
    await lead.publish()
    await until(lambda: bool(follower.puller.problem))
    assert follower.puller.problem == f"version 5: {follower.lacks}"
    assert len({path.name for path in (follower.directory / "pieces").iterdir()} - before) == 1  # the record of 5
    await follower.step()
    assert follower.parts.progress.state == "WAITING"
    assert "version 5: it takes 9 MB" in follower.parts.progress.reason
    assert "practising with version 4" in follower.parts.progress.reason
    follower.lacks = ""
    await follower.at(5)
    assert follower.same(lead)


async def test_rounds_are_counted_on_from_what_the_node_trained_itself(place: Place, make_lead: MakeLead) -> None:
    lead = make_lead()
    lead.update(1)
    await lead.publish()
    await place.serve(lead)
    follower = await place.follow()
    follower.parts.history.last_step = lambda: {"step": 500}
    await follower.following.recover(follower.parts, follower.own)  # type: ignore[arg-type]
    await follower.at(1)
    await follower.step()
    assert follower.recorded == [501]


async def test_what_is_just_written_is_not_tidied_away(
    place: Place, make_lead: MakeLead, monkeypatch: pytest.MonkeyPatch
) -> None:
    lead = make_lead()
    await lead.publish()
    await place.serve(lead)
    follower = await place.follow()
    written, go_on = threading.Event(), threading.Event()
    write = follower.following._write

    def slowly(pulled: Pulled) -> Version:
        version = write(pulled)
        written.set()
        assert go_on.wait(20)
        return version

    monkeypatch.setattr(follower.following, "_write", slowly)
    lead.update(1)
    await lead.publish()
    assert await asyncio.to_thread(written.wait, 20)
    follower.following._tidy()  # as when an older version has just been taken up
    go_on.set()
    await follower.at(1)
    assert follower.same(lead)


async def test_what_a_killed_process_had_half_written_is_gone_at_the_next_start(
    place: Place, make_lead: MakeLead
) -> None:
    lead = make_lead()
    lead.update(4)
    await lead.publish()
    await place.serve(lead)
    follower = await place.follow()
    await follower.at(4)
    for name in (".aside-weights-5-0123456789abcdef.safetensors", ".aside-whole.safetensors"):
        (follower.directory / name).write_bytes(b"half")
    # killed before it was seen that these are no weights to work with
    next(iter(follower.bundle.model.parameters())).data[0, 0] = float("nan")
    weights = follower.trainer.snapshot("bfloat16")
    bad = write_weights(weights, follower.directory / "bad.safetensors", "bfloat16")
    bad.path.replace(follower.directory / f"weights-5-{bad.digest().hex()[:16]}.safetensors")
    again = await place.restart(follower)
    assert again.said.endswith("at version 4 of its policy")
    assert again.same(lead)
    assert [path.name.split("-")[:2] for path in again.directory.glob("*.safetensors")] == [["weights", "4"]]
    assert not list(again.directory.glob(".aside*"))


async def test_without_a_leader_nothing_is_practised(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []

    async def sleep(seconds: float, do: Callable[[float], Awaitable[None]] = asyncio.sleep) -> None:
        waited.append(seconds)
        await do(0.01)

    follower = await place.follow()
    monkeypatch.setattr("node.federation.following.asyncio.sleep", sleep)
    await follower.step()
    assert follower.own.rounds == []
    assert waited
    assert follower.parts.progress.told()[:2] == ("WAITING", f"the leader …{LEADER.peer_id[-8:]} does not answer")
    with pytest.raises(StepSkipped, match="trains nothing"):
        follower.trainer.update(Batch(1, ()))
