"""Computes the log-probabilities of a follower's group again, under the version that the group claims.

As in TOPLOC (arXiv 2501.16007), what another machine computed is compared with a tolerance for its rounding. A model of
another size, another quantisation or made-up numbers are far outside; a version next to the claimed one is not, and
does no harm: the correction of the update (train.correction) works with what was claimed.
"""

import copy
import functools
import random
from collections.abc import Mapping, Sequence
from typing import Any

from node.engines.agreement import AGREEMENT
from node.federation.publishing import Publisher
from node.interfaces import TrainGroup
from node.memory import give_back
from node.models import ModelBundle
from node.rollouts import sampling_seed
from node.training.forward import run, sequence_logprobs
from protocol.identity import Identity
from protocol.policy import Weights
from protocol.rejection import Reason, Rejected

MEAN_AGREEMENT = {"float32": 2e-3, "bfloat16": 0.1}
"""How far claimed and computed may be apart in the mean over a group's checked tokens, in nats, by the published type:
engines in bfloat16 differ by 0.03 in the mean, and by up to 0.5 at a token (AGREEMENT)."""
HALF_PRECISION = 2.0**-11
"""Of a log-probability, lost on the wire."""
COMPLETIONS = 2
"""Checked of a group: which ones its producer cannot know."""


class SpotCheck:
    """Draws by a secret, so that nobody knows which groups are checked; the same ones in every replay."""

    def __init__(self, publisher: Publisher, bundle: ModelBundle, identity: Identity) -> None:
        self._publisher, self._bundle = publisher, bundle
        self._secret = int.from_bytes(identity.sign(b"shoal/1/spot-check\n")[:16], "big")

    def drawn(self, digest: bytes, share: float) -> bool:
        """Whether the group is one of the `share` that are checked."""
        return sampling_seed(self._secret, digest.hex(), "group") < share * 2**63

    def check(self, version: int, groups: Mapping[bytes, TrainGroup], budget: int) -> dict[bytes, Rejected]:
        """Which of the groups, by digest, have other log-probabilities than the version gives. On the model thread.

        `budget`: tokens of a pass. Raises UnknownVersion.
        """
        scratch: Any = copy.deepcopy(self._bundle.model).requires_grad_(False)
        try:
            self._publisher.load(version, dict(scratch.named_parameters()))
            chosen = [self._chosen(digest, group) for digest, group in groups.items()]
            computed = sequence_logprobs(chosen, budget, functools.partial(run, scratch))
        finally:
            scratch = None
            give_back()
        found = {}
        for digest, group, rows in zip(groups, chosen, computed, strict=True):
            try:
                compare(
                    [sequence.behaviour_logprobs or () for sequence in group.sequences], rows, self._publisher.dtype
                )
            except Rejected as rejected:
                found[digest] = rejected
        return found

    def _chosen(self, digest: bytes, group: TrainGroup) -> TrainGroup:
        chance = random.Random(sampling_seed(self._secret, digest.hex(), "completions"))
        numbers = chance.sample(range(len(group.sequences)), min(COMPLETIONS, len(group.sequences)))
        return TrainGroup(group.prompt_ids, tuple(group.sequences[number] for number in numbers), group.origin)


def compare(claimed: Sequence[Sequence[float]], computed: Sequence[Sequence[float]], dtype: Weights) -> None:
    """log-probabilities of completions, token by token, as claimed and as computed here, with the tolerance of `dtype`.

    Raises Rejected: logprob_mismatch.
    """
    differences = [
        max(abs(a - b) - HALF_PRECISION * abs(a), 0.0)
        for theirs, ours in zip(claimed, computed, strict=True)
        for a, b in zip(theirs, ours, strict=True)
    ]
    worst, mean = max(differences, default=0.0), sum(differences) / max(1, len(differences))
    if not (worst <= AGREEMENT[dtype] and mean <= MEAN_AGREEMENT[dtype]):
        raise Rejected(
            Reason.logprob_mismatch,
            f"log-probs of {len(differences)} tokens differ by up to {worst:.3f} nats, {mean:.3f} in the mean; "
            f"allowed are {AGREEMENT[dtype]:g} and {MEAN_AGREEMENT[dtype]:g} ({dtype})",
        )
