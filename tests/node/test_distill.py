"""On-policy distillation: its estimate, where the teacher is asked, and that it teaches without any reward."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from transformers import AutoModelForCausalLM

from node.config import Config
from node.config_train import TrainConfig
from node.device import Device
from node.engines.transformers import TransformersEngine
from node.interfaces import Batch, PromptRequest, StepSkipped, TeacherError, TrainGroup, TrainSequence
from node.loop import Loop
from node.models import ModelBundle, load_model
from node.progress import Progress
from node.training.distill import LocalTeacher, known, load_teacher, mean_gap, reverse_kl, taught
from node.training.local import LocalTrainer

CPU = torch.device("cpu")


def group(*tokens: Sequence[int], origin: Any = "own", rewards: Sequence[float] | None = None) -> TrainGroup:
    scores = rewards or [0.0] * len(tokens)
    sequences = [TrainSequence(tuple(ids), (True,) * len(ids), r, None) for ids, r in zip(tokens, scores, strict=True)]
    return TrainGroup((9, 8, 7), tuple(sequences), origin)


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


def another(bundle: ModelBundle, directory: Path, seed: int = 1) -> Path:
    """A model of the same family with other weights, as a directory."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(bundle.model.config)
    model.save_pretrained(directory)
    bundle.tokenizer.save_pretrained(directory)
    return directory


# -- the estimate --------------------------------------------------------------------------------------------


def test_in_expectation_value_and_gradient_are_those_of_the_reverse_kl() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(12, generator=generator, dtype=torch.float64, requires_grad=True)
    teacher = torch.randn(12, generator=generator, dtype=torch.float64).log_softmax(-1)
    policy = logits.log_softmax(-1)
    exact = (policy.exp() * (policy - teacher)).sum()
    (gradient,) = torch.autograd.grad(exact, logits, retain_graph=True)
    estimate = reverse_kl(policy, policy.detach(), teacher)
    (estimated,) = torch.autograd.grad((policy.detach().exp() * estimate).sum(), logits)
    assert (policy.detach().exp() * estimate).sum().item() == pytest.approx(exact.item(), abs=1e-12)
    assert torch.allclose(estimated, gradient, atol=1e-12)


def test_tokens_nobody_was_asked_about_and_impossible_ones() -> None:
    logprobs = torch.tensor([-1.0, -1.0, -1.0], requires_grad=True)
    teacher = torch.tensor([torch.nan, -1000.0, -3.0])
    losses = reverse_kl(logprobs, logprobs.detach(), teacher)
    assert losses.tolist() == [0, 20, 2]
    losses.sum().backward()  # type: ignore[no-untyped-call]
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [0, 20, 2], "far away is held at 20, not let go"
    assert mean_gap(logprobs.detach(), teacher, torch.tensor([True, False, True])) == 2
    assert mean_gap(logprobs.detach(), teacher, torch.tensor([True, False, False])) is None


def test_after_the_first_optimizer_step_the_ratio_weighs() -> None:
    old = torch.tensor([-1.0])
    assert reverse_kl(old + math.log(2), old, torch.tensor([-2.0])).tolist() == [pytest.approx(2.0)]


# -- who is asked about what ---------------------------------------------------------------------------------


class Fixed:
    """Gives -1, -2, ... for the tokens of each sequence; or one value too few."""

    name = "fixed"

    def __init__(self, short: int = 0) -> None:
        self.short, self.asked = short, list[Sequence[TrainGroup]]()

    async def logprobs(self, groups: Sequence[TrainGroup]) -> list[list[tuple[float, ...]]]:
        self.asked.append(groups)
        return [
            [tuple(-1.0 - i for i in range(len(s.token_ids) - self.short)) for s in group.sequences] for group in groups
        ]


async def test_only_own_tokens_are_asked_about() -> None:
    teacher = Fixed()
    groups = [group([2, 3], [4]), group([5, 6], origin="foreign"), group([7], [])]
    first, foreign, last = await taught(groups, teacher)
    assert teacher.asked == [[groups[0], groups[2]]]
    assert [s.teacher_logprobs for s in first.sequences] == [(-1, -2), (-1,)]
    assert foreign == groups[1]
    assert [s.teacher_logprobs for s in last.sequences] == [(-1,), ()]
    values = known([first, foreign, last], CPU)
    assert values is not None
    assert values[:3].tolist() == [-1, -2, -1]
    assert values[3:5].isnan().all()
    assert known(groups, CPU) is None
    assert await taught([groups[1]], Fixed()) == (groups[1],)


async def test_a_teacher_that_answers_too_little_is_refused() -> None:
    with pytest.raises(TeacherError, match="gave 1 log-probabilities of 2 tokens"):
        await taught([group([2, 3])], Fixed(short=1))


