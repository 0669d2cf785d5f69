"""Several optimizer steps, the critic and the rest of docs/algorithms.md on the real trainer with a tiny model."""

import json
import math
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
import torch
from transformers import AutoModelForCausalLM

from node.batching import MicroBatch
from node.checkpoint import CheckpointError
from node.config_train import TrainConfig
from node.interfaces import Batch, Interrupted, StepSkipped, TrainGroup, TrainSequence
from node.models import load_model
from node.training.critic import Critic
from node.training.forward import States
from node.training.local import LocalTrainer
from node.training.objective import Forward, StepObjective

GOLDEN = json.loads((Path(__file__).parent / "algorithms" / "golden.json").read_text())["losses"]
Make = Callable[..., LocalTrainer]


@pytest.fixture
def make(tiny_model: Callable[[str], Path], tmp_path: Path) -> Iterator[Make]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)

    def trainer(dtype: str = "float32", **settings: Any) -> LocalTrainer:
        bundle = load_model(str(tiny_model("llama")), device="cpu", dtype=dtype, models=tmp_path)
        plain = {"learning_rate": 1e-3, "warmup_steps": 0, "advantage": "dr_grpo", "aggregation": "token-mean"}
        return LocalTrainer(bundle, TrainConfig(**{**plain, **settings}), dumps=tmp_path / "dumps")

    yield trainer
    torch.set_num_threads(threads)


def batch(step: int = 1, *, seed: int = 0, groups: int = 3, size: int = 3, mu: float | None = None) -> Batch:
    """Groups with rewards 1, 0, 0, ..., every third one foreign; a masked token in each completion."""
    rng = random.Random(seed)

    def sequence(reward: float, known: float | None) -> TrainSequence:
        tokens = tuple(rng.randrange(2, 60) for _ in range(rng.randint(3, 8)))
        mask = tuple(i != 1 for i in range(len(tokens)))
        return TrainSequence(tokens, mask, reward, None if known is None else (known,) * len(tokens))

    made = []
    for g in range(groups):
        foreign = g % 3 == 2
        sequences = tuple(sequence(float(i == 0), None if foreign else mu) for i in range(size))
        prompt = tuple(rng.randrange(2, 60) for _ in range(5))
        made.append(TrainGroup(prompt, sequences, "foreign" if foreign else "own"))
    return Batch(step, tuple(made))


def weights(trainer: LocalTrainer) -> list[torch.Tensor]:
    return [weight.detach().clone() for weight in trainer.weights.masters.values()]


def equal(one: LocalTrainer, other: LocalTrainer) -> bool:
    return all(map(torch.equal, weights(one), weights(other)))


def words(setting: str) -> list[str]:
    """All that a setting may be."""
    return list(get_args(TrainConfig.model_fields[setting].annotation))


@pytest.mark.parametrize("setting", ["advantage", "loss", "correction", "aggregation", "kl_estimator"])
def test_every_word_of_a_setting_makes_an_update(make: Make, setting: str) -> None:
    for word in words(setting):
        trainer = make(passes=2, kl_coefficient=0.1 if setting == "kl_estimator" else 0.0, **{setting: word})
        before = weights(trainer)
        stats = trainer.update(batch(mu=-4.0))
        assert math.isfinite(stats.loss), word
        assert stats.grad_norm > 0, word
        assert (stats.critic_loss is not None) == word.endswith("gae"), word
        assert not all(map(torch.equal, before, weights(trainer))), word


# -- several optimizer steps -----------------------------------------------------------------------------------


