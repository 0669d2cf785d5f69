"""The home of a node that has trained for long, in the node's own tables: 100,000 steps, 1,000 peers, 5,000 groups."""

import hashlib
import json
import random
import sqlite3
from collections.abc import Callable
from contextlib import closing

import msgspec

from node.history import History
from node.home import Home
from protocol.assignment import own_task, shared_task
from protocol.envelope import Domain, seal
from protocol.identity import Identity
from protocol.manifest import Manifest, embedded_manifest
from protocol.rejection import Reason
from protocol.rollout import Completion, RolloutGroup, Turn
from swarm.experience import ADMITTED, ANNOUNCED, TRAINED, ExperienceStore, GroupRecord, PeerRecord
from tests.web.fixture_history import History as MadeUp
from tests.web.fixture_view import MODELS, peer_id


def make_long_home(
    home: Home, clock: Callable[[], float], *, steps: int = 100_000, peers: int = 1000, groups: int = 5000
) -> None:
    now = clock()
    home.init()
    manifest = embedded_manifest("first-words", now - 13.0 * steps)
    home.found(manifest)
    fill_history(home, clock, steps)
    store = ExperienceStore(home.database, 512 << 20, clock)
    with store.transaction():
        fill_peers(store, peers, now)
        fill_groups(store, manifest, home.identity(), groups, peers, now)
    store.close()


def fill_history(home: Home, clock: Callable[[], float], steps: int) -> None:
    made_up = MadeUp(steps)
    History(home.database, clock).close()
    with closing(sqlite3.connect(home.database)) as database, database:
        database.executemany(
            "INSERT INTO steps VALUES (?, ?, ?, ?)",
            (
                (row["step"], clock() - 13.0 * (steps - row["step"]), json.dumps(row), 4 * row["step"])
                for row in made_up.rows(0, steps - 1)
            ),
        )
    history = History(home.database, clock)  # makes the series of steps that are older than it
    for step, mean in made_up.evaluations(0, steps):
        history.record_evaluation(step, {"chain_sum": mean, "letter_counting": mean})
    for number in range(1000):
        history.event("info", "peers", f"connected to …{peer_id(number)[-12:]}")
    history.record_step(steps, made_up.rows(steps - 1, 1)[0])  # and thins the older ones out
    history.close()


def fill_peers(store: ExperienceStore, peers: int, now: float) -> None:
    for i in range(peers):
        draw = random.Random(i)
        seen = now - 60.0 * i
        record = PeerRecord(peer_id(i), 40 * draw.random(), 5.0 * (i % 7 == 0), seen, False, MODELS[i % 4], 0.0, seen)
        verdicts = (ADMITTED, ANNOUNCED, TRAINED, Reason.uninformative, Reason.stale)
        for verdict in draw.choices(verdicts, k=8):
            store.peers.save(record, str(verdict))


def fill_groups(
    store: ExperienceStore, manifest: Manifest, identity: Identity, groups: int, peers: int, now: float
) -> None:
    for row in range(groups):
        draw, at = random.Random(row), now - 3.0 * (groups - row)
        epoch, own = manifest.epoch_at(at), row % 2 == 0
        producer = identity.peer_id if own else peer_id(row % peers)
        task = shared_task(manifest, epoch, row % 8) if row % 8 < 4 else own_task(manifest, epoch, producer, row % 64)
        rewards = tuple(draw.choices((0.01, 0.2, 0.5, 1.0), k=8))
        answers = tuple(
            Completion((Turn("assistant", f"Let me count. Answer: {i}" * 4),), "stop", 24, reward)
            for i, reward in enumerate(rewards)
        )
        group = RolloutGroup(epoch, task, MODELS[0], b"", row, answers)
        body = seal(identity, Domain.group, msgspec.msgpack.encode(group), issued=at, expires=at + 1800)
        verdict = ADMITTED if own or row % 16 != 1 else str(Reason.stale)
        record = GroupRecord(
            hashlib.sha256(body).digest(), "own" if own else "foreign", producer, epoch, task, MODELS[0], rewards,
            rewards, verdict, "" if verdict == ADMITTED else "made 41 minutes ago, at most 30", at, at + 1800,
        )  # fmt: skip
        assert store.add(record, body)
