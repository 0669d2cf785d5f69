"""Adapters at a fake vLLM server: loaded beside the older ones, named by requests, unloaded when nobody names them."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from node.config import Config
from node.device import Device
from node.engines.choose import make_engine, server_plan
from node.engines.vllm import VllmEngine
from node.engines.vllm_adapters import AdapterTransfer
from node.engines.vllm_client import VllmClient
from node.engines.vllm_probe import EngineSetupError, lora_slot
from node.hardware import EngineChoice, Gpu, Machine
from node.interfaces import PromptRequest, Sample, SampledGroup
from node.memory_plan import MemoryPlan
from node.models import ModelBundle, load_model
from node.preflight import Setup
from node.training.local import LocalTrainer

Make = Callable[..., Any]
PROMPT = tuple(range(40, 60))


def ask(key: str = "a", new: int = 2) -> PromptRequest:
    return PromptRequest(key, PROMPT, 1, new, 1.0, 5)


async def collect(engine: VllmEngine, *requests: PromptRequest) -> dict[str, SampledGroup]:
    return {group.key: group async for group in engine.generate(requests)}


def ids(count: int) -> tuple[int, ...]:
    return tuple(10 + at % 50 for at in range(count))


@pytest.fixture
async def made(make: Make, fake: Any) -> Any:
    """An engine that has been started with adapters of version 0."""
    fake.lora_config, fake.overrides = {"max_lora_rank": 8, "max_loras": 2}, {}
    one = make(lora_rank=4)
    await one.engine.start()
    return one


async def test_requests_name_the_newest_adapters(made: Any, fake: Any) -> None:
    """And nothing is paused for them: only what is in flight would wait."""
    fake.calls.clear()
    await made.update(5, version=1)
    assert fake.calls == ["/v1/load_lora_adapter", "/update_weight_version"]
    groups = await collect(made.engine, ask())
    assert groups["a"].samples == (Sample(ids(2), (-6.0, -6.0), "length", 1),)
    assert fake.bodies[-1]["model"] == made.files.latest.directory.name
    assert fake.weights == 0, "the base model is not touched"


async def test_old_adapters_go_and_their_names_never_return(made: Any, fake: Any) -> None:
    seen = set(fake.adapters)
    for version in range(1, 6):
        await made.update(version, version)
        assert len(fake.adapters) == 2, "the newest, and the one before for who is just asking"
        seen |= set(fake.adapters)
    assert len(seen) == 6
    assert len(list(made.files.root.iterdir())) == 3, "a request that waits may have its adapters read again"


async def test_a_request_in_flight_ends_with_what_it_began_with(made: Any, fake: Any) -> None:
    """The server labels its tokens with the newest version, which is not what they were sampled by."""
    fake.token_seconds = 0.01
    task = asyncio.ensure_future(collect(made.engine, ask(new=40)))
    async with asyncio.timeout(5):
        while fake.sent < 8:  # noqa: ASYNC110 - it watches a server
            await asyncio.sleep(0.002)
    await made.update(3, version=1)
    assert fake.sent < 40
    (sample,) = (await task)["a"].samples
    assert sample == Sample(ids(40), (-1.0,) * 40, "length", 0)
    (sample,) = (await collect(made.engine, ask()))["a"].samples
    assert sample == Sample(ids(2), (-4.0, -4.0), "length", 1)


async def test_requests_that_begin_and_end_around_a_load_are_labelled_by_what_sampled_them(
    made: Any, fake: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is paused, so one may end while the server's new label is not confirmed yet, and another begin."""
    fake.token_seconds = 0.005
    labelled, answered = asyncio.Event(), asyncio.Event()
    post = VllmClient.post

    async def slow(client: VllmClient, path: str, *others: Any, **more: Any) -> None:
        await post(client, path, *others, **more)
        if path == "/update_weight_version":
            labelled.set()
            await answered.wait()

    monkeypatch.setattr(VllmClient, "post", slow)
    old = asyncio.ensure_future(collect(made.engine, ask(new=40)))
    async with asyncio.timeout(5):
        while fake.sent < 8:  # noqa: ASYNC110 - it watches a server
            await asyncio.sleep(0.002)
        update = asyncio.ensure_future(made.update(3, version=1))
        await labelled.wait()
        assert fake.sent < 40
        new = await collect(made.engine, ask("b"))
        assert (await old)["a"].samples == (Sample(ids(40), (-1.0,) * 40, "length", 0),)
        assert new["b"].samples == (Sample(ids(2), (-4.0, -4.0), "length", 1),)
        answered.set()
        await update


