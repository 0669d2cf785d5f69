"""Routing replay: what the rollout's routers chose is taken in training, with the training router's own weights."""

import asyncio
import base64
import dataclasses
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from node.batching import micro_batches, pack
from node.bench import step_ours
from node.config_train import TrainConfig
from node.device import Device
from node.engines.agreement import AgreementError, check_agreement
from node.engines.transformers import TransformersEngine
from node.interfaces import Batch, PromptRequest, Sample, TrainGroup, TrainSequence
from node.journal import JournalRecord, append, read
from node.models import ModelBundle, ModelError, load_model
from node.routing import Routing, RoutingError, bounded, divide, fits, from_vllm, noted, told
from node.training.forward import states
from node.training.local import LocalTrainer

KINDS = ["mixtral", "olmoe", "qwen2_moe", "qwen3_moe"]
PROMPT = tuple(range(40, 60))
Load = Callable[..., ModelBundle]


@pytest.fixture
def load(tiny_model: Callable[[str], Path], tmp_path: Path) -> Load:
    torch.set_num_threads(1)

    def loaded(kind: str = "mixtral", dtype: str = "float32") -> ModelBundle:
        return load_model(str(tiny_model(kind)), device="cpu", dtype=dtype, models=tmp_path)

    return loaded


def ask(n: int = 6, new: int = 10, **others: Any) -> PromptRequest:
    return PromptRequest("x", PROMPT, n=n, max_new_tokens=new, temperature=1.0, seed=3, **others)


def sample(bundle: ModelBundle, request: PromptRequest) -> tuple[Sample, ...]:
    async def collect() -> tuple[Sample, ...]:
        (group,) = [group async for group in TransformersEngine(bundle, Device()).generate([request])]
        return group.samples

    return asyncio.run(collect())


def as_group(bundle: ModelBundle, samples: tuple[Sample, ...]) -> TrainGroup:
    prompt, own = divide(bundle.routing, len(PROMPT), samples)
    sequences = tuple(
        TrainSequence(one.token_ids, (True,) * len(one.token_ids), float(i % 2), one.logprobs, experts=experts)
        for i, (one, experts) in enumerate(zip(samples, own, strict=True))
    )
    return TrainGroup(PROMPT, sequences, "own", prompt)


def mismatch(trainer: LocalTrainer, group: TrainGroup) -> torch.Tensor:
    """Log-probability of every token in training minus that in the rollout."""
    (rows,) = trainer.logprobs([group])
    return torch.tensor(
        [
            ours - mu
            for one, row in zip(group.sequences, rows, strict=True)
            for ours, mu in zip(row, one.behaviour_logprobs or (), strict=True)
        ]
    )


@pytest.mark.parametrize("kind", KINDS)
def test_the_engine_notes_what_the_plain_model_chooses(kind: str, load: Load) -> None:
    """For the prompt and every sampled token but the last, in every layer that has experts."""
    bundle = load(kind)
    routing = bundle.routing
    assert routing is not None
    assert (routing.layers, routing.experts, routing.chosen) == ((0, 2) if "qwen" in kind else (0, 1, 2), 8, 2)
    plain = AutoModelForCausalLM.from_pretrained(bundle.directory, dtype=torch.float32, local_files_only=True).eval()
    chosen: list[torch.Tensor] = []
    for layer in routing.layers:
        plain.base_model.layers[layer].mlp.gate.register_forward_hook(lambda *call: chosen.append(call[2][2]))
    for one in sample(bundle, ask()):
        values = routing.unpack(one.experts, 100)
        assert len(values) == len(PROMPT) + len(one.token_ids) - 1
        chosen.clear()
        with torch.no_grad():
            plain(torch.tensor([PROMPT + one.token_ids[:-1]]), use_cache=False)
        assert np.array_equal(np.sort(values, -1), np.sort(torch.stack(chosen, 1).numpy(), -1))


