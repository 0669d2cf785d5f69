from dataclasses import replace
from pathlib import Path
from typing import Any

from swarm.experience import ExperienceStore
from swarm.records import PeerRecord

NOW = 1_800_000_000.0
ALICE = PeerRecord("alice", 1.5, 2.5, NOW, True, "tiny", NOW - 1, NOW)


def test_peers_and_verdicts_survive_a_restart(tmp_path: Path, clock: Any) -> None:
    store = ExperienceStore(tmp_path / "node.db", 1 << 20, clock)
    store.peers.save(replace(ALICE, banned=False), "admitted")
    store.peers.save(ALICE, "admitted")
    store.peers.save(ALICE, "stale")
    store.peers.save(ALICE)
    store.close()
    store = ExperienceStore(tmp_path / "node.db", 1 << 20, clock)
    assert store.peers.all() == [ALICE]
    assert store.peers.verdicts(["alice", "bob"]) == {"alice": {"admitted": 2, "stale": 1}}
    store.close()


def test_all_with_how_often_they_were_admitted_and_refused(store: ExperienceStore) -> None:
    for verdict in ("announced", "admitted", "admitted", "trained", "stale", "replayed", "replayed"):
        store.peers.save(ALICE, verdict)
    bob = replace(ALICE, peer="bob", last_seen=NOW + 5)
    store.peers.save(bob)
    assert store.peers.standings() == [(ALICE, 2, 3), (bob, 0, 0)]


def test_a_forgotten_peer_leaves_nothing(store: ExperienceStore) -> None:
    store.peers.save(ALICE, "stale")
    store.peers.save(replace(ALICE, peer="bob"), "stale")
    store.peers.forget("alice")
    assert [record.peer for record in store.peers.all()] == ["bob"]
    assert store.peers.verdicts(["alice", "bob"]) == {"bob": {"stale": 1}}
