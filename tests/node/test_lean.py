"""The lean layers compute what the library's do, and keep less."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from node.models import load_model


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 0.06)])
def test_outputs_and_gradients(
    kind: str, dtype: str, tolerance: float, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    ours = load_model(str(tiny_model(kind)), device="cpu", dtype=dtype, models=tmp_path).model
    theirs = AutoModelForCausalLM.from_pretrained(tiny_model(kind), dtype=ours.dtype, local_files_only=True).eval()
    ids = torch.randint(2, 258, (2, 15), generator=torch.Generator().manual_seed(0))
    kept = []
    for model in (theirs, ours):
        bytes_kept = 0

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal bytes_kept
            bytes_kept += tensor.numel() if tensor.dim() == 3 else 0
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            output = model(ids, use_cache=False).logits
        (output.float().square().mean()).backward()
        kept.append(bytes_kept)
    torch.testing.assert_close(ours(ids).logits, theirs(ids).logits, atol=tolerance, rtol=tolerance)
    for (name, expected), got in zip(theirs.named_parameters(), ours.parameters(), strict=True):
        assert expected.grad is not None, name
        scale = expected.grad.float().abs().max()
        assert (got.grad.float() - expected.grad.float()).abs().max() <= tolerance * max(1.0, scale), name
    assert kept[1] < 0.8 * kept[0]
