"""The outer optimizer: against torch's SGD with Nesterov momentum, and against contributions that are meant to hurt."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from node.checkpoint import CheckpointError
from node.training import outer
from node.training.outer import NoOuterStep, Outer, combine, nesterov, outer_step

SETTINGS = {"rate": 0.7, "mu": 0.9, "max_norm": 3.0, "robust": "none", "least": 2}


def vector(seed: int, length: int = 1000) -> torch.Tensor:
    return torch.randn(length, generator=torch.Generator().manual_seed(seed))


def moved(anchor: torch.Tensor, seed: int, by: float = 0.01) -> np.ndarray:
    return (anchor + by * vector(seed, len(anchor))).numpy()


def start(length: int = 1000) -> Outer:
    return Outer(vector(0, length), torch.zeros(length), 0)


def take(state: Outer, contributions: list[np.ndarray], own: int = 0, **settings: object) -> tuple[Outer, object]:
    return outer_step(state, contributions, own, step=state.step + 10, **{**SETTINGS, **settings})


def test_nesterov_is_torchs_to_the_bit() -> None:
    weights = torch.nn.Parameter(vector(1))
    ours, momentum = weights.detach().clone(), torch.zeros(1000)
    optimizer = torch.optim.SGD([weights], lr=0.7, momentum=0.9, nesterov=True)
    for step in range(5):
        weights.grad = vector(10 + step)
        optimizer.step()
        ours, momentum = nesterov(ours, momentum, vector(10 + step), rate=0.7, mu=0.9)
        assert torch.equal(ours, weights)


def test_an_outer_step_is_that_of_the_mean_pseudo_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outer, "CHUNK", 300)  # several parts
    state = start()
    contributions = [moved(state.anchor, seed) for seed in (1, 2, 3)]
    after, stats = take(state, contributions)
    gradient = torch.stack([state.anchor - torch.from_numpy(one) for one in contributions]).sum(0) / 3
    expected, momentum = nesterov(state.anchor, state.momentum, gradient, rate=0.7, mu=0.9)
    assert torch.equal(after.anchor, expected)
    assert torch.equal(after.momentum, momentum)
    assert after.step == 10
    assert stats.combined == pytest.approx(float(gradient.norm()), rel=1e-5)
    # every node computes the same, whichever contribution is its own
    assert torch.equal(take(state, contributions, own=2)[0].anchor, after.anchor)


def test_nodes_that_are_apart_come_together() -> None:
    """What one missed is made up for: the mean is of weights, not of differences to anchors that differ."""
    states = [start(), Outer(start().anchor + 0.05 * vector(9), torch.zeros(1000), 0)]
    first = float((states[0].anchor - states[1].anchor).norm())
    for step in range(12):
        now = [moved(state.anchor, 20 + step, 0.001) for state in states]
        states = [take(state, now, own, max_norm=1000.0)[0] for own, state in enumerate(states)]
    assert float((states[0].anchor - states[1].anchor).norm()) < first / 20


def test_a_contribution_moves_a_node_no_further_than_its_limit() -> None:
    state = start()
    honest = moved(state.anchor, 1)
    without, _ = take(state, [honest, state.anchor.numpy()])
    for hostile in (moved(state.anchor, 2, 1e6), np.full(1000, 3e38, np.float32), moved(state.anchor, 1, -5.0)):
        after, stats = take(state, [honest, hostile])
        own = float((state.anchor - torch.from_numpy(honest)).norm())
        assert stats.limit == pytest.approx(3 * own, rel=1e-6)
        assert stats.norms[1] > stats.limit
        # lr * (1 + mu) * limit / n
        pushed = float((after.anchor - without.anchor).norm())
        assert pushed == pytest.approx(0.7 * 1.9 * 3 * own / 2, rel=1e-3)
    assert stats.cosines[1] == pytest.approx(-1.0)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_left_out(poison: float) -> None:
    state = start()
    bad = moved(state.anchor, 3)
    bad[7] = poison
    honest = [moved(state.anchor, 1), moved(state.anchor, 2)]
    after, stats = take(state, [honest[0], bad, honest[1]])
    assert torch.equal(after.anchor, take(state, honest)[0].anchor)
    assert stats.norms[1] == math.inf
    with pytest.raises(NoOuterStep, match="only 1 contributions are finite"):
        take(state, [honest[0], bad])
    with pytest.raises(NoOuterStep, match="own weights"):
        take(state, [bad, honest[0]])
    with pytest.raises(NoOuterStep, match="have not moved"):
        take(state, [state.anchor.numpy(), honest[0]])


@pytest.mark.parametrize("poison", [1e6, math.nan])
def test_a_file_that_changes_between_measuring_and_averaging_is_no_way_past_the_limit(poison: float) -> None:
    class Changing(np.ndarray):
        reads = 0

        def __getitem__(self, part: slice) -> np.ndarray:
            self.reads += 1
            now = np.asarray(self)[part]
            return now if self.reads == 1 else now + np.float32(poison)

    state = start()
    with pytest.raises(NoOuterStep, match="changed while they were read"):
        take(state, [moved(state.anchor, 1), moved(state.anchor, 2).view(Changing)])


def test_robust_means() -> None:
    rows = torch.tensor([[1.0, 5.0], [2.0, -90.0], [3.0, 6.0], [100.0, 7.0]])
    assert combine(rows, "none").tolist() == [26.5, -18.0]
    assert combine(rows, "median").tolist() == [2.5, 5.5]
    assert combine(rows[:3], "median").tolist() == [2.0, 5.0]
    assert combine(rows, "trimmed").tolist() == [2.5, 5.5]
    assert combine(rows[:2], "median").tolist() == [1.5, -42.5]
    many = torch.arange(8.0).reshape(8, 1) ** 2
    assert combine(many, "trimmed").tolist() == [(4 + 9 + 16 + 25) / 4]


@pytest.mark.parametrize(
    ("robust", "least"),
    [("median", {3: 2, 4: 2, 5: 3, 6: 3, 7: 4, 8: 4}), ("trimmed", dict.fromkeys(range(3, 8), 2) | {8: 3})],
)
def test_how_many_nodes_steer_a_robust_mean(robust: outer.Robust, least: dict[int, int]) -> None:
    """As docs/security.md has it."""
    for nodes, hostile in least.items():
        rows = torch.zeros(nodes, 1)
        rows[: hostile - 1] = 3.0
        assert combine(rows, robust).tolist() == [0.0]
        rows[hostile - 1] = 3.0
        assert combine(rows, robust) > 0


def test_a_minority_cannot_turn_the_median_around() -> None:
    state = start()
    honest = [moved(state.anchor, 1), *(moved(state.anchor, 1) for _ in range(2))]
    hostile = [moved(state.anchor, 1, -0.03)] * 2  # the other way, three times as far: not clipped
    plain, _ = take(state, [*honest, *hostile])
    robust, _ = take(state, [*honest, *hostile], robust="median")
    direction = torch.from_numpy(honest[0]) - state.anchor
    assert float((plain.anchor - state.anchor) @ direction) < 0 < float((robust.anchor - state.anchor) @ direction)


def test_files_hold_the_numbers_and_are_refused_for_another_model(tmp_path: Path) -> None:
    weights = {"b": torch.nn.Parameter(vector(1, 6).view(2, 3)), "a": torch.nn.Parameter(vector(2, 4))}
    flat = outer.flatten(weights)
    assert torch.equal(flat[:4], weights["a"].detach())
    digest = outer.write(flat, tmp_path / "own.bin")
    assert (tmp_path / "own.bin").read_bytes() == flat.numpy().tobytes()
    assert len(digest) == 32
    others = {name: torch.nn.Parameter(torch.zeros_like(weight)) for name, weight in weights.items()}
    outer.put(torch.from_numpy(outer.Vector(tmp_path / "own.bin")[0:10].copy()), others)
    with pytest.raises(OSError, match="cut short"):
        outer.Vector(tmp_path / "own.bin")[5:11]
    assert all(torch.equal(others[name], weights[name]) for name in weights)
    assert outer.layout(weights) == outer.layout(others) != outer.layout({"a": weights["a"]})

    state = Outer(flat, flat * 2, 30)
    outer.save(state, tmp_path)
    found = outer.load(tmp_path, 10)
    assert found is not None
    assert torch.equal(found.anchor, flat)
    assert torch.equal(found.momentum, flat * 2)
    assert found.step == 30
    with pytest.raises(CheckpointError, match="another model"):
        outer.load(tmp_path, 11)
    (tmp_path / outer.FILE).write_bytes(b"nothing")
    with pytest.raises(CheckpointError, match="cannot be read"):
        outer.load(tmp_path, 10)
    assert outer.load(tmp_path / "elsewhere", 10) is None
