"""What a training node is made of, as its loop and the services beside it see it."""

from collections.abc import Callable
from dataclasses import dataclass

from node.averaging import Averaging
from node.checkpoint import CheckpointStore
from node.config import Config
from node.device import Device
from node.history import History
from node.interfaces import Engine, Teacher, Trainer
from node.models import ModelBundle
from node.progress import Progress
from node.rounds import Rounds
from node.scorer import Scorer
from node.training import lora
from protocol.manifest import Manifest
from swarm.exchange import Exchange
from swarm.experience import ExperienceStore
from swarm.sampler import Sampler


@dataclass(slots=True)
class Parts:
    """What the loop works with; the daemon makes them."""

    config: Config
    manifest: Manifest
    peer_id: str
    bundle: ModelBundle
    device: Device
    engine: Engine
    trainer: Trainer
    scorer: Scorer
    exchange: Exchange
    store: ExperienceStore
    sampler: Sampler
    checkpoints: CheckpointStore
    history: History
    progress: Progress
    clock: Callable[[], float]
    teacher: Teacher | None = None
    rounds: Rounds | None = None
    """Where the swarm has coordinators."""
    averaging: Averaging | None = None
    unreached: Callable[[], str] = str
    """Why nobody is connected, where peers are known and none answers; empty else."""

    def refuses(self, peer: str) -> bool:
        """Whether the coordinator's member list has nothing given to this peer. May be called from any thread."""
        return self.rounds is not None and self.rounds.access.refused(peer)


def model_mark(bundle: ModelBundle) -> str:
    """Tells models apart by tokenizer and size, wherever their files lie, with adapters or without."""
    size = sum(weight.numel() for name, weight in bundle.model.named_parameters() if lora.MARK not in name)
    return f"{bundle.fingerprint.hex()[:16]}-{size}"


def dtype_of(bundle: ModelBundle) -> str:
    """What the node computes in."""
    return str(bundle.model.dtype).removeprefix("torch.")
