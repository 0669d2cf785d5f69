"""What the API says of every process of a home, of a node and of a coordinator."""

import os
import resource
from collections.abc import Mapping
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import psutil

if TYPE_CHECKING:
    from node.coordinator.process import CoordinatorProcess
    from node.daemon import Daemon

VERSION = version("shoal")


def presence_facts(node: "Daemon | CoordinatorProcess", now: float) -> dict[str, Any]:
    """Of the status, see `web.view.NodeView.status`."""
    state, reason, following = node.progress.told()
    return {
        "state": state,
        "reason": node.home.hints(reason),
        "next": node.home.hints(following),
        "peers": len(node.transport.peers()),
        "peer_id": node.identity.peer_id,
        "name": node.config.node.name or node.identity.peer_id[-8:],
        "swarm": node.manifest.name if node.manifest else "",
        "rss_mb": psutil.Process(os.getpid()).memory_info().rss / 2**20,
        "peak_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10,
        "uptime": now - node.started_at,
        "version": VERSION,
    }


def presence_samples(node: "Daemon | CoordinatorProcess", status: Mapping[str, Any]) -> dict[str, float]:
    """Of the metrics, see `web.view.NodeView.metrics`."""
    stats = node.transport.stats()
    return {
        "shoal_up": float(status["state"] != "FAILED"),
        "shoal_peers": status["peers"],
        "shoal_resident_bytes": status["rss_mb"] * 2**20,
        "shoal_uptime_seconds": status["uptime"],
        "shoal_network_bytes_in_total": stats.bytes_in,
        "shoal_network_bytes_out_total": stats.bytes_out,
    }
