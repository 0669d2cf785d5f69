"""TRL on our tokens: what it is given, that it moves the model the right way, and how it fails."""

import logging
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from node.config_train import TrainConfig
from node.interfaces import Message
from node.models import ModelBundle, encode_completion, load_model, render_prompt
from node.offline.examples import Labelled, OfflineError, Pair
from node.offline.trainers import Course, kto_rows, kto_weights, micro_batch, plain_copy, require_trl, train

needs_trl = [
    pytest.mark.trl,
    pytest.mark.skipif(find_spec("trl") is None, reason="shoal[trl] is not installed (make test-interop does)"),
]


def course(method: Any, **changes: Any) -> Course:
    given = {"steps": 8, "batch": 4, "learning_rate": 3e-3, "beta": 0.1, "seed": 0, "autocast": False, **changes}
    return Course(method=method, **given)


@pytest.fixture
def bundle(tiny_model: Callable[[str], Path], tmp_path: Path) -> ModelBundle:
    torch.set_num_threads(1)
    return load_model(str(tiny_model("llama")), device="cpu", dtype="float32", models=tmp_path)


def examples(bundle: ModelBundle, method: str) -> list[Any]:
    """'yes' is good and 'no' is bad, to eight prompts of different length."""
    prompts = [render_prompt(bundle, (Message("user", "?" * n),)) for n in range(1, 9)]
    yes, no = encode_completion(bundle, "yes", "stop"), encode_completion(bundle, "no", "length")
    if method == "dpo":
        return [Pair(prompt, yes, no) for prompt in prompts]
    if method == "kto":
        return [Labelled(prompt, ids, ids == yes) for prompt in prompts for ids in (yes, no)]
    return [Labelled(prompt, yes, True) for prompt in prompts]


def logprob(model: Any, prompt_ids: tuple[int, ...], completion_ids: tuple[int, ...]) -> float:
    """Of the whole completion, by the plain model and without padding."""
    ids = torch.tensor([[*prompt_ids, *completion_ids]])
    with torch.no_grad():
        scores = model(ids, use_cache=False).logits[0, :-1].float().log_softmax(-1)
    return float(scores.gather(1, ids[0, 1:, None])[len(prompt_ids) - 1 :].sum())


def trained(bundle: ModelBundle, tmp_path: Path, method: str, **changes: Any) -> tuple[Any, Any]:
    (tmp_path / "work").mkdir(exist_ok=True)
    model = plain_copy(bundle.model, dict(bundle.model.named_parameters()))
    given = {"examples": examples(bundle, method), "should_stop": lambda: False, "config": TrainConfig(), **changes}
    stop, config, chosen = given.pop("should_stop"), given.pop("config"), given.pop("examples")
    outcome = train(
        model, bundle.tokenizer, chosen, course(method, **given), config, work=tmp_path / "work", should_stop=stop
    )
    return model.eval(), outcome


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "method" in metafunc.fixturenames:
        metafunc.parametrize("method", ["dpo", "kto", "sft"])


# -- without TRL ---------------------------------------------------------------------------------------------


def test_a_plain_copy_says_the_same(bundle: ModelBundle) -> None:
    plain = plain_copy(bundle.model, dict(bundle.model.named_parameters())).eval()
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        assert torch.allclose(plain(ids).logits, bundle.model(ids).logits, atol=1e-6)
    assert plain.config._attn_implementation == "sdpa"
    assert bundle.model.config._attn_implementation != "sdpa"


def test_micro_batches_keep_to_the_budget() -> None:
    pairs = [Pair((1,) * 10, (2,) * 5, (3,) * 10)] * 8  # 40 tokens with padding
    assert micro_batch(pairs, course("dpo"), 100) == 2
    assert micro_batch(pairs, course("dpo"), 10) == 1
    assert micro_batch(pairs, course("dpo"), 10_000) == 4, "no more than a batch"
    assert micro_batch(pairs[:3], course("dpo", batch=8), 10_000) == 3, "nor than there are"
    assert micro_batch(pairs, course("dpo", batch=8), 200) == 4, "5 would fit, and twice 5 are no batch of 8"
    assert micro_batch(pairs, course("dpo", batch=7), 200) == 4
    labels = [Labelled((1,) * 10, (2,) * 10, True)] * 8
    assert micro_batch(labels, course("sft"), 45) == 2
    assert micro_batch(labels, course("kto"), 10) == 2, "the KL is estimated from pairs of examples"


def test_kto_takes_the_answers_of_a_micro_batch_in_turn() -> None:
    labels = [Labelled((n,), (10 + n,), n % 2 == 0) for n in range(5)]
    rows = kto_rows(labels, 2)
    assert [row["KL_completion_ids"] for row in rows] == [[11], [10], [13], [12], [14]]
    assert [(row["prompt_ids"], row["completion_ids"], row["label"]) for row in rows[:2]] == [
        ([0], [10], True), ([1], [11], False)
    ]  # fmt: skip


