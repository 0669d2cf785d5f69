"""The simulation behind `shoal bench scheduler`: its inputs, that it repeats, and what it must show."""

import asyncio

import pytest

from node.bench import scheduler
from node.bench.scheduler import DENSE, EXPERTS, Case, simulate, table, tail_of
from node.bench.scheduler_traces import GROUP_SIZE, SCALE, lognormal, recorded
from node.bench.simulated import EngineModel, SimulatedEngine, Trace
from node.bench.virtual_time import run_virtual
from node.interfaces import PromptRequest

SMALL = Case("experts", EXPERTS, 8, lambda n: lognormal("short", n, median=4_000, cap=32_768, seed=1))


def test_synthetic_lengths_are_long_tailed_alike_within_a_group_and_follow_from_the_seed() -> None:
    made = lognormal("x", 400, median=20_000, cap=98_304, seed=3)
    assert made == lognormal("x", 400, median=20_000, cap=98_304, seed=3)
    assert made != lognormal("x", 400, median=20_000, cap=98_304, seed=4)
    lengths = sorted(length * SCALE for group in made.groups for length in group)
    assert lengths[len(lengths) // 2] == pytest.approx(20_000, rel=0.1)
    assert lengths[-1] == 98_304 == made.budget * SCALE
    assert sum(lengths[-len(lengths) // 10 :]) / sum(lengths) == pytest.approx(0.3, abs=0.03)
    means = [sum(group) / GROUP_SIZE for group in made.groups]
    spread = sum((mean - sum(means) / 400) ** 2 for mean in means) / 400
    within = sum((x - mean) ** 2 for group, mean in zip(made.groups, means, strict=True) for x in group) / 400 / 8
    assert spread > within


def test_recorded_lengths_are_the_embedded_models_own() -> None:
    made = recorded("x", 100, cap=65_536, seed=0)
    assert len(made.groups) == 100
    assert {len(group) for group in made.groups} == {GROUP_SIZE}
    assert sorted(made.groups[:64]) == sorted(recorded("x", 64, cap=65_536, seed=9).groups)
    assert max(map(max, made.groups)) == made.budget == 65_536 // SCALE


def test_a_simulated_engine_takes_the_time_its_constants_say() -> None:
    model = EngineModel(2, 1000, step_seconds=2.0, kv_seconds=0.01, token_seconds=0.5, prefill_seconds=0.1)
    assert model.step(1, 100) == 3.0
    assert model.step(10, 0) == 5.0

    async def run() -> float:
        engine = SimulatedEngine("e", model, Trace({"a": [4, 4]}))
        async for group in engine.generate([PromptRequest("a", (1,) * 10, 2, 9, 1.0, 0)]):
            assert [sample.token_ids for sample in group.samples] == [(0, 0, 0, 0), (1, 0, 0, 0)]
        return asyncio.get_running_loop().time()

    # the prompt once, then four steps of two sequences: 10 tokens of keys and values that become 12, 14, 16
    assert run_virtual(run()) == pytest.approx(10 * 0.1 + 4 * 2.0 + 0.01 * (10 + 12 + 14 + 16))


def test_tail_latency_is_the_time_after_nine_tenths() -> None:
    assert tail_of([*range(1, 10), 50], 50.0) == 41.0
    assert tail_of([], 50.0) == 0.0


def test_a_run_repeats_to_the_digit() -> None:
    row = scheduler.rows_of(EXPERTS)[3]
    workload = SMALL.lengths(80)
    first, second = (simulate(SMALL, workload, row, train_seconds=1e-4, steps=4) for _ in range(2))
    assert first == second


def test_resuming_beats_waiting_and_nothing_but_tail_batching_gives_tokens_up() -> None:
    rows = {row["policy"]: row for row in table(SMALL, steps=5)}
    assert rows["synchronous"]["throughput_ratio"] == 1.0
    resumed = rows["+ over-provision, resumed"]
    assert resumed["rollout_throughput_ratio"] > 1.9
    assert resumed["tail_ratio"] < 0.3
    assert resumed["idle_share_rollout"] < rows["+ divided"]["idle_share_rollout"] < 1
    assert 0 < resumed["oldest_token_versions_behind"] <= 2
    assert rows["asynchronous"]["throughput_ratio"] > resumed["throughput_ratio"] > 1
    assert {name for name, row in rows.items() if row["given_up_share"] > 0} == {"+ tail batching"}
    on_policy = ("synchronous", "+ longest first", "+ divided", "+ tail batching")
    assert {rows[name]["oldest_token_versions_behind"] for name in on_policy} == {0}


def test_the_cases_differ_in_what_limits_decoding() -> None:
    """With half of its memory in use a step of the dense engine takes over half as long: it is the memory it reads."""
    for model, least in ((DENSE, 0.5), (EXPERTS, 0.8)):
        full, half = model.step(64, model.kv_tokens), model.step(32, model.kv_tokens / 2)
        assert half / full > least
    assert DENSE.step(64, DENSE.kv_tokens) > 4 * DENSE.step(1, 0)
    assert EXPERTS.step(64, EXPERTS.kv_tokens) < 2 * EXPERTS.step(1, 0)