def test_the_weights_are_those_of_the_training_router(load: Load) -> None:
    """softmax over the told experts of the router's own logits, renormalised where the model does so."""
    for kind, renormalised in (("mixtral", True), ("qwen2_moe", False)):
        bundle = load(kind)
        routing = bundle.routing
        assert routing is not None
        router = bundle.model.base_model.layers[2].mlp.gate
        states = torch.randn(3, 48, generator=torch.Generator().manual_seed(0))
        free = router(states)
        worst = free[0].argsort(-1)[:, :2]  # not what it would choose
        routing.told = torch.full((3, len(routing.layers), 2), -1)
        routing.told[:2, -1] = worst[:2]
        _, weights, experts = router(states)
        routing.told = None
        assert torch.equal(experts, torch.cat([worst[:2], free[2][2:]]))
        probabilities = torch.softmax(states @ router.weight.t(), -1).gather(-1, experts)
        expected = probabilities / probabilities.sum(-1, keepdim=True) if renormalised else probabilities
        torch.testing.assert_close(weights, expected)
        torch.testing.assert_close(weights[2], free[1][2])
        got = torch.autograd.grad(weights[0, 0], router.weight)[0]
        wanted = torch.autograd.grad(expected[0, 0], router.weight)[0]
        assert wanted.abs().max() > 1e-4
        torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("kind", KINDS)
def test_replay_narrows_the_mismatch_of_another_compute_type(kind: str, load: Load, tmp_path: Path) -> None:
    """Rollout in bfloat16, training in float32: flipped experts are gone, rounding stays."""
    low, exact = load(kind, "bfloat16"), load(kind)
    group = as_group(low, sample(low, ask(n=32, new=64)))
    replayed = mismatch(LocalTrainer(exact, TrainConfig(), dumps=tmp_path), group)
    free = mismatch(LocalTrainer(exact, TrainConfig(routing_replay="off"), dumps=tmp_path), group)
    assert replayed.abs().max() < 0.1
    assert free.abs().max() > 1.2 * replayed.abs().max()
    assert free.square().mean() > 1.1 * replayed.square().mean()


async def test_the_check_at_start_takes_the_noted_experts(load: Load, tmp_path: Path) -> None:
    low, exact = load(dtype="bfloat16"), load()
    engine, trainer = TransformersEngine(low, Device()), LocalTrainer(exact, TrainConfig(), dumps=tmp_path)
    prompts = [tuple(range(start, start + 20)) for start in range(40, 60)]
    given: dict[str, Any] = {"dtypes": ["bfloat16"], "tokens": 12}
    with pytest.raises(AgreementError, match=r"differ by \d\.\d+ nats"):
        await check_agreement(engine, trainer, engine.device, prompts, **given)
    assert await check_agreement(engine, trainer, engine.device, prompts, **given, routing=low.routing) < 0.2


def test_gradients_flow_to_routers_and_experts_under_replay(load: Load, tmp_path: Path) -> None:
    """Told what it would choose anyway, the trainer has the gradients of free routing; told otherwise, others."""
    bundle = load()
    samples = sample(bundle, ask())
    group = as_group(bundle, samples)
    assert bundle.routing is not None
    rng = np.random.default_rng(0)

    def strange(tokens: int) -> bytes:
        """Two random experts a token and layer."""
        experts = np.tile(np.arange(8, dtype=np.uint8), (tokens, 3, 1))
        return rng.permuted(experts, axis=-1)[..., :2].tobytes()

    sequences = tuple(msgspec.structs.replace(one, experts=strange(len(one.token_ids))) for one in group.sequences)
    other = msgspec.structs.replace(group, sequences=sequences)
    found = []
    for given, replay in ((group, True), (group, False), (other, True)):
        bundle.model.zero_grad()
        (micro,) = micro_batches([given], [(0, i) for i in range(6)], 10**6)
        states(bundle.model, micro, bundle.routing if replay else None).logprobs.sum().backward()
        found.append({name: weight.grad.clone() for name, weight in bundle.model.named_parameters()})
    routers = [name for name in found[0] if name.endswith("mlp.gate.weight")]
    assert len(routers) == 3
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient, atol=1e-5, rtol=1e-4)
    for name in routers:
        assert found[0][name].abs().max() > 1e-3
        assert found[2][name].abs().max() > 1e-3
        assert not torch.allclose(found[2][name], found[0][name], atol=1e-3)


