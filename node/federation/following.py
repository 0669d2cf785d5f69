"""The follower's side: takes up each new version of a leader's policy between two steps, and practises with it.

A follower trains nothing. What it has of the leader's policy is on disk in one file that its name says the version of,
so a process that was killed goes on with the weights that it had, under their version.

    policies/<leader>/weights-N-STATE.safetensors    version N, STATE the first 16 hex digits of its digest
"""

import asyncio
import logging
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from node.assign import DataPosition
from node.disk import write_atomic
from node.federation.changes import BadChanges, Changes
from node.federation.followed import FollowedPolicy
from node.federation.weights_file import (
    WORDS,
    BadWeights,
    Shapes,
    WeightsFile,
    write_changed,
    write_weights,
    write_whole,
)
from node.limits import NoRoom
from node.own_groups import OwnGroups
from node.rollouts import Rollout
from node.summary import summarise
from protocol.policy import PolicyRecord, Weights, claiming
from swarm.experience import StoreError
from swarm.policies import PolicyStore
from swarm.policy_pulling import Arrived, MayTake, NoWay, PolicyPuller, Pulled

if TYPE_CHECKING:
    from node.parts import Parts

log = logging.getLogger(__name__)

_NAME = re.compile(r"weights-(\d+)-([0-9a-f]{16})\.safetensors\Z")
_MALFORMED = (BadWeights, BadChanges, ValueError, TypeError, ArithmeticError, LookupError)
"""What making weights of a leader's bytes ends in where they are none: as foreseen, or else in a way that must not end
the node at every start either."""
SILENT_SECONDS = 60.0
"""A leader that has not answered for so long is said to be gone."""


class Position(msgspec.Struct, frozen=True):
    """Where a follower is among its tasks, on disk after every round."""

    epoch: int
    taken: int
    rounds: int


@dataclass(frozen=True, slots=True)
class Version:
    """Weights on disk."""

    number: int
    state: bytes
    file: WeightsFile


