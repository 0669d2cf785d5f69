"""Distillation between nodes: a peer's answers are those of its model, and a step does not depend on them."""

import asyncio
import math
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from node.batching import MicroBatch, micro_batches
from node.device import Device
from node.federation.teaching import PeerTeacher, Teaching, parts_of
from node.interfaces import TeacherError, TrainGroup, TrainSequence
from node.models import ModelBundle, load_model
from node.training.distill import LocalTeacher, taught
from protocol.teaching import MAX_TEACH_TOKENS, AskedGroup, TeachRequest
from swarm.accounts import Accounts
from swarm.experience import ExperienceStore
from swarm.memory import MemoryHub
from swarm.reputation import Reputation
from swarm.teaching import TeachServing
from tests.swarm.world import who

SWARM = b"s" * 32


def group(prompt: tuple[int, ...], *answers: tuple[int, ...]) -> TrainGroup:
    return TrainGroup(prompt, tuple(TrainSequence(ids, (True,) * len(ids), 0.0, None) for ids in answers), "own")


GROUPS = (group((9, 8, 7), (3, 4), (3, 5, 6)), group((9,), (2,), ()))


@pytest.fixture
def bundle(tiny_model: Callable[[str], Path], tmp_path: Path) -> Iterator[ModelBundle]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield load_model(str(tiny_model("llama")), device="cpu", dtype="float32", models=tmp_path)
    torch.set_num_threads(threads)


@pytest.fixture
def device() -> Iterator[Device]:
    made = Device()
    yield made
    made.close()


class Pair:
    """A teacher and a learner that know each other."""

    def __init__(self, path: Path, bundle: ModelBundle, device: Device) -> None:
        hub = MemoryHub()
        self.stores = [ExperienceStore(path / f"{name}.db", 1 << 20, time.time) for name in ("a", "b")]
        self.teacher, self.learner = hub.transport(who("teacher")), hub.transport(who("learner"))
        self.told: list[str] = []
        given, learned = (
            Accounts(transport, Reputation(store, time.time), time.time, lambda kind, said: None)
            for transport, store in zip((self.teacher, self.learner), self.stores, strict=True)
        )
        teaching = Teaching(bundle, device, lambda: 3, 64)
        self.serving = TeachServing(teaching.answer, given, time.time, swarm=SWARM, tokens_a_minute=10**6)
        self.serving.serve_on(self.teacher)
        self.peer = PeerTeacher(
            self.teacher.peer_id,
            bundle,
            self.learner,
            learned,
            time.monotonic,
            swarm=SWARM,
            seconds=lambda: 5.0,
            tell=self.told.append,
        )

    async def start(self) -> "asyncio.Task[None]":
        for transport in (self.teacher, self.learner):
            await transport.start()
        await self.learner.connect(self.teacher.addresses()[0], timeout=1)
        return asyncio.create_task(self.serving.run())


@pytest.fixture
async def pair(
    tmp_path: Path, bundle: ModelBundle, device: Device, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Pair]:
    monkeypatch.setattr("swarm.teaching.COME_BACK_SECONDS", 0.01)
    made = Pair(tmp_path, bundle, device)
    running = await made.start()
    yield made
    running.cancel()
    for store in made.stores:
        store.close()


async def test_a_peer_says_what_its_model_says(pair: Pair, bundle: ModelBundle, device: Device) -> None:
    here = await LocalTeacher(bundle, bundle, device, 64).logprobs(GROUPS)
    there = await pair.peer.logprobs(GROUPS)
    assert [[len(row) for row in rows] for rows in there] == [[2, 3], [1, 0]]
    for ours, theirs in zip(here, there, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            assert other == pytest.approx(one, rel=2**-11)
    assert pair.told == []


async def test_a_teacher_that_is_gone_leaves_the_step_its_rewards(pair: Pair) -> None:
    await pair.teacher.stop()
    pair.peer._seconds = lambda: 0.1
    for _ in range(2):
        groups = await taught(GROUPS, pair.peer)
        assert all(map(math.isnan, groups[0].sequences[1].teacher_logprobs or ()))
    assert len(pair.told) == 1  # and not with every step
    assert "no answer in time" in pair.told[0]
    assert "steps go on with rewards alone" in pair.told[0]


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        (TeachRequest(SWARM, b"x" * 32, (AskedGroup((1,), ((2,),)),)), "has another tokenizer; choose"),
        (TeachRequest(SWARM, b"", (AskedGroup((1,) * 5000, ((2,),)),)), "5001 tokens are more than the"),
        (TeachRequest(SWARM, b"", (AskedGroup((1,), ((10**6,),)),)), "token 1000000 is none of the"),
    ],
)
async def test_what_a_teacher_refuses(bundle: ModelBundle, device: Device, request_: TeachRequest, said: str) -> None:
    request = TeachRequest(SWARM, request_.fingerprint or bundle.fingerprint, request_.groups)
    answer = await Teaching(bundle, device, lambda: 3, 64).answer(request)
    assert said in answer.refusal
    assert answer.logprobs == b""


async def test_a_question_that_fails_ends_nothing(
    bundle: ModelBundle, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("no room for 9 GB")

    monkeypatch.setattr("node.federation.teaching.states", fail)
    request = TeachRequest(SWARM, bundle.fingerprint, (AskedGroup((1,), ((2,),)),))
    answer = await Teaching(bundle, device, lambda: 3, 64).answer(request)
    assert answer.refusal == "it could not be computed; the teacher's log says why"


async def test_empty_answers_and_prompts_computed_again_and_again(bundle: ModelBundle, device: Device) -> None:
    teaching = Teaching(bundle, device, lambda: 3, 64)
    nothing = TeachRequest(SWARM, bundle.fingerprint, (AskedGroup((1, 2, 3), ((), ())),))
    answer = await teaching.answer(nothing)
    assert (answer.refusal, answer.logprobs) == ("", b"")
    costly = AskedGroup(tuple(range(1, 60)), tuple((3 + number,) * 5 for number in range(20)))
    small = Teaching(bundle, device, lambda: 3, 16)
    refused = await small.answer(TeachRequest(SWARM, bundle.fingerprint, (costly,)))
    assert "tokens of work for 159; ask" in refused.refusal


async def test_a_question_is_not_laid_out_where_the_node_answers_others(
    bundle: ModelBundle, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[threading.Thread] = []

    def noted(*arguments: Any) -> list[MicroBatch]:
        threads.append(threading.current_thread())
        return micro_batches(*arguments)

    monkeypatch.setattr("node.federation.teaching.micro_batches", noted)
    request = TeachRequest(SWARM, bundle.fingerprint, (AskedGroup((1,), ((2,),)),))
    answer = await Teaching(bundle, device, lambda: 3, 64).answer(request)
    assert answer.refusal == ""
    assert len(threads) == 1
    assert threads[0] is not threading.current_thread()


def test_groups_are_asked_about_in_parts_and_a_giant_is_named() -> None:
    half = group((1,) * (MAX_TEACH_TOKENS // 2), (2,))
    assert [len(part) for part in parts_of([half, GROUPS[0], half, half])] == [2, 1, 1]
    with pytest.raises(TeacherError, match=r"65,?537 tokens is more than a teacher among peers takes"):
        parts_of([group((1,) * MAX_TEACH_TOKENS, (2,))])