def test_the_first_choice_of_a_merged_token_decides() -> None:
    routing = Routing((0,), 8, 1)

    def one(ids: tuple[int, ...], experts: bytes) -> TrainSequence:
        return TrainSequence(ids, (True,) * len(ids), 1.0, None, experts=experts)

    own = TrainGroup((5, 6), (one((7, 8, 9), b"\x03\x04"), one((7, 8, 8), b"\x05\x05")), "own", b"\x01\x02")
    foreign = TrainGroup((5, 6), (one((7, 7, 7), b""),), "foreign")
    bare = TrainGroup((5, 4), (one((2, 2), b""),), "own")
    members = [(0, 0), (0, 1), (1, 0), (2, 0)]
    (micro,) = micro_batches([own, foreign, bare], members, 10**6)
    row = pack(micro.trie, torch.device("cpu"), leaves=False)
    experts = told(routing, micro, row)
    assert experts is not None
    found = zip(row.token_ids.tolist(), row.positions.tolist(), experts.flatten().tolist(), strict=True)
    # of the two choices for 7 the one of 7 8 8 counts: it comes before 7 8 9
    assert sorted(found) == [(2, 2, -1), (4, 1, -1), (5, 0, 1), (6, 1, 2), (7, 2, 5), (7, 3, -1), (8, 3, 5)]
    (free,) = micro_batches([bare], [(0, 0)], 10**6)
    assert told(routing, free, pack(free.trie, torch.device("cpu"), leaves=False)) is None


def test_a_sample_that_goes_on_keeps_the_choices_it_was_sampled_with(load: Load) -> None:
    bundle = load()
    assert bundle.routing is not None
    size = bundle.routing.token_bytes
    whole = sample(bundle, ask(n=2))[0]
    begun = dataclasses.replace(
        whole,
        token_ids=whole.token_ids[:4],
        logprobs=whole.logprobs[:4],
        finish="aborted",
        experts=bytes(size * (len(PROMPT) + 3)),  # experts 0 and 0, as no router chooses
    )
    again = sample(bundle, ask(n=2, starts=(begun,)))[0]
    assert again.experts[: len(begun.experts)] == begun.experts
    assert len(again.experts) == size * (len(PROMPT) + len(again.token_ids) - 1)
    assert again.experts[len(begun.experts) :][:size] == whole.experts[len(begun.experts) :][:size]


def test_choices_are_journalled(load: Load, tmp_path: Path) -> None:
    bundle = load()
    batch = Batch(1, (as_group(bundle, sample(bundle, ask())),))
    append(tmp_path / "journal", JournalRecord(1, batch, {}, {}))
    ((record,), _) = read(tmp_path / "journal")
    assert record.batch == batch
    assert len(record.batch.groups[0].prompt_experts) == len(PROMPT) * 6


