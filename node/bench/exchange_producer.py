"""The sending side of `shoal bench exchange`: makes groups, shares them, serves them.

Completions are what the embedded model says to these tasks once it has the format: answers of the asked form, some
right, some those of other tasks of the environment, some wordy. What is right is for the scorer to say, here as there.
"""

import asyncio
import json
import random
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from node.assign import DataPosition
from node.bench.exchange_node import ExchangeNode, exchange_node
from node.bench.side import BenchError, Say, serve
from node.bench.workload import GROUP_SIZE
from node.interfaces import Sample
from node.models import encode_completion
from node.rollouts import Rollout, to_group
from protocol.messages import BatchRequest
from protocol.rollout import RolloutGroup, unpack_logprobs, unpack_token_ids
from swarm.exchange import announcement_of
from swarm.libp2p_host import PUBLISH_INTERVAL

MESH_SECONDS = 3.0
"""For GossipSub to see the consumer's subscription: heartbeats are 1 s apart."""
CONNECT_SECONDS = 20.0
IN_FLIGHT = 64
"""Groups handed over and not yet announced: as many as the outbox and the transport's queue hold without loss."""
RIGHT, WORDY = 0.3, 0.15
"""Shares of the completions; the others are answers to other tasks."""
SPARE = 1.5
"""Tasks made per group wanted: those whose answers all score alike are left out."""


async def produce(spec: Mapping[str, Any], say: Say, directory: Path) -> None:
    """Make the groups and say their sizes; on the next line of input share them; on the one after that, end."""
    lines = asyncio.Queue[str](4)
    loop = asyncio.get_running_loop()
    reader = loop.run_in_executor(None, _read_lines, lambda line: loop.call_soon_threadsafe(lines.put_nowait, line))
    async with exchange_node(spec, "producer", spec["genesis"], directory) as node:
        groups = await make_groups(node, spec["groups"])
        running = asyncio.create_task(node.exchange.run())
        await node.transport.connect(spec["address"], timeout=CONNECT_SECONDS)
        await asyncio.sleep(MESH_SECONDS)
        named = (node.manifest.digest, node.identity.peer_id)
        say(
            {
                "tokens": sum(completion.token_count for group in groups for completion in group.completions),
                "json_bytes": sum(len(as_json(group, *named)) for group in groups),
                "json_around_bytes": sum(len(around_as_json(group, named[0])) for group in groups),
            }
        )
        await lines.get()
        began_at, cpu = time.time(), time.process_time()
        digests = []
        for group in groups:
            digests.append(node.exchange.publish(group))
            # gossip is paced, and what is over its queue is lost
            while len(digests) - node.transport.stats().messages_out > IN_FLIGHT:  # noqa: ASYNC110
                await asyncio.sleep(PUBLISH_INTERVAL)
        await lines.get()
        say(
            {
                "began_at": began_at,
                "cpu_seconds": time.process_time() - cpu,
                "body_bytes": sum(len(node.store.body(digest) or b"") for digest in digests),
                "announcement_bytes": sum(map(len, node.store.announcements.live(time.time(), len(digests)))),
                "counters": {
                    **node.exchange.counters(),
                    "dropped_publishes": node.transport.stats().dropped_publishes,
                },
            }
        )
        running.cancel()
        await asyncio.wait({running})
    await reader


async def make_groups(node: ExchangeNode, count: int) -> list[RolloutGroup]:
    """`count` informative groups of this node's own tasks. Raises BenchError when too few are informative."""
    chance = random.Random(0)
    position, me = DataPosition(), node.identity.peer_id
    refs = position.take(node.manifest, me, int(count * SPARE), time.time())
    tasks = await node.scorer.tasks(refs)
    right = [ANSWERS[ref.environment](task.messages[-1].content) for ref, task in zip(refs, tasks, strict=True)]
    known: dict[str, list[str]] = {}
    for ref, answer in zip(refs, right, strict=True):
        known.setdefault(ref.environment, []).append(answer)
    texts = [
        [_completion(answer, known[ref.environment], chance) for _ in range(GROUP_SIZE)]
        for ref, answer in zip(refs, right, strict=True)
    ]
    scores = iter(
        await node.scorer.score([(ref, text) for ref, group in zip(refs, texts, strict=True) for text in group])
    )
    groups = []
    for ref, group in zip(refs, texts, strict=True):
        rollout = Rollout(
            origin="own",
            ref=ref,
            prompt_ids=(),
            samples=tuple(_sample(node, text, chance) for text in group),
            texts=tuple(group),
            scores=tuple(next(scores) for _ in group),
            budget=0,  # nothing is trained here
        )
        if rollout.informative:
            groups.append(to_group(rollout, epoch=position.epoch, bundle=node.bundle))
    if len(groups) < count:
        raise BenchError(f"only {len(groups)} of {len(refs)} groups are informative, {count} are wanted")
    return groups[:count]


def as_json(group: RolloutGroup, swarm: bytes, producer: str) -> bytes:
    """The group as a JSON protocol would send it: named fields, ids as numbers, log-probabilities to 4 digits.

    Unsigned, so it has to name its swarm and producer, which our envelope and announcement say.
    """
    plain = {"swarm": swarm.hex(), "producer": producer, **_named(group)}
    for packed, completion in zip(group.completions, plain["completions"], strict=True):
        completion["token_ids"] = unpack_token_ids(packed.token_ids)
        completion["logprobs"] = [round(value, 4) for value in unpack_logprobs(packed.logprobs)]
    return _compact(plain)


def around_as_json(group: RolloutGroup, swarm: bytes) -> bytes:
    """Its announcement and the request for it, as JSON too; no signature, sender or expiry."""
    announcement = announcement_of(group, b"", swarm)
    return _compact(_named(announcement)) + _compact(_named(BatchRequest((announcement.group,))))


def _compact(plain: object) -> bytes:
    return json.dumps(plain, separators=(",", ":")).encode()


def _named(value: object) -> Any:
    if isinstance(value, msgspec.Struct):
        return {name: _named(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, tuple):
        return [_named(item) for item in value]
    return value.hex() if isinstance(value, bytes) else value


def _completion(answer: str, others: Sequence[str], chance: random.Random) -> str:
    kind = chance.random()
    if kind < RIGHT:
        return answer
    return f"The answer is {answer}." if kind < RIGHT + WORDY else chance.choice(others)


def _sample(node: ExchangeNode, text: str, chance: random.Random) -> Sample:
    ids = encode_completion(node.bundle, text, "stop")
    return Sample(ids, tuple(-chance.expovariate(1.0) for _ in ids), "stop", version=1)


def _count_letters(question: str) -> str:
    letter, text = re.findall(r'"([^"]*)"', question)[:2]
    return str(text.lower().count(letter))


def _sum(question: str) -> str:
    left, sign, right = re.findall(r"(-?\d+) ([+-]) (-?\d+)", question)[0]
    return str(int(left) + int(right) if sign == "+" else int(left) - int(right))


def _sort(question: str) -> str:
    words = question.rsplit(": ", 1)[1].split(", ")
    return ", ".join(sorted(words, reverse="descending order (" in question))


ANSWERS: Mapping[str, Callable[[str], str]] = {
    "letter_counting": _count_letters,
    "chain_sum": _sum,
    "spell_backward": lambda question: question.rsplit(": ", 1)[1][::-1],
    "word_sorting": _sort,
}
"""The answer to a question of each embedded environment; where it is not, the scorer says so and the group goes."""


def _read_lines(put: Callable[[str], object]) -> None:
    for line in sys.stdin:
        put(line)


if __name__ == "__main__":
    serve(produce)
