"""Why something foreign was not believed: one named reason and one sentence for people."""

from enum import StrEnum


class Reason(StrEnum):
    """Counted by producer, shown on the dashboard, and moving the producer's reputation."""

    too_large = "too_large"
    hash_mismatch = "hash_mismatch"
    malformed = "malformed"
    unsupported_version = "unsupported_version"
    bad_signature = "bad_signature"
    wrong_producer = "wrong_producer"
    banned = "banned"
    wrong_swarm = "wrong_swarm"
    stale = "stale"
    from_future = "from_future"
    replayed = "replayed"
    equivocation = "equivocation"
    broken_commitment = "broken_commitment"
    broken_chain = "broken_chain"
    unassigned_task = "unassigned_task"
    unknown_environment = "unknown_environment"
    reward_mismatch = "reward_mismatch"
    scorer_failed = "scorer_failed"
    over_budget = "over_budget"
    uninformative = "uninformative"
    stale_policy = "stale_policy"
    logprob_mismatch = "logprob_mismatch"


class Rejected(Exception):
    """A foreign record is not admitted. `detail` is a sentence for people; it may quote the record."""

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail
