from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from swarm.experience import ExperienceStore
from swarm.records import PeerRecord
from swarm.reputation import weight_at

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


def page(store: ExperienceStore, *connected: str, search: str = "", sort: str = "last_seen", **how: Any) -> Any:
    how = {"descending": True, "offset": 0, "limit": 9, "weigh": partial(weight_at, NOW), **how}
    return store.peers.page(connected, NOW + 9, search=search, sort=sort, **how)


def test_pages_are_ordered_by_what_they_were_admitted_and_refused_for(store: ExperienceStore) -> None:
    for verdict in ("announced", "admitted", "admitted", "trained", "stale", "replayed", "replayed"):
        store.peers.save(ALICE, verdict)
    bob = replace(ALICE, peer="bob", model="a_b%", last_seen=NOW + 5)
    for verdict in ("admitted", *["announced", "trained"] * 9, *["stale"] * 4):
        store.peers.save(bob, verdict)
    assert page(store) == page(store, sort="rejected") == (2, [bob, ALICE])
    assert page(store, sort="admitted") == page(store, descending=False) == (2, [ALICE, bob])
    assert page(store, search="LIC") == page(store, search="tiny") == (1, [ALICE])
    assert page(store, search="_B%") == (1, [bob])
    assert page(store, search="' OR 1 --") == (0, [])
    assert page(store, offset=2) == (2, [])


def test_who_is_connected_is_seen_now_and_known_at_once(store: ExperienceStore) -> None:
    store.peers.save(ALICE, "admitted")
    store.peers.save(replace(ALICE, peer="bob", last_seen=NOW + 5))
    new = PeerRecord("new", 0.0, 0.0, NOW + 9, False, "", NOW + 9, NOW + 9)
    here = replace(ALICE, last_seen=NOW + 9)
    assert page(store, "new", "alice", limit=2) == (3, [here, new])
    assert store.peers.nearest(["new"], NOW + 9, 9) == [(new, 0), (ALICE, 1)]
    assert store.peers.nearest(["new"], NOW + 9, 1) == [(new, 0)]
    assert [store.peers.seen_since(["new"], NOW + 9, NOW + late) for late in (0, 1, 6)] == [2, 1, 0]


def test_a_forgotten_peer_leaves_nothing(store: ExperienceStore) -> None:
    store.peers.save(ALICE, "stale")
    store.peers.save(replace(ALICE, peer="bob"), "stale")
    store.peers.forget("alice")
    assert [record.peer for record in store.peers.all()] == ["bob"]
    assert store.peers.verdicts(["alice", "bob"]) == {"bob": {"stale": 1}}
