"""What tests of every room share: a clock."""

import pytest


class Clock:
    """Time that stands still until a test moves it: `clock.now += 5`."""

    def __init__(self) -> None:
        self.now = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()
