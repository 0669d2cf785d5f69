"""How the passes of an update are divided between processes that hold one model together: the local trainer's seam.

With shards, every pass needs all processes, so all of them must make the same number of passes: what one of them
leaves out, the others wait for without end.
"""

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from node.batching import MicroBatch
from node.models import ModelBundle, load_model
from node.routing import Routing
from node.training import files, forward
from node.training.forward import Take
from node.training.weights import Weights


class TrainedWeights(Protocol):
    """What is trained: float32 masters with their gradients, and what the model computes with."""

    masters: dict[str, torch.nn.Parameter]

    def publish(self) -> None:
        """Bring the model's tensors up to date with their masters."""

    def clip(self, largest: float) -> float:
        """Scale gradients to a global norm of at most `largest`; returns the norm before that."""

    def drop_gradients(self) -> None:
        """Free all gradients, complete or not."""

    def memory(self) -> Mapping[str, int]:
        """Bytes of weights and of gradients that this process holds."""


class Ranks(Protocol):
    """The processes of a trainer, as one of them sees them."""

    rank: int
    """This one's number; 0 writes what is written once."""
    count: int

    def weights(self, model: Any) -> TrainedWeights:
        """What is trained of a model."""

    def reference(self, bundle: ModelBundle, *, untrained: bool) -> Any:
        """The model as it was loaded, frozen; `untrained`: the bundle's still is."""

    def run(
        self,
        model: Any,
        micros: Sequence[MicroBatch],
        take: Take,
        *,
        routing: Routing | None = None,
        recompute: bool = False,
    ) -> None:
        """Passes of a model over this process's part of micro-batches (node/training/forward.py); all call it alike.

        `take` is called where a pass ends, once for each micro-batch among all the parts.
        """

    def sum(self, tensor: torch.Tensor) -> None:
        """Add up a tensor over the parts, in place: each has put in what its `take` saw, and 0 elsewhere."""

    def save_model(self, bundle: ModelBundle, weights: Mapping[str, torch.Tensor], directory: Path) -> None:
        """Write all that inference needs."""


class Alone:
    """One process does everything."""

    rank, count = 0, 1

    def weights(self, model: Any) -> Weights:
        return Weights(model)

    def reference(self, bundle: ModelBundle, *, untrained: bool) -> Any:
        """A copy, or the model's files loaded anew."""
        if untrained:
            return copy.deepcopy(bundle.model).requires_grad_(False)
        kind = str(bundle.model.dtype).removeprefix("torch.")
        device = str(bundle.model.device)
        again = load_model(str(bundle.directory), device=device, dtype=kind, models=bundle.directory.parent)
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
        forward.run(model, micros, take, routing=routing, recompute=recompute)

    def sum(self, tensor: torch.Tensor) -> None:
        """There is nothing to add."""

    def save_model(self, bundle: ModelBundle, weights: Mapping[str, torch.Tensor], directory: Path) -> None:
        files.save_model(bundle, weights, directory)
