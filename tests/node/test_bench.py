"""The benchmarks themselves: what they count, and that every side does its work and says it. Not how fast."""

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from node.bench import (
    coordinator,
    exchange,
    members,
    memory,
    policy,
    rollout_hf,
    rollout_ours,
    routing,
    step,
    step_ours,
    train,
)
from node.bench.exchange_producer import ANSWERS, around_as_json, as_json
from node.bench.floor import Work, work_of
from node.bench.machine import machine
from node.bench.side import BenchError, SideTimeout, run_side
from node.bench.workload import GROUP_SIZE, NEW_TOKENS, PROMPTS, bench_manifest, median, own_refs
from node.environments.reasoning_gym import ReasoningGym
from node.interfaces import TrainGroup, TrainSequence
from node.models import load_model
from protocol.manifest import embedded_manifest
from protocol.rollout import Completion, RolloutGroup, TaskRef, Turn, pack_logprobs, pack_token_ids


def group(prompt: tuple[int, ...], answers: list[tuple[int, ...]], rewards: list[float]) -> TrainGroup:
    sequences = [
        TrainSequence(ids, (True,) * len(ids), reward, None) for ids, reward in zip(answers, rewards, strict=True)
    ]
    return TrainGroup(prompt, tuple(sequences), "own")


def test_work_counts_every_distinct_token_once() -> None:
    informative = group((1, 2, 3), [(4, 5, 6), (4, 5, 7), (8,)], [1.0, -0.5, -0.5])
    uniform = group((1, 2, 9), [(4, 4), (4, 4), (5, 5)], [0.0, 0.0, 0.0])
    counted = work_of([informative, uniform])
    # prompts 1 2 3 and 9; fed back: 4, 4 5 of the first and 4, 5 of the second, the last of each completion never
    assert counted == Work(prompts=2, prefill_tokens=4, decode_tokens=4, trained_tokens=5, trained_states=3)
    layers, head = 10, 100
    assert counted.flops(layers, head) == 2 * 10 * (4 + 4) + 2 * 100 * (2 + 4) + 6 * 10 * 5 + 6 * 100 * 3


def test_work_without_anything_to_learn_is_the_rollout_alone() -> None:
    counted = work_of([group((1, 2), [(3,), (3,)], [0.0, 0.0])])
    assert counted == Work(1, 2, 0, 0, 0)
    assert counted.flops(10, 100) == 2 * 10 * 2 + 2 * 100


def test_the_median_of_an_even_number_is_the_lower_middle() -> None:
    assert median([3.0, 1.0, 2.0]) == 2.0
    assert median([4.0, 1.0, 2.0, 3.0]) == 2.0


def test_tasks_are_the_same_at_every_run_and_of_one_epoch() -> None:
    refs = own_refs(bench_manifest(), 40)
    assert refs == own_refs(bench_manifest(), 40)
    assert {ref.environment for ref in refs} == {"letter_counting", "chain_sum", "spell_backward"}


def test_machine_names_what_a_time_depends_on() -> None:
    facts = machine(1)
    assert facts["threads"] == 1
    assert facts["gemm_gflops_f32"] > 0.1
    assert facts["gemm_gflops_bf16"] > 0.1
    assert json.loads(json.dumps(facts)) == facts


async def test_a_side_that_ends_or_hangs_is_named() -> None:
    with pytest.raises(BenchError, match=r"node\.bench\.machine ended with code 0"):
        await run_side("node.bench.machine", {"threads": 1}, 60.0)
    with pytest.raises(SideTimeout, match=r"node\.bench\.rollout_hf said nothing for 0 s"):
        await run_side("node.bench.rollout_hf", {"threads": 1}, 0.01)


