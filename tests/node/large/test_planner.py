"""Where parts go on clusters of many shapes, and what is said of it. No Ray."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from node.config import Config
from node.config_train import TrainConfig
from node.large.cluster_file import Cluster
from node.large.planner import DoesNotFit, Placement, place
from node.large.room import GB, Bundle, Host, Need, Needs
from node.large.sizes import needs_of
from node.model_shape import ModelShape

NEEDS = Needs(
    True,
    trainer=Need(60 * GB, "masters 60.0"),
    engine=Need(20 * GB, "weights 14.0"),
    shared=Need(70 * GB, "masters and weights 70.0"),
    kept=50 * GB,
    model="M with 7.00 billion parameters",
)


def hosts(*gpus: int, size: int = 80, cpus: float = 64.0) -> list[Host]:
    return [
        Host(f"10.0.0.{at}", f"node{at}", cpus, count, size * GB if count else 0, "H100", 256 * GB)
        for at, count in enumerate(gpus, 1)
    ]


def cluster(workers: int, engines: int, each: int = 1, layout: str = "auto", rewards: int = 0, **more: Any) -> Cluster:
    asked = {
        "layout": layout,
        "trainer": {"workers": workers, "gpus": min(each, 1), **more},
        "engines": {"number": engines, "gpus": each},
        "rewards": {"workers": rewards},
    }
    return Cluster.model_validate(asked)


def on(bundles: Sequence[Bundle]) -> list[str]:
    return [bundle.node.removeprefix("node") for bundle in bundles]


def check(placement: Placement, machines: Sequence[Host], asked: Cluster) -> None:
    """Nothing is given twice, and all that was asked for is there."""
    assert [one.number for one in placement.trainer] == list(range(asked.trainer.workers))
    assert [one.number for one in placement.engines] == list(range(asked.engines.number))
    assert len(placement.rewards) == asked.rewards.workers
    for machine in machines:
        here = [one for one in placement.bundles if one.node == machine.node]
        assert sum(one.gpus for one in here) <= machine.gpus
        assert sum(one.cpus for one in here) <= machine.cpus
    shared = Counter(worker for one in placement.engines for worker in one.shares)
    assert max(shared.values(), default=0) <= 1, "one engine at a time on a GPU"
    where = {one.number: one.node for one in placement.trainer}
    for one in placement.engines:
        assert {where[worker] for worker in one.shares} <= {one.node}
        assert len(one.shares) + one.gpus == asked.engines.gpus


@pytest.mark.parametrize(
    ("gpus", "workers", "engines", "each", "layout", "trainer", "at"),
    [
        ((8,), 4, 4, 1, "disjoint", "1111", "1111"),
        ((8,), 4, 2, 2, "disjoint", "1111", "11"),
        ((8, 8), 8, 4, 2, "disjoint", "11111111", "2222"),
        ((4, 8), 4, 8, 1, "disjoint", "1111", "22222222"),  # the trainer where it leaves least
        ((8, 4), 4, 1, 8, "disjoint", "2222", "1"),
        ((4, 4), 6, 1, 2, "disjoint", "111122", "2"),  # on two machines
        ((4, 4), 4, 2, 2, "disjoint", "1111", "22"),
        ((3, 3), 2, 2, 2, "disjoint", "12", "12"),  # engines of two GPUs first, or they would not fit
        ((4,), 4, 4, 1, "colocated", "1111", "1111"),
        ((4,), 4, 2, 2, "colocated", "1111", "11"),
        ((8,), 4, 6, 1, "mixed", "1111", "111111"),
        ((4, 4), 8, 2, 4, "colocated", "11112222", "12"),
        ((4, 0), 2, 2, 1, "disjoint", "11", "11"),
    ],
)
def test_layouts(
    gpus: tuple[int, ...], workers: int, engines: int, each: int, layout: str, trainer: str, at: str
) -> None:
    machines, asked = hosts(*gpus), cluster(workers, engines, each)
    found = place(machines, asked, NEEDS)
    check(found, machines, asked)
    assert (found.layout, "".join(on(found.trainer)), "".join(on(found.engines))) == (layout, trainer, at)


def test_it_is_explained() -> None:
    assert str(place(hosts(4, 4), cluster(4, 4, rewards=2), NEEDS)) == (
        "Ray offers 8 GPUs (H100 of 80.0 GB) on 2 machines.\n"
        "M with 7.00 billion parameters is trained by 4 workers on 10.0.0.1, each with 60.0 GB of its GPU "
        "(masters 60.0).\n"
        "4 vLLM engines: 4 with 1 GPU, of their own on 10.0.0.2; each device holds 20.0 GB at least (weights 14.0).\n"
        "2 reward workers on 10.0.0.1 (1), 10.0.0.2 (1).\n"
        "disjoint, because everything has devices of its own, so that engines sample while the trainer works."
    )
    said = str(place(hosts(8), cluster(4, 6), NEEDS))
    assert "4 with 1 GPU, of their own on 10.0.0.1 and 2 on the trainer's GPUs on 10.0.0.1, asleep while it" in said
    assert said.splitlines()[-1] == (
        "mixed, because there are GPUs for some of the engines, which sample while the trainer works (not disjoint: "
        "there is room for 4 of 6 engines with 1 GPU, 1 CPUs and 20.0 GB on each GPU (weights 14.0))."
    )


@pytest.mark.parametrize(
    ("gpus", "size", "asked", "said"),
    [
        ((), 80, cluster(1, 1), "there is room for 0 of 1 trainer workers.* ; start Ray on some machine"),
        (
            (8,),
            40,
            cluster(4, 2),
            r"60.0 GB \(masters 60.0\).* ; raise trainer.workers, .* 60.0 GB are more than the 40.0",
        ),
        (
            (2,),
            80,
            cluster(4, 1),
            r"room for 2 of 4 trainer workers.* ; lower .* disjoint takes 5 GPUs, and there are 2",
        ),
        ((8,), 80, cluster(4, 2, 8), "0 of 2 engines with 8 GPUs"),
        ((8,), 80, cluster(4, 5, layout="disjoint"), "room for 4 of 5 engines"),
        ((4, 4), 80, cluster(4, 1, 4, layout="mixed"), "mixed: there is one engine only"),
        ((8,), 80, cluster(4, 5, layout="colocated"), "room for 4 of 5 engines that share them"),
        ((8,), 80, cluster(4, 2, cpus=20.0), "there is room for 3 of 4 trainer workers, each with 1 GPU, 20 CPUs"),
        ((8,), 80, cluster(4, 2, rewards=1000), "there are CPUs for 58 of 1000 reward workers, 1 each"),
        (
            (8,),
            80,
            cluster(4, 2, rewards=1000),
            r" ; lower rewards.workers, rewards.cpus, .* all parts take 1006 CPUs, and there are 64; or add machines",
        ),
        ((8,), 80, cluster(4, 2, cpus=20.0), " ; lower trainer.cpus or engines.cpus: all parts take 82 CPUs, and"),
        ((8, 8), 80, cluster(3, 1, cpus=42.0), " ; lower engines.gpus, or the numbers or cpus of parts: no machine"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_sum(gpus: tuple[int, ...], size: int, asked: Cluster, said: str) -> None:
    with pytest.raises(DoesNotFit, match=said):
        place(hosts(*gpus, size=size), asked, NEEDS)


@pytest.mark.parametrize(
    ("machines", "trainer", "engines", "rewards"),  # (CPUs, GPUs) of each machine; (number, CPUs, GPUs) of each part
    [
        (((2, 2), (2, 1), (8, 4)), (2, 2, 1), (2, 1, 1), (3, 2)),
        (((8, 2), (6, 4)), (3, 2, 1), (3, 1, 1), (3, 1)),
        (((1, 4), (6, 4), (4, 1)), (2, 2, 1), (1, 1, 2), (3, 2)),
        (((5, 1), (2, 3)), (1, 2, 1), (2, 1, 1), (1, 2)),
        (((4, 2), (5, 4), (1, 4)), (2, 2, 1), (2, 2, 2), (2, 1)),
    ],
)
def test_cpus_that_are_short_are_enough_where_they_can_be(
    machines: Sequence[tuple[float, int]],
    trainer: tuple[int, float, int],
    engines: tuple[int, float, int],
    rewards: tuple[int, float],
) -> None:
    there = [replace(hosts(0, gpus)[1], cpus=cpus, node=f"node{at}") for at, (cpus, gpus) in enumerate(machines)]
    asked = Cluster.model_validate(
        {
            "layout": "disjoint",
            "trainer": {"workers": trainer[0], "cpus": float(trainer[1]), "gpus": trainer[2]},
            "engines": {"number": engines[0], "cpus": float(engines[1]), "gpus": engines[2]},
            "rewards": {"workers": rewards[0], "cpus": float(rewards[1])},
        }
    )
    check(place(there, asked, NEEDS), there, asked)


def test_small_gpus_are_for_engines_and_shared_ones_need_more() -> None:
    machines = [*hosts(4), replace(hosts(4, size=24)[0], name="10.0.0.9", node="node9")]
    found = place(machines, cluster(4, 4), NEEDS)
    assert (set(on(found.trainer)), set(on(found.engines))) == ({"1"}, {"9"})
    with pytest.raises(DoesNotFit, match=r"colocated: .* and 70.0 GB"):
        place(hosts(4, size=64), cluster(4, 4), NEEDS)
    unknown = [replace(hosts(8)[0], gpu_bytes=0)]
    assert "H100 of unknown memory" in str(place(unknown, cluster(4, 4), NEEDS))


def test_without_gpus_main_memory_and_processors_count() -> None:
    needs = replace(NEEDS, on_gpu=False)
    asked = cluster(2, 2, 0)
    machines = [replace(host, memory=130 * GB, cpus=2.0) for host in hosts(0, 0)]
    found = place(machines, asked, needs)
    check(found, machines, asked)
    assert (found.layout, on(found.trainer), on(found.engines)) == ("disjoint", ["1", "1"], ["2", "2"])
    assert found.why[0] == "Ray offers 4 CPUs and 260.0 GB of memory on 2 machines."
    assert found.why[-1] == "disjoint, because nothing shares a GPU."
    with pytest.raises(DoesNotFit, match=r"room for 1 of 2 trainer workers, each with 1 CPUs and 60.0 GB"):
        place([replace(machines[0], memory=100 * GB)], asked, needs)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(0, 8), min_size=1, max_size=5),
    st.integers(1, 12),
    st.integers(1, 8),
    st.integers(1, 4),
)
def test_whatever_is_placed_fits_and_what_fits_apart_is_placed_apart(
    gpus: list[int], workers: int, engines: int, each: int
) -> None:
    machines, asked = hosts(*gpus), cluster(workers, engines, each)
    apart = sum(count // each for count in gpus) >= engines and sum(gpus) >= workers + engines * each
    try:
        found = place(machines, asked, NEEDS)
    except DoesNotFit:
        assert not apart
        return
    check(found, machines, asked)
    assert (found.layout == "disjoint") == apart


def test_needs_are_the_sums_of_one_worker_and_one_engine() -> None:
    shape = ModelShape("big", 7_000_000_000, 131072, layers=32, width=4096, embedding=500_000_000)
    asked = cluster(4, 2, 2)
    four = needs_of(Config.model_validate({"train": {"shards": 4}}), shape, torch.bfloat16, asked)
    eight = needs_of(Config.model_validate({"train": {"shards": 8}}), shape, torch.bfloat16, asked)
    # a quarter of 16 bytes a number in masters, moments and gradients, and what is gathered
    gathered = shape.gathered() * (2 + 4) + shape.activations(TrainConfig(), recomputed=True) * 2
    assert abs(four.trainer.bytes - (7_000_000_000 * 4 + gathered)) < 1e6
    assert abs(eight.trainer.bytes - (7_000_000_000 * 2 + gathered)) < 1e6
    assert "1/4 of 32-bit weights 6.5 + 1/4 of optimizer 13.0" in four.trainer.said
    assert abs(four.engine.bytes - (7_000_000_000 + 131072 * 512) / 0.9) < 1e6
    # one is a worker as well: the node's own weights, and what checks followers by them, are in main memory
    one = needs_of(Config.model_validate({"federation": {"publish": True}}), shape, torch.bfloat16, cluster(1, 2, 2))
    assert abs(one.trainer.bytes - (7_000_000_000 * 16 + gathered)) < 1e6
    assert one.trainer.said.startswith("32-bit weights 26.1 + optimizer 52.2 + gradients 26.1")
    # an engine that sleeps while the trainer works, and takes less than an update does
    assert (four.kept, four.shared.bytes) == (7_000_000_000 * 3, four.trainer.bytes)
    assert four.shared.said.endswith("+ activations 0.2) and (vLLM's weights 6.5 + keys and values 0.1)")
    awake = Config.model_validate({"train": {"shards": 4}, "engine": {"sleep": "off"}})
    both = needs_of(awake, shape, torch.bfloat16, asked).shared.bytes
    assert both == four.trainer.bytes + four.engine.bytes