async def test_a_server_restarted_in_between_gets_them_again(made: Any, fake: Any) -> None:
    await made.update(4, version=2)
    fake.adapters.clear()
    fake.label = "default"
    groups = await collect(made.engine, ask())
    assert groups["a"].samples == (Sample(ids(2), (-5.0, -5.0), "length", 2),)


async def test_a_sleep_keeps_the_base_model(make: Make, fake: Any) -> None:
    """It would not be had again from the trainer."""
    fake.lora_config = {"max_lora_rank": 8}
    made = make(lora_rank=4, sleep=True)
    await made.engine.start()
    await made.engine.device.run(lambda: None)  # what the trainer does
    assert fake.calls[-1] == "/sleep?level=1"
    await made.update(2, version=1)
    groups = await collect(made.engine, ask())
    assert groups["a"].samples == (Sample(ids(2), (-3.0, -3.0), "length", 1),)
    await made.engine.device.run(lambda: None)
    groups = await collect(made.engine, ask("b"))  # the same adapters, which are still there
    assert groups["b"].samples == (Sample(ids(2), (-3.0, -3.0), "length", 1),)


async def test_a_server_without_versions_is_asked_for_them_too(make: Make, fake: Any) -> None:
    fake.lora_config, fake.scale_out = {"max_lora_rank": 8}, False
    made = make(lora_rank=4)
    await made.engine.start()
    await collect(made.engine, ask())
    assert fake.bodies[-1]["model"] == made.files.latest.directory.name


# -- what it is started with, and given ----------------------------------------------------------------------


def settings(**sections: Any) -> Config:
    return Config.model_validate({"train": {"lora_rank": 12}, **sections})


def test_arguments_of_a_server(bundle: ModelBundle, tmp_path: Path) -> None:
    cpu, gpu = Machine(1 << 30, (), "vllm"), Machine(1 << 30, (Gpu("g", 1 << 34),), "vllm")
    plan = server_plan(settings(), bundle, cpu, share=0.9, sleep=False, home=tmp_path)
    assert {"--enable-lora", "--max-lora-rank=16", "--max-loras=2", "--max-cpu-loras=3"} <= set(plan.arguments)
    assert not [argument for argument in plan.arguments if "hf-overrides" in argument], "the base is never reloaded"
    assert ("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "True") in plan.environment
    late = settings(rollout={"policy": "asynchronous", "max_staleness": 3}, engine={"quantization": "fp8"})
    plan = server_plan(late, bundle, gpu, share=0.9, sleep=False, home=tmp_path)
    assert {"--max-loras=5", "--quantization=fp8"} <= set(plan.arguments)
    plan = server_plan(Config(), bundle, gpu, share=0.9, sleep=False, home=tmp_path)
    assert not [argument for argument in plan.arguments if "lora" in argument or "quantization" in argument]


@pytest.mark.parametrize(("rank", "slot"), [(1, 8), (8, 8), (9, 16), (129, 256), (512, 512)])
def test_ranks_that_vllm_knows(rank: int, slot: int) -> None:
    assert lora_slot(rank) == slot


def test_the_engine_that_is_made(bundle: ModelBundle, tmp_path: Path) -> None:
    machine = Machine(1 << 34, (), "vllm")
    setup = Setup(machine, EngineChoice("vllm", ""), MemoryPlan((), (), (), False, 1 << 34, ""))

    def made(config: Config) -> Any:
        return make_engine(setup, config, bundle, Device(), home=tmp_path, peer_id="x" * 30, say=print)

    engine = made(settings(engine={"url": "http://gpu-server:8000"}))
    assert isinstance(engine.transfer, AdapterTransfer)
    with pytest.raises(
        EngineSetupError, match=r"engine\.quantization = fp8 needs a GPU, .*set engine\.quantization to"
    ):
        made(settings(engine={"quantization": "fp8"}))


def test_what_a_server_is_given(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    """Adapters as the model computes with them, in peft's layout, and no weights of the base model."""
    pytest.importorskip("peft", reason="needs shoal[lora]")
    bundle = load_model(str(tiny_model("llama")), device="cpu", dtype="bfloat16", models=tmp_path)
    config = settings()
    LocalTrainer(bundle, config.train, dumps=tmp_path)
    device = Device()
    published = AdapterTransfer(tmp_path / "w", device, bundle, config).files.publish(0)
    device.close()
    weights = load_file(published.directory / "adapter_model.safetensors")
    assert len(weights) == 3 * 7 * 2
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}
    assert weights["base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"].shape == (12, 48)
    assert '"r": 12' in (published.directory / "adapter_config.json").read_text()
