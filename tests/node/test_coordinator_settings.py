"""A coordinator whose settings ask members for what they cannot give does not start."""

import msgspec
import pytest

from node.config import CoordinatorConfig
from node.coordinator.process import TooManyAnswers, check_answers
from protocol.manifest import embedded_manifest

MANIFEST = embedded_manifest("lab", 1e9)


def test_no_more_answers_are_asked_for_than_a_report_holds() -> None:
    check_answers(MANIFEST, CoordinatorConfig(tasks=256, samples=16))
    spec = MANIFEST.environments[0]
    many = msgspec.structs.replace(MANIFEST, environments=(spec,) * 17)
    with pytest.raises(TooManyAnswers, match=r"17 environments .* are 69632 answers of each member, at most 65536 ; "):
        check_answers(many, CoordinatorConfig(tasks=256, samples=16))
