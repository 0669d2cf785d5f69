"""One model over several processes by Megatron-core: tensor, pipeline and expert parallelism, and replicas of that.

A layer's products are divided between the processes of `train.tensor_parallel` (Shoeybi et al., arXiv 1909.08053), runs
of layers between the stages of `train.pipeline_parallel`, which pass micro-batches on in Megatron's own 1F1B schedule
(arXiv 2104.04473), and experts between the processes of `train.expert_parallel`, which are replicas otherwise. Masters,
moments and gradients are this process's part of each Hugging Face tensor, so that optimizer, checkpoints and what the
node takes over are those of every other trainer; Megatron's own tensors are what is computed with.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from node.batching import MicroBatch, Packed, pack
from node.config_train import TrainConfig
from node.models import ModelBundle, load_model
from node.routing import Routing, replayed
from node.training.files import local, placed
from node.training.forward import Take, drawn_from, idle
from node.training.fsdp import dealt
from node.training.megatron_checks import check_architecture, check_division
from node.training.megatron_model import MegatronModel
from node.training.megatron_weights import divided, stage_of
from node.training.whole import write_whole

AXES = ("replica", "expert", "tensor")
"""Of the processes of a pipeline stage, in Megatron's order of ranks (tp-cp-ep-dp-pp, the last outermost)."""


