"""The feed-forward and norm layers of a llama-like model as one autograd function each.

Frozen weights get no gradient, and layers with adapters (node/training/lora.py) are computed as the library does.

Under plain autograd a layer keeps every intermediate for the way back: 11,000 floats a token and layer in a 576-wide
model. These keep what cannot be had again by cheap elementwise work: 40% less memory, so larger micro-batches, and
fewer passes over memory that is the bottleneck beside the matrix products.
"""

import types
from typing import Any

import torch
from torch.nn import functional


def make_lean(model: Any) -> None:
    """Give the layers of a loaded model their lean forward, where they have the plain SwiGLU and RMSNorm form."""
    plain_mlp = model.config.hidden_act == "silu" and not getattr(model.config, "mlp_bias", False)
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = types.MethodType(_norm, module)
        elif plain_mlp and all(hasattr(module, name) for name in ("gate_proj", "up_proj", "down_proj")):
            module.forward = types.MethodType(_mlp, module)


def _mlp(module: Any, x: torch.Tensor) -> torch.Tensor:
    output: torch.Tensor
    if any(hasattr(layer, "base_layer") for layer in (module.gate_proj, module.up_proj, module.down_proj)):
        output = type(module).forward(module, x)  # a weight alone says nothing of its adapter
        return output
    output = _SwiGLU.apply(x, module.gate_proj.weight, module.up_proj.weight, module.down_proj.weight)
    return output


def _norm(module: Any, x: torch.Tensor) -> torch.Tensor:
    output: torch.Tensor = _RMSNorm.apply(x, module.weight, module.variance_epsilon)
    return output


class _SwiGLU(torch.autograd.Function):
    """down(silu(gate(x)) * up(x)); keeps x and the two products, not what is made of them."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        opened, raised = functional.linear(x, gate), functional.linear(x, up)
        ctx.save_for_backward(x, gate, up, down, opened, raised)
        return functional.linear(functional.silu(opened).mul_(raised), down)

    @staticmethod
    def backward(ctx: Any, d_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, gate, up, down, opened, raised = ctx.saved_tensors
        shape = x.shape
        x, d_output = x.flatten(0, -2), d_output.flatten(0, -2)
        opened, raised = opened.flatten(0, -2), raised.flatten(0, -2)
        d_inner = torch.mm(d_output, down)
        silu = functional.silu(opened)
        _, of_gate, of_up, of_down = ctx.needs_input_grad
        d_down = torch.mm(d_output.t(), silu * raised) if of_down else None
        d_raised = silu.mul_(d_inner)
        d_opened = torch.ops.aten.silu_backward(d_inner.mul_(raised), opened)
        d_x = torch.mm(d_opened, gate).addmm_(d_raised, up)
        d_gate = torch.mm(d_opened.t(), x) if of_gate else None
        d_up = torch.mm(d_raised.t(), x) if of_up else None
        return d_x.view(shape), d_gate, d_up, d_down


class _RMSNorm(torch.autograd.Function):
    """w * x / rms(x), computed in float32 as the library does; keeps x and one number a row."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        exact = x.float()
        scale = torch.rsqrt(torch.linalg.vecdot(exact, exact).div_(x.shape[-1]).add_(epsilon)).unsqueeze(-1)
        ctx.save_for_backward(x, weight, scale)
        return (exact * scale).to(x.dtype).mul_(weight)

    @staticmethod
    def backward(ctx: Any, d_output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, None]:
        x, weight, scale = ctx.saved_tensors
        normed = x.float() * scale
        d_output = d_output.float()
        of_weight = ctx.needs_input_grad[1]
        d_weight = (d_output * normed).flatten(0, -2).sum(0).to(weight.dtype) if of_weight else None
        d_normed = d_output * weight
        inner = torch.linalg.vecdot(d_normed, normed).div_(x.shape[-1]).unsqueeze(-1)
        return d_normed.sub_(normed.mul_(inner)).mul_(scale).to(x.dtype), d_weight, None