async def test_a_failing_teacher_skips_the_step() -> None:
    parts: Any = SimpleNamespace(
        config=Config(), engine=None, bundle=None, scorer=None, clock=time.time, progress=Progress(time.time, 60.0),
        teacher=Fixed(short=1),
    )  # fmt: skip
    loop = Loop(parts)
    with pytest.raises(StepSkipped, match="the teacher fixed failed: the teacher gave 1"):
        await loop._taught([group([2, 3])])
    parts.teacher = Fixed()
    assert (await loop._taught([group([2, 3])]))[0].sequences[0].teacher_logprobs == (-1, -2)
    parts.teacher = None
    assert await loop._taught([group([2, 3])]) == (group([2, 3]),)


def test_a_batch_keeps_what_the_teacher_said(bundle: ModelBundle, tmp_path: Path) -> None:
    said = msgspec.structs.replace(group([2, 3]).sequences[0], teacher_logprobs=(-1.5, -2.5))
    batch = Batch(1, (TrainGroup((9,), (said,), "own"),))
    raw = msgspec.msgpack.encode(batch)
    assert msgspec.msgpack.decode(raw, type=Batch) == batch


# -- a second model ------------------------------------------------------------------------------------------


async def test_a_local_teacher_says_what_a_plain_forward_does(
    bundle: ModelBundle, device: Device, tmp_path: Path
) -> None:
    directory = another(bundle, tmp_path / "teacher")
    config = Config.model_validate({"train": {"distill_teacher": str(directory), "tokens_per_micro_batch": 64}})
    teacher = await load_teacher(config, bundle, device)
    assert isinstance(teacher, LocalTeacher)
    assert teacher.name == "teacher"
    groups = [group([20, 21, 22], [20, 21, 30]), group([50, 51])]
    said = await teacher.logprobs(groups)
    plain = AutoModelForCausalLM.from_pretrained(directory).eval()
    for one, answers in zip(groups, said, strict=True):
        for sequence, values in zip(one.sequences, answers, strict=True):
            ids = torch.tensor([[*one.prompt_ids, *sequence.token_ids]])
            with torch.no_grad():
                scores = plain(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
            assert values == pytest.approx(scores[len(one.prompt_ids) - 1 :].tolist(), abs=1e-5)
    assert not any(parameter.requires_grad for parameter in teacher.model.parameters())
    assert await load_teacher(Config(), bundle, device) is None


async def test_a_teacher_of_another_family_is_refused(
    bundle: ModelBundle, tiny_model: Callable[..., Path], device: Device
) -> None:
    other = tiny_model("llama", ascii_only=True)
    config = Config.model_validate({"train": {"distill_teacher": str(other)}})
    with pytest.raises(TeacherError, match=r"has another tokenizer than tiny-llama-False.*train.distill_teacher to a"):
        await load_teacher(config, bundle, device)


def test_equal_rewards_teach_nothing_but_a_teacher_does(bundle: ModelBundle, tmp_path: Path) -> None:
    trainer = LocalTrainer(bundle, TrainConfig(), dumps=tmp_path)
    plain = group([2, 3], [4, 5])
    with pytest.raises(StepSkipped, match="all groups are uniform"):
        trainer.update(Batch(1, (plain,)))
    taught_group = msgspec.structs.replace(
        plain, sequences=tuple(msgspec.structs.replace(s, teacher_logprobs=(-1.0, -2.0)) for s in plain.sequences)
    )
    before = trainer.logprobs([taught_group])[0]
    stats = trainer.update(Batch(1, (taught_group, group([6, 7], [8, 9], origin="foreign"))))
    assert stats.tokens_trained == 4, "the foreign group is uniform and was not asked about"
    gaps = [old - new for values in before for old, new in zip(values, (-1.0, -2.0), strict=True)]
    assert stats.kl_teacher == pytest.approx(sum(gaps) / 4, abs=1e-5)
    assert stats.loss == pytest.approx(sum(gaps) / 4, abs=1e-5)


async def test_the_policy_becomes_its_teacher_without_any_reward(
    bundle: ModelBundle, device: Device, tmp_path: Path
) -> None:
    config = TrainConfig(learning_rate=3e-3, distill_teacher=str(another(bundle, tmp_path / "teacher")))
    trainer = LocalTrainer(bundle, config, dumps=tmp_path)
    teacher = await load_teacher(Config(train=config), bundle, device)
    assert teacher is not None
    engine = TransformersEngine(bundle, device)
    gaps: list[float] = []
    for step in range(1, 41):
        requests = [PromptRequest(str(i), (0, 10 + i), 8, 6, 1.0, 100 * step + i) for i in range(4)]
        groups = []
        async for sampled in engine.generate(requests):
            prompt = requests[int(sampled.key)].prompt_ids
            sequences = [
                TrainSequence(s.token_ids, (True,) * len(s.token_ids), 0.0, s.logprobs) for s in sampled.samples
            ]
            groups.append(TrainGroup(prompt, tuple(sequences), "own"))
        stats = trainer.update(Batch(step, await taught(groups, teacher)))
        assert stats.kl_teacher is not None
        gaps.append(stats.kl_teacher)
        await engine.update_weights(step)
    assert sum(gaps[-5:]) < 0.5 * sum(gaps[:5]), gaps
