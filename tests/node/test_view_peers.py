"""The lists of peers: a page of many, in every order, and the graph."""

import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from node.view import DaemonView
from node.view_peers import MAX_NODES
from swarm.experience import ExperienceStore, PeerRecord
from swarm.reputation import BAN_AT, HALF_LIFE
from swarm.transport import Connection


@pytest.fixture
def store(tmp_path: Path, clock: Any) -> Iterator[ExperienceStore]:
    store = ExperienceStore(tmp_path / "node.db", 1 << 20, clock)
    yield store
    store.close()


def view(store: ExperienceStore, clock: Any, **connections: Connection) -> DaemonView:
    transport = SimpleNamespace(peers=lambda: tuple(connections), connections=lambda: connections)
    identity, bundle = SimpleNamespace(peer_id="me"), SimpleNamespace(name="tiny")
    node: Any = SimpleNamespace(transport=transport, store=store, clock=clock, identity=identity, bundle=bundle)
    return DaemonView(node)


def ids(view: DaemonView, offset: int = 0, limit: int = 100, **how: Any) -> list[str]:
    found = view.peers(offset, limit, **{"sort": "last_seen", "descending": True, "search": "", **how})
    return [row["peer_id"] for row in found["peers"]]


def meet(store: ExperienceStore, clock: Any, number: int = 5) -> None:
    for n in range(number):
        record = PeerRecord(f"peer{n}", float(n), 0.0, clock.now, False, f"model {n % 2}", 0.0, clock.now - 10 * n)
        for _ in range(n):
            store.peers.save(record, "admitted")
        for _ in range(number - n):
            store.peers.save(record, "stale")


def test_a_page_says_of_each_peer_what_is_known(store: ExperienceStore, clock: Any) -> None:
    meet(store, clock)
    for verdict in ("trained", "trained", "followed"):
        store.peers.save(store.peers.all()[3], verdict)
    store.peers.save(store.peers.all()[3], "announced")
    found = view(store, clock, peer3=Connection("inbound", 0.0125), new=Connection(None)).peers(
        0, 3, sort="last_seen", descending=True, search=""
    )
    assert (found["total"], found["connected"]) == (6, 2)
    assert [found["peers"][0], found["peers"][2]] == [
        {
            "peer_id": "new", "connected": True, "direction": None, "latency_ms": None, "model": "",
            "reputation": 0.25, "banned": False, "published": 0, "admitted": 0, "trained": 0, "followed": 0,
            "rejected": {},
            "last_seen": clock.now,
        },
        {
            "peer_id": "peer3", "connected": True, "direction": "inbound", "latency_ms": 12.5, "model": "model 1",
            "reputation": pytest.approx(4 / 7), "banned": False, "published": 1, "admitted": 3, "trained": 2,
            "followed": 1, "rejected": {"stale": 2}, "last_seen": clock.now,
        },
    ]  # fmt: skip


def test_orders_pages_and_search(store: ExperienceStore, clock: Any) -> None:
    meet(store, clock)
    shown = view(store, clock)
    up, down = [f"peer{n}" for n in range(5)], [f"peer{n}" for n in reversed(range(5))]
    assert ids(shown) == ids(shown, sort="rejected") == ids(shown, sort="peer_id", descending=False) == up
    assert ids(shown, sort="admitted") == ids(shown, sort="reputation") == ids(shown, descending=False) == down
    assert ids(shown, offset=1, limit=2) == ["peer1", "peer2"]
    assert ids(shown, offset=9) == []
    assert ids(shown, search="MODEL 1") == ["peer1", "peer3"]
    assert ids(shown, search="eer4") == ["peer4"]
    assert shown.peers(0, 1, sort="peer_id", descending=False, search="model 0")["total"] == 3


def test_a_ban_ends_though_the_peer_is_not_seen_again(store: ExperienceStore, clock: Any) -> None:
    store.peers.save(PeerRecord("bad", 1.0, BAN_AT, clock.now, True, "tiny", 0.0, clock.now))
    shown = view(store, clock)

    def row() -> dict[str, Any]:
        return dict(shown.peers(0, 1, sort="last_seen", descending=True, search="")["peers"][0])

    assert (row()["banned"], row()["reputation"]) == (True, 0.0)
    clock.now += 2 * HALF_LIFE
    assert (row()["banned"], row()["reputation"] > 0) == (False, True)


def test_the_graph_has_only_edges_that_this_node_knows_of(store: ExperienceStore, clock: Any) -> None:
    meet(store, clock, 4)
    of = {record.peer: record for record in store.peers.all()}
    for name in ("peer2", "peer2", "peer2", "peer2", "peer1"):  # of a group that was admitted, each use in an update
        store.peers.save(of[name], "trained")
    shown = view(store, clock, peer0=Connection("inbound"), peer2=Connection("outbound"), new=Connection(None))
    graph = shown.peer_graph()
    assert [(node["peer_id"], node["self"], node["connected"]) for node in graph["nodes"]] == [
        ("me", True, True),
        ("peer2", False, True),
        ("new", False, True),
        ("peer0", False, True),
        ("peer3", False, False),
        ("peer1", False, False),
    ]
    assert [tuple(edge.values()) for edge in graph["edges"]] == [
        ("me", "peer2", "connection", 1),
        ("peer2", "me", "groups", 4),
        ("me", "new", "connection", 1),
        ("peer0", "me", "connection", 1),
        ("peer1", "me", "groups", 1),
    ]


def test_two_thousand_peers(store: ExperienceStore, clock: Any) -> None:
    """In what time is printed; the graph keeps its bound."""
    store._db.execute(
        "INSERT INTO peers WITH RECURSIVE counter (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM counter WHERE n < 2000)"
        f" SELECT printf('peer%04d', n), n % 7, 0, {clock.now}, 0, 'tiny', 0, {clock.now} - n FROM counter"
    )
    store._db.execute("INSERT INTO verdicts SELECT peer, 'admitted', 1 + accepted FROM peers")
    store._db.execute("INSERT INTO verdicts SELECT peer, 'trained', 2 + accepted FROM peers")
    store._db.execute("INSERT INTO verdicts SELECT peer, 'stale', 3 FROM peers")
    shown = view(store, clock)
    began = time.process_time()
    assert ids(shown, 1000, 3, sort="peer_id") == ["peer1000", "peer0999", "peer0998"]
    print(f"a page of 2,000 peers in {1000 * (time.process_time() - began):.0f} ms")  # noqa: T201
    graph = shown.peer_graph()
    assert (len(graph["nodes"]), len(graph["edges"])) == (MAX_NODES, MAX_NODES - 1)
    assert {edge["weight"] for edge in graph["edges"]} == {8.0}