class PlainPolicy:
    """PPO with a plain forward per sequence and torch's AdamW: what two passes over one batch should come to."""

    def __init__(self, directory: Path, given: Batch) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, local_files_only=True).eval()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0)
        self.given = given
        with torch.no_grad():
            self.old = [self.logprobs(group, sequence) for group, sequence in self.sequences()]

    def sequences(self) -> list[tuple[TrainGroup, TrainSequence]]:
        return [(group, sequence) for group in self.given.groups for sequence in group.sequences]

    def logprobs(self, group: TrainGroup, sequence: TrainSequence) -> torch.Tensor:
        ids = torch.tensor([group.prompt_ids + sequence.token_ids])
        scores = self.model(ids, use_cache=False).logits[0, :-1].log_softmax(-1)
        return scores.gather(1, ids[0, 1:, None])[len(group.prompt_ids) - 1 :, 0]

    def step(self, low: float, high: float) -> tuple[float, float]:
        """One optimizer step on the whole batch; its loss, and the largest |r - 1|."""
        terms, tokens, furthest = [], 0, 0.0
        for (group, sequence), old in zip(self.sequences(), self.old, strict=True):
            rewards = [one.reward for one in group.sequences]
            advantage = sequence.reward - sum(rewards) / len(rewards)
            mask = torch.tensor(sequence.mask)
            ratio = (self.logprobs(group, sequence) - old).exp()[mask]
            furthest = max(furthest, float((ratio.detach() - 1).abs().max()))
            terms.append(torch.maximum(-ratio * advantage, -ratio.clamp(1 - low, 1 + high) * advantage).sum())
            tokens += int(mask.sum())
        loss = torch.stack(terms).sum() / tokens
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return loss.item(), furthest


def test_passes_are_ppo_epochs_on_ratios_to_the_policy_before(make: Make, tiny_model: Callable[[str], Path]) -> None:
    given = batch()
    trainer = make(passes=3, clip_low=0.02, clip_high=0.03, dual_clip=1e6, loss="ppo")
    plain = PlainPolicy(tiny_model("llama"), given)
    stats = trainer.update(given)
    losses = [plain.step(0.02, 0.03) for _ in range(3)]
    assert losses[0][1] < 1e-6 < 0.03 < losses[2][1], "ratios have left 1, and the clip"
    assert stats.loss == pytest.approx(sum(loss for loss, _ in losses) / 3, abs=1e-5)
    assert stats.optimizer_steps == 3
    assert 0 < stats.clip_fraction < 1
    assert trainer.step == 1
    named = dict(plain.model.named_parameters())
    for name, weight in trainer.weights.masters.items():
        torch.testing.assert_close(weight, named[name], atol=2e-5, rtol=0)


@pytest.mark.parametrize(
    ("loss", "aggregation", "entry"),
    [
        ("ppo", "token-mean", "ppo_0.2_0.28_token_mean"),
        ("gspo", "seq-mean-token-mean", "gspo_3e-4_4e-4_seq_mean"),
        ("cispo", "token-mean", "cispo_lo1.0_hi4.0"),
    ],
)
def test_the_second_step_has_the_golden_loss(
    make: Make, monkeypatch: pytest.MonkeyPatch, loss: str, aggregation: str, entry: str
) -> None:
    """The trainer is given the golden log-probabilities: the old ones before the update, the new ones in it."""
    trainer = make(loss=loss, aggregation=aggregation, passes=2)
    masks = [tuple(map(bool, row)) for row in GOLDEN["mask"]]
    # a cut-off third completion makes the advantages 1 and -0.5 those of a group with mean 0
    rewards, masks = (1.0, -0.5, -0.5), [*masks, (False,) * 3]
    sequences = tuple(
        TrainSequence((10 + i, 20 + i, 30 + i), mask, reward, None)
        for i, (mask, reward) in enumerate(zip(masks, rewards, strict=True))
    )
    real, seen = trainer._given, list[float]()

    def given(micro: MicroBatch, found: States) -> Forward:
        rows = GOLDEN["logp" if torch.is_grad_enabled() else "old"]
        values = torch.tensor([value for _, s in micro.members for value in rows[s]])
        return real(micro, found._replace(logprobs=values + 0 * found.logprobs))

    def note(*_: object) -> float:
        return seen.append(1.0) or 1.0

    monkeypatch.setattr(trainer, "_given", given)
    monkeypatch.setattr(trainer, "_apply_gradients", note)
    stats = trainer.update(Batch(1, (TrainGroup((5, 6), sequences, "own"),)))
    assert len(seen) == 2
    assert stats.loss == pytest.approx(GOLDEN[entry], abs=1e-5)
    assert stats.tokens_trained == 5