class Following:
    """What a follower does in place of training. Used from the loop's task; `puller` runs beside it.

    While `unpaused` is cleared it only learns of new versions, and pulls none.
    """

    def __init__(
        self,
        store: PolicyStore,
        trainer: FollowedPolicy,
        dtype: Weights,
        position: Path,
        make_puller: Callable[[Arrived, MayTake], PolicyPuller],
        unpaused: asyncio.Event,
        no_room: NoRoom,
    ) -> None:
        self._store, self._trainer, self._dtype, self._position_path = store, trainer, dtype, position
        self._shapes: Shapes = {name: tuple(p.shape) for name, p in trainer.model.named_parameters()}
        self._file_bytes = sum(map(math.prod, self._shapes.values())) * np.dtype(WORDS[dtype]).itemsize
        """Of one version."""
        self._present: Version | None = None
        """What the model has."""
        self._loading: Version | None = None
        """What it is about to have."""
        self._staged: Version | None = None
        """The newest on disk."""
        self._made: Path | None = None
        """What is being written."""
        self._rounds = 0
        self._unpaused, self._no_room = unpaused, no_room
        self.puller = make_puller(self.arrived, self._may_take)
        self.last: Pulled | None = None
        self._taken_up: dict[str, Any] | None = None
        """What the present version cost, until a round's record has it."""

    @property
    def staged(self) -> Version | None:
        """The newest version on disk."""
        return self._staged

    def facts(self) -> dict[str, Any]:
        """JSON values: what is known of the leader's policy."""
        puller = self.puller
        known = puller.known
        return {
            "leader": puller.leader,
            "newest": known.head.version if known else None,
            "issued": known.issued if known else None,
            "answered": puller.answered_at,
            "problem": puller.problem,
        }

    # -- beside the loop -------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Learn of new versions and have them on disk, until cancelled."""
        await asyncio.to_thread(self._store.verify)
        await self.puller.run()

    async def _may_take(self, records: Sequence[PolicyRecord], size: int | None) -> None:
        """A pause and a full disk hold pulling up; what it will take, with the file made of it, must have room."""
        await self._unpaused.wait()
        if size is not None:
            files = 1 + (records[0].base is None and len(records) > 1)  # a whole is written, and then changed
            if why := await self._no_room(size + files * self._file_bytes):
                raise NoWay(f"version {records[-1].version}: {why}")

    async def arrived(self, pulled: Pulled) -> None:
        """Make a file of what was pulled. Raises OSError."""
        newest = pulled.records[-1]
        self._made = self._path(newest.version, newest.state)
        try:
            staged = await asyncio.to_thread(self._write, pulled)
        except _MALFORMED as problem:
            foreseen = isinstance(problem, BadWeights | BadChanges)
            log.error(
                "version %d of the policy is not taken up: %s",
                pulled.version,
                problem,
                exc_info=None if foreseen else problem,
            )
            self.puller.refuse(pulled)
            return
        finally:
            self._made = None
        self._staged, self.last = staged, pulled
        self.puller.have = staged.number, staged.state
        self._tidy()

    def _write(self, pulled: Pulled) -> Version:
        records, file = list(pulled.records), self._staged.file if self._staged else None
        newest = records[-1]
        path = self._path(newest.version, newest.state)
        aside = path.with_name(".aside-whole.safetensors")
        try:
            if records[0].base is None:
                whole = records.pop(0)
                file = write_whole(self._store.pieces_of(whole), aside, self._shapes, self._dtype, whole.state)
            if file is None:
                raise BadWeights("there are no weights to change")
            if records:
                changes = [Changes(self._store.open(record)) for record in records]
                made = write_changed(file, changes, path, newest.state)
            else:
                file.path.replace(path)
                made = WeightsFile(path, self._shapes, self._dtype)
        finally:
            aside.unlink(missing_ok=True)
        if not made.finite():
            path.unlink()
            raise BadWeights("not all weights are finite")
        return Version(newest.version, newest.state, made)

    # -- in the loop -----------------------------------------------------------------------------------------

    async def recover(self, parts: "Parts", own: OwnGroups) -> str:
        """Have the weights of the last process, or else those that the base model begins with; says which."""
        for left in self._store.directory.glob("*.safetensors"):  # of a process that was killed as it wrote
            if not _NAME.fullmatch(left.name):
                left.unlink(missing_ok=True)
        self._staged = await asyncio.to_thread(self._find)
        if self._staged is None:
            weights = await parts.device.run(self._trainer.snapshot, self._dtype)
            self._staged = await asyncio.to_thread(self._write_base, weights)
        self.puller.have = self._staged.number, self._staged.state
        self.puller.recall()
        try:
            position = msgspec.json.decode(self._position_path.read_bytes(), type=Position)
        except FileNotFoundError:
            position = Position(-1, 0, 0)
        except msgspec.DecodeError as error:
            log.warning("%s cannot be read (%s): the epoch's tasks begin anew", self._position_path, error)
            position = Position(-1, 0, 0)
        last = parts.history.last_step()  # of its own training, maybe: rounds are counted on from there
        own.position = DataPosition(position.epoch, position.taken)
        self._rounds = max(position.rounds, last["step"] if last else 0)
        await self._take_up(parts)
        return f"follows {self.puller.leader}, at version {self._staged.number} of its policy"

    async def step(self, parts: "Parts", own: OwnGroups, share: Callable[[Sequence[Rollout]], None]) -> None:
        """Take up the newest version, sample the next tasks with it, and share them. Raises StepSkipped."""
        p = parts
        await self._take_up(p)
        self._say(p)
        if not self._leads:
            p.progress.enter("waiting for the policy")
            await asyncio.sleep(1.0)
            p.progress.last_step_at = p.clock()  # it is as it should be, and not stuck
            return
        p.progress.stages.clear()
        started, number = p.clock(), self._rounds + 1
        sampled = await own.roll_out(number, p.config.swarm.own_groups + p.config.swarm.foreign_groups)
        share(sampled)
        await asyncio.to_thread(self._keep_position, own.position, number)
        self._rounds, p.progress.last_step_at = number, p.clock()
        summary = summarise(
            sampled,
            sampled,
            (),
            version=p.trainer.step,
            rollout_seconds=p.progress.stages.get("rollout", 0.0),
            seconds=p.clock() - started,
        )
        log.info("round %d: %d groups with version %d", number, len(sampled), p.trainer.step)
        summary["taken_up"], self._taken_up = self._taken_up, None
        try:
            p.history.record_step(number, {**summary, "stages": dict(p.progress.stages)})
        except StoreError as error:
            log.error("round %d is not in the history: %s", number, error)

    def model_name(self, name: str) -> str:
        """A group's `model`, with the version that sampled it."""
        assert self._present is not None
        return claiming(name, self.puller.leader, self._present.state)

    async def _take_up(self, p: "Parts") -> None:
        staged = self._staged
        if staged is None or staged is self._present:
            return
        self._loading = staged
        async with p.progress.during("weights"):
            await p.device.run(self._trainer.adopt, staged.number, staged.file.path)
            await p.engine.update_weights(staged.number)
        if self._present is not None:
            log.info("version %d of the policy is taken up", staged.number)
        self._present, self._loading = staged, None
        if self.last is not None and self.last.version == staged.number:
            self._taken_up = {
                "version": staged.number,
                "bytes": self.last.bytes_in,
                "pull_seconds": self.last.seconds,
                "after_seconds": p.clock() - self.last.signed,
            }
        self._tidy()

    @property
    def _leads(self) -> bool:
        """Whether the present weights are the leader's, and not only the base model's."""
        return self._present is not None and (self._present.number > 0 or self.puller.up_to_date)

    def _say(self, p: "Parts") -> None:
        puller, now = self.puller, p.clock()
        who = f"…{puller.leader[-8:]}"
        meanwhile = f"; practising with version {p.trainer.step} of its policy" if self._leads else ""
        if puller.missing is not None and not self._leads:
            p.progress.say("WAITING", f"the policy of {who} is on its way: {puller.missing / 1e6:.0f} MB are to come")
        elif puller.missing is None and (puller.answered_at is None or now - puller.answered_at > SILENT_SECONDS):
            p.progress.say("WAITING", f"the leader {who} does not answer{meanwhile}", "see that it is up: shoal peers")
        elif puller.problem:
            p.progress.say("WAITING", f"the policy of {who}: {puller.problem}{meanwhile}", "see shoal logs")
        elif not self._leads:
            p.progress.say("WAITING", f"the policy of {who} is on its way")
        else:
            p.progress.say("TRAINING", f"practises with version {p.trainer.step} of the policy of {who}")

    # -- files -----------------------------------------------------------------------------------------------

    def _keep_position(self, position: DataPosition, rounds: int) -> None:
        try:
            write_atomic(self._position_path, msgspec.json.encode(Position(position.epoch, position.taken, rounds)))
        except OSError as error:  # a restart would answer the same tasks again, and publish none of them twice
            log.error("%s cannot be written: %s", self._position_path, error)

    def _find(self) -> Version | None:
        """The weights written last that are as their name says."""
        for path in sorted(self._files(), key=lambda path: path.stat().st_mtime, reverse=True):
            number, state = _NAME.fullmatch(path.name).groups()  # type: ignore[union-attr]
            try:
                file = WeightsFile(path, self._shapes, self._dtype)
                digest = file.digest()
            except BadWeights as problem:
                log.warning("%s is left out: %s", path, problem)
                continue
            if digest.hex().startswith(state) and file.finite():  # a kill may have come before that was looked at
                return Version(int(number), digest, file)
            log.warning("%s is damaged, and left out", path)
        return None

    def _write_base(self, weights: Mapping[str, Any]) -> Version:
        file = write_weights(weights, self._store.directory / ".aside-base.safetensors", self._dtype)
        state = file.digest()
        path = self._path(0, state)
        file.path.replace(path)
        return Version(0, state, WeightsFile(path, self._shapes, self._dtype))

    def _tidy(self) -> None:
        """Keep the weights that the model has or is about to have and the newest, and no others."""
        kept = {one.file.path for one in (self._present, self._loading, self._staged) if one is not None}
        kept |= {self._made} if self._made else set()
        for path in self._files():
            if path not in kept:
                path.unlink(missing_ok=True)

    def _files(self) -> Iterator[Path]:
        return (path for path in self._store.directory.iterdir() if _NAME.fullmatch(path.name))

    def _path(self, number: int, state: bytes) -> Path:
        return self._store.directory / f"weights-{number}-{state.hex()[:16]}.safetensors"
