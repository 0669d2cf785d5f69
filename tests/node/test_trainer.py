"""One update: its gradient, what it leaves out, how it fails without harm, and exact resume."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from transformers import AutoModelForCausalLM

from node.checkpoint import CheckpointError
from node.config_train import TrainConfig
from node.interfaces import Batch, Interrupted, StepSkipped, TrainGroup, TrainSequence
from node.models import load_model
from node.training import files
from node.training.local import LocalTrainer

Make = Callable[..., LocalTrainer]
PLAIN = {"learning_rate": 1e-3, "advantage": "dr_grpo", "aggregation": "token-mean"}
"""The rewards of `batch` have mean 0 in every group: they are the advantages."""


@pytest.fixture
def make(tiny_model: Callable[[str], Path], tmp_path: Path) -> Iterator[Make]:
    """A trainer on a fresh tiny model, with some settings of TrainConfig."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)

    def trainer(dtype: str = "float32", **settings: Any) -> LocalTrainer:
        bundle = load_model(str(tiny_model("llama")), device="cpu", dtype=dtype, models=tmp_path)
        return LocalTrainer(bundle, TrainConfig(**{**PLAIN, **settings}), dumps=tmp_path / "dumps")

    yield trainer
    torch.set_num_threads(threads)


def batch(step: int = 1, *, seed: int = 0, mu: float | None = None, uniform: bool = True) -> Batch:
    """Two informative groups, own and foreign, with common beginnings and masked tokens, and a uniform one."""
    rng = random.Random(seed)

    def ids(low: int, high: int, longest: int) -> tuple[int, ...]:
        return tuple(rng.randrange(low, high) for _ in range(rng.randint(2, longest)))

    def group(origin: Any, rewards: list[float]) -> TrainGroup:
        sequences = []
        for reward in rewards:
            tokens = ids(2, 6, 8)
            mask = tuple(i != 1 for i in range(len(tokens)))
            known = None if mu is None or origin == "foreign" else (mu,) * len(tokens)
            sequences.append(TrainSequence(tokens, mask, reward, known))
        return TrainGroup((9, 8, *ids(2, 258, 6)), tuple(sequences), origin)

    groups = [group("own", [1.0, -0.5, -0.5]), group("foreign", [0.7, -0.7])]
    return Batch(step, (*groups, group("own", [0.0, 0.0])) if uniform else tuple(groups))


def weights(trainer: LocalTrainer) -> list[torch.Tensor]:
    return [weight.detach().clone() for weight in trainer.weights.masters.values()]


def gradients(
    trainer: LocalTrainer, given: Batch, monkeypatch: pytest.MonkeyPatch
) -> tuple[dict[str, torch.Tensor], float]:
    """The gradient of one update before clipping, and its loss."""
    caught: dict[str, torch.Tensor] = {}

    def clip(largest: float) -> float:
        caught.update({name: weight.grad.clone() for name, weight in trainer.weights.masters.items()})  # type: ignore[union-attr]
        return 1.0

    monkeypatch.setattr(trainer.weights, "clip", clip)
    return caught, trainer.update(given).loss


