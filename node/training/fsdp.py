"""One model over several processes by FSDP2: each holds its rows of masters, gradients and moments.

Zhao et al., arXiv 2304.11277, as `torch.distributed.fsdp.fully_shard` has it. A layer's weights are gathered in the
compute type just before they are used and dropped afterwards; its gradients are added up (not averaged: the
denominators of the loss are those of the whole step) in float32 as soon as they are complete. Every pass is thus
collective: who has no micro-batch left runs an idle one, with a loss of 0.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from node.batching import MicroBatch, micro_batches
from node.models import ModelBundle, load_model
from node.routing import Routing
from node.training.files import local, rows_of
from node.training.forward import States, Take, go_back, idle, states
from node.training.whole import write_whole

SMALLEST_PART = 16
"""Tokens of a micro-batch below which no more are made for the sake of even work."""
ROOM = (1.0, 1.15, 1.3, 1.5)
"""Sizes of an even part of the work that are tried."""


class Shards:
    """The processes of a sharded trainer, as one of them sees them; `torch.distributed` is up."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        """`dtype`: the compute type."""
        self.rank, self.count = dist.get_rank(), dist.get_world_size()
        self.device, self.dtype = device, dtype
        self.mesh: DeviceMesh = init_device_mesh(device.type, (self.count,))

    def load(self, path: str, models: Path) -> ModelBundle:
        """A model's files, read by the first process and dealt out to all. Raises ModelError in the first one."""
        source = load_model(path, device="cpu", dtype="float32", models=models) if self.rank == 0 else None
        self.sum(torch.zeros(1, device=self.device))  # the embedded model may have been converted just now
        bundle = load_model(path, device="meta", dtype="float32", models=models)
        model = bundle.model
        model.tie_weights()
        if source is not None:
            model.generation_config = source.model.generation_config
        self._shard(model)
        model.to_empty(device=self.device)
        tensors = dict(source.model.named_parameters()) | dict(source.model.named_buffers()) if source else {}
        for name, target in (*model.named_parameters(), *model.named_buffers()):
            whole = torch.empty(target.shape, dtype=target.dtype, device=self.device)
            if self.rank == 0:
                whole.copy_(tensors[name].detach())
            dist.broadcast(whole, 0)
            rows = rows_of(len(whole), self.rank, self.count) if isinstance(target, DTensor) else slice(None)
            local(target.detach()).copy_(whole[rows])
        return bundle

    def _shard(self, model: Any) -> None:
        kind = None if self.dtype == torch.float32 else self.dtype
        policy = MixedPrecisionPolicy(param_dtype=kind, reduce_dtype=torch.float32, cast_forward_inputs=False)
        for layer in model.base_model.layers:
            fully_shard(layer, mesh=self.mesh, mp_policy=policy)
        fully_shard(model, mesh=self.mesh, mp_policy=policy)
        for module in _sharded(model):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            module.set_reduce_scatter_unused_params(True)  # experts that no token of this process went to

        def forward(micro: MicroBatch, routing: Routing | None, recompute: bool) -> States:
            # inside the root's own forward, where the output layer's weights are whole
            return states(model, micro, routing, recompute=recompute)

        model.forward = forward

    # -- what the trainer asks for (node/training/ranks.py) ----------------------------------------------------

    def weights(self, model: Any) -> "ShardedWeights":
        return ShardedWeights(model)

    def reference(self, bundle: ModelBundle, *, untrained: bool) -> Any:
        """A second model of the same files, shared out like the first."""
        again = self.load(str(bundle.directory), bundle.directory.parent)
        return again.model.requires_grad_(False)

    def run(
        self,
        model: Any,
        micros: Sequence[MicroBatch],
        take: Take,
        *,
        routing: Routing | None = None,
        recompute: bool = False,
    ) -> None:
        for micro in dealt(micros, self.rank, self.count):
            found = model(micro or idle(), routing, recompute)
            if micro is not None:
                go_back(take(micro, found))
            elif torch.is_grad_enabled():
                go_back(found.logprobs.mul(0.0).sum())

    def sum(self, tensor: torch.Tensor) -> None:
        dist.all_reduce(tensor)

    def save_model(self, bundle: ModelBundle, weights: Mapping[str, torch.Tensor], directory: Path) -> None:
        self.gather(bundle, weights, directory, torch.float32)

    def gather(
        self, bundle: ModelBundle, weights: Mapping[str, torch.Tensor], directory: Path, dtype: torch.dtype
    ) -> list[str]:
        """Have the first process write whole weights in a type, in the Hugging Face layout; the names of the files."""

        def gather(name: str) -> torch.Tensor | None:
            tensor = weights[name].detach().to(dtype)
            assert isinstance(tensor, DTensor)
            whole = tensor.full_tensor()
            return whole if self.rank == 0 else None

        return write_whole(bundle, {name: weight.shape for name, weight in weights.items()}, gather, directory, dtype)


