"""On-policy distillation: on the tokens that the policy sampled, move its distribution towards a teacher's.

The reverse KL of the policy to the teacher, token by token and without looking ahead (discount 0), by the policy
gradient on sampled tokens: Agarwal et al., arXiv 2306.13649 (GKD, on-policy, reverse KL); Thinking Machines,
'On-Policy Distillation' (2025). Every token gets its own signal, so it teaches where all rewards are equal, too.

Log-probabilities of the teacher go into the batch before it is journalled: a step is repeated without the teacher.
"""

import functools
import math
from collections.abc import Sequence

import msgspec
import torch
from torch import Tensor

from node.algorithms.losses import MAX_LOG_RATIO, log_ratio
from node.config import Config
from node.config_train import TrainConfig
from node.config_types import PEER
from node.device import Device
from node.engines.vllm_client import Address, VllmClient
from node.home import models_dir
from node.interfaces import Teacher, TeacherError, TrainGroup
from node.models import ModelBundle, load_model
from node.training.forward import run, sequence_logprobs
from node.training.teacher_vllm import VllmTeacher


def reverse_kl(logprobs: Tensor, old: Tensor, teacher: Tensor) -> Tensor:
    """r (old - teacher) of each token, [N], 0 where `teacher` is nan (not asked).

    At r = exp(logp - old) = 1 its value estimates the reverse KL (Schulman's k1), and the expectation of its gradient
    is that of the KL. The gap is clamped to +-20: what the teacher would never say weighs much, but not everything.
    """
    gap = (old - teacher).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).nan_to_num(0.0)
    return log_ratio(logprobs, old).exp() * gap


def known(groups: Sequence[TrainGroup], device: torch.device) -> Tensor | None:
    """The teacher's log-probabilities of all tokens of a step in their order, [N], nan where it was not asked.

    None where it was not asked at all.
    """
    values: list[float] = []
    for group in groups:
        for sequence in group.sequences:
            values += sequence.teacher_logprobs or (torch.nan,) * len(sequence.token_ids)
    return None if all(map(math.isnan, values)) else torch.tensor(values, dtype=torch.float32, device=device)


def mean_gap(old: Tensor, teacher: Tensor, mask: Tensor) -> float | None:
    """Mean of old - teacher over the tokens in `mask` that the teacher was asked about, None without any."""
    gap = (old - teacher)[mask & ~teacher.isnan()]
    return float(gap.mean()) if len(gap) else None


async def taught(groups: Sequence[TrainGroup], teacher: Teacher) -> tuple[TrainGroup, ...]:
    """The groups with the teacher's log-probabilities of own tokens.

    Foreign tokens are another policy's samples: on them the estimate would not be that of the KL. Raises TeacherError.
    """
    own = [group for group in groups if group.origin == "own"]
    answers = iter(await teacher.logprobs(own) if own else [])
    return tuple(_with(group, next(answers)) if group.origin == "own" else group for group in groups)


def _with(group: TrainGroup, logprobs: Sequence[tuple[float, ...]]) -> TrainGroup:
    sequences = []
    for sequence, values in zip(group.sequences, logprobs, strict=True):
        if len(values) != len(sequence.token_ids):
            raise TeacherError(f"the teacher gave {len(values)} log-probabilities of {len(sequence.token_ids)} tokens")
        sequences.append(msgspec.structs.replace(sequence, teacher_logprobs=values))
    return msgspec.structs.replace(group, sequences=tuple(sequences))


def local_teacher(config: TrainConfig) -> str:
    """Path of the teacher that this process loads; empty: there is none, or it is a server or another node."""
    path = config.distill_teacher
    return "" if path.startswith(("http://", "https://", PEER)) else path


async def load_teacher(config: Config, policy: ModelBundle, device: Device) -> Teacher | None:
    """The teacher of `train.distill_teacher` where it is a model or a server. Raises TeacherError, ModelError."""
    path = config.train.distill_teacher
    if not path or path.startswith(PEER):
        return None
    if not local_teacher(config.train):
        remote = VllmTeacher(VllmClient(Address(path)), policy, seconds=config.limits.stage_seconds)
        await remote.check()
        return remote
    kind = str(policy.model.dtype).removeprefix("torch.")
    load = functools.partial(load_model, path, device=str(policy.model.device), dtype=kind, models=models_dir())
    return LocalTeacher(await device.run(load), policy, device, config.train.tokens_per_micro_batch)


class LocalTeacher:
    """A second model in this process. It shares the model thread with the policy, and its memory is on top."""

    def __init__(self, bundle: ModelBundle, policy: ModelBundle, device: Device, budget: int) -> None:
        """`budget`: tokens of one forward. Raises TeacherError when its tokens are not the policy's."""
        if bundle.fingerprint != policy.fingerprint:
            raise TeacherError(
                f"the teacher {bundle.name} has another tokenizer than {policy.name}, so its probabilities are of other"
                " tokens ; set train.distill_teacher to a model of the same family"
            )
        self.name = bundle.name
        self.model = bundle.model.requires_grad_(False)
        self._device, self._budget = device, budget

    async def logprobs(self, groups: Sequence[TrainGroup]) -> list[list[tuple[float, ...]]]:
        """log-probability of every sequence token under the teacher; [group][sequence][token]."""
        return await self._device.run(self._logprobs, groups)

    def _logprobs(self, groups: Sequence[TrainGroup]) -> list[list[tuple[float, ...]]]:
        return sequence_logprobs(groups, self._budget, functools.partial(run, self.model))
