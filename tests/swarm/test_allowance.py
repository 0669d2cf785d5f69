from typing import Any

import pytest

from swarm.allowance import Allowance


def test_a_burst_and_then_a_rate(clock: Any) -> None:
    allowance = Allowance(10.0, 30.0, clock)
    assert sum(allowance.take("a") for _ in range(100)) == 30
    assert allowance.take("b"), "each has its own"
    assert allowance.refused == 70
    clock.now += 1
    assert sum(allowance.take("a") for _ in range(100)) == 10
    clock.now += 1000
    assert sum(allowance.take("a") for _ in range(100)) == 30, "silence saves up no more than a burst"


def test_what_is_larger_than_the_burst_is_had_and_then_worked_off(clock: Any) -> None:
    allowance = Allowance(10.0, 30.0, clock)
    assert allowance.wait("a") == 0.0
    allowance.spend("a", 530)
    assert allowance.wait("a") == pytest.approx(50.0, abs=0.01)
    clock.now += 49.9
    assert allowance.wait("a") > 0
    clock.now += allowance.wait("a")
    assert allowance.wait("a") == 0.0, "whoever waits as long as it is told need not be told again"


def test_a_clock_that_goes_back_gives_and_takes_nothing(clock: Any) -> None:
    allowance = Allowance(10.0, 30.0, clock)
    allowance.spend("a", 30)
    clock.now -= 1000
    assert not allowance.take("a")
    clock.now += 1001
    assert sum(allowance.take("a") for _ in range(100)) == 10


def test_memory_is_bounded_by_the_peers_that_asked_last(clock: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm.allowance.MAX_PEERS", 3)
    allowance = Allowance(10.0, 30.0, clock)
    for n in range(10):
        allowance.spend(f"peer{n}", 100)
    assert len(allowance) == 3
    assert [bool(allowance.wait(f"peer{n}")) for n in (6, 7, 8, 9)] == [False, True, True, True]
    allowance.forget("peer9")
    assert allowance.wait("peer9") == 0.0
