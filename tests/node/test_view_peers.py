"""The list of peers, however many are known."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from node.view import DaemonView
from swarm.experience import ExperienceStore
from swarm.records import PeerRecord
from swarm.reputation import BAN_AT, HALF_LIFE


@pytest.fixture
def store(tmp_path: Path, clock: Any) -> Iterator[ExperienceStore]:
    store = ExperienceStore(tmp_path / "node.db", 1 << 20, clock)
    yield store
    store.close()


def test_those_connected_and_those_seen_last_are_listed(
    store: ExperienceStore, clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("node.view.MAX_PEERS_SHOWN", 3)
    for n in range(10):
        store.peers.save(PeerRecord(f"peer{n}", 1.0, 0.0, clock.now, False, "tiny", 0.0, float(n)), "admitted")
    store.peers.save(PeerRecord("peer9", 1.0, BAN_AT, clock.now, True, "tiny", 0.0, 9.0))
    transport = SimpleNamespace(peers=lambda: ("peer0", "stranger"))
    node: Any = SimpleNamespace(transport=transport, store=store, exchange=None, clock=clock)
    rows = {row["peer_id"]: row for row in DaemonView(node).peers()}
    assert list(rows) == ["peer0", "peer7", "peer8", "peer9", "stranger"]
    assert [row["connected"] for row in rows.values()] == [True, False, False, False, True]
    assert (rows["peer0"]["admitted"], rows["peer0"]["last_seen"]) == (1, 0.0)
    assert (rows["peer9"]["banned"], rows["peer8"]["banned"]) == (True, False)
    assert (rows["stranger"]["admitted"], rows["stranger"]["last_seen"]) == (0, clock.now)
    clock.now += 2 * HALF_LIFE  # the ban is over, though the peer was not seen again
    assert not any(row["banned"] for row in DaemonView(node).peers())
