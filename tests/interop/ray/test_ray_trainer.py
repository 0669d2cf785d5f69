"""The sharded trainer with workers that Ray places: the local trainer's numbers, and what becomes of a killed actor."""

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from node.config_train import TrainConfig
from node.interfaces import Batch, TrainerLost, TrainGroup, TrainSequence
from node.large.ray_cluster import RayCluster
from node.large.trainer_actors import RayLauncher
from node.models import load_model
from node.training.local import LocalTrainer
from node.training.sharded import ShardedTrainer
from node.training.workers import WorkerPlan, Workers

pytestmark = [pytest.mark.interop, pytest.mark.slow, pytest.mark.network]

SETTINGS: dict[str, Any] = {"learning_rate": 1e-3, "warmup_steps": 0, "tokens_per_micro_batch": 64}
SECONDS = 400.0


def batch(step: int) -> Batch:
    rng = random.Random(step)

    def ids(count: int) -> tuple[int, ...]:
        return tuple(rng.randrange(2, 90) for _ in range(count))

    groups = tuple(
        TrainGroup(
            ids(8),
            tuple(TrainSequence(ids(n), (True,) * n, float(n % 2), (-2.0,) * n) for n in (4, 7, 9, 12)),
            "own",
        )
        for _ in range(3)
    )
    return Batch(step, groups)


class ByPort(RayLauncher):
    """As if the workers were on several machines: they find each other by a port."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._one_machine = False


def gone(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def test_it_trains_as_the_local_one_and_a_killed_actor_costs_a_start(
    cluster: RayCluster,
    room: Callable[..., Any],
    tiny_model: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.set_num_threads(1)
    path = str(tiny_model("llama", ascii_only=True))
    local = LocalTrainer(
        load_model(path, device="cpu", dtype="float32", models=tmp_path), TrainConfig(**SETTINGS), dumps=tmp_path
    )
    group, bundles = room("trainer", 2)
    plan = WorkerPlan(2, "cpu", "float32", path, tmp_path, 1, 0.0, tmp_path, tmp_path / "logs" / "trainer.log")
    launcher = ByPort(cluster, group, bundles, log=plan.log, threads=1, meet=tmp_path)
    workers = Workers(plan, launcher)
    bundle = load_model(path, device="cpu", dtype="float32", models=tmp_path)
    trainer = ShardedTrainer(
        bundle,
        TrainConfig(**SETTINGS, shards=2),
        workers,
        handover=tmp_path / "seen" / "trainer",
        seconds=lambda: SECONDS,
        passing=tmp_path / "seen" / "checkpoints",
    )
    trainer.start()
    try:
        children = [psutil.Process(pid) for pid in workers.pids]
        # each is the child of an actor's process, which Ray started
        assert all("ray::TrainerActor" in " ".join(child.parent().cmdline()) for child in children)
        ours, theirs = local.update(batch(1)), trainer.update(batch(1))
        assert abs(ours.loss - theirs.loss) < 1e-5
        assert abs(ours.grad_norm - theirs.grad_norm) < 1e-3 * ours.grad_norm
        for name, weight in local.bundle.model.named_parameters():
            torch.testing.assert_close(dict(bundle.model.named_parameters())[name], weight, atol=2e-5, rtol=0)
        saved = tmp_path / "step-1"
        saved.mkdir()
        trainer.save(saved)
        assert {"model.safetensors", "exp_avg-00001-of-00002.safetensors"} <= {file.name for file in saved.iterdir()}
        assert not list((tmp_path / "seen" / "checkpoints").iterdir()), "what came by there is gone"

        # an actor's process is killed amid an update
        def kill() -> None:
            time.sleep(0.2)
            os.kill(children[1].parent().pid, signal.SIGKILL)

        killer = threading.Thread(target=kill)
        killer.start()
        with pytest.raises(TrainerLost) as lost:  # noqa: PT012 - whichever of them it is
            for _ in range(1000):
                trainer.update(batch(2))
        killer.join()
        assert f"worker 2 (process {children[1].pid} on {bundles[1].host}) was ended by SIGKILL" in str(lost.value)
        psutil.wait_procs(children, timeout=20)
        assert all(map(gone, children))
        lost.value.again()
        trainer.load(saved)
        assert trainer.step == 1
        ours, theirs = local.update(batch(2)), trainer.update(batch(2))
        assert abs(ours.loss - theirs.loss) < 1e-5
        for name, weight in local.bundle.model.named_parameters():
            torch.testing.assert_close(dict(bundle.model.named_parameters())[name], weight, atol=4e-5, rtol=0)
        children = [psutil.Process(pid) for pid in workers.pids]
    finally:
        trainer.close()
    psutil.wait_procs(children, timeout=20)
    assert all(map(gone, children))
