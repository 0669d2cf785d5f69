"""The peers for people: a page of those known and connected, and the graph of who gives whom."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from swarm.records import PeerRecord
from swarm.reputation import faded, weight

if TYPE_CHECKING:
    from node.daemon import Daemon

Json = Any
MAX_NODES = 200


@dataclass(frozen=True, slots=True)
class Standing:
    """What a list of peers is sorted by."""

    record: PeerRecord
    """As of now."""
    admitted: int
    refused: int


ORDERS: Mapping[str, Callable[[Standing], Any]] = {
    "last_seen": lambda peer: peer.record.last_seen,
    "reputation": lambda peer: weight(peer.record),
    "admitted": lambda peer: peer.admitted,
    "rejected": lambda peer: peer.refused,
    "peer_id": lambda peer: peer.record.peer,
}


def standings(node: "Daemon") -> list[Standing]:
    """All peers known (swarm.peer_records.MAX_PEERS at most) and connected, by their ids."""
    now, connected = node.clock(), node.transport.peers()
    found = {
        record.peer: Standing(faded(record, now), admitted, refused)
        for record, admitted, refused in node.store.peers.standings()
    }
    for peer in connected:  # seen now, whenever it last did anything
        known = found.get(peer) or Standing(PeerRecord(peer, 0.0, 0.0, now, False, "", now, now), 0, 0)
        found[peer] = replace(known, record=replace(known.record, last_seen=now))
    return [found[peer] for peer in sorted(found)]


def peers_page(node: "Daemon", offset: int, limit: int, *, sort: str, descending: bool, search: str) -> dict[str, Json]:
    """See `web.view.NodeView.peers`. Of equals, the one with the smaller id comes first."""
    connections, wanted = node.transport.connections(), search.casefold()
    chosen = [
        peer
        for peer in standings(node)
        if wanted in peer.record.peer.casefold() or wanted in peer.record.model.casefold()
    ]
    chosen.sort(key=ORDERS[sort], reverse=descending)
    page = chosen[offset : offset + limit]
    verdicts = node.store.peers.verdicts([peer.record.peer for peer in page])
    rows = []
    for peer in page:
        record, counts = peer.record, dict(verdicts.get(peer.record.peer, {}))
        connection = connections.get(record.peer)
        latency = connection.latency if connection else None
        rows.append(
            {
                "peer_id": record.peer,
                "connected": connection is not None,
                "direction": connection.direction if connection else None,
                "latency_ms": None if latency is None else 1000 * latency,
                "model": record.model,
                "reputation": weight(record),
                "banned": record.banned,
                "published": counts.pop("announced", 0),
                "admitted": counts.pop("admitted", 0),
                "trained": counts.pop("trained", 0),
                "followed": counts.pop("followed", 0),
                "rejected": counts,
                "last_seen": record.last_seen,
            }
        )
    return {"total": len(chosen), "connected": len(connections), "peers": rows}


def peer_graph(node: "Daemon") -> dict[str, Json]:
    """This node, whom it is connected to, and whose groups it admitted: those with the most, up to MAX_NODES.

    What peers are connected to each other nobody knows here, so there are no such edges.
    """
    me, connections = node.identity.peer_id, node.transport.connections()
    drawn = [peer for peer in standings(node) if peer.record.peer in connections or peer.admitted]
    drawn.sort(key=lambda peer: (peer.record.peer in connections, peer.admitted), reverse=True)
    bundle = node.bundle
    nodes = [
        {
            "peer_id": me,
            "self": True,
            "connected": True,
            "reputation": None,
            "model": bundle.name if bundle else "",
            "admitted": 0,
        }
    ]
    edges = []
    for peer in drawn[: MAX_NODES - 1]:
        name, connection = peer.record.peer, connections.get(peer.record.peer)
        nodes.append(
            {
                "peer_id": name,
                "self": False,
                "connected": connection is not None,
                "reputation": weight(peer.record),
                "model": peer.record.model,
                "admitted": peer.admitted,
            }
        )
        if connection is not None:
            ends = (name, me) if connection.direction == "inbound" else (me, name)
            edges.append({"from": ends[0], "to": ends[1], "kind": "connection", "weight": 1})
        if peer.admitted:
            edges.append({"from": name, "to": me, "kind": "groups", "weight": peer.admitted})
    return {"nodes": nodes, "edges": edges}