def dealt(micros: Sequence[MicroBatch], part: int, count: int) -> Iterator[MicroBatch | None]:
    """Every count-th micro-batch, of parts made smaller where that evens out the work; then None for an idle pass."""
    even = evened(micros, count)
    for start in range(0, len(even), count):
        yield even[start + part] if start + part < len(even) else None


def evened(micros: Sequence[MicroBatch], count: int) -> Sequence[MicroBatch]:
    """The same sequences in micro-batches that keep `count` processes equally busy, in as many rounds.

    What is merged in one micro-batch costs twice in two, so an even part is tried with some room, too, but none is
    made larger than the largest was: memory is planned for that. The work is the largest micro-batch of each round,
    added up: the others wait for it.
    """
    if len(micros) % count == 0:
        return micros
    slots = -(-len(micros) // count) * count
    part = -(-sum(len(micro.trie) for micro in micros) // slots)
    most = _largest(micros)
    members = [member for micro in micros for member in micro.members]
    tried = [micros]
    for room in ROOM:
        budget = max(SMALLEST_PART, int(part * room))
        tried.append(micro_batches(micros[0].groups, members, budget, micros[0].trie.merge))
    fitting = (those for those in tried if len(those) <= slots and _largest(those) <= most)
    return min(fitting, key=lambda those: _work(those, count))


def _largest(micros: Sequence[MicroBatch]) -> int:
    return max(len(micro.trie) for micro in micros)


def _work(micros: Sequence[MicroBatch], count: int) -> int:
    starts = range(0, len(micros), count)
    return sum(_largest(micros[start : start + count]) for start in starts)


class ShardedWeights:
    """Masters are the sharded parameters; what the model computes with is gathered from them for each pass."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.masters: dict[str, torch.nn.Parameter] = dict(model.named_parameters())

    def publish(self) -> None:
        """Drop gathered weights, which would be the old ones in the next pass."""
        for module in _sharded(self.model):
            module.reshard()

    def clip(self, largest: float) -> float:
        """Scale gradients to a global norm of at most `largest`; returns the norm before that."""
        norm = torch.nn.utils.get_total_norm([w.grad for w in self.masters.values() if w.grad is not None])
        whole = norm.full_tensor() if isinstance(norm, DTensor) else norm
        torch.nn.utils.clip_grads_with_norm_(self.masters.values(), largest, whole, foreach=False)
        return float(whole)

    def drop_gradients(self) -> None:
        for weight in self.masters.values():
            weight.grad = None

    def memory(self) -> Mapping[str, int]:
        """Bytes of the rows of this process."""
        rows = [local(weight) for weight in self.masters.values()]
        gradients = [local(weight.grad) for weight in self.masters.values() if weight.grad is not None]
        return {
            "weights": sum(t.numel() * t.itemsize for t in rows),
            "gradients": sum(g.numel() * g.itemsize for g in gradients),
        }


def _sharded(model: Any) -> Iterator[FSDPModule]:
    return (module for module in model.modules() if isinstance(module, FSDPModule))
