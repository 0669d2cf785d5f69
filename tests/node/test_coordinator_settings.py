"""What a coordinator's process makes of its settings: none that ask members for what they cannot give."""

import time

import msgspec
import pytest

from node.config import CoordinatorConfig
from node.coordinator.process import CoordinatorProcess, TooManyAnswers, check_answers
from node.daemon import Daemon
from node.home import Home
from node.settings import load
from protocol.manifest import embedded_manifest

MANIFEST = embedded_manifest("lab", 1e9)


def test_no_more_answers_are_asked_for_than_a_report_holds() -> None:
    check_answers(MANIFEST, CoordinatorConfig(tasks=256, samples=16))
    spec = MANIFEST.environments[0]
    many = msgspec.structs.replace(MANIFEST, environments=(spec,) * 17)
    with pytest.raises(TooManyAnswers, match=r"17 environments .* are 69632 answers of each member, at most 65536 ; "):
        check_answers(many, CoordinatorConfig(tasks=256, samples=16))


async def test_peers_are_dialled_by_a_clock_that_nobody_sets(home: Home) -> None:
    home.found(embedded_manifest("lab", 1e9))
    settings = load(home)
    for made in (CoordinatorProcess(home, settings, clock=time.time), Daemon(home, settings, clock=time.time)):
        assert made.presence.discovery._clock is time.monotonic
        made.history.close()