@pytest.mark.parametrize(("wanted", "unwanted", "weights"), [(10, 90, (9, 1)), (90, 10, (1, 9)), (5, 5, (1, 1))])
def test_kto_weighs_both_kinds_alike(wanted: int, unwanted: int, weights: tuple[float, float]) -> None:
    assert kto_weights(wanted, unwanted) == weights


def test_a_missing_trl_is_named_with_the_way_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("node.offline.trainers.find_spec", lambda name: None)
    with pytest.raises(OfflineError, match=r"trl, which is not installed ; .venv/bin/pip install -e '.\[trl\]'"):
        require_trl()


# -- with TRL ------------------------------------------------------------------------------------------------


class TestWithTrl:
    pytestmark = needs_trl

    def test_good_answers_gain_on_bad_ones(self, bundle: ModelBundle, tmp_path: Path, method: str) -> None:
        prompt = examples(bundle, "dpo")[3].prompt_ids
        yes, no = examples(bundle, "dpo")[3].chosen_ids, examples(bundle, "dpo")[3].rejected_ids
        before = logprob(bundle.model, prompt, yes) - logprob(bundle.model, prompt, no)
        model, outcome = trained(bundle, tmp_path, method)
        after = logprob(model, prompt, yes) - logprob(model, prompt, no)
        assert after > before + 1
        assert outcome.steps == len(outcome.losses) == 8
        assert outcome.losses[-1] < outcome.losses[0]

    def test_the_first_loss_is_that_of_the_formula(self, bundle: ModelBundle, tmp_path: Path, method: str) -> None:
        given = examples(bundle, method)
        _, outcome = trained(bundle, tmp_path, method, steps=1, batch=len(given))
        if method == "sft":
            tokens = sum(len(e.completion_ids) for e in given)
            expected = -sum(logprob(bundle.model, e.prompt_ids, e.completion_ids) for e in given) / tokens
        else:  # the policy is its own reference: log sigmoid(0), and sigmoid(0)
            expected = {"dpo": 0.693147, "kto": 0.5}[method]
        assert outcome.losses == [pytest.approx(expected, rel=1e-4)]

    def test_bfloat16_computes_about_the_same(self, bundle: ModelBundle, tmp_path: Path, method: str) -> None:
        exact, rounded = (trained(bundle, tmp_path, method, steps=2, autocast=flag)[1] for flag in (False, True))
        assert rounded.losses == pytest.approx(exact.losses, rel=0.05)
        assert rounded.losses != exact.losses
        model, _ = trained(bundle, tmp_path, method, steps=1, autocast=True)
        assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}

    def test_a_seed_determines_the_result(self, bundle: ModelBundle, tmp_path: Path) -> None:
        runs = [trained(bundle, tmp_path, "sft", steps=3, seed=seed)[0] for seed in (1, 1, 2)]
        first, again, other = ([p.detach() for p in model.parameters()] for model in runs)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
        assert any(not torch.equal(a, b) for a, b in zip(first, other, strict=True))

    def test_neither_model_nor_tokenizer_of_the_node_changes(self, bundle: ModelBundle, tmp_path: Path) -> None:
        before = [p.detach().clone() for p in bundle.model.parameters()], dict(bundle.tokenizer.special_tokens_map)
        trained(bundle, tmp_path, "dpo", steps=2)
        assert all(torch.equal(a, b) for a, b in zip(before[0], bundle.model.parameters(), strict=True))
        assert bundle.tokenizer.special_tokens_map == before[1]

    def test_it_stops_when_asked_and_says_how_far_it_is(
        self, bundle: ModelBundle, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        asked = iter([False, True, True])
        caplog.set_level(logging.INFO, "node.offline.trainers")
        _, outcome = trained(bundle, tmp_path, "sft", should_stop=lambda: next(asked))
        assert outcome.steps == 2
        assert "step 2 of 8, loss" in caplog.text

    def test_a_lost_loss_ends_it(self, bundle: ModelBundle, tmp_path: Path) -> None:
        with pytest.raises(OfflineError, match=r"the loss of step \d is nan ; lower --learning-rate .1e\+30"):
            trained(bundle, tmp_path, "sft", learning_rate=1e30, config=TrainConfig(max_grad_norm=1e30))

    def test_running_out_of_memory_says_what_to_lower(
        self, bundle: ModelBundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def no_memory(*_: Any) -> None:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

        monkeypatch.setattr("node.offline.trainers._trainer", no_memory)
        with pytest.raises(OfflineError, match=r"with 4 examples a forward ; lower train.tokens_per_micro_batch .640"):
            trained(bundle, tmp_path, "sft")
