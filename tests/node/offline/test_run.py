"""The whole way of `shoal train offline` on a tiny model, and that a node is as before until the result is whole."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from node.checkpoint import CheckpointError, CheckpointStore
from node.history import History
from node.home import Home, HomeLocked, NoSwarm
from node.offline.examples import OfflineError
from node.offline.run import BadOrder, Order, check, run
from node.settings import load
from protocol.manifest import EnvironmentSpec, make_manifest
from tests.node.test_resume import foreign_groups

needs_trl = [
    pytest.mark.trl,
    pytest.mark.skipif(find_spec("trl") is None, reason="shoal[trl] is not installed (make test-interop does)"),
]

CONFIG = """
[node]
threads = 1
[model]
path = "{model}"
dtype = "float32"
[eval]
tasks = 4
[web]
port = 0
[network]
listen = "/ip4/127.0.0.1/tcp/0"
[swarm]
own_groups = 1
foreign_groups = 2
[rollout]
group_size = 4
"""


@pytest.fixture
def swarm(home: Home, evenness: EnvironmentSpec, tiny_model: Callable[..., Path]) -> Home:
    """A home with eight foreign groups: 'even' and 'four' are right, 'odd' is wrong."""
    manifest = make_manifest("offline", time.time() - 60, (evenness,), epoch_seconds=86400)
    home.found(manifest)
    home.config_path.write_text(CONFIG.format(model=tiny_model("llama", ascii_only=True)))
    foreign_groups(home, manifest, 8)
    return home


def order(method: Any = "sft", **changes: Any) -> Order:
    return Order(**{"method": method, "steps": 3, "learning_rate": 1e-3, **changes})


def train(home: Home, ordered: Order) -> dict[str, Any]:
    return run(home, load(home), ordered)


def scores(monkeypatch: pytest.MonkeyPatch, *means: float) -> None:
    """Held-out scores, one after the other, instead of sampling."""
    told = iter(means)

    async def held_out(*_: Any) -> Mapping[str, float]:
        return {"evenness": next(told)}

    monkeypatch.setattr("node.offline.run.held_out", held_out)


def files(home: Home) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in home.checkpoints.rglob("*")}


# -- before anything is loaded -------------------------------------------------------------------------------


@pytest.fixture
def any_trl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("node.offline.run.require_trl", lambda: None)


@pytest.mark.usefixtures("any_trl")
def test_orders_that_make_no_sense(tmp_path: Path) -> None:
    with pytest.raises(BadOrder, match="give --output DIR for a model directory, or --apply"):
        check(order())
    with pytest.raises(BadOrder, match="worse ones beside them, which dpo needs ; use --method sft"):
        check(order("dpo", source="environments", apply=True))
    (tmp_path / "taken").mkdir()
    with pytest.raises(BadOrder, match=r"taken is there already ; give a new directory"):
        check(order(output=tmp_path / "taken"))
    with pytest.raises(BadOrder, match=r"nowhere is no directory ; make it first"):
        check(order(output=tmp_path / "nowhere" / "model"))


@pytest.mark.usefixtures("any_trl")
def test_a_node_that_is_up_or_in_no_swarm_is_left_alone(home: Home, swarm: Home) -> None:
    with swarm.lock(), pytest.raises(HomeLocked, match=r"in use by process .* ; stop it with `shoal .*down`"):
        train(swarm, order(apply=True))
    swarm.leave()
    with pytest.raises(NoSwarm, match="shoal swarm create"):
        train(swarm, order(apply=True))


# -- the whole way -------------------------------------------------------------------------------------------


class TestWithTrl:
    pytestmark = needs_trl

    @pytest.mark.parametrize("method", ["dpo", "kto", "sft"])
    def test_a_model_directory_comes_out_and_the_node_is_as_before(
        self, swarm: Home, tmp_path: Path, tiny_model: Callable[..., Path], method: str
    ) -> None:
        report = train(swarm, order(method, output=tmp_path / "model"))
        assert report["output"] == str(tmp_path / "model")
        assert (report["source"], report["groups"], report["tasks"]) == ("experience", 8, 8)
        # distinct answers of a task: 'even', 'four', 'odd', 'answer N'; the last one is even for N > 9 only
        assert report["examples"] == {"dpo": 8, "kto": 32, "sft": 24}[method]
        assert (report["step"], report["checkpoint"], report["steps"], report["ended"]) == (0, None, 3, "done")
        assert set(report["held_out"]["before"]) == {"evenness", "mean"}
        assert json.loads(json.dumps(report)) == report
        AutoTokenizer.from_pretrained(tmp_path / "model")
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
        first = AutoModelForCausalLM.from_pretrained(tiny_model("llama", ascii_only=True))
        assert any((a - b).abs().max() > 1e-4 for a, b in zip(model.parameters(), first.parameters(), strict=True))
        assert files(swarm) == {}
        assert not list(tmp_path.glob(".model-*"))

    def test_a_warm_start_teaches_the_gold_answer(self, swarm: Home, tmp_path: Path) -> None:
        asked = order(source="environments", tasks=32, steps=120, learning_rate=3e-3, output=tmp_path / "model")
        report = train(swarm, asked)
        assert report["left_out"] == {"tasks of evenness without an answer that scores 1": 4}
        assert report["examples"] == 28
        tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
        chat = [{"role": "user", "content": "123 4"}]
        prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        said = model.generate(**prompt, max_new_tokens=8, do_sample=False)[0, prompt["input_ids"].shape[1] :]
        assert tokenizer.decode(said) == "even<|im_end|>"

    def test_an_applied_result_is_the_next_step(self, swarm: Home, monkeypatch: pytest.MonkeyPatch) -> None:
        scores(monkeypatch, 0.25, 0.5, 0.5, 0.5)
        assert train(swarm, order(apply=True))["checkpoint"] == 1
        recovery = CheckpointStore(swarm.checkpoints, 2).latest()
        assert (recovery.step, list(recovery.records), list(recovery.problems)) == (1, [], [])
        assert recovery.state is not None
        assert recovery.state["epoch"] == -1, "no task of its own was used"
        assert recovery.directory is not None
        assert json.loads((recovery.directory / "trainer.json").read_text()) == {
            "step": 1,
            "updates": 0,
            "optimizer": "adamw",
        }
        history = History(swarm.database, time.time)
        assert [(e["step"], e["mean"]) for e in history.evaluations(-1, 10)] == [(1, 0.5)]
        (said,) = [e["message"] for e in history.events(None, 100) if e["kind"] == "offline"]
        assert said == "sft on 24 examples is step 1; held-out 0.250 -> 0.500; the optimizer starts anew"
        history.close()
        # the next one goes on from it
        first = load_file(recovery.directory / "model.safetensors")
        report = train(swarm, order("dpo", apply=True, learning_rate=1e-6))
        assert (report["step"], report["checkpoint"]) == (1, 2)
        second = load_file(swarm.checkpoints / "step-2" / "model.safetensors")
        assert max(float((first[name] - second[name]).abs().max()) for name in first) < 1e-5

    def test_a_worse_model_is_not_applied_unless_forced(
        self, swarm: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        scores(monkeypatch, 0.5, 0.25, 0.5, 0.25)
        both = order(apply=True, output=tmp_path / "model")
        with pytest.raises(OfflineError, match=r"fell from 0.500 to 0.250, so the node stays at step 0, .*--force"):
            train(swarm, both)
        assert files(swarm) == {}
        assert (tmp_path / "model" / "model.safetensors").exists()
        assert train(swarm, replace(both, output=None, force=True))["checkpoint"] == 1

    def test_a_deadline_ends_it_early(self, swarm: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        scores(monkeypatch, 0.5, 0.5)
        report = train(swarm, order(steps=1000, minutes=1e-6, output=tmp_path / "model"))
        assert (report["steps"], report["ended"]) == (1, "deadline")

    def test_steps_of_another_model_are_not_trained_on(
        self, swarm: Home, tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        scores(monkeypatch, 0.5, 0.5)
        train(swarm, order(apply=True, steps=1))
        swarm.config_path.write_text(CONFIG.format(model=tiny_model("qwen2")))
        with pytest.raises(CheckpointError, match="has the steps of another model"):
            train(swarm, order(apply=True, steps=1))

    def test_no_experience_says_what_to_do(self, swarm: Home) -> None:
        swarm.database.unlink()
        with pytest.raises(OfflineError, match=r"experience of this node is empty ; train some steps first"):
            train(swarm, order(apply=True))

    @pytest.mark.slow
    def test_a_kill_in_the_middle_leaves_the_node_as_it_was(self, swarm: Home, tmp_path: Path) -> None:
        command = [sys.executable, "-m", "node", "--home", str(swarm.path), "train", "offline", "--method", "sft"]
        asked = [*command, "--steps", "100000", "--output", str(tmp_path / "model"), "--apply"]
        log = tmp_path / "log"
        process = subprocess.Popen(asked, stderr=log.open("wb"), env={**os.environ, "OMP_NUM_THREADS": "1"})
        deadline = time.monotonic() + 180
        while "step 3 of" not in log.read_text() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(signal.SIGKILL)
        assert process.wait(10) == -signal.SIGKILL, log.read_text()
        assert files(swarm) == {}
        assert not (tmp_path / "model").exists()
        assert (swarm.path / "offline").exists()
        # nothing is locked, and the node trains on: a second training and a start both find it as it was
        again = subprocess.run(
            [*command, "--steps", "1", "--apply", "--force", "--json"], capture_output=True, timeout=180, check=True
        )
        assert json.loads(again.stdout)["checkpoint"] == 1
        assert not (swarm.path / "offline").exists(), "what the killed one left is gone, too"
        up = [*command[:5], "up", "--steps", "2"]
        subprocess.run(up, capture_output=True, timeout=180, check=True)
        assert CheckpointStore(swarm.checkpoints, 2).latest().step == 2
