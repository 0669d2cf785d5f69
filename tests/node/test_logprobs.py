"""The entropy's gradient, and a divided vocabulary; log-probabilities in chunks are in test_attention.py."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from node import logprobs
from node.logprobs import chosen_logprobs

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("keep", [0, 1 << 28])
@pytest.mark.parametrize("both", [False, True])
def test_the_entropy_has_the_gradient_of_a_plain_one(keep: int, both: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprobs, "CHUNK_BYTES", 4 * 30 * 3)  # 3 rows of 30 at once
    monkeypatch.setattr(logprobs, "KEEP_BYTES", keep)
    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(7, 5, generator=generator, requires_grad=True)
    weight = torch.randn(30, 5, generator=generator, requires_grad=True)
    rows, tokens = torch.tensor([6, 0, 0, 3, 0, 5]), torch.tensor([1, 2, 29, 4, 2, 0])
    of_tokens, of_states = torch.randn(6, generator=generator), torch.randn(7, generator=generator)
    scores = (hidden @ weight.t()).log_softmax(-1)
    plain = (-(scores.exp() * scores).sum(-1) * of_states).sum() + both * (scores[rows, tokens] * of_tokens).sum()
    values, entropy = chosen_logprobs(hidden, weight, rows, tokens)
    ours = (entropy * of_states).sum() + (values * of_tokens).sum() if both else (entropy * of_states).sum()
    torch.testing.assert_close(ours, plain)
    torch.testing.assert_close(
        torch.autograd.grad(ours, (hidden, weight)), torch.autograd.grad(plain, (hidden, weight))
    )


def test_an_impossible_token_does_not_spoil_the_entropy() -> None:
    hidden = torch.tensor([[300.0, -300.0]], requires_grad=True)
    weight = torch.eye(2, requires_grad=True)
    _, entropy = chosen_logprobs(hidden, weight, torch.tensor([0]), torch.tensor([0]))
    (gradient,) = torch.autograd.grad(entropy.sum(), hidden)
    assert torch.isfinite(entropy).all()
    assert gradient.tolist() == [[0, 0]]


PARTS = """
import sys
import torch
import torch.distributed as dist
from node import logprobs
from node.logprobs import Vocabulary, chosen_logprobs

rank, keep = int(sys.argv[1]), int(sys.argv[3])
logprobs.CHUNK_BYTES, logprobs.KEEP_BYTES = 3 * 4 * 6, keep  # three states at a time; kept, or computed again
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=2)
generator = torch.Generator().manual_seed(3)
hidden, weight = torch.randn(7, 5, generator=generator), torch.randn(11, 5, generator=generator)
rows, tokens = torch.tensor([0, 2, 2, 5, 6, 1]), torch.tensor([10, 0, 5, 6, 3, 9])
of_tokens, of_states = torch.randn(6, generator=generator), torch.randn(7, generator=generator)
here = slice(0, 6) if rank == 0 else slice(6, 11)  # the second part is smaller


def found(hidden, weight, vocabulary):
    hidden, weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    values, entropy = chosen_logprobs(hidden, weight, rows, tokens, vocabulary)
    ((values * of_tokens).sum() + (entropy * of_states).sum()).backward()
    return values.detach(), entropy.detach(), hidden.grad, weight.grad


whole = found(hidden, weight, None)
part = found(hidden, weight[here], Vocabulary(here.start, 6, dist.group.WORLD))
for ours, theirs in zip(part, (*whole[:3], whole[3][here]), strict=True):
    torch.testing.assert_close(ours, theirs)
"""


@pytest.mark.slow
@pytest.mark.network
@pytest.mark.parametrize("keep", [0, 1 << 20])
def test_two_processes_that_divide_the_vocabulary(tmp_path: Path, keep: int) -> None:
    both = [
        subprocess.Popen(
            [sys.executable, "-c", PARTS, str(rank), str(tmp_path / "store"), str(keep)],
            env={**os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    for process in both:
        said = process.communicate(timeout=240)[1]
        assert process.returncode == 0, said


def test_logits_of_bfloat16_are_not_rounded_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprobs, "WIDENED_BYTES", 4 * 8 * 7)  # 7 rows of 30 at once
    generator = torch.Generator().manual_seed(3)
    hidden, weight = (10 * torch.randn(n, 8, generator=generator) for n in (5, 30))
    hidden, weight = hidden.bfloat16(), weight.bfloat16()
    exact = hidden.double() @ weight.double().t()
    assert exact.abs().max() > 256  # where bfloat16 has steps of 2
    torch.testing.assert_close(logprobs.logits_of(hidden, weight).double(), exact, rtol=0, atol=1e-3)
    rows, tokens = torch.arange(5), torch.tensor([0, 7, 29, 13, 14])
    values, _ = chosen_logprobs(hidden, weight, rows, tokens)
    torch.testing.assert_close(values.double(), exact.log_softmax(-1)[rows, tokens], rtol=0, atol=1e-3)
