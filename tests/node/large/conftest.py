"""Stands for Ray: actors are objects of this process, and what they are asked runs on threads or on the test's loop."""

import asyncio
import concurrent.futures
import inspect
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from node.large import engine_actors, ray_cluster, reward_actors, trainer_actors
from node.large.ray_cluster import ActorGone
from node.large.room import Bundle

Future = concurrent.futures.Future[Any]


class Actor:
    """An object, or what there is of it."""

    def __init__(self, kind: type, arguments: tuple[Any, ...], loop: asyncio.AbstractEventLoop | None) -> None:
        self.held = kind(*arguments)
        self.loop = loop
        self.asked: list[Future] = []
        self.dead = False

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=lambda *arguments: self.ask(getattr(self.held, name), arguments))

    def ask(self, method: Callable[..., Any], arguments: tuple[Any, ...]) -> Future:
        future: Future = concurrent.futures.Future()
        self.asked.append(future)
        if self.dead:
            future.set_exception(ActorGone("it is dead"))
        elif inspect.iscoroutinefunction(method):
            assert self.loop is not None
            task = self.loop.create_task(method(*arguments))
            task.add_done_callback(lambda done: None if done.cancelled() else self.answer(future, done.result))
        else:
            threading.Thread(target=self.answer, args=(future, lambda: method(*arguments)), daemon=True).start()
        return future

    def answer(self, future: Future, made: Callable[[], Any]) -> None:
        try:
            result = made()
        except Exception as error:  # noqa: BLE001 - as Ray does
            self.settle(future, ActorGone(str(error)))
        else:
            self.settle(future, result)

    def settle(self, future: Future, result: Any) -> None:
        if not future.done():
            if isinstance(result, Exception):
                future.set_exception(result)
            else:
                future.set_result(result)

    def die(self) -> None:
        self.dead = True
        for future in self.asked:
            self.settle(future, ActorGone("it was killed"))


class StandIn:
    """A `RayCluster` without Ray."""

    def __init__(self) -> None:
        self.cluster = SimpleNamespace(ray=SimpleNamespace(start_seconds=20.0))
        self.section = self.cluster.ray
        self.actors: list[Actor] = []
        self.replaced: Callable[[int], type | None] = lambda number: None
        """Another class for the actor that is made as the nth."""

    def actor(self, kind: type, group: Any, index: int, bundle: Bundle, *arguments: Any, **options: Any) -> Actor:
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            loop = None
        self.actors.append(Actor(self.replaced(len(self.actors)) or kind, arguments, loop))
        return self.actors[-1]


async def awaited(reference: Future, seconds: float | None = None) -> Any:
    async with asyncio.timeout(seconds):
        return await asyncio.wrap_future(reference)


def result(reference: Future, seconds: float) -> Any:
    return reference.result(seconds)


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    monkeypatch.setattr(ray_cluster, "awaited", awaited)
    monkeypatch.setattr(ray_cluster, "result", result)
    monkeypatch.setattr(ray_cluster, "kill", lambda actor: actor.die())
    for module in (engine_actors, trainer_actors):
        monkeypatch.setattr(module, "address_here", lambda: "127.0.0.1")
    monkeypatch.setattr(trainer_actors, "gpus_here", lambda: ["3"])
    monkeypatch.setattr(reward_actors, "FIRST_PAUSE", 0.05)
    return StandIn()


@pytest.fixture
def bundles() -> list[Bundle]:
    return [Bundle("trainer", number, "10.0.0.1", "node1", 1.0) for number in range(2)]
