"""The coordinator's part of the Swarm page, the same for members and for coordinators."""

from collections.abc import Mapping
from contextlib import closing
from typing import Any

from node.coordinator.at_rest import chain_of
from node.home import Home
from protocol.manifest import Manifest
from protocol.rounds import State
from swarm.coordination.chain import Chain

MAX_STANDINGS = 100


def coordination(
    chain: Chain,
    *,
    leading: bool = False,
    said: str = "",
    listed: bool = True,
    heard: Mapping[str, float] | None = None,
    most: int | None = MAX_STANDINGS,
) -> dict[str, Any]:
    """JSON values. `said`: what the coordinator answered when it did not let this node in. `heard`: when each one was
    heard of, where that is more than `chain` knows. `most`: standings of the board; None: all.
    """
    record, board, manifest = chain.round, chain.board, chain.manifest
    members = chain.members.members if chain.members else ()
    return {
        "coordinators": list(manifest.coordinators),
        "leader": chain.leader,
        "leading": leading,
        "heard": chain.heard() if heard is None else heard,
        "listed_only": manifest.listed_only,
        "listed": listed,
        "said": said,
        "members": len(members),
        "faults": [
            {"coordinator": fault.coordinator, "reason": fault.reason, "detail": fault.detail}
            for fault in chain.faults.values()
        ],
        "round": record
        and {
            "number": record.number,
            "state": record.state.name,
            "term": record.term,
            "opened": record.opened or None,
            "closes": record.closes if record.state is State.open else None,
            "answers_by": record.answers_by if record.state is State.closing else None,
            "mix": {
                spec.name: weight / sum(record.mix)
                for spec, weight in zip(manifest.environments, record.mix, strict=True)
            },
        },
        "board": board
        and {
            "number": board.number,
            "of": len(board.standings),
            "standings": [
                {"peer": one.peer, "mean": one.mean, "best": one.best, "credit": one.credit, "scores": list(one.scores)}
                for one in board.standings[:most]
            ],
        },
    }


def kept(home: Home, manifest: Manifest) -> dict[str, Any] | None:
    """The same from what a home's database has of the log; None: it was never started. Raises StoreError."""
    if not home.database.exists():
        return None
    found = chain_of(home, manifest)
    with closing(found.log):
        return coordination(found)