def test_mini_batches_are_whole_groups_each_once_a_pass(make: Make) -> None:
    trainer = make(mini_batches=2, passes=2)
    given = batch(groups=5)
    members = [(g, s) for g in range(5) for s in range(3)]
    parts = list(trainer._parts(7, members))
    assert [len(part) for part in parts] == [9, 6, 9, 6]
    for one, other in (parts[:2], parts[2:]):
        assert sorted(one + other) == members
        assert not {g for g, _ in one} & {g for g, _ in other}
    assert parts == list(trainer._parts(7, members)), "a replay deals the same"
    assert parts != list(trainer._parts(8, members))
    assert trainer.update(given).optimizer_steps == 4
    assert make(mini_batches=8).update(batch(groups=2)).optimizer_steps == 2


@pytest.mark.parametrize(
    "settings",
    [
        {"passes": 2, "mini_batches": 2},
        {"advantage": "gae", "gamma": 0.9, "gae_lambda": 0.9, "passes": 2},
        {"advantage": "reinforce_pp", "kl_coefficient": 0.1, "kl_in": "reward"},
    ],
    ids=["steps", "critic", "reference"],
)
def test_the_same_batches_give_the_same_weights_bit_for_bit_across_a_resume(
    make: Make, settings: dict[str, Any], tmp_path: Path
) -> None:
    straight, first, second = make(**settings), make(**settings), make(**settings)
    stats = [straight.update(batch(step, seed=step, mu=-2.0)) for step in range(1, 5)]
    for step in range(1, 3):
        assert first.update(batch(step, seed=step, mu=-2.0)) == stats[step - 1]
    saved = tmp_path / "saved"
    saved.mkdir()
    first.save(saved)
    second.load(saved)
    for step in range(3, 5):
        assert second.update(batch(step, seed=step, mu=-2.0)) == stats[step - 1]
    assert equal(straight, second)
    if straight.critic is not None:
        assert second.critic is not None
        assert torch.equal(straight.critic.weight, second.critic.weight)
        assert torch.equal(straight.critic.bias, second.critic.bias)


