"""The averager as a node starts it: `python -m node.averager_process FD`. Confined first, hivemind is imported then."""

import sys
from pathlib import Path

from node.isolation import isolate_averager
from swarm.averaging_wire import Setup
from swarm.averaging_worker import main

MEMORY_MB = 2048
"""Of each of its processes, of which there are five; they have 50 to 300 MB of it."""
FILE_MARGIN = 64 << 20
"""Of files that are no weights: its log, and what hivemind's processes share."""


def confine(setup: Setup) -> tuple[str, ...]:
    writable = Path(setup.directory)
    return isolate_averager(MEMORY_MB, setup.size + FILE_MARGIN, writable.parent, writable)


if __name__ == "__main__":
    main(int(sys.argv[1]), confine)
