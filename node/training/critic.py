"""The critic of the gae advantages: a linear head on the policy's last states.

The states are detached, so the critic costs one number for each of their entries, no second model and no pass of its
own, and its loss does not pull at the policy. Its optimizer is its own too.
"""

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from node.checkpoint import CheckpointError

FILE = "critic.safetensors"


class Critic:
    """V(state) = mean(weight * state / rms(state)) + bias, from 0 everywhere.

    The mean makes the learning rate the distance that a value moves in one step of Adam, whatever the width.
    """

    def __init__(self, width: int, device: torch.device) -> None:
        self.weight = torch.zeros(width, device=device, requires_grad=True)
        self.bias = torch.zeros(1, device=device, requires_grad=True)
        self._named = {"weight": self.weight, "bias": self.bias}
        self.optimizer = torch.optim.Adam(self._named.values(), betas=(0.9, 0.95))

    def __call__(self, states: Tensor) -> Tensor:
        """Values before the tokens that follow states [M, D]; [M] float32, differentiable in the head only."""
        exact = states.detach().float()
        scale = torch.rsqrt(exact.square().mean(-1) + 1e-6)
        values: Tensor = torch.mv(exact, self.weight) * scale / len(self.weight) + self.bias
        return values

    def gradients(self) -> list[Tensor]:
        """Zeros where there was nothing to learn from in this process."""
        for weight in self._named.values():
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)
        return [weight.grad for weight in self._named.values() if weight.grad is not None]

    def finite(self) -> bool:
        """Whether the gradients can be used."""
        return all(w.grad is None or bool(torch.isfinite(w.grad).all()) for w in self._named.values())

    def step(self, learning_rate: float) -> None:
        """Apply the gradients."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.step()

    def drop_gradients(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)

    def save(self, directory: Path) -> None:
        """Write the head and its optimizer's state into a checkpoint."""
        tensors = {name: weight.detach() for name, weight in self._named.items()}
        for name, weight in self._named.items():
            tensors |= {f"{name}.{key}": value for key, value in self.optimizer.state.get(weight, {}).items()}
        save_file(tensors, directory / FILE)

    def load(self, directory: Path) -> bool:
        """Inverse of `save` on a fresh critic; False where the checkpoint has none. Raises CheckpointError."""
        path = directory / FILE
        if not path.exists():
            return False
        try:
            tensors = load_file(path, device=str(self.weight.device))
            for name, weight in self._named.items():
                weight.detach().copy_(tensors[name])
                if f"{name}.step" in tensors:  # not before the first update
                    self.optimizer.state[weight] = {
                        "step": tensors[f"{name}.step"].cpu(),
                        "exp_avg": tensors[f"{name}.exp_avg"],
                        "exp_avg_sq": tensors[f"{name}.exp_avg_sq"],
                    }
        except (OSError, SafetensorError, KeyError, RuntimeError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error
        return True

    def memory(self) -> int:
        """Bytes of weights and optimizer."""
        states = [value for state in self.optimizer.state.values() for value in state.values()]
        return sum(tensor.numel() * tensor.itemsize for tensor in (self.weight, self.bias, *states))
