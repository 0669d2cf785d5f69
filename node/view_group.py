"""One rollout group for people: its completions with what their rewards are made of, and their tokens."""

import asyncio
from collections.abc import Sequence
from typing import Any

from node.models import ModelBundle, decode
from protocol.assignment import is_shared
from protocol.manifest import Manifest
from protocol.rollout import Completion, RolloutGroup, unpack_logprobs, unpack_token_ids
from swarm.experience import GroupRecord

Json = Any
MAX_SIBLINGS = 32
MAX_PIECES = 16_384
"""Tokens shown of one group: completions beyond them are shown as text only."""
PIECES_AT_ONCE = 256
SPLIT_TOKENS = 8
"""A character may be spelled by several tokens; more than so many are no character."""


def group_summary(record: GroupRecord) -> dict[str, Json]:
    """One row of the groups table."""
    return {
        "row": record.row,
        "id": record.digest.hex(),
        "origin": record.origin,
        "producer": record.producer,
        "model": record.model,
        "environment": record.task.environment,
        "epoch": record.epoch,
        "rewards": list(record.local or record.claimed),
        "claimed": list(record.claimed),
        "verdict": record.verdict,
        "detail": record.detail,
        "size": record.size,
        "uses": record.uses,
        "at": record.received_at,
    }


def task_of(record: GroupRecord, manifest: Manifest | None) -> dict[str, Json]:
    """The task's name, with its seed in words: 63 bits are more than a JSON number holds in a browser."""
    task = record.task
    return {
        "task": {
            "environment": task.environment,
            "version": task.version,
            "seed": str(task.seed),
            "index": task.index,
        },
        "shared": manifest is not None and is_shared(manifest, record.epoch, task),
    }


async def completions(group: RolloutGroup, record: GroupRecord, bundle: ModelBundle | None) -> list[dict[str, Json]]:
    """What was answered, with the local score where there is one."""
    shown = []
    room = MAX_PIECES if bundle is not None and group.tokenizer == bundle.fingerprint else 0
    for i, completion in enumerate(group.completions):
        found = None
        if bundle is not None and 0 < len(completion.token_ids) // 4 <= room:
            room -= len(completion.token_ids) // 4
            found = await pieces(completion, bundle)
        one = {
            "text": completion.text,
            "finish": completion.finish,
            "tokens": completion.token_count,
            "claimed": completion.reward,
            "reward": record.local[i] if i < len(record.local) else None,
            "pieces": found,
        }
        if i < len(record.parts):
            one["parts"] = dict(record.parts[i])
        shown.append(one)
    return shown


async def pieces(completion: Completion, bundle: ModelBundle) -> list[dict[str, Json]] | None:
    """Text and log-probability under the behaviour policy of each sampled token; None where the ids are not those of
    the text. Tokens that spell a part of a character have no text but the last, special ones have their name."""
    try:
        ids, logprobs = unpack_token_ids(completion.token_ids), unpack_logprobs(completion.logprobs)
    except ValueError:
        return None
    if any(token >= bundle.vocabulary_size for token in ids) or decode(bundle, ids) != completion.text:
        return None
    known: Sequence[float | None] = logprobs if len(logprobs) == len(ids) else [None] * len(ids)
    special, names = set(bundle.tokenizer.all_special_ids), bundle.tokenizer.convert_ids_to_tokens
    shown = []
    before = start = 0  # the text of ids[before:start] is told, and decides how what follows is spelled
    for end, (token, logprob) in enumerate(zip(ids, known, strict=True), start=1):
        if end % PIECES_AT_ONCE == 0:
            await asyncio.sleep(0)  # a long answer must not keep the API to itself
        if token in special:
            shown.append({"text": str(names(token)), "logprob": logprob})
            before = start = end
            continue
        told, text = decode(bundle, ids[before:start]), decode(bundle, ids[before:end])
        if text.endswith("\ufffd") and end - start < SPLIT_TOKENS:
            shown.append({"text": "", "logprob": logprob})
            continue
        shown.append({"text": text[len(told) :], "logprob": logprob})
        before, start = start, end
    if start < len(ids):  # cut off in the middle of a character
        shown[-1]["text"] = decode(bundle, ids[before:])[len(decode(bundle, ids[before:start])) :]
    return shown
