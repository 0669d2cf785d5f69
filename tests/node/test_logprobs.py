"""The entropy's gradient; log-probabilities in chunks are in test_attention.py."""

import pytest
import torch

from node import logprobs
from node.logprobs import chosen_logprobs


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
