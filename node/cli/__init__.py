"""The `shoal` command."""

import os
import sys

try:
    from node.cli.app import main
except KeyboardInterrupt:  # before there is anybody to report it: not with a traceback
    sys.stderr.write("interrupted\n")
    os._exit(130)

__all__ = ["main"]
