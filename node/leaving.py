"""How a node's or a coordinator's process ends."""

import logging
import os
import sys
from typing import NoReturn

from node.home import Home

STOP_SECONDS = 4.0
"""How long a stop may take before the process exits anyway; what counts is on disk at any instant."""


def leave(home: Home, code: int) -> NoReturn:
    """End the process at once: taking torch apart takes seconds, and a matrix product cannot be interrupted.

    Everything is on disk: files are fsynced as they are written, and what the model thread computes is journalled.
    """
    home.remove_daemon()  # `shoal down` takes this for the end of the process
    home.clear_holder()
    logging.shutdown()
    sys.stdout.flush()
    os._exit(code)


def innermost(error: BaseException) -> BaseException:
    """What broke first, out of the groups that tasks wrap it in."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
