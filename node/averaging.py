"""Averaging with other nodes of the same model: when a round is due, what comes of it, and how it is kept.

An outer step is not journalled, since its input is everybody's weights. It is kept by a full checkpoint right after
it: until that is written, a kill leaves the node as it was before, and where it cannot be written, the step is undone.
"""

import hashlib
import logging
import math
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from node.checkpoint import CheckpointError
from node.config import Config
from node.disk import AVERAGING, advice
from node.history import History
from node.home import Home
from node.limits import NoRoom
from node.models import ModelError
from node.training import outer
from node.training.local import LocalTrainer
from node.training.outer import NoOuterStep, Outer, OuterStats
from swarm.averager_finding import AveragerFinding
from swarm.averaging import Averager, Contributions, NotAveraged
from swarm.averaging_wire import Setup

if TYPE_CHECKING:
    from node.parts import Parts

log = logging.getLogger(__name__)

PROGRAM = "node.averager_process"
CAUTION = "averaging trusts other nodes with a share of this one's weights: what they send is clipped, not checked"


class Averaging:
    """The outer loop of one node. `begin`, `save` and what `round` computes run on the model thread."""

    def __init__(self, trainer: LocalTrainer, averager: Averager, directory: Path, no_room: NoRoom) -> None:
        """`directory`: of the home, for the own weights of a round. `no_room` is asked before each."""
        self.trainer, self.averager, self.directory, self._no_room = trainer, averager, directory, no_room
        self.state: Outer | None = None
        self._tried = 0
        """Inner step of the last round that was tried."""

    @property
    def _masters(self) -> dict[str, torch.nn.Parameter]:
        return self.trainer.weights.masters

    def begin(self, checkpoint: Path | None) -> None:
        """Continue as the checkpoint has it that was just loaded, or begin at its weights. Raises CheckpointError.

        Before journalled updates are repeated: so every start begins at the same weights.
        """
        flat = outer.flatten(self._masters)
        found = None if checkpoint is None else outer.load(checkpoint, len(flat))
        self.state = found or Outer(flat, torch.zeros_like(flat), self.trainer.step)
        self._tried = self.state.step

    def save(self, directory: Path) -> None:
        """Write the outer optimizer beside a checkpoint's files."""
        if self.state is not None:
            outer.save(self.state, directory)

    def due(self, step: int, every: int) -> bool:
        return self.state is not None and step - self._tried >= every

    async def round(self, parts: "Parts", keep: Callable[[], Any]) -> bool:
        """Come together with others and take the outer step; whether there was one.

        Whatever fails leaves the weights as they are, and is told.

        `keep` writes the checkpoint that holds the outer step; it raises CheckpointError.
        """
        p, step, own = parts, self.trainer.step, self.directory / "own.bin"
        self._tried = step
        try:
            await self._ask_for_room(p.config.averaging.min_peers)
            async with p.progress.during("averaging"):
                digest = await p.device.run(lambda: outer.write(outer.flatten(self._masters), own))
            async with p.progress.during("averaging"):  # a deadline of its own: a round may take nearly all of it
                got = await self.averager.round(own, digest, p.config.averaging.timeout)
            try:
                return await self._step(p, got, own, keep)
            finally:
                self._forget(got)
        except (NotAveraged, NoOuterStep) as why:
            p.history.event("info", "averaging", f"no outer step after step {step}: {why}; going on alone")
        except FileNotFoundError as gone:
            said = f"{gone.filename} is gone: the averager was started again meanwhile"
            p.history.event("info", "averaging", f"no outer step after step {step}: {said}; going on alone")
        except OSError as error:
            fix = advice(error, self.directory)
            p.history.event("error", "averaging", f"no outer step after step {step}: {error}; {fix}")
        return False

    async def _ask_for_room(self, weights: int) -> None:
        """Raises NotAveraged where so many nodes' weights have no room."""
        size = weights * outer.BYTES * sum(master.numel() for master in self._masters.values())
        if why := await self._no_room(size):
            raise NotAveraged(why)

    async def _step(self, p: "Parts", got: Contributions, own: Path, keep: Callable[[], Any]) -> bool:
        """The outer step, kept or undone; whether it was kept. Raises NotAveraged, NoOuterStep, OSError."""
        step, least, before = self.trainer.step, p.config.averaging.min_peers, self.state
        if len(got.all) < least:
            raise NotAveraged(f"weights of {len(got.all)} nodes came, and averaging.min_peers is {least}")
        async with p.progress.during("averaging"):
            stats = await p.device.run(self._take, got, p.config)
        try:
            async with p.progress.during("checkpoint"):
                await p.device.run(keep)
        except CheckpointError as error:
            if p.checkpoints.base != step:
                await p.device.run(self._undo, before, own)
                p.history.event("error", "averaging", f"the outer step after step {step} is undone: {error}")
                return False
            p.history.event("error", "checkpoint", str(error))  # it is kept; old ones were not removed
        p.history.event("info", "averaging", in_words(step, got, stats))
        return True

    def _take(self, got: Contributions, config: Config) -> OuterStats:
        """The outer step, in the weights. Raises NoOuterStep, OSError."""
        assert self.state is not None
        settings = config.averaging
        self.state, stats = outer.outer_step(
            self.state,
            [outer.Vector(one.path) for one in got.all],
            got.own,
            step=self.trainer.step,
            rate=settings.outer_learning_rate,
            mu=settings.outer_momentum,
            max_norm=settings.max_norm,
            robust=settings.robust,
            least=settings.min_peers,
        )
        self._put(self.state.anchor)
        return stats

    def _undo(self, before: Outer | None, own: Path) -> None:
        assert before is not None
        self.state = before
        self._put(torch.from_numpy(outer.Vector(own)[0 : len(before.anchor)].copy()))

    def _put(self, flat: torch.Tensor) -> None:
        outer.put(flat, self._masters)
        self.trainer.weights.publish()

    def _forget(self, got: Contributions) -> None:
        for at, one in enumerate(got.all):
            if at != got.own:  # the own ones are fetched by others still
                one.path.unlink(missing_ok=True)


