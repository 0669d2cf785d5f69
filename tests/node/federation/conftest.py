"""A tiny model that is trained by hand, a leader that publishes it, and a follower over the in-memory hub."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from node.config_train import TrainConfig
from node.device import Device
from node.federation.followed import FollowedPolicy
from node.federation.publishing import Publisher
from node.models import ModelBundle, load_model
from protocol.identity import Identity
from protocol.policy import Weights
from swarm.policies import PolicyStore

SWARM = b"s" * 32
LEADER = Identity.from_seed(b"leader".ljust(32, b"."))


@dataclass
class Lead:
    """A leader whose updates are small random changes of some weights."""

    bundle: ModelBundle
    trainer: FollowedPolicy
    store: PolicyStore
    options: dict[str, Any]
    told: list[str] = field(default_factory=list)
    device: Device = field(default_factory=Device)

    def __post_init__(self) -> None:
        self.publisher = self.again()

    def again(self) -> Publisher:
        """As after a restart."""
        self.publisher = Publisher(
            self.store, LEADER, swarm=SWARM, model="mark", clock=time.time,
            tell=lambda level, message: self.told.append(message), **self.options,
        )  # fmt: skip
        return self.publisher

    def update(self, version: int, share: float = 0.1) -> None:
        """Weights of another version: the same ones whenever it is called for the same version before it."""
        chance = torch.Generator().manual_seed(version)
        for parameter in self.bundle.model.parameters():
            touched = torch.rand(parameter.shape, generator=chance) < share
            parameter.data += touched * 0.01 * torch.randn(parameter.shape, generator=chance)
        self.trainer.step = version

    async def publish(self) -> Any:
        """Write the present version, at once."""
        copy = self.trainer.snapshot(self.publisher.dtype)
        await self.publisher._publish(self.trainer.step, copy, 0.0)
        return self.publisher.last


@pytest.fixture
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def model(tiny_model: Callable[..., Path], tmp_path: Path, one_thread: None) -> Callable[[], ModelBundle]:
    return lambda: load_model(str(tiny_model("llama")), device="cpu", dtype="float32", models=tmp_path)


@pytest.fixture
def make_lead(model: Callable[[], ModelBundle], tmp_path: Path) -> Iterator[Callable[..., Lead]]:
    made: list[Lead] = []

    def make(dtype: Weights = "bfloat16", whole_every: int = 4, staleness: int = 2) -> Lead:
        bundle = model()
        options = {"dtype": dtype, "every": 1, "whole_every": whole_every, "staleness": lambda: staleness}
        made.append(Lead(bundle, FollowedPolicy(bundle, TrainConfig()), PolicyStore(tmp_path / "leader"), options))
        return made[-1]

    yield make
    for lead in made:
        lead.device.close()
