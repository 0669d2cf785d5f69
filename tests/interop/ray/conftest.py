"""One real Ray on this machine for all tests here, on the CPU, with more processors than there are."""

import asyncio
import importlib.util
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import pytest

from node.large.cluster_file import Cluster
from node.large.ray_cluster import VARIABLES, RayCluster
from node.large.room import Bundle

T = TypeVar("T")

ROOT = Path(__file__).parents[3]
SECONDS = 480.0
"""Deadline of everything: an idle machine takes a tenth of it."""
CPUS = 16
TRIES = 3
"""Ray gives up on itself after 30 s, which a busy machine may take longer than."""


@pytest.fixture(scope="session")
def ray_address(evenness_site: Path) -> Iterator[str]:
    """A head node, started as people start one, that knows this checkout; ended by its own process ids."""
    if importlib.util.find_spec("ray") is None:  # not imported here: it reads its variables when it is
        pytest.skip("no Ray; `make test-interop` installs it")
    place = tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp")  # short: sockets lie below it
    variables = {
        **VARIABLES,
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": "0123456789abcdef" * 4,
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), str(evenness_site), os.environ.get("PYTHONPATH")))),
    }
    os.environ.update(variables)
    try:
        for _ in range(TRIES):
            starter = subprocess.Popen(
                [sys.executable, "-c", HEAD, place.name, str(CPUS)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
            assert starter.stdout is not None
            if address := starter.stdout.readline().strip():
                break
            starter.wait(60)
        assert address, "Ray did not start"
        yield address
    finally:
        starter.communicate("", timeout=60)
        place.cleanup()
        for name in variables:
            if name != "PYTHONPATH":
                os.environ.pop(name, None)


HEAD = """
import sys
import ray

context = ray.init(
    num_cpus=int(sys.argv[2]), num_gpus=0, include_dashboard=False, object_store_memory=100 << 20,
    _temp_dir=sys.argv[1], log_to_driver=False, configure_logging=False,
)
print(context.address_info["gcs_address"], flush=True)
sys.stdin.read()  # until the tests close it
ray.shutdown()
"""


class Runner:
    """An asyncio loop on a thread of its own, for tests of calls that block and for what lives as long as they do."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()

    def __call__(self, job: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(job, self.loop).result(SECONDS)


@pytest.fixture(scope="session")
def run() -> Iterator[Runner]:
    runner = Runner()
    yield runner
    runner.loop.call_soon_threadsafe(runner.loop.stop)


@pytest.fixture(scope="session")
def cluster(ray_address: str, run: Runner) -> Iterator[RayCluster]:
    """A connection to it."""
    asked = {
        "ray": {"address": ray_address, "start_seconds": SECONDS},
        "trainer": {"workers": 2, "gpus": 0},
        "engines": {"number": 2, "gpus": 0},
    }
    connected = RayCluster(Cluster.model_validate(asked))
    run(connected.connect())
    yield connected
    run(connected.close())


Kind = Literal["trainer", "engine", "rewards"]


@pytest.fixture
def room(cluster: RayCluster, run: Runner, tmp_path: Path) -> Callable[[Kind, int], tuple[Any, Sequence[Bundle]]]:
    """A placement group of some bundles of a kind, and the bundles."""
    (host,), trouble = run(cluster.hosts(tmp_path, tmp_path))
    assert "config.json" not in str(trouble)
    assert (host.cpus, host.gpus) == (CPUS, 0)

    def make(kind: Kind, number: int) -> tuple[Any, Sequence[Bundle]]:
        bundles = [Bundle(kind, at, host.name, host.node, 0.5) for at in range(number)]
        return run(cluster.reserve(bundles, "PACK")), bundles

    return make
