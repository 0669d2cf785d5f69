"""Who starts a node's process again whenever it ends, and so how a person ends it or starts it anew."""

import psutil

from node.addresses import in_container


def supervisor(pid: int | None) -> int | None:
    """The process of the `shoal local` that runs process `pid`, if one does."""
    if pid is None:
        return None
    try:
        parent = psutil.Process(pid).parent()
        return parent.pid if parent is not None and "local" in parent.cmdline() else None
    except psutil.Error:  # it has ended, or is another user's
        return None


def how_to_restart(pid: int | None) -> str:
    """What starts a node that runs as process `pid`, here or in this container, with its new settings."""
    if in_container() and _parent(pid) == 1:  # it is the container's own process, or a child of its `init`
        return "docker compose restart, outside of the container"
    supervising = supervisor(pid)
    return f"{how_to_end(supervising)}, then start it again" if supervising else "shoal down, then shoal up"


def _parent(pid: int | None) -> int | None:
    try:
        return max(1, psutil.Process(pid).ppid()) if pid is not None else None
    except psutil.Error:
        return None


def how_to_end(supervising: int) -> str:
    return f"end all nodes of that swarm with Ctrl-C there, or `kill {supervising}`"
