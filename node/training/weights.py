"""The trained weights: float32 masters, and the model's own tensors where it computes in another type.

Parameters that take no gradient (all but the adapters, with `train.lora_rank`) have no master, moments or gradient.
"""

from collections.abc import Mapping
from typing import Any

import torch


class Weights:
    """Masters are the model's parameters themselves in float32, and float32 copies of them otherwise.

    There is one set of gradients: with copies, each parameter's gradient is added to its master's in float32 as soon
    as it is complete, and freed.
    """

    def __init__(self, model: Any) -> None:
        named = dict(model.named_parameters())
        self.parameters: dict[str, torch.nn.Parameter] = {n: p for n, p in named.items() if p.requires_grad}
        """The trained ones. Tied parameters are in here once, under their first name."""
        self.frozen = [parameter for parameter in named.values() if not parameter.requires_grad]
        self.masters: dict[str, torch.nn.Parameter] = {}
        for name, parameter in self.parameters.items():
            if parameter.dtype == torch.float32:
                self.masters[name] = parameter
                continue
            master = torch.nn.Parameter(parameter.detach().float())
            self.masters[name] = master
            parameter.register_post_accumulate_grad_hook(_Move(master))

    def publish(self) -> None:
        """Bring the model's tensors up to date with their masters."""
        for name, parameter in self.parameters.items():
            if parameter is not self.masters[name]:
                parameter.detach().copy_(self.masters[name].detach())

    def clip(self, largest: float) -> float:
        """Scale gradients to a global norm of at most `largest`; returns the norm before that."""
        masters = list(self.masters.values())
        norm = torch.nn.utils.clip_grad_norm_(masters, largest, foreach=False)
        return float(norm)

    def drop_gradients(self) -> None:
        """Free all gradients, complete or not."""
        for tensor in (*self.masters.values(), *self.parameters.values()):
            tensor.grad = None

    def memory(self) -> Mapping[str, int]:
        """Bytes of weights (masters, copies and what is frozen) and of gradients."""
        tensors = {id(t): t for t in (*self.masters.values(), *self.parameters.values(), *self.frozen)}.values()
        gradients = [t.grad for t in tensors if t.grad is not None]
        return {
            "weights": sum(t.numel() * t.itemsize for t in tensors),
            "gradients": sum(g.numel() * g.itemsize for g in gradients),
        }


def weights_copied(model: Any, dtype: str) -> dict[str, torch.Tensor]:
    """A copy of all parameters by name in main memory, as 'float32' or 'bfloat16'; tied ones once."""
    kind = getattr(torch, dtype)
    return {
        name: parameter.detach().to("cpu", kind, copy=True).contiguous() for name, parameter in model.named_parameters()
    }


class _Move:
    """Adds a finished gradient to its master's."""

    def __init__(self, master: torch.nn.Parameter) -> None:
        self.master = master

    def __call__(self, parameter: torch.Tensor) -> None:
        gradient = parameter.grad
        parameter.grad = None
        if gradient is None:
            return
        if self.master.grad is None:
            self.master.grad = gradient.float()
        else:
            self.master.grad += gradient