def plain_gradients(directory: Path, given: Batch, tis_cap: float = 2.0) -> tuple[dict[str, torch.Tensor], float]:
    """-A logp over informative groups with a plain forward per sequence, mean over trained tokens, TIS weights."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, local_files_only=True).eval()
    terms, tokens = [], 0
    for group in given.groups:
        for sequence in group.sequences:
            if not any(s.reward for s in group.sequences):
                continue
            ids = torch.tensor([group.prompt_ids + sequence.token_ids])
            scores = model(ids, use_cache=False).logits[0, :-1].log_softmax(-1)
            logprobs = scores.gather(1, ids[0, 1:, None])[len(group.prompt_ids) - 1 :, 0]
            correction = torch.ones(len(logprobs))
            if sequence.behaviour_logprobs is not None:
                correction = (logprobs.detach() - torch.tensor(sequence.behaviour_logprobs)).exp().clamp(max=tis_cap)
            mask = torch.tensor(sequence.mask)
            terms.append((-sequence.reward * correction * logprobs)[mask].sum())
            tokens += int(mask.sum())
    total = sum(terms) / tokens
    total.backward()  # type: ignore[union-attr]
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}, total.item()  # type: ignore[union-attr]


@pytest.mark.parametrize("mu", [None, -1.5])
def test_gradient_equals_the_plain_one(
    make: Make, mu: float | None, tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make(loss="reinforce")
    got, loss = gradients(trainer, batch(mu=mu), monkeypatch)
    expected, expected_loss = plain_gradients(tiny_model("llama"), batch(mu=mu))
    assert loss == pytest.approx(expected_loss, abs=1e-5)
    assert got.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(got[name], gradient, atol=1e-5, rtol=1e-5)


def test_loss_and_gradient_do_not_depend_on_the_split(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    for aggregation in ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"):
        whole = make(aggregation=aggregation)
        split = make(aggregation=aggregation)
        split.budget = 1  # every sequence alone
        expected, loss = gradients(whole, batch(mu=-1.0), monkeypatch)
        got, split_loss = gradients(split, batch(mu=-1.0), monkeypatch)
        assert split_loss == pytest.approx(loss, abs=1e-6)
        for name, gradient in expected.items():
            torch.testing.assert_close(got[name], gradient, atol=1e-6, rtol=1e-5)


def test_uniform_groups_cost_nothing_and_change_nothing(make: Make) -> None:
    with_uniform, without = make(), make()
    first = with_uniform.update(batch())
    second = without.update(batch(uniform=False))
    assert first == second
    assert all(map(torch.equal, weights(with_uniform), weights(without)))
    uniform = Batch(1, batch().groups[2:])
    with pytest.raises(StepSkipped, match="all groups are uniform"):
        with_uniform.update(uniform)
    assert with_uniform.step == 1


def test_statistics(make: Make) -> None:
    trainer = make(kl_coefficient=0.1)
    given = batch(mu=-2.0)
    before = trainer.logprobs(given.groups)
    stats = trainer.update(given)
    own = [
        (old, trained)
        for row, sequence in zip(before[0], given.groups[0].sequences, strict=True)
        for old, trained in zip(row, sequence.mask, strict=True)
        if trained
    ]
    gaps = [-2.0 - old for old, _ in own]
    assert stats.kl_behaviour == pytest.approx(sum(gaps) / len(gaps), abs=1e-5)
    assert stats.max_mismatch == pytest.approx(max(map(abs, gaps)), abs=1e-5)
    trained = sum(sum(s.mask) for group in given.groups[:2] for s in group.sequences)
    corrections = [min(2.0, 2.718281828 ** (-gap)) for gap in gaps] + [1.0] * (trained - len(gaps))
    assert stats.ess == pytest.approx(sum(corrections) ** 2 / (trained * sum(w * w for w in corrections)), abs=1e-5)
    assert stats.tokens_trained == trained
    assert (
        0
        < stats.tokens_forwarded
        < sum(len(g.prompt_ids) + len(s.token_ids) for g in given.groups for s in g.sequences)
    )
    assert stats.clip_fraction == 0
    assert 0 < stats.entropy < 5.56  # log of the vocabulary
    assert stats.kl_reference == pytest.approx(0, abs=1e-6)
    assert stats.learning_rate == pytest.approx(2e-4)
    assert (stats.micro_batches, stats.oom_retries) == (1, 0)
    assert trainer.update(batch(2, mu=-2.0)).kl_reference > 1e-5  # type: ignore[operator]
    assert trainer.memory()["gradients"] == 0


def test_the_learning_rate_rises_stays_and_falls_with_the_root_of_the_step(make: Make) -> None:
    trainer = make(warmup_steps=2, decay_after=3)
    rates = [trainer.update(batch(step)).learning_rate for step in range(1, 7)]
    falling = [1e-3 * (3 / step) ** 0.5 for step in (4, 5, 6)]
    assert rates == pytest.approx([5e-4, 1e-3, 1e-3, *falling])
    assert make(warmup_steps=0, decay_after=0).update(batch()).learning_rate == pytest.approx(1e-3)


def test_learning_makes_good_answers_likelier(make: Make) -> None:
    trainer = make(warmup_steps=0)
    given = batch()

    def gap() -> float:
        good, bad, *_ = (sum(row) / len(row) for row in trainer.logprobs(given.groups)[0])
        return good - bad

    before = gap()
    for step in range(3):
        trainer.update(msgspec.structs.replace(given, step=step + 1))
    assert gap() > before + 0.1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_same_batches_give_the_same_weights_bit_for_bit_across_a_resume(
    make: Make, dtype: str, tmp_path: Path
) -> None:
    straight, first, second = make(dtype), make(dtype), make(dtype)
    for step in range(1, 5):
        straight.update(batch(step, seed=step, mu=-1.0))
    for step in range(1, 3):
        first.update(batch(step, seed=step, mu=-1.0))
    saved = tmp_path / "saved"
    saved.mkdir()
    first.save(saved)
    second.load(saved)
    assert second.step == 2
    for step in range(3, 5):
        second.update(batch(step, seed=step, mu=-1.0))
    assert second.step == straight.step == 4
    assert all(map(torch.equal, weights(straight), weights(second)))
    for ours, theirs in zip(straight.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_saved_initial_model_loads(make: Make, tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    saved.mkdir()
    trainer, other = make(), make()
    trainer.save(saved)
    other.update(batch())
    other.load(saved)
    assert other.step == 0
    assert all(map(torch.equal, weights(trainer), weights(other)))
    trainer.update(batch())
    other.update(batch())
    assert all(map(torch.equal, weights(trainer), weights(other)))


def test_a_failed_write_comes_after_what_other_processes_wait_for(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make()
    trainer.update(batch())
    brought = list[int]()
    rows = files._rows

    def count(tensor: torch.Tensor) -> torch.Tensor:
        brought.append(1)
        return rows(tensor)

    def full(path: Any) -> Any:
        raise OSError(28, f"no room for {path}")

    monkeypatch.setattr(files, "_rows", count)
    monkeypatch.setattr(files, "save_file", lambda tensors, path, *rest: full(path.name))
    with pytest.raises(OSError, match=r"no room for model\.safetensors"):
        trainer.save(tmp_path)
    assert len(brought) == 2 * len(weights(trainer))
    monkeypatch.setattr(trainer, "export", lambda directory: None)
    with pytest.raises(OSError, match=r"no room for exp_avg\.safetensors"):
        trainer.save(tmp_path)
    assert len(brought) == 4 * len(weights(trainer))


def test_export_is_a_model_directory(make: Make, tmp_path: Path) -> None:
    trainer = make()
    trainer.update(batch())
    exported = tmp_path / "exported"
    exported.mkdir()
    trainer.export(exported)
    assert "exp_avg.safetensors" not in {path.name for path in exported.iterdir()}
    again = load_model(str(exported), device="cpu", dtype="float32", models=tmp_path)
    assert again.fingerprint == trainer.bundle.fingerprint
    ids = torch.arange(2, 20)[None]
    with torch.no_grad():
        assert torch.equal(again.model(ids).logits, trainer.model(ids).logits)


def test_loading_what_is_damaged_or_of_another_model(make: Make, tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    saved.mkdir()
    trainer = make()
    trainer.update(batch())
    trainer.save(saved)
    content = (saved / "exp_avg.safetensors").read_bytes()
    (saved / "exp_avg.safetensors").write_bytes(content[:-100])
    with pytest.raises(CheckpointError, match=r"exp_avg\.safetensors cannot be read"):
        trainer.load(saved)
    (saved / "exp_avg.safetensors").write_bytes(content)
    (saved / "model.safetensors").write_bytes((saved / "exp_avg.safetensors").read_bytes())
    trainer.load(saved)  # same names and shapes
    (saved / "trainer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"trainer\.json cannot be read"):
        trainer.load(saved)


@pytest.mark.parametrize(
    "error", [MemoryError("none left"), RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory")]
)
def test_out_of_memory_starts_the_step_again_keeping_less_and_then_with_smaller_micro_batches(
    make: Make, error: Exception
) -> None:
    calm, hit = make(), make()
    calm.update(batch())
    failures = [error, error]

    def fail(*_: object) -> None:
        if failures:
            raise failures.pop()

    hit.model.base_model.layers[2].register_forward_hook(fail)
    stats = hit.update(batch())
    assert stats.oom_retries == 2
    assert hit.recompute
    assert hit.budget == TrainConfig().tokens_per_micro_batch // 2
    assert all(map(torch.equal, weights(calm), weights(hit)))


def test_out_of_memory_for_good_skips_the_step(make: Make) -> None:
    trainer = make()
    before = weights(trainer)

    def fail(*_: object) -> None:
        raise MemoryError

    trainer.model.base_model.layers[0].register_forward_hook(fail)
    with pytest.raises(StepSkipped, match="out of memory even at 64 tokens"):
        trainer.update(batch())
    assert all(map(torch.equal, before, weights(trainer)))
    assert trainer.memory()["gradients"] == 0


def test_other_errors_are_not_taken_for_memory(make: Make) -> None:
    trainer = make()

    def fail(*_: object) -> None:
        raise RuntimeError("size mismatch")

    trainer.model.base_model.layers[0].register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="size mismatch"):
        trainer.update(batch())
    assert trainer.memory()["gradients"] == 0


def test_a_non_finite_loss_or_gradient_is_dumped_and_changes_nothing(make: Make, tmp_path: Path) -> None:
    trainer = make()
    trainer.update(batch(1))
    before = weights(trainer)
    groups = batch(2).groups
    bad = msgspec.structs.replace(groups[0].sequences[0], reward=float("nan"))
    poisoned = Batch(2, (msgspec.structs.replace(groups[0], sequences=(bad, *groups[0].sequences[1:])), *groups[1:]))
    with pytest.raises(StepSkipped, match="the loss is nan") as skipped:
        trainer.update(poisoned)
    dump = tmp_path / "dumps" / "step-2.msgpack"
    assert str(dump) in str(skipped.value)
    dumped = msgspec.msgpack.decode(dump.read_bytes(), type=Batch)
    assert dumped.groups[1:] == poisoned.groups[1:]

    def infinite(module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        output.register_hook(lambda gradient: gradient * torch.inf)
        return output

    handle = trainer.model.base_model.norm.register_forward_hook(infinite)
    with pytest.raises(StepSkipped, match=r"gradient norm is (nan|inf)"):
        trainer.update(batch(3))
    handle.remove()
    assert all(map(torch.equal, before, weights(trainer)))
    assert trainer.step == 1
    assert trainer.memory()["gradients"] == 0


def test_a_stop_between_micro_batches_leaves_nothing(make: Make) -> None:
    trainer, calm = make(), make()
    trainer.budget = 1
    calls = 0

    def stop() -> bool:
        nonlocal calls
        calls += 1
        return calls == 3

    with pytest.raises(Interrupted):
        trainer.update(batch(), stop)
    assert trainer.step == 0
    assert trainer.memory()["gradients"] == 0
    trainer.budget = calm.budget
    trainer.update(batch())
    calm.update(batch())
    assert all(map(torch.equal, weights(calm), weights(trainer)))


def test_bfloat16_keeps_float32_masters_and_gradients(make: Make) -> None:
    trainer, exact = make("bfloat16", learning_rate=1e-6), make()
    before = weights(trainer)
    trainer.update(batch())
    moved = [not torch.equal(a, b) for a, b in zip(before, weights(trainer), strict=True)]
    assert all(moved), "steps far below the resolution of bfloat16 are kept"
    assert {p.dtype for p in trainer.model.parameters()} == {torch.bfloat16}
    assert trainer.memory()["weights"] == exact.memory()["weights"] * 3 // 2
    for ours, theirs in zip(trainer.logprobs(batch().groups)[0], exact.logprobs(batch().groups)[0], strict=True):
        assert ours == pytest.approx(theirs, abs=0.1)
