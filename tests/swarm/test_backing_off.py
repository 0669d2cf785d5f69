"""Pauses double up to a limit, and a very long row of failures is no error."""

import pytest

from swarm.backing_off import pause_after


@pytest.mark.parametrize(
    ("failures", "seconds"), [(-1, 0.0), (0, 0.0), (1, 1.5), (2, 3.0), (5, 24.0), (6, 40.0), (10**6, 40.0)]
)
def test_pauses(failures: int, seconds: float) -> None:
    assert pause_after(failures, 1.5, 40.0) == seconds