def in_words(step: int, got: Contributions, stats: OuterStats) -> str:
    """An outer step for a person to read."""
    others = [at for at in range(len(got.all)) if at != got.own]
    told = "; ".join(
        f"{got.all[at].peer[-6:]} moved {stats.norms[at]:.3g}, cosine {stats.cosines[at]:.2f}"
        + _clipped(stats.norms[at], stats.limit)
        for at in others
    )
    lost = f"; without {', '.join(got.lost)}" if got.lost else ""
    return (
        f"averaged after step {step} with {len(others)} others: the own weights moved {stats.norms[got.own]:.3g}, "
        f"all together {stats.combined:.3g}; {told}{lost}"
    )


def _clipped(norm: float, limit: float) -> str:
    if math.isinf(norm):
        return " (not finite: left out)"
    return f" (clipped to {limit:.3g})" if norm > limit else ""


def make_finding(parts: "Parts", *, closed: bool) -> AveragerFinding | None:
    """What finds the averagers of the swarm's other nodes, serving from now on; None in a swarm that anybody may join:
    there they are named by hand (`averaging.peers`)."""
    p = parts
    if p.averaging is None or not closed:
        return None
    finding = AveragerFinding(
        p.exchange.transport,
        p.averaging.averager,
        p.exchange.accounts,
        p.clock,
        swarm=p.manifest.digest,
        rounds=p.averaging.averager.rounds,
        request_timeout=p.config.network.request_timeout,
        refused=p.refuses,
    )
    finding.serve_on(p.exchange.transport)
    return finding


def make_averaging(
    trainer: object,
    config: Config,
    home: Home,
    history: History,
    *,
    mark: str,
    manifest: bytes,
    psk: bytes | None,
    no_room: NoRoom,
) -> Averaging | None:
    """Averaging as the settings have it, None where they have none. Raises ModelError.

    `mark` tells models apart, `manifest` is the swarm's digest, and `psk` its key where it is private: whoever lacks
    one of them does not find the rounds.
    """
    settings = config.averaging
    if settings.method == "none":
        return None
    if find_spec("hivemind") is None:
        raise ModelError(
            "averaging.method = diloco needs the package hivemind, which is not installed; run "
            "`.venv/bin/pip install -e '.[averaging]'`, or set averaging.method to none"
        )
    assert isinstance(trainer, LocalTrainer)  # the settings allow no other
    masters = trainer.weights.masters
    named = hashlib.sha256(b"|".join((mark.encode(), outer.layout(masters).encode(), manifest, psk or b"")))
    directory = home.path / AVERAGING
    directory.mkdir(mode=0o700, exist_ok=True)
    setup = Setup(
        prefix=f"shoal{named.hexdigest()[:40]}",
        listen=settings.listen,
        peers=settings.peers,
        directory=str(directory / "peers"),  # its own; what is beside it is this node's
        size=outer.BYTES * sum(master.numel() for master in masters.values()),
        min_peers=settings.min_peers,
    )

    def say(level: str, message: str) -> None:
        history.event(level, "averaging", message)

    return Averaging(trainer, Averager(setup, home.logs / "averaging.log", PROGRAM, say=say), directory, no_room)