async def test_our_step_is_the_loops(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    spec = {"threads": 1, "model": str(tiny_model("llama", ascii_only=True)), "steps": 1}
    result = await step_ours.measure(spec, tmp_path)
    (real,), (synthetic,) = result["steps"], result["all_informative"]
    assert synthetic["groups_skipped"] == 0
    assert len(real["prompt_tokens"]) == PROMPTS
    assert PROMPTS * GROUP_SIZE <= real["tokens_generated"] <= PROMPTS * GROUP_SIZE * NEW_TOKENS
    assert synthetic["tokens_forwarded"] > synthetic["tokens_prefilled"]
    assert synthetic["flops"] > 0
    assert {"rollout", "journal", "update"} <= synthetic["stages"].keys()
    merged = step._merge([result, result])
    assert merged["seconds"] == real["seconds"]
    assert merged["flops"] == {"real": real["flops"], "all_informative": synthetic["flops"]}


async def test_both_rollouts_make_the_same_ragged_tokens(tiny_model: Callable[..., Path]) -> None:
    budgets = (2, 3, 4, 5, 6, 7, 8, 9)
    spec = {"threads": 1, "model": str(tiny_model("llama")), "repeats": 1, "ragged": budgets, "dtype": "float32"}
    ours = await rollout_ours.measure(spec)
    theirs = await asyncio.to_thread(rollout_hf.measure, spec)
    assert ours["ragged"][0]["tokens"] == theirs["ragged"][0]["tokens"] == GROUP_SIZE * sum(budgets)
    assert ours["uniform"][0]["tokens_prefilled"] > 100
    for side in (ours, theirs):
        assert 0 < side["uniform"][0]["tokens"] <= PROMPTS * GROUP_SIZE * NEW_TOKENS
        assert side["uniform"][0]["seconds"] > 0


@pytest.mark.slow
async def test_trl_does_the_same_number_of_completions(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    pytest.importorskip("trl", reason="shoal[trl] is not installed")
    from node.bench import step_trl

    spec = {"threads": 1, "model": str(tiny_model("llama")), "steps": 1, "prompts": PROMPTS, "dtype": "float32"}
    result = await asyncio.to_thread(step_trl.measure, spec, str(tmp_path))
    (only,) = result["steps"]
    assert PROMPTS * GROUP_SIZE <= only["tokens_generated"] <= PROMPTS * GROUP_SIZE * NEW_TOKENS
    # every completion carries its whole prompt
    assert only["tokens_forwarded"] > PROMPTS * GROUP_SIZE * 100
    assert 0 <= only["groups_uniform"] <= PROMPTS
    assert result["probe"]["tokens_generated"] <= GROUP_SIZE * NEW_TOKENS


@pytest.mark.parametrize("name", sorted(ANSWERS))
def test_answers_are_right(name: str) -> None:
    spec = embedded_manifest("bench", 0).environment(name)
    assert spec is not None
    environment = ReasoningGym(spec.name, spec.version, spec.settings)
    for index in range(20):
        answer = ANSWERS[name](environment.task(1, index).messages[-1].content)
        assert environment.score(1, index, answer).reward == 1.0


def test_json_says_all_that_the_group_says() -> None:
    one = Completion((Turn("assistant", "4"),), "stop", 2, 1.0, pack_token_ids([36, 2]), pack_logprobs([-0.5, -0.25]))
    group = RolloutGroup(3, TaskRef("chain_sum", "1", 5, 6), "tiny", bytes(32), 7, (one,) * 8)
    plain = json.loads(as_json(group, bytes(32), "12D3KooW"))
    assert (plain["swarm"], plain["producer"], plain["epoch"]) == ("00" * 32, "12D3KooW", 3)
    assert plain["task"] == {"environment": "chain_sum", "version": "1", "seed": 5, "index": 6}
    assert plain["completions"][0] == {
        "turns": [{"role": "assistant", "text": "4"}],
        "finish": "stop",
        "token_count": 2,
        "reward": 1.0,
        "token_ids": [36, 2],
        "logprobs": [-0.5, -0.25],
    }
    assert b'"reward_std":0.0' in around_as_json(group, bytes(32))


@pytest.mark.model
@pytest.mark.network
@pytest.mark.slow
async def test_groups_cross_between_two_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "GROUPS", 32)
    result: dict[str, Any] = await exchange.compare(1, {})
    counters = result["ours"]["counters"]
    assert counters["consumer"]["admitted"] == counters["producer"]["published"] == 32
    assert counters["consumer"]["rejected"] == {}
    assert result["ours"]["groups_per_second"] > 0
    assert result["ratio"] > 2


@pytest.mark.slow
@pytest.mark.network
async def test_versions_cross_between_two_processes_bit_for_bit(
    tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = str(tiny_model("llama"))
    monkeypatch.setattr(policy, "spec_of", lambda threads, **more: {"threads": threads, "model": model, **more})
    result = await policy.compare(1, {})
    assert result["bit_for_bit"]
    whole, one, ten = result["versions"]
    assert [row["updates"] for row in result["versions"]] == [0, 1, 10]
    assert whole["bytes"] > ten["bytes"] > one["bytes"] > 0
    assert 0 == whole["changed_share"] < one["changed_share"] < ten["changed_share"] < 1
    assert result["ratio"] == whole["bytes"] / one["bytes"]
    for row in result["versions"]:
        assert row["wire_bytes"] >= row["bytes"]
        assert row["seconds"] > row["copy_seconds"] > 0
        assert min(row["encode_seconds"], row["pull_seconds"], row["apply_seconds"], row["adopt_seconds"]) > 0


def test_training_is_measured_with_both_ways_to_pack(tmp_path: Path, tiny_model: Callable[..., Path]) -> None:
    vocabulary, shape = 50, (12, 3, 4)
    case = train.grouped(*shape, vocabulary=vocabulary)
    merged, whole = len(case.groups) * (12 + 4 * 3), len(case.groups) * 4 * (12 + 3)
    assert len(case.groups) == 8
    assert case.token_ratio == pytest.approx(whole / merged, rel=0.1)  # of 50 tokens, some answers begin alike
    assert [train.grouped(p, 8, 4, vocabulary=vocabulary).shape["groups"] for p in (1000, 280, 40)] == [1, 2, 8]
    assert 1 < case.work_ratio(1, 10) < case.work_ratio(10, 1) < whole / (8 * (12 + 4 * 2)) * 1.1
    bundle = load_model(str(tiny_model("llama")), device="cpu", dtype="float32", models=tmp_path)
    for made in (case, train.branching(10, 2, 5, (2, 3), vocabulary=vocabulary)):
        result = train.measured(bundle, made, tmp_path)
        assert result["share"] == pytest.approx(result["time_ratio"] / result["token_ratio"])
        assert result["cpu_seconds"] > 0
        sequences = [len(group.prompt_ids) + len(one.token_ids) for group in made.groups for one in group.sequences]
        assert result["tokens_plain"] == sum(sequences) - len(sequences)  # the last token of each is not laid out
        assert result["tokens"] < result["tokens_plain"] / 2
    (group,) = made.groups
    assert len(group.sequences) == 6
    assert group.sequences[0].mask == (True,) * 2 + (False,) * 5 + (True,) * 2
    assert group.sequences[0].token_ids[:7] == group.sequences[2].token_ids[:7]


def test_routing_is_measured_with_replay_and_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing, "PROMPTS", 1)
    monkeypatch.setattr(routing, "NEW_TOKENS", 8)
    shape = {**routing.SHAPE, "num_hidden_layers": 2, "vocab_size": 64}
    rows = routing.measure(tmp_path, shape)["rows"]
    assert [(row["model"], row["training"], row["replay"]) for row in rows] == [
        ("qwen3_moe", "float32", True),
        ("qwen3_moe", "float32", False),
        ("qwen3_moe", "bfloat16", True),
        ("qwen3_moe", "bfloat16", False),
        ("qwen3", "float32", False),
        ("qwen3", "bfloat16", False),
    ]
    assert all(row["tokens"] == routing.GROUP_SIZE * 8 for row in rows)
    assert 0 < rows[0]["choices_flipped"] == rows[1]["choices_flipped"] < 0.5
    assert rows[0]["kl"] < rows[1]["kl"]
    assert rows[0]["mean"] < rows[1]["mean"]
    assert rows[4]["choices_flipped"] is None


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_adapters_hold_less_than_all_weights(
    dtype: str, tiny_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("peft", reason="needs shoal[lora]")
    monkeypatch.setattr(memory, "load_model", lambda model, **given: load_model(model, **{**given, "dtype": dtype}))
    spec = {"threads": 1, "model": str(tiny_model("llama"))}
    whole, adapted = (
        memory.measure({**spec, "train": dict(memory.CASES[case])}, tmp_path)
        for case in ("all weights", "adapters of rank 16, recomputing")
    )
    assert whole["optimizer_mb"] > adapted["optimizer_mb"] > 0
    # in bfloat16 the float32 copies of what is trained are among the weights
    assert (whole["weights_mb"] < adapted["weights_mb"]) == (dtype == "float32")
    held = [sum(case[f"{kind}_mb"] for kind in ("weights", "gradients", "optimizer")) for case in (whole, adapted)]
    assert held[0] > held[1] > 0


async def test_what_a_member_costs_a_coordinator() -> None:
    found = await coordinator.compare(1, {}, members=12)
    assert (found["calls"]["enter"], found["calls"]["report"]) == (12, 12)
    assert found["calls"]["announcement"] == 2 * 12 * coordinator.GROUPS  # at the gate, and counted
    assert set(found["cpu_ms_per_member"]) == {"enter", "follow", "announcement", "report", "score"}
    assert all(spent > 0 for spent in found["cpu_ms_per_member"].values())
    assert found["bytes_per_member"]["round"]["out"] > 0
    assert 0 < found["memory"]["bytes_per_member"] < 100_000


PARENT = """
import sys, time
from pathlib import Path
from node.bench.members import _coordinator
with _coordinator(Path(sys.argv[1]), 2) as lead:
    print(lead.process.pid, flush=True)
    time.sleep(60)
"""


@pytest.mark.slow
def test_a_benchmark_that_is_ended_takes_its_coordinator_along(tmp_path: Path) -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    lead = psutil.Process(int(parent.stdout.readline()))
    parent.terminate()
    assert parent.wait(10) == -signal.SIGTERM
    gone, _ = psutil.wait_procs([lead], timeout=30)
    assert gone == [lead]


@pytest.mark.slow
@pytest.mark.network
async def test_members_go_through_a_round_as_processes() -> None:
    found = await members.compare(1, {}, members=3)
    spent = found["coordinator_per_member"]
    assert found["member"]["peers"] >= 1
    assert spent["cpu_ms"] > spent["of_it_scorer_ms"] >= 0
    # a report of 32 answers, and eight announcements of 200 bytes at least
    assert spent["bytes_in"] > 32 * 42 + 8 * 200
    assert spent["bytes_out"] > 0
    assert 50 < found["coordinator_resident_mb"] < 400
