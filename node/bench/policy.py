"""`shoal bench policy`: versions of the embedded model from a leader to a follower, over libp2p on loopback.

The leader is a process that trains at the default rate without warm-up, on groups of random tokens: what an update
changes depends on the rate, hardly on the task. The follower is another one. A version is timed from the end of the
update: copied on the model thread, written and signed, pulled, made anew from the one before, taken over by the model.
"""

from typing import Any

from node.bench.side import Side
from node.bench.workload import spec_of

LEADER, FOLLOWER = "node.bench.policy_leader", "node.bench.policy_follower"
START_SECONDS = 300.0
STEP_SECONDS = 1800.0
STEPS = (0, 1, 10)
"""Updates before each of the versions."""


async def compare(threads: int, machine: dict[str, Any]) -> dict[str, Any]:
    """Measure. `ratio` is the bytes of a whole over those of the changes of one update."""
    versions = []
    async with Side(LEADER, spec_of(threads)) as leader:
        where = await leader.line(START_SECONDS)
        async with Side(FOLLOWER, spec_of(threads, **where)) as follower:
            await follower.line(START_SECONDS)
            for steps in STEPS:
                await leader.tell({"steps": steps})
                made = await leader.line(STEP_SECONDS)
                taken = await follower.line(STEP_SECONDS)
                versions.append(_row(steps, made, taken))
    whole, one = versions[0]["bytes"], versions[1]["bytes"]
    return {
        "workload": {key: where[key] for key in ("parameters", "learning_rate")},
        "dtype": where["dtype"],
        "versions": versions,
        "bit_for_bit": all(row["same"] for row in versions),
        "ratio": whole / one,
        "floor_ratio": None,
        "floor_note": "no floor: hashing, DEFLATE, files and libp2p, not arithmetic, bound it",
    }


def _row(steps: int, made: dict[str, Any], taken: dict[str, Any]) -> dict[str, Any]:
    return {
        "updates": steps,
        "bytes": made["bytes"],
        "changed_share": made["changed_share"],
        "copy_seconds": made["copy_seconds"],
        "encode_seconds": made["encode_seconds"],
        "pull_seconds": taken["pull_seconds"],
        "apply_seconds": taken["apply_seconds"],
        "adopt_seconds": taken["adopt_seconds"],
        "seconds": taken["at"] - made["began_at"],
        "cpu_seconds_copy_encode": made["cpu_seconds"],
        "cpu_seconds_apply_adopt": taken["cpu_seconds"],
        "wire_bytes": taken["bytes_in"],
        "same": made["state"] == taken["state"],
    }
