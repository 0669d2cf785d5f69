"""Whether a `shoal local` runs a node's process: it starts the node again whenever that ends."""

import psutil


def supervisor(pid: int | None) -> int | None:
    """The process of the `shoal local` that runs process `pid`, if one does."""
    if pid is None:
        return None
    try:
        parent = psutil.Process(pid).parent()
        return parent.pid if parent is not None and "local" in parent.cmdline() else None
    except psutil.Error:  # it has ended, or is another user's
        return None


def how_to_end(supervising: int) -> str:
    return f"end all nodes of that swarm with Ctrl-C there, or `kill {supervising}`"
