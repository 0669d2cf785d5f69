"""What needs no processes: how work, rows and files are divided, the wire, and memory that ran out."""

import itertools
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch.distributed.tensor import Replicate, Shard

from node.batching import micro_batches
from node.checkpoint import CheckpointError
from node.config_train import TrainConfig
from node.engines.vllm_weights import digest
from node.interfaces import TrainerLost, TrainGroup, TrainSequence, UpdateStats
from node.models import ModelError, load_model
from node.training import files
from node.training.fsdp import evened
from node.training.sharded import ShardedTrainer, load_in_place
from node.training.whole import split
from node.training.worker_wire import LENGTH, MAX_FRAME, Beat, Done, Failed, Frames, Memory, Reply, WireError, frame
from node.training.workers import WorkersLost
from tests.node.fsdp.conftest import batch


def test_work_is_made_even_where_that_makes_it_shorter() -> None:
    groups = batch().groups
    members = [(g, s) for g, group in enumerate(groups) for s in range(len(group.sequences))]
    one = micro_batches(groups, members, 640)
    assert len(one) == 1
    two = evened(one, 2)
    assert len(two) == 2
    assert max(len(micro.trie) for micro in two) < len(one[0].trie)
    assert sorted(member for micro in two for member in micro.members) == sorted(members)
    assert evened(two, 2) is two  # each has one
    single = micro_batches(groups, members[:1], 640)
    assert evened(single, 4) == single
    assert evened([], 2) == []


def test_even_work_takes_no_larger_micro_batches() -> None:
    answers = tuple(TrainSequence((at, *range(100, 111)), (True,) * 12, 0.0, None) for at in range(15))
    micros = micro_batches([TrainGroup(tuple(range(200, 220)), answers, "own")], [(0, at) for at in range(15)], 64)
    assert [len(micro.trie) for micro in micros] == [56] * 5
    # four of 68 would be less work, and above the setting
    assert [len(micro.trie) for micro in evened(micros, 2)] == [56] * 5


def test_rows_are_dealt_as_torch_chunks_them() -> None:
    for length in (1, 2, 5, 48, 258):
        for count in (1, 2, 3, 4):
            chunks = torch.arange(length).chunk(count)
            for rank in range(count):
                theirs = chunks[rank].tolist() if rank < len(chunks) else []
                assert list(range(length))[files.rows_of(length, rank, count)] == theirs


class Mesh:
    """Of two axes, as one process sees it."""

    def __init__(self, place: tuple[int, int], sizes: tuple[int, int]) -> None:
        self.place, self.sizes = place, sizes

    def get_local_rank(self, axis: int) -> int:
        return self.place[axis]

    def size(self, axis: int) -> int:
        return self.sizes[axis]


def test_a_part_is_found_however_a_tensor_is_shared_out(tmp_path: Path) -> None:
    whole = torch.arange(35.0).reshape(7, 5)
    paths = [tmp_path / files.numbered("w.safetensors", at, 2) for at in range(2)]
    save_file({"w": whole[:4].contiguous()}, paths[0])
    save_file({"w": whole[4:].contiguous()}, paths[1])
    ways = ([Replicate(), Shard(1)], [Shard(0), Shard(1)], [Shard(0), Shard(0)], [Replicate(), Replicate()])
    for way in ways:
        found = torch.zeros_like(whole)
        for place in itertools.product(range(2), range(3)):
            here = files.placed(whole.shape, way, Mesh(place, (2, 3)))  # type: ignore[arg-type]
            with safe_open(paths[0], "pt") as first, safe_open(paths[1], "pt") as second:
                part = files._joined([first.get_slice("w"), second.get_slice("w")], here)
            assert torch.equal(part, whole[here])
            found[here] = part
        assert torch.equal(found, whole)


def test_weights_go_into_files_of_a_bounded_size() -> None:
    assert split({"a": 3, "b": 4, "c": 5, "d": 1}, 8) == [["a", "b"], ["c", "d"]]
    assert split({"a": 20, "b": 4}, 8) == [["a"], ["b"]]
    assert files.numbered("model.safetensors", 1, 3) == "model-00002-of-00003.safetensors"
    assert files.numbered("model.safetensors", 0, 1) == "model.safetensors"


def test_rows_of_any_files_are_read(tmp_path: Path) -> None:
    whole = {"a": torch.arange(14.0).reshape(7, 2), "b": torch.arange(3.0)}
    paths = [tmp_path / files.numbered("w.safetensors", at, 3) for at in range(3)]
    save_file({"a": whole["a"][:3].contiguous(), "b": whole["b"][:1]}, paths[0])
    save_file({"a": whole["a"][3:6].contiguous(), "b": whole["b"][1:]}, paths[1])
    save_file({"a": whole["a"][6:].contiguous()}, paths[2])
    targets = {name: torch.zeros_like(tensor) for name, tensor in whole.items()}
    files.load_weights(targets, paths)
    assert all(torch.equal(targets[name], tensor) for name, tensor in whole.items())
    with pytest.raises(CheckpointError, match="of another model: 1 tensors differ, the first is a"):
        files.load_weights(targets, paths[:2])
    save_file({"a": torch.zeros(1, 3)}, paths[2])
    with pytest.raises(CheckpointError, match="of another model"):
        files.load_weights(targets, paths)
    paths[1].write_bytes(b"\xff" * 64)
    with pytest.raises(CheckpointError, match=r"w-00002-of-00003\.safetensors cannot be read"):
        files.load_weights(targets, paths)
    assert torch.equal(targets["a"], whole["a"])


