"""The vLLM engine against the real server: `make test-interop`. What each test asserts was wrong once somewhere."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from node.config import Config
from node.device import Device
from node.engines.agreement import check_agreement
from node.engines.choose import make_engine
from node.engines.partial import EngineFailed
from node.engines.vllm import VllmEngine
from node.engines.vllm_probe import MissingFlag, Unreachable, WrongModel
from node.history import History
from node.home import Home
from node.interfaces import PromptRequest, Sample, SampledGroup
from node.models import ModelBundle, load_model
from node.preflight import prepare
from node.scheduler import Scheduler
from node.training.local import LocalTrainer
from protocol.manifest import EnvironmentSpec, make_manifest

pytestmark = pytest.mark.interop

PROMPT = tuple(range(5, 45))
TRAIN_SECONDS = 900.0

Make = Callable[..., VllmEngine]


@pytest.fixture
async def make(bundle: ModelBundle, tmp_path: Path) -> AsyncIterator[Make]:
    """Makes engines as the daemon does, closed at the end."""
    made: list[VllmEngine] = []
    device = Device()

    def build(model: ModelBundle | None = None, **engine: Any) -> VllmEngine:
        chosen = model or bundle
        config = Config.model_validate(
            {
                "rollout": {"engine": "vllm"},
                "engine": {"start_seconds": 900, **engine},
                "model": {"path": str(chosen.directory), "dtype": "float32"},
                "node": {"threads": 1},
            }
        )
        setup = prepare(config, tmp_path)
        home = tmp_path / str(len(made))
        one = make_engine(setup, config, chosen, device, home=home, peer_id="p" * 20, say=lambda told: None)
        assert isinstance(one, VllmEngine)
        made.append(one)
        return one

    yield build
    for one in made:
        await one.close()
    device.close()


def ask(key: str = "a", n: int = 2, new: int = 32, seed: int = 5, starts: tuple[Sample, ...] = ()) -> PromptRequest:
    return PromptRequest(key, PROMPT, n, new, 1.0, seed, starts)


async def collect(
    engine: VllmEngine | Scheduler, *requests: PromptRequest, stop: asyncio.Event | None = None
) -> dict[str, SampledGroup]:
    return {group.key: group async for group in engine.generate(requests, stop)}


async def until_sampled(engine: VllmEngine, tokens: int) -> None:
    async with asyncio.timeout(120):
        while sum(len(stream.token_ids) for stream in engine._open) < tokens:  # noqa: ASYNC110
            await asyncio.sleep(0.02)


def endless(bundle: ModelBundle) -> ModelBundle:
    """The model without an end of turn: every answer runs to its budget."""
    return replace(bundle, stop_ids=frozenset())


def disturb(bundle: ModelBundle, seed: int) -> None:
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in bundle.model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)


@pytest.fixture
def restored(bundle: ModelBundle) -> Any:
    """The weights are the old ones again after the test."""
    before = {name: parameter.detach().clone() for name, parameter in bundle.model.named_parameters()}
    yield
    with torch.no_grad():
        for name, parameter in bundle.model.named_parameters():
            parameter.copy_(before[name])


async def test_samples_end_as_asked(make: Make, server: str, bundle: ModelBundle) -> None:
    engine = make(url=server)
    await engine.start()
    groups = await collect(engine, ask("a", n=24, new=60), ask("b", n=1, new=1))
    finishes = set()
    for sample in groups["a"].samples:
        finishes.add(sample.finish)
        assert len(sample.logprobs) == len(sample.token_ids)
        assert not bundle.stop_ids & set(sample.token_ids[:-1])
        if sample.finish == "stop":
            assert sample.token_ids[-1] in bundle.stop_ids
        else:
            assert len(sample.token_ids) == 60
    assert finishes == {"stop", "length"}
    assert len({sample.token_ids for sample in groups["a"].samples}) > 20
    drawn = [(await collect(engine, ask("c", n=1, new=20, seed=seed)))["c"].samples for seed in (5, 5, 6)]
    assert drawn[0] == drawn[1] != drawn[2]


@pytest.mark.parametrize("temperature", [1.0, 0.6])
async def test_logprobs_are_the_trainers_before_and_after_an_update(
    make: Make, server: str, bundle: ModelBundle, tmp_path: Path, restored: None, temperature: float
) -> None:
    """The second half fails where the output layer keeps its old weights (node.engines.choose.unties)."""
    engine = make(url=server)
    trainer = LocalTrainer(bundle, Config().train, dumps=tmp_path)
    await engine.start()
    prompts = [PROMPT, tuple(range(10, 90))]
    for version in (0, 1):
        if version:
            disturb(bundle, version)
            await engine.update_weights(version)
        largest = await check_agreement(engine, trainer, engine.device, prompts, dtypes=["float32"], tokens=48)
        assert largest < 1e-3
        (sample,) = (await collect(engine, replace(ask(n=1, new=16), temperature=temperature)))["a"].samples
        with torch.no_grad():
            logits = bundle.model(torch.tensor([PROMPT + sample.token_ids]), use_cache=False).logits[0]
        wanted = logits.log_softmax(-1)[
            range(len(PROMPT) - 1, len(PROMPT) - 1 + len(sample.token_ids)), sample.token_ids
        ]
        torch.testing.assert_close(torch.tensor(sample.logprobs), wanted, atol=1e-3, rtol=0)


async def test_new_weights_change_what_is_sampled_and_old_files_go(
    make: Make, server: str, bundle: ModelBundle, restored: None
) -> None:
    engine = make(url=server)
    await engine.start()
    first = (await collect(engine, ask()))["a"].samples
    seen = [first]
    for version in (1, 2, 3):
        disturb(bundle, version)
        await engine.update_weights(version)
        seen.append((await collect(engine, ask()))["a"].samples)
        assert {sample.version for sample in seen[-1]} == {version}
    assert len({samples[0].token_ids for samples in seen}) == 4
    root = engine.transfer.files.root  # type: ignore[attr-defined]
    assert len(list(root.iterdir())) == 2
    await engine.close()
    assert not list(root.iterdir())


async def test_a_request_in_flight_crosses_a_version(
    make: Make, server: str, bundle: ModelBundle, restored: None
) -> None:
    model = endless(bundle)
    engine = make(model, url=server)
    await engine.start()
    task = asyncio.ensure_future(collect(engine, ask(n=4, new=300)))
    await until_sampled(engine, 20)
    disturb(bundle, 1)
    await engine.update_weights(1)
    samples = (await task)["a"].samples
    for sample in samples:
        assert [version for version, _ in sample.spans] == [0, 1]
        assert sum(count for _, count in sample.spans) == len(sample.token_ids) == 300
        # the tokens said to be of the new weights are: but for keys and values of before, which are kept, they agree
    with torch.no_grad():
        logits = bundle.model(torch.tensor([PROMPT + samples[0].token_ids]), use_cache=False).logits[0]
    at = range(len(PROMPT) - 1, len(PROMPT) + 299)
    trained = logits.log_softmax(-1)[at, samples[0].token_ids]
    difference = (torch.tensor(samples[0].logprobs) - trained).abs()
    old = samples[0].spans[0][1]
    assert difference[:old].mean() > 2 * difference[-100:].mean()


async def test_a_stop_keeps_the_tokens_and_they_go_on(make: Make, server: str, bundle: ModelBundle) -> None:
    engine = make(endless(bundle), url=server)
    await engine.start()
    stop = asyncio.Event()
    task = asyncio.ensure_future(collect(engine, ask(n=3, new=400), stop=stop))
    await until_sampled(engine, 24)
    stop.set()
    began = time.monotonic()
    parts = (await task)["a"].samples
    assert time.monotonic() - began < 10
    assert [sample.finish for sample in parts] == ["aborted"] * 3
    assert all(0 < len(sample.token_ids) < 400 for sample in parts)
    done = (await collect(engine, ask(n=3, new=450, starts=parts)))["a"].samples
    for part, whole in zip(parts, done, strict=True):
        assert whole.token_ids[: len(part.token_ids)] == part.token_ids
        assert whole.logprobs[: len(part.token_ids)] == part.logprobs
        assert whole.finish == "length"
    # nothing is left running at the server
    await idle(engine)


async def idle(engine: VllmEngine) -> None:
    """Wait until nothing runs at the server."""
    async with asyncio.timeout(60):
        while True:
            metrics = await engine.client.get("/metrics", 30)
            lines = [line for line in metrics.splitlines() if line.startswith("vllm:num_requests_running")]
            if not sum(float(line.rsplit(" ", 1)[1]) for line in lines):
                return
            await asyncio.sleep(0.2)


async def test_closing_the_iterator_aborts_at_the_server(make: Make, server: str, bundle: ModelBundle) -> None:
    engine = make(endless(bundle), url=server)
    await engine.start()
    iterator = engine.generate([ask("a", n=1, new=1), ask("b", n=4, new=450)])
    assert (await anext(iterator)).key == "a"
    await iterator.aclose()  # type: ignore[attr-defined]
    await idle(engine)


async def test_a_killed_server_loses_no_token_and_is_started_again(
    make: Make, vllm: str, bundle: ModelBundle, restored: None
) -> None:
    """A server of the node's own, killed with kill -9 in the middle of a batch, under the scheduler."""
    engine = make(endless(bundle), command=vllm, args=["--max-num-seqs=8"])
    scheduler = Scheduler([engine])
    await engine.start()
    assert engine.server is not None
    first = engine.server.pid
    assert first is not None
    disturb(bundle, 1)
    await scheduler.update_weights(1)
    kept: list[Sample] = []
    told: list[str] = []
    generate = engine.generate

    async def watched(requests: Any, stop: Any = None) -> Any:
        try:
            async for group in generate(requests, stop):
                yield group
        except EngineFailed as failure:
            kept.extend(sample for group in failure.groups for sample in group.samples)
            told.append(str(failure))
            raise

    engine.generate = watched  # type: ignore[method-assign]
    task = asyncio.ensure_future(collect(scheduler, ask("a", n=2, new=200), ask("b", n=2, new=200, seed=9)))
    await until_sampled(engine, 40)
    os.kill(first, signal.SIGKILL)
    groups = await task
    assert "was ended by SIGKILL" in told[0]
    assert engine.server.pid != first
    assert sum(len(sample.token_ids) for sample in kept) >= 40
    whole = [sample for group in groups.values() for sample in group.samples]
    assert all(sample.finish == "length" and len(sample.token_ids) == 200 for sample in whole)
    beginnings = {sample.token_ids[:8] for sample in whole}
    assert {part.token_ids[:8] for part in kept if len(part.token_ids) >= 8} <= beginnings
    assert {sample.version for sample in whole} == {1}
    # the restarted server has the newest weights
    with torch.no_grad():
        logits = bundle.model(torch.tensor([PROMPT + whole[0].token_ids]), use_cache=False).logits[0]
    trained = logits.log_softmax(-1)[range(len(PROMPT) - 1, len(PROMPT) + 199), whole[0].token_ids]
    assert (torch.tensor(whole[0].logprobs) - trained).abs().max() < 1e-3
    began = time.monotonic()
    await engine.close()
    assert time.monotonic() - began < 10


