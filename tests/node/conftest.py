"""`shoal` in this process, a home in a temporary directory, scorer processes, and a count of forward passes."""

import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result

from node.cli.app import shoal
from node.engines import decoding
from node.home import Home
from node.scorer import Scorer
from protocol.manifest import EnvironmentSpec, embedded_manifest
from tests.node.evaluating import DEADLINE, EVALUATING, install


@pytest.fixture
def home(tmp_path: Path, no_variables: None) -> Home:
    made = Home(tmp_path / "home")
    made.init()
    return made


@pytest.fixture
async def evaluating(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Scorer]:
    install(tmp_path / "site", "evaluating", EVALUATING, "evaluating@1 = evaluating:Evaluating")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    scorer = Scorer([EnvironmentSpec("evaluating", "1", 1, {})], deadline=DEADLINE, memory_mb=512, clock=time.monotonic)
    await scorer.start()
    yield scorer
    await scorer.close()


@pytest.fixture
async def embedded() -> AsyncIterator[Scorer]:
    scorer = Scorer(embedded_manifest("t", 0).environments, deadline=5, memory_mb=1024, clock=time.monotonic)
    await scorer.start()
    yield scorer
    await scorer.close()


@pytest.fixture
def forwarded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens of each forward pass of the engine from here on."""
    passes: list[int] = []
    forward = decoding._forward

    def counted(bundle: object, token_ids: torch.Tensor, *others: object) -> torch.Tensor:
        passes.append(len(token_ids))
        return forward(bundle, token_ids, *others)  # type: ignore[arg-type]

    monkeypatch.setattr(decoding, "_forward", counted)
    return passes


@pytest.fixture
def run(no_variables: None) -> Callable[..., Result]:
    def call(*args: str | Path, input: str | None = None) -> Result:
        return CliRunner().invoke(shoal, [str(arg) for arg in args], input=input)

    return call
