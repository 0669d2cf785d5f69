"""The peers for people: a page of those known and connected, and the graph of who gives whom."""

import functools
from typing import TYPE_CHECKING, Any

from swarm.reputation import faded, weight, weight_at

if TYPE_CHECKING:
    from node.daemon import Daemon

Json = Any
MAX_NODES = 200
MEMBER_SECONDS = 86400.0


def members_seen(node: "Daemon") -> int:
    """Nodes of the swarm seen in the last day, this one included."""
    now = node.clock()
    return 1 + node.store.peers.seen_since(node.transport.peers(), now, now - MEMBER_SECONDS)


def peers_page(node: "Daemon", offset: int, limit: int, *, sort: str, descending: bool, search: str) -> dict[str, Json]:
    """See `web.view.NodeView.peers`. Of equals, the one with the smaller id comes first."""
    connections, now = node.transport.connections(), node.clock()
    total, page = node.store.peers.page(
        connections,
        now,
        search=search,
        sort=sort,
        descending=descending,
        offset=offset,
        limit=limit,
        weigh=functools.partial(weight_at, now),
    )
    verdicts = node.store.peers.verdicts([record.peer for record in page])
    rows = []
    for record in (faded(record, now) for record in page):
        counts = dict(verdicts.get(record.peer, {}))
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
    return {"total": total, "connected": len(connections), "peers": rows}


def peer_graph(node: "Daemon") -> dict[str, Json]:
    """This node, whom it is connected to, and whose groups it admitted: those with the most, up to MAX_NODES. Edges of
    kind "groups" weigh how often groups of theirs went into updates.

    What peers are connected to each other nobody knows here, so there are no such edges.
    """
    me, connections = node.identity.peer_id, node.transport.connections()
    bundle, now = node.bundle, node.clock()
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
    nearest = node.store.peers.nearest(connections, now, MAX_NODES - 1)
    verdicts = node.store.peers.verdicts([record.peer for record, _ in nearest])
    for record, admitted in nearest:
        name, connection = record.peer, connections.get(record.peer)
        nodes.append(
            {
                "peer_id": name,
                "self": False,
                "connected": connection is not None,
                "reputation": weight(faded(record, now)),
                "model": record.model,
                "admitted": admitted,
            }
        )
        if connection is not None:
            ends = (name, me) if connection.direction == "inbound" else (me, name)
            edges.append({"from": ends[0], "to": ends[1], "kind": "connection", "weight": 1})
        trained = verdicts.get(name, {}).get("trained", 0)
        if trained:
            edges.append({"from": name, "to": me, "kind": "groups", "weight": trained})
    return {"nodes": nodes, "edges": edges}
