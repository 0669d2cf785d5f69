"""The policy of a follower: another node trains it, so there are weights, and no optimizer, gradients or masters."""

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal

import torch

from node.config_train import TrainConfig
from node.interfaces import Batch, StepSkipped, TrainGroup, UpdateStats
from node.models import ModelBundle
from node.training import files
from node.training.forward import run, sequence_logprobs
from node.training.weights import weights_copied


class FollowedPolicy:
    """Implements `Trainer` for weights that are taken over. Every method runs on the model thread."""

    def __init__(self, bundle: ModelBundle, config: TrainConfig) -> None:
        self.bundle, self.config, self.step = bundle, config, 0
        self.model = bundle.model.eval().requires_grad_(False)

    def adopt(self, version: int, path: Path) -> None:
        """Take over the weights of a file. Raises CheckpointError."""
        files.load_weights(dict(self.model.named_parameters()), [path])
        self.step = version

    def configure(self, config: TrainConfig) -> None:
        self.config = config

    def update(self, batch: Batch, should_stop: Callable[[], bool] = bool) -> UpdateStats:
        """Raises StepSkipped: what is learned comes from the leader."""
        raise StepSkipped("this node follows another one's policy (federation.follow), and trains nothing")

    def logprobs(self, groups: Sequence[TrainGroup]) -> list[list[tuple[float, ...]]]:
        """log-probability of every sequence token under the present version; [group][sequence][token]."""
        routing = None if self.config.routing_replay == "off" else self.bundle.routing
        passes = functools.partial(run, self.model, routing=routing)
        return sequence_logprobs(groups, self.config.tokens_per_micro_batch, passes)

    def snapshot(self, dtype: Literal["float32", "bfloat16"]) -> Mapping[str, torch.Tensor]:
        return weights_copied(self.model, dtype)

    def save(self, directory: Path) -> None:
        """What `export` writes: there is nothing else."""
        self.export(directory)

    def load(self, directory: Path) -> None:
        """Take over a checkpoint's weights. Raises CheckpointError."""
        self.adopt(self.step, directory / files.WEIGHTS)

    def export(self, directory: Path) -> None:
        files.save_model(self.bundle, dict(self.model.named_parameters()), directory)

    def memory(self) -> Mapping[str, int]:
        return {"weights": sum(p.numel() * p.itemsize for p in self.model.parameters())}