# -- the wire ------------------------------------------------------------------------------------------------


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, Frames]]:
    ours, theirs = socket.socketpair()

    class Reading(Frames):
        def read(self, connection: socket.socket = ours) -> list[Any]:
            return super().read(connection)

    yield theirs, Reading(msgspec.msgpack.Decoder(Reply).decode)
    ours.close()
    theirs.close()


def test_messages_are_cut_out_of_the_stream(pair: tuple[socket.socket, Any]) -> None:
    sender, frames = pair
    said = frame(Beat()) + frame(Done(3, memory={"weights": 7})) + frame(Failed("skipped", "why"))
    sender.sendall(said[:7])
    found = frames.read()
    sender.sendall(said[7:])
    found += frames.read()
    assert found == [Beat(), Done(3, memory={"weights": 7}), Failed("skipped", "why")]


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (LENGTH.pack(MAX_FRAME + 1), "a message of 1073741825 bytes"),
        (LENGTH.pack(3) + b"\xc1\xc1\xc1", "no message"),
        (LENGTH.pack(len(os.urandom(5))) + b"hello", "no message"),
        (frame(Memory()), "no message"),  # a command is no reply
        (frame(Failed("melted", "")), "no message"),  # type: ignore[arg-type]
        (b"", "the other side has ended"),
    ],
)
def test_what_is_no_message_is_refused(pair: tuple[socket.socket, Any], said: bytes, why: str) -> None:
    sender, frames = pair
    sender.sendall(said)
    if not said:
        sender.close()
    with pytest.raises(WireError, match=why):
        frames.read()


# -- the node's side -----------------------------------------------------------------------------------------


class FakeWorkers:
    """Remembers what they were started with; loses every question by the next of some causes."""

    def __init__(self, *causes: WorkersLost) -> None:
        self.causes, self.started = list(causes), list[TrainConfig]()

    def start(self, train: TrainConfig, seconds: float) -> None:
        self.started.append(train)

    def ask(self, *arguments: object) -> Sequence[Done]:
        raise self.causes.pop(0)

    def kill(self) -> None: ...


def test_memory_that_ran_out_has_workers_started_with_less(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    bundle = load_model(str(tiny_model("llama")), device="cpu", dtype="float32", models=tmp_path)
    workers: Any = FakeWorkers(*[WorkersLost("out of memory", "memory") for _ in range(3)], WorkersLost("killed"))
    trainer = ShardedTrainer(
        bundle, TrainConfig(tokens_per_micro_batch=160), workers, handover=tmp_path / "h", seconds=lambda: 1.0
    )
    trainer.start()
    for _ in range(4):
        with pytest.raises(TrainerLost) as lost:
            trainer.update(batch())
        lost.value.again()
    asked = [(train.gradient_checkpointing, train.tokens_per_micro_batch) for train in workers.started]
    assert asked == [("auto", 160), ("on", 160), ("on", 80), ("on", 64), ("on", 64)]


def test_weights_are_handed_over_in_the_time_that_is_left_of_the_update(tmp_path: Path) -> None:
    given = list[float]()

    class Slow(FakeWorkers):
        def ask(self, command: object, seconds: float, *rest: object) -> Sequence[Done]:
            given.append(seconds)
            if len(given) == 2:
                raise WorkersLost("worker 1 is late")
            time.sleep(0.3)
            return [Done(1, stats=UpdateStats(0.0, 0.0, 0.0, 1, 1, 0.0, 0.0, 0.0, 1.0, 0.0, None, 1, 0))]

    workers: Any = Slow()
    bundle: Any = None
    trainer = ShardedTrainer(bundle, TrainConfig(), workers, handover=tmp_path / "h", seconds=lambda: 20.0)
    with pytest.raises(TrainerLost, match="is late"):
        trainer.update(batch())
    assert given[1] <= given[0] - 0.3


def test_a_start_removes_the_copies_of_checkpoints_that_a_killed_node_left(tmp_path: Path) -> None:
    seen = tmp_path / "shared" / "checkpoints"
    (seen / "checkpoint-k1ll3d").mkdir(parents=True)
    (seen / "checkpoint-k1ll3d" / "model.safetensors").write_bytes(b"x")
    workers: Any = FakeWorkers()
    bundle: Any = None
    trainer = ShardedTrainer(bundle, TrainConfig(), workers, handover=tmp_path / "h", seconds=lambda: 1.0, passing=seen)
    trainer.start()
    assert not list(seen.iterdir())


def test_settings_that_no_restart_mends_end_the_node(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    bundle = load_model(str(tiny_model("llama")), device="cpu", dtype="float32", models=tmp_path)
    workers: Any = FakeWorkers(WorkersLost("train.routing_replay is on", "model"))
    trainer = ShardedTrainer(bundle, TrainConfig(), workers, handover=tmp_path / "h", seconds=lambda: 1.0)
    with pytest.raises(ModelError, match=r"train\.routing_replay is on"):
        trainer.update(batch())


def test_only_weights_that_are_whole_are_taken_over(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    wanted = {"weight": torch.ones(2, 3), "bias": torch.full((2,), 5.0)}
    save_file(wanted, tmp_path / "model.safetensors")
    sums = {"model.safetensors": digest(tmp_path / "model.safetensors")}
    load_in_place(model, tmp_path, sums)
    assert torch.equal(model.weight, wanted["weight"])
    assert torch.equal(model.bias, wanted["bias"])
    save_file({"weight": torch.zeros(2, 3)}, tmp_path / "model.safetensors")
    with pytest.raises(OSError, match="is not what was written"):
        load_in_place(model, tmp_path, sums)
    assert torch.equal(model.weight, wanted["weight"])
    with pytest.raises(OSError, match="1 tensors are missing, the first is bias"):
        load_in_place(model, tmp_path, {"model.safetensors": digest(tmp_path / "model.safetensors")})