async def test_a_wrong_address(make: Make) -> None:
    with pytest.raises(Unreachable, match=r"correct engine\.url"):
        await make(url="http://127.0.0.1:9", start_seconds=2).start()


async def test_another_model(make: Make, server: str, tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    other = load_model(str(tiny_model("qwen3", head_dim=32)), device="cpu", dtype="float32", models=tmp_path)
    with pytest.raises(WrongModel, match="start it with this node's model: vllm serve"):
        await make(other, url=server).start()


async def test_a_server_without_the_flags(make: Make, bare_server: str) -> None:
    with pytest.raises(MissingFlag, match="VLLM_SERVER_DEV_MODE=1"):
        await make(url=bare_server).start()


def test_a_node_trains_with_a_server(
    server: str, bundle: ModelBundle, tmp_path: Path, evenness: EnvironmentSpec
) -> None:
    """`shoal up --set rollout.engine=vllm --set engine.url=...`, as a user runs it."""
    home = Home(tmp_path / "home")
    home.init()
    home.found(make_manifest("interop", time.time() - 60, (evenness,), epoch_seconds=86400))
    home.config_path.write_text(
        f"""
[node]
threads = 1
[model]
path = "{bundle.directory}"
dtype = "float32"
[rollout]
group_size = 8
[train]
learning_rate = 1e-3
[swarm]
own_groups = 4
foreign_groups = 0
[network]
listen = "/ip4/127.0.0.1/tcp/0"
[web]
port = 0
[eval]
every = 0
tasks = 2
"""
    )
    sets = ("rollout.engine=vllm", f"engine.url={server}")
    command = [sys.executable, "-m", "node", "--home", str(home.path), "up", "--steps", "3"]
    for each in sets:
        command += ["--set", each]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TRAIN_SECONDS, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    history = History(home.database, time.time)
    steps = history.steps(0, 10)
    events = [event["message"] for event in history.events(0, 1000)]
    history.close()
    assert [step["step"] for step in steps] == [1, 2, 3]
    # rollouts of each step were sampled with the weights that the trainer had: the mismatch is rounding
    assert all(step["max_mismatch"] < 1e-3 for step in steps)
    assert any(f"the vLLM server at {server}" in message for message in events)
