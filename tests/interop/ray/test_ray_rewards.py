"""Reward workers that Ray places: the same scores as the local scorer, also of answers whose worker is killed."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

import psutil
import pytest

from node.config import LimitsConfig
from node.large.ray_cluster import RayCluster
from node.large.reward_actors import RewardCrew
from node.scorer import Scorer, make_scorer
from protocol.manifest import EnvironmentSpec
from protocol.rollout import TaskRef

pytestmark = [pytest.mark.interop, pytest.mark.slow, pytest.mark.network]

LIMITS = LimitsConfig(scorer_seconds=20)


def actors() -> list[psutil.Process]:
    return [
        one for one in psutil.process_iter(["cmdline"]) if "ray::RewardActor" in " ".join(one.info["cmdline"] or ())
    ]


def test_many_scorers_say_what_one_says(
    cluster: RayCluster, room: Callable[..., Any], run: Callable[..., Any], evenness: EnvironmentSpec
) -> None:
    group, bundles = room("rewards", 2)
    crew = RewardCrew(cluster, group, bundles, [evenness], LIMITS, in_flight=1)
    run(compared(make_scorer([evenness], LIMITS, crew=crew), make_scorer([evenness], LIMITS), crew))


async def compared(many: Scorer, one: Scorer, crew: RewardCrew) -> None:
    await asyncio.gather(many.start(), one.start())
    try:
        assert many.isolation == one.isolation
        refs = [TaskRef("evenness", "1", seed, index) for seed in (1, 2) for index in range(5)]
        assert await many.tasks(refs) == await one.tasks(refs)
        assert await many.golds(refs) == await one.golds(refs)
        answers = [(refs[at % 10], "x" * (at % 7) + ("\ud800" if at == 3 else "")) for at in range(200)]
        expected = await one.score(answers)
        most, watching = 0, True

        async def watch() -> None:
            nonlocal most
            while watching:
                most = max(most, sum(lane.busy for lane in crew._lanes))
                await asyncio.sleep(0.001)

        watcher = asyncio.create_task(watch())
        scored = [asyncio.create_task(many.score(answers, foreign=bool(at % 2))) for at in range(8)]
        await asyncio.sleep(0.05)
        (first, *_) = await asyncio.to_thread(actors)
        first.kill()
        assert await asyncio.gather(*scored) == [expected] * 8
        watching = False
        await watcher
        assert 0 < most <= 2, "each has one chunk at most, the others wait in the node"
        assert many.restarts >= 1
        until = time.monotonic() + 200
        while None in [lane.actor for lane in crew._lanes]:
            assert time.monotonic() < until
            await asyncio.sleep(0.5)
        assert await many.score(answers) == expected
    finally:
        await asyncio.gather(many.close(), one.close())
