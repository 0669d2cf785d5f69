"""Which tasks this node practises next: its own slots of the epoch, every fourth one shared with everybody.

Shared tasks let completions of different models to the same task be compared; own slots keep a node from
choosing easy prompts (protocol.assignment derives both from the manifest, the epoch and the peer id).
"""

from collections.abc import Callable, Container
from dataclasses import dataclass

from node.selection import REVISIT_EVERY
from protocol.assignment import own_task, shared_task
from protocol.manifest import Manifest
from protocol.rollout import TaskRef

SHARED_EVERY = 4
MOST_PASSED = 256
"""Slots left out in a row: an epoch of few slots may have none that the mix takes."""


@dataclass(slots=True)
class DataPosition:
    """How far into which epoch's tasks this node is. Saved with every step, so a restart repeats no task."""

    epoch: int = -1
    taken: int = 0

    def take(
        self,
        manifest: Manifest,
        peer_id: str,
        count: int,
        now: float,
        passed_over: Container[str] = (),
        takes: Callable[[TaskRef], bool] = lambda ref: True,
    ) -> tuple[TaskRef, ...]:
        """The next `count` tasks at time `now` (unix seconds). Slots wrap when an epoch's are used up.

        Tasks of the environments `passed_over` are left out, but every REVISIT_EVERY-th slot is looked at whatever it
        has. So are those that a coordinator's mix does not take, unless MOST_PASSED in a row were left out.
        """
        epoch = manifest.epoch_at(now)
        if epoch != self.epoch:
            self.epoch, self.taken = epoch, 0
        refs: list[TaskRef] = []
        passed = 0
        while len(refs) < count:
            ref = self._task(manifest, peer_id, self.taken)
            looked_at = ref.environment not in passed_over or self.taken % REVISIT_EVERY == 0
            if (looked_at and takes(ref)) or passed == MOST_PASSED:
                refs.append(ref)
                passed = 0
            else:
                passed += 1
            self.taken += 1
        return tuple(refs)

    def _task(self, manifest: Manifest, peer_id: str, position: int) -> TaskRef:
        turn, within = divmod(position, SHARED_EVERY)
        if within == SHARED_EVERY - 1 and turn < manifest.shared_slots:
            return shared_task(manifest, self.epoch, turn)
        return own_task(manifest, self.epoch, peer_id, position % manifest.slots_per_epoch)