@pytest.mark.parametrize(
    "settings",
    [
        {"passes": 2, "loss": "gmpo"},
        {"advantage": "bilevel_gae", "gae_lambda": 0.9},
        {"advantage": "gdpo", "entropy_coefficient": 0.1, "correction": "mis-geometric", "mis_low": 0.01},
        {"correction": "icepop", "icepop_low": 0.0, "opsm_delta": 1e-4, "foreign_negatives": "truncated", "passes": 2},
    ],
    ids=["gmpo", "gae", "gdpo", "corrections"],
)
def test_the_split_into_micro_batches_changes_nothing(make: Make, settings: dict[str, Any]) -> None:
    whole, split = make(**settings), make(**settings)
    split.budget = 1
    expected, found = whole.update(batch(mu=-3.0)), split.update(batch(mu=-3.0))
    assert found.micro_batches > expected.micro_batches
    assert found.loss == pytest.approx(expected.loss, abs=1e-5)
    for ours, theirs in zip(weights(split), weights(whole), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


def test_a_stop_is_heard_before_the_first_optimizer_step_and_not_after(make: Make) -> None:
    trainer, calls = make(passes=2), list[int]()
    before = weights(trainer)
    with pytest.raises(Interrupted):
        trainer.update(batch(), lambda: True)
    assert all(map(torch.equal, before, weights(trainer)))
    reference = make(passes=2)
    reference.update(batch())
    trainer.update(batch(), lambda: bool(calls.append(1)) or len(calls) > 2)  # true once a step is done
    assert len(calls) == 2, "asked before the look and before the first step"
    assert equal(trainer, reference)


def test_a_step_that_is_not_finite_is_left_out_of_several(make: Make) -> None:
    trainer = make(mini_batches=2)
    hurt = list[int]()

    def poison(module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled() and not hurt:
            hurt.append(1)
            return output * torch.nan
        return output

    handle = trainer.model.base_model.norm.register_forward_hook(poison)
    stats = trainer.update(batch(groups=2))
    handle.remove()
    assert stats.optimizer_steps == 1
    assert trainer.step == 1
    assert all(torch.isfinite(weight).all() for weight in weights(trainer))


# -- which groups count ----------------------------------------------------------------------------------------


def test_cut_off_completions_count_for_the_others_and_are_not_trained(make: Make) -> None:
    given = batch(groups=1)
    first, *rest = given.groups[0].sequences
    cut = msgspec.structs.replace(first, mask=(False,) * len(first.token_ids))
    empty = TrainSequence((), (), 0.0, None)
    group = msgspec.structs.replace(given.groups[0], sequences=(cut, *rest, empty))
    trainer = make()
    stats = trainer.update(Batch(1, (group,)))
    assert stats.tokens_trained == sum(sum(sequence.mask) for sequence in rest)
    assert stats.loss > 0  # both that are trained are worse than the mean
    nothing = msgspec.structs.replace(group, sequences=(cut, empty))
    with pytest.raises(StepSkipped, match="there is no token to train on"):
        trainer.update(Batch(2, (nothing,)))


def test_uniform_groups_teach_a_critic_and_not_the_others(make: Make) -> None:
    sequences = tuple(msgspec.structs.replace(s, reward=1.0) for s in batch(groups=1).groups[0].sequences)
    uniform = Batch(1, (msgspec.structs.replace(batch(groups=1).groups[0], sequences=sequences),))
    for advantage in ("grpo", "opo", "gdpo", "reinforce_pp", "reinforce_pp_baseline"):
        with pytest.raises(StepSkipped, match="all groups are uniform"):
            make(advantage=advantage).update(uniform)
    trainer = make(advantage="gae", gamma=0.5)
    assert trainer.update(uniform).critic_loss == pytest.approx(
        sum(0.5 * 0.25**i for sequence in sequences for i in range(sum(sequence.mask)))
        / sum(sum(sequence.mask) for sequence in sequences),
        abs=1e-5,
    )


# -- the critic ------------------------------------------------------------------------------------------------


def test_the_critic_learns_what_the_answers_are_worth(make: Make) -> None:
    trainer = make(advantage="gae", learning_rate=1e-9, critic_clip=1.0, critic_learning_rate=0.1)
    given = batch(groups=4, size=2)
    losses = [trainer.update(Batch(step, given.groups)).critic_loss for step in range(1, 101)]
    assert losses[0] == pytest.approx(0.25, abs=0.05)  # V = 0, and half of the returns are 1: (1/2) 1/2
    assert losses[-1] is not None
    assert losses[-1] < 0.05


def test_the_critic_moves_as_far_as_its_learning_rate_says(make: Make) -> None:
    critic = Critic(64, torch.device("cpu"))
    states = torch.randn(5, 64, generator=torch.Generator().manual_seed(1)) * 30
    assert critic(states).tolist() == [0] * 5
    (critic(states) - 1).square().sum().backward()
    critic.step(0.01)
    assert critic(states).mean().item() == pytest.approx(0.01, abs=0.008)


def test_the_critic_pulls_at_nothing_but_itself(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make(advantage="gae")
    objective_loss = list[torch.Tensor]()

    def apply() -> float:
        objective_loss.extend(w.grad.clone() for w in trainer.weights.masters.values() if w.grad is not None)
        return 1.0

    monkeypatch.setattr(trainer, "_apply_gradients", apply)
    given = batch(groups=1)
    trainer.update(given)
    with_critic = list(objective_loss)
    objective_loss.clear()
    assert trainer.critic is not None
    monkeypatch.setattr("node.training.objective.value_loss", lambda v, *_: 0 * v)
    trainer.update(given)
    assert all(map(torch.equal, with_critic, objective_loss))


def test_a_damaged_critic_is_named_and_a_missing_one_starts_afresh(make: Make, tmp_path: Path) -> None:
    trainer = make(advantage="gae")
    trainer.update(batch())
    saved = tmp_path / "saved"
    saved.mkdir()
    trainer.save(saved)
    content = (saved / "critic.safetensors").read_bytes()
    (saved / "critic.safetensors").write_bytes(content[:-9])
    with pytest.raises(CheckpointError, match=r"critic\.safetensors cannot be read"):
        make(advantage="gae").load(saved)
    (saved / "critic.safetensors").unlink()
    fresh = make(advantage="gae")
    fresh.load(saved)
    assert fresh.critic is not None
    assert not fresh.critic.weight.any()


def test_settings_change_the_critic_as_a_replay_needs_it(make: Make, tmp_path: Path) -> None:
    """A checkpoint with a critic, loaded under settings without one, then an update with the old settings."""
    straight = make(advantage="gae")
    straight.update(batch(1))
    saved = tmp_path / "saved"
    saved.mkdir()
    straight.save(saved)
    straight.update(batch(2, seed=2))
    other = make(advantage="grpo")
    other.load(saved)
    assert other.critic is None
    other.configure(straight.config)
    other.update(batch(2, seed=2))
    assert equal(straight, other)
    other.configure(TrainConfig())
    assert other.critic is None
    assert "critic" not in other.memory()
    assert straight.memory()["critic"] == 4 * (3 * 49 + 2)


# -- KL, entropy, corrections ----------------------------------------------------------------------------------


def test_kl_in_the_reward_reaches_the_advantages_and_not_the_loss(make: Make) -> None:
    near = make(advantage="reinforce_pp", kl_coefficient=0.5, kl_in="reward", kl_estimator="k1")
    far = make(advantage="reinforce_pp")
    given = batch()
    first, second = near.update(given), far.update(given)
    assert first.loss == pytest.approx(second.loss, abs=1e-5)  # the reference is the policy yet: the KL is 0
    assert first.kl_reference == pytest.approx(0, abs=1e-6)
    moved, free = near.update(batch(2)), far.update(batch(2))
    assert moved.grad_norm != pytest.approx(free.grad_norm, rel=1e-2)  # whitened: both losses are 0
    assert moved.kl_reference is not None
    assert abs(moved.kl_reference) > 1e-4


def test_an_entropy_bonus_keeps_the_policy_open(make: Make) -> None:
    plain, open_minded = make(), make(entropy_coefficient=1.0)
    for step in range(1, 9):
        without, with_bonus = plain.update(batch(step, seed=step)), open_minded.update(batch(step, seed=step))
    assert with_bonus.entropy > without.entropy + 0.01


def test_corrections_that_drop_everything_leave_no_gradient(make: Make) -> None:
    given = batch(groups=2, mu=-60.0)  # the policy is far likelier to say it than whoever sampled it
    assert make(correction="mis").update(given).grad_norm == 0
    assert make(correction="icepop").update(given).ess == 0
    assert make(correction="tis").update(given).grad_norm > 0


def test_off_policy_masking_and_tapering_weigh_bad_answers_down(make: Make) -> None:
    given = batch(groups=3, mu=-1e-3)  # whoever sampled was almost sure, the policy is not
    settings = {"correction": "none", "loss": "reinforce"}
    full = make(**settings).update(given)
    masked = make(**settings, opsm_delta=1e-4).update(given)
    own_negatives = sum(sum(s.mask) for g in given.groups[:2] for s in g.sequences[1:])
    assert masked.ess == pytest.approx(1 - own_negatives / full.tokens_trained, abs=1e-5)
    tapered = make(**settings, foreign_negatives="truncated")
    assert tapered.update(given).ess == pytest.approx(1)  # foreign text has no mu: its ratio starts at 1
    foreign = msgspec.structs.replace(given.groups[0], origin="foreign")
    assert tapered.update(Batch(2, (foreign,))).ess < 0.9


@pytest.mark.parametrize("known", [False, True], ids=["self", "behaviour"])
@pytest.mark.parametrize("loss", ["dapo", "cispo", "reinforce", "gpg"])
def test_tapering_weighs_a_bad_foreign_answer_by_its_ratio_once(loss: str, known: bool) -> None:
    """By pi / mu in all, for a token whose likelihood has been halved since the step began and is a fifth of mu."""
    config = TrainConfig(loss=loss, foreign_negatives="truncated", passes=2, advantage="dr_grpo", clip_low=0.9)
    mu = -1.0 + math.log(2.5)
    given = tuple(TrainSequence((5,), (True,), reward, (mu,) if known else None) for reward in (0.0, 1.0))
    objective = StepObjective(config, (TrainGroup((1,), given, "foreign"),), torch.device("cpu"))
    old = torch.tensor([-1.0, -1.0])
    objective.remember(objective.members, Forward(old, torch.zeros(2), None))
    members = objective.judge()
    objective.begin(members)
    logprobs = (old + torch.tensor([0.5, 1.0]).log()).requires_grad_()
    objective.loss(members, Forward(logprobs, torch.zeros(2), None))[0].backward()
    assert logprobs.grad is not None
    share, advantage = 0.5, 0.5
    assert float(logprobs.grad[0]) == pytest.approx(share * advantage * (0.2 if known else 0.5))
