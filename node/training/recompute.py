"""Gradient checkpointing: of each layer only what goes in is kept, and the layer is computed again on the way back.

Chen et al., arXiv 1604.06174. Memory of a pass falls from all that its layers compute to one state a token and layer;
a third of the work comes on top. transformers' own switch wants a model in training mode, and would act on rollouts.
"""

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from node.routing import Routing


@contextmanager
def recomputed(layers: Iterable[Any], routing: Routing | None) -> Iterator[None]:
    """A forward pass with gradients inside this keeps the inputs of these layers only; without, it changes nothing.

    What routers are told to choose holds for the second time, too, when `routing.told` is long another row's.
    """
    if not torch.is_grad_enabled():
        yield
        return
    told = None if routing is None else routing.told
    for layer in layers:
        again = functools.partial(_told, routing, told, layer.forward)
        layer.forward = functools.partial(checkpoint, again, use_reentrant=False, preserve_rng_state=False)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward  # the class's own shows again


def _told(
    routing: Routing | None, told: torch.Tensor | None, forward: Callable[..., Any], *args: Any, **options: Any
) -> Any:
    """A layer's forward with routers told what they were told at first."""
    if routing is None:
        return forward(*args, **options)
    before, routing.told = routing.told, told
    try:
        return forward(*args, **options)
    finally:
        routing.told = before