async def test_a_step_of_the_loop_notes_journals_and_replays(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    """The loop's own step, as `shoal bench step` makes it, on a mixture of experts."""
    spec = {"threads": 1, "model": str(tiny_model("mixtral")), "steps": 1}
    result = await step_ours.measure(spec, tmp_path)
    assert result["all_informative"][0]["tokens_forwarded"] > 0
    records, _ = read(tmp_path / "checkpoints" / "journal-0.bin")
    for group in records[-1].batch.groups:
        assert len(group.prompt_experts) == 6 * len(group.prompt_ids)
        for one in group.sequences:
            assert len(one.experts) == 6 * (len(one.token_ids) - 1)


def test_what_exceeds_the_bounds_goes_without(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = TrainSequence((1, 2), (True, True), 1.0, None, experts=b"1234")
    groups = [TrainGroup((1,), (one, one), "own", bytes(size)) for size in (2, 50, 6)]
    kept = bounded(groups, limit=30)
    assert [(len(group.prompt_experts), len(group.sequences[0].experts)) for group in kept] == [(2, 4), (0, 0), (6, 4)]
    assert "1 of 3 groups train without routing replay" in caplog.text
    routing = Routing((0, 1), 300, 4)
    assert (routing.token_bytes, routing.dtype) == (16, np.dtype("<u2"))
    monkeypatch.setattr("node.routing.MAX_GROUP_BYTES", 6 * 30 * 16)
    assert fits(routing, ask())
    assert not fits(routing, ask(new=11))
    assert not fits(None, ask())


def test_choices_of_another_model_are_refused() -> None:
    routing = Routing((0, 1), 4, 2)
    with pytest.raises(RoutingError, match="expert 4 was noted, but the model has 4 a layer"):
        routing.unpack(b"\x00\x01\x02\x04", 3)
    with pytest.raises(RoutingError, match="5 bytes of experts for 3 tokens at 4 a token"):
        routing.unpack(bytes(5), 3)
    with pytest.raises(RoutingError, match="16 bytes of experts for 3 tokens"):
        routing.unpack(bytes(16), 3)


def test_dense_models_note_nothing(load: Load, tmp_path: Path) -> None:
    bundle = load("llama")
    assert bundle.routing is None
    assert {one.experts for one in sample(bundle, ask())} == {b""}
    with noted(None) as routes:
        pass
    assert routes.of([0, 1]) == b""
    with pytest.raises(ModelError, match=r"train\.routing_replay is on, but .* has no experts"):
        LocalTrainer(bundle, TrainConfig(routing_replay="on"), dumps=tmp_path)


def test_a_saved_model_of_experts_loads_again(load: Load, tmp_path: Path) -> None:
    for kind in ("mixtral", "qwen3_moe"):
        trainer = LocalTrainer(load(kind), TrainConfig(), dumps=tmp_path)
        group = as_group(trainer.bundle, sample(trainer.bundle, ask()))
        trainer.update(Batch(1, (group,)))
        saved = tmp_path / kind
        saved.mkdir()
        trainer.save(saved)
        again = LocalTrainer(load(kind), TrainConfig(), dumps=tmp_path)
        again.load(saved)
        exported = load_model(str(saved), device="cpu", dtype="float32", models=tmp_path)
        weights = dict(trainer.model.named_parameters())
        for model in (again.model, exported.model):
            assert all(torch.equal(weight, weights.pop(name)) for name, weight in model.named_parameters())
            weights = dict(trainer.model.named_parameters())
        torch.testing.assert_close(mismatch(again, group), mismatch(trainer, group), atol=1e-5, rtol=0)


def as_vllm(values: np.ndarray[Any, Any]) -> str:
    file = io.BytesIO()
    np.save(file, values)
    return base64.b64encode(file.getvalue()).decode()


def test_the_field_of_vllm() -> None:
    """All layers are in it; those of the routers are taken."""
    routing = Routing((1, 3), 8, 2)
    values = np.random.default_rng(0).integers(0, 8, (5, 5, 2)).astype(np.int32)
    assert from_vllm(as_vllm(values), routing, 5) == values[:, [1, 3]].astype(np.uint8).tobytes()
    with pytest.raises(RoutingError, match="covers 5 tokens of 4 with experts up to"):
        from_vllm(as_vllm(values), routing, 4)
    with pytest.raises(RoutingError, match=r"covers 5 tokens of 9 with experts up to \d+ of 8"):
        from_vllm(as_vllm(values + 2), routing, 9)
    with pytest.raises(RoutingError, match=r"has shape \(5, 3, 2\), but the model has 4 layers or more and 2 experts"):
        from_vllm(as_vllm(values[:, :3]), routing, 5)
    with pytest.raises(RoutingError, match="cannot be read"):
        from_vllm("no base64!", routing, 5)
    file = io.BytesIO()
    np.save(file, np.array([{}], dtype=object), allow_pickle=True)
    with pytest.raises(RoutingError, match="cannot be read"):
        from_vllm(base64.b64encode(file.getvalue()).decode(), routing, 5)
