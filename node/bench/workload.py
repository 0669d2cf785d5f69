"""What every side works on: the embedded swarm's own tasks of one fixed node, the same at every run.

8 prompts a step (120 to 170 tokens with three worked examples), G = 8 completions of at most 16 tokens each.
"""

import hashlib
import time
from collections.abc import Callable
from typing import Any

import msgspec

from node.assign import DataPosition
from node.config import Config
from node.scorer import Scorer, make_scorer
from protocol.identity import Identity
from protocol.manifest import Manifest, embedded_manifest
from protocol.rollout import TaskRef

PROMPTS = 8
GROUP_SIZE = 8
NEW_TOKENS = 16
ENVIRONMENTS = ("letter_counting", "chain_sum", "spell_backward")
"""Not word_sorting, the fourth embedded one: its prompts have 400 tokens, which only slow TRL, which pads."""
RAGGED = (8, 16, 24, 48, 80, 128, 192, 256)
"""New tokens of each prompt in the ragged workload."""
GENESIS = 1_000_000_000
EPOCH_SECONDS = 30 * 86400


def bench_manifest() -> Manifest:
    """The embedded swarm with one long epoch, so that a run never crosses into other tasks."""
    manifest = embedded_manifest("bench", GENESIS)
    chosen = tuple(spec for spec in manifest.environments if spec.name in ENVIRONMENTS)
    return msgspec.structs.replace(manifest, environments=chosen, epoch_seconds=EPOCH_SECONDS)


def bench_identity() -> Identity:
    return Identity.from_seed(hashlib.sha256(b"shoal bench").digest())


def bench_clock() -> Callable[[], float]:
    """Seconds that pass as they do, but begin at the genesis: the same epoch, hence the same tasks, at every run."""
    began = time.monotonic()
    return lambda: GENESIS + time.monotonic() - began


def bench_config(model: str) -> Config:
    """A node's configuration for the workload: own groups only, nothing but steps."""
    return Config.model_validate(
        {
            "model": {"path": model},
            "rollout": {"group_size": GROUP_SIZE, "max_new_tokens": NEW_TOKENS},
            "swarm": {"own_groups": PROMPTS, "foreign_groups": 0},
            "train": {"dynamic_rounds": 0},  # the peer cannot ask for more of what teaches something
            "eval": {"every": 0},
            "checkpoint": {"every": 1_000_000, "seconds": 1e9},
        }
    )


def own_refs(manifest: Manifest, count: int) -> tuple[TaskRef, ...]:
    """The fixed node's first tasks, in the order its loop takes them."""
    return DataPosition().take(manifest, bench_identity().peer_id, count, GENESIS)


def bench_scorer(manifest: Manifest, config: Config) -> Scorer:
    return make_scorer(manifest.environments, config.limits)


def median(values: list[float]) -> float:
    """The lower of the two middle ones where their number is even."""
    return sorted(values)[(len(values) - 1) // 2]


def spec_of(threads: int, **others: Any) -> dict[str, Any]:
    """The spec that every side understands."""
    return {"threads": threads, "model": "embedded", **others}
