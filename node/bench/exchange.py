"""`shoal bench exchange`: groups per second from one node process to another, over libp2p on loopback.

A group counts once the receiver has heard its announcement, pulled and verified it, scored it in its own scorer
process and stored it. The producer hands over `GROUPS` groups as fast as its outbox takes them. Bytes are those of
sealed announcements, requests and sealed groups, as the transport counts them (what libp2p adds to a message or a
stream is the same for any format), against the same as JSON.
"""

from typing import Any

from node.bench.side import Side
from node.bench.workload import GROUP_SIZE, spec_of

CONSUMER, PRODUCER = "node.bench.exchange_consumer", "node.bench.exchange_producer"
GROUPS = 512
START_SECONDS = 300.0
DEADLINE = 300.0


async def compare(threads: int, machine: dict[str, Any]) -> dict[str, Any]:
    """Measure. `ratio` is the bytes of groups, announcements and requests as JSON, unsigned, over those on the wire.

    `ratio_group_alone` is the JSON of the group without the two over the same, announcement and request included.
    """
    async with Side(CONSUMER, spec_of(threads, groups=GROUPS)) as consumer:
        listening = await consumer.line(START_SECONDS)
        async with Side(PRODUCER, spec_of(threads, groups=GROUPS, **listening)) as producer:
            made = await producer.line(START_SECONDS)
            await producer.tell({"go": True})
            taken = await consumer.line(DEADLINE)
            await producer.tell({"stop": True})
            sent = await producer.line(START_SECONDS)
    seconds = taken["finished_at"] - sent["began_at"]
    groups = taken["admitted"]
    wire = taken["bytes_in"] + taken["bytes_out"]
    return {
        "workload": {"groups": GROUPS, "group_size": GROUP_SIZE, "tokens_per_group": made["tokens"] / GROUPS},
        "ours": {
            "seconds": seconds,
            "groups_per_second": groups / seconds,
            "bytes_per_group": wire / groups,
            "body_bytes_per_group": sent["body_bytes"] / GROUPS,
            "announcement_bytes_per_group": sent["announcement_bytes"] / GROUPS,
            "cpu_ms_per_group": {
                "producer": 1e3 * sent["cpu_seconds"] / groups,
                "consumer": 1e3 * taken["cpu_seconds"] / groups,
                "consumer_scorer": 1e3 * taken["scorer_cpu_seconds"] / groups,
            },
            "counters": {"consumer": taken["counters"], "producer": sent["counters"]},
        },
        "peer": {
            "name": "JSON over the same transport, unsigned",
            "version": "RFC 8259",
            "bytes_per_group": (made["json_bytes"] + made["json_around_bytes"]) / GROUPS,
            "body_bytes_per_group": made["json_bytes"] / GROUPS,
        },
        "ratio": (made["json_bytes"] + made["json_around_bytes"]) / GROUPS / (wire / groups),
        "ratio_group_alone": made["json_bytes"] / GROUPS / (wire / groups),
        "ratio_body": made["json_bytes"] / sent["body_bytes"],
        "floor_ratio": None,
        "floor_note": "no floor: signatures, SQLite and the scorer, not arithmetic, bound it; see cpu_ms_per_group",
    }