class Megatron:
    """The processes of a trainer, as one of them sees them; `torch.distributed` is up."""

    def __init__(self, device: torch.device, dtype: torch.dtype, config: TrainConfig, seconds: float) -> None:
        """`dtype`: the compute type; `seconds`: deadline of one exchange."""
        self.rank, self.count = dist.get_rank(), dist.get_world_size()
        self.device, self.dtype, self.config = device, dtype, config
        tensor, pipeline, expert = config.tensor_parallel, config.pipeline_parallel, config.expert_parallel
        parallel_state.initialize_model_parallel(
            tensor,
            pipeline,
            expert_model_parallel_size=expert,
            expert_tensor_parallel_size=1,
            distributed_timeout_minutes=seconds / 60,
            create_gloo_process_groups=False,
        )
        replicas = self.count // (tensor * pipeline * expert)
        self.mesh = init_device_mesh(
            device.type, (pipeline, replicas, expert, tensor), mesh_dim_names=("pipeline", *AXES)
        )
        self.of_stage = self.mesh[AXES]
        self.stages = pipeline
        self._parts = replicas * expert
        """Processes, or groups of them, that micro-batches are dealt to."""
        self._part = self.mesh.get_local_rank("replica") * expert + self.mesh.get_local_rank("expert")

    def load(self, path: str, models: Path) -> ModelBundle:
        """A model's files, read by the first process and dealt out to all. Raises ModelError."""
        source = load_model(path, device="cpu", dtype="float32", models=models) if self.rank == 0 else None
        dist.all_reduce(torch.zeros(1, device=self.device))  # the embedded model may have been converted just now
        bundle = load_model(path, device="meta", dtype="float32", models=models)
        bundle.model.tie_weights()
        if source is not None:
            bundle.model.generation_config = source.model.generation_config
        check_architecture(bundle.model.config)
        check_division(bundle.model.config, self.config)
        model = MegatronModel(bundle, self.device, self.dtype)
        tensors = dict(source.model.named_parameters()) if source else {}
        parts = model.parts()
        for name, shape in model.shapes.items():
            whole = torch.empty(shape, device=self.device)
            if self.rank == 0:
                whole.copy_(tensors[name].detach())
            dist.broadcast(whole, 0)
            part = whole[placed(shape, self.placements(name), self.of_stage)].contiguous()
            for piece in parts.get(name, ()):
                piece.values.copy_(piece.of(part))
        return dataclasses.replace(bundle, model=model)

    def placements(self, name: str) -> tuple[Placement, ...]:
        """How a Hugging Face tensor is shared out over the axes of its stage."""
        where = divided(name)
        return tuple(Shard(where[1]) if where and where[0] == axis else Replicate() for axis in AXES)

    # -- what the trainer asks for (node/training/ranks.py) ----------------------------------------------------

    def weights(self, model: MegatronModel) -> "MegatronWeights":
        return MegatronWeights(self, model)

    def reference(self, bundle: ModelBundle, *, untrained: bool) -> MegatronModel:
        """A second model of the same files, divided like the first."""
        again: MegatronModel = self.load(str(bundle.directory), bundle.directory.parent).model
        again.gpt.requires_grad_(False)
        return again.eval()

    def run(
        self,
        model: MegatronModel,
        micros: Sequence[MicroBatch],
        take: Take,
        *,
        routing: Routing | None = None,
        recompute: bool = False,
    ) -> None:
        """In Megatron's schedule, also without stages."""
        mine = list(dealt(micros, self._part, self._parts))

        def forward(todo: Iterator[MicroBatch | None], _: Any) -> tuple[torch.Tensor, Callable[..., Any]]:
            micro = next(todo)
            told = None if micro is None else routing
            packed = pack((micro or idle()).trie, self.device, leaves=False)
            with replayed(told, micro or idle(), packed):
                states = model.forward(packed, told, recompute=recompute)
            return states, functools.partial(self._end, model, micro, packed, take)

        if mine:
            get_forward_backward_func()(
                forward_step_func=forward,
                data_iterator=iter(mine),
                model=model.gpt,
                num_microbatches=len(mine),
                seq_length=1,  # unused: the lengths of micro-batches differ, and are sent along
                micro_batch_size=1,
                forward_only=not torch.is_grad_enabled(),
            )

    def _end(
        self, model: MegatronModel, micro: MicroBatch | None, packed: Packed, take: Take, states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, None]:
        """The loss function of a pass, as Megatron wants it: the loss, a count that it is not divided by, None."""
        weight, vocabulary = model.output()
        found = drawn_from(states[:, 0], weight, micro or idle(), packed, vocabulary)
        loss = found.logprobs.mul(0.0).sum() if micro is None else take(micro, found)
        nothing = torch.zeros((), device=self.device)
        return nothing if loss is None else loss, nothing.int(), None

    def sum(self, tensor: torch.Tensor) -> None:
        here = tensor.to(self.device)  # groups of a GPU's processes need not exchange what lies in main memory
        for axis in ("pipeline", "replica", "expert"):  # those that divide a layer have all seen the same
            _add_up(here, self.mesh, axis)
        if here is not tensor:
            tensor.copy_(here)

    def save_model(self, bundle: ModelBundle, weights: Mapping[str, torch.Tensor], directory: Path) -> None:
        self.gather(bundle, weights, directory, torch.float32)

    def gather(
        self, bundle: ModelBundle, weights: Mapping[str, torch.Tensor], directory: Path, dtype: torch.dtype
    ) -> list[str]:
        """Have the first process write whole weights in a type, in the Hugging Face layout; the names of the files."""
        layers = bundle.model.config.num_hidden_layers

        def gather(name: str) -> torch.Tensor | None:
            weight = weights[name]
            source = stage_of(name, layers, self.stages) * (self.count // self.stages)
            if weight.is_meta:
                whole = torch.empty(weight.shape if self.rank == 0 else 0, dtype=dtype, device=self.device)
            else:
                whole = _whole(weight.detach().to(dtype))
            if source == self.rank != 0:
                dist.send(whole, 0)
            elif source != self.rank == 0:
                dist.recv(whole, source)
            return whole if self.rank == 0 else None

        return write_whole(bundle, {name: weight.shape for name, weight in weights.items()}, gather, directory, dtype)


class MegatronWeights:
    """Masters are float32 parts of Hugging Face tensors; Megatron's tensors are copies of them, and hold no gradients.

    A gradient is added to the masters' as soon as it is complete. Tensors of other stages are on the meta device.
    """

    def __init__(self, ranks: Megatron, model: MegatronModel) -> None:
        self.model, self._mesh, self._placements = model, ranks.of_stage, ranks.placements
        self._parts = model.parts()
        self.masters: dict[str, torch.nn.Parameter] = {}
        for name, shape in model.shapes.items():
            master = torch.empty(shape, device="meta")
            if name in self._parts:
                placements = ranks.placements(name)
                place = placed(shape, placements, self._mesh)
                part = torch.empty([one.stop - one.start for one in place], device=ranks.device)
                for piece in self._parts[name]:
                    piece.of(part).copy_(piece.values)
                master = DTensor.from_local(
                    part, self._mesh, placements, run_check=False, shape=shape, stride=master.stride()
                )
            self.masters[name] = torch.nn.Parameter(master)
        for name, parameter in model.gpt.named_parameters():
            parameter.register_post_accumulate_grad_hook(functools.partial(self._move, name))

    def publish(self) -> None:
        for name, pieces in self._parts.items():
            for piece in pieces:
                piece.values.copy_(piece.of(local(self.masters[name].detach())))

    def clip(self, largest: float) -> float:
        """Add up gradients over replicas, and scale them to a global norm of at most `largest`; returns it before."""
        own = []
        for name in self._parts:
            gradient = self._complete(name)
            alike = [axis for axis, placement in enumerate(self._placements(name)) if not isinstance(placement, Shard)]
            if all(self._mesh.get_local_rank(axis) == 0 for axis in alike):  # what several have counts once
                own.append(gradient.norm())
        total = torch.stack(own).square().sum() if own else torch.zeros((), device=self.model.device)
        dist.all_reduce(total)
        norm = float(total.sqrt())
        for name in self._parts:
            self._gradient(name).mul_(min(1.0, largest / (norm + 1e-6)))
        return norm

    def drop_gradients(self) -> None:
        for tensor in (*self.masters.values(), *self.model.gpt.parameters()):
            tensor.grad = None

    def memory(self) -> Mapping[str, int]:
        """Bytes of masters and copies, and of gradients, in this process."""
        masters = [self.masters[name] for name in self._parts]
        weights = [*(local(master.detach()) for master in masters), *self.model.gpt.parameters()]
        gradients = [local(master.grad) for master in masters if master.grad is not None]
        return {
            "weights": sum(t.numel() * t.itemsize for t in weights),
            "gradients": sum(g.numel() * g.itemsize for g in gradients),
        }

    def _move(self, name: str, parameter: torch.Tensor) -> None:
        gradient, parameter.grad = parameter.grad, None
        if gradient is not None:
            for piece in self.model.pieces(name, gradient):
                piece.of(self._gradient(piece.name)).add_(piece.values)

    def _gradient(self, name: str) -> torch.Tensor:
        """This process's part of a master's gradient."""
        master = self.masters[name]
        if master.grad is None:
            master.grad = torch.zeros_like(master)
        return local(master.grad)

    def _complete(self, name: str) -> torch.Tensor:
        """The same, added up over all that saw other tokens, or other heads of them."""
        gradient = self._gradient(name)
        where = divided(name)
        _add_up(gradient, self._mesh, "replica")
        if where is None or where[0] != "expert":  # an expert has been sent all processes' tokens
            _add_up(gradient, self._mesh, "expert")
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            _add_up(gradient, self._mesh, "tensor")
        return gradient


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    assert isinstance(tensor, DTensor)
    return tensor.full_tensor()


def _add_up(tensor: torch.Tensor, mesh: DeviceMesh, axis: str) -> None:
    group = mesh.get_group(axis)
    if group.size() > 1:
        dist.all_reduce(tensor, group=group)
