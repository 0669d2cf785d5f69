"""A real vLLM server, started without any flag of ours, as a teacher: `make test-interop`."""

from pathlib import Path

import pytest

from node.config import Config
from node.config_train import TrainConfig
from node.device import Device
from node.interfaces import TrainGroup, TrainSequence
from node.models import ModelBundle
from node.training.distill import load_teacher
from node.training.local import LocalTrainer
from node.training.teacher_vllm import VllmTeacher

pytestmark = pytest.mark.interop


async def test_its_logprobs_are_those_of_the_model(bare_server: str, bundle: ModelBundle, tmp_path: Path) -> None:
    config = Config.model_validate({"train": {"distill_teacher": bare_server}})
    device = Device()
    teacher = await load_teacher(config, bundle, device)
    assert isinstance(teacher, VllmTeacher)
    sequences = [tuple(range(10 + i, 18 + i)) for i in range(6)]
    group = TrainGroup(
        tuple(range(20, 52)), tuple(TrainSequence(ids, (True,) * 8, 0.0, None) for ids in sequences), "own"
    )
    (said,) = await teacher.logprobs([group])
    (ours,) = LocalTrainer(bundle, TrainConfig(), dumps=tmp_path).logprobs([group])
    for theirs, own in zip(said, ours, strict=True):
        assert theirs == pytest.approx(own, abs=1e-3)
    await teacher.close()
    device.close()
