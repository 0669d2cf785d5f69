"""Servers that are not fit: each error says what to change."""

import asyncio
import re
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web

from node.config import Config
from node.engines.vllm_client import Address, VllmClient
from node.engines.vllm_probe import EngineSetupError, MissingFlag, Unreachable, WrongModel, wait_until_healthy
from node.making import wait_for_server
from node.progress import Progress

Make = Callable[..., Any]


async def test_a_fit_server_says_what_it_is(make: Make) -> None:
    made = make()
    await made.engine.start()
    facts = made.engine.facts
    assert (facts.served, facts.context, facts.dtype) == ("/models/served", 400, "float32")


async def test_nothing_answers() -> None:
    client = VllmClient(Address("http://127.0.0.1:9"))
    said: list[str] = []
    with pytest.raises(Unreachable, match=r"no vLLM server answers at http://127.0.0.1:9 after 1 s .*engine\.url"):
        await wait_until_healthy(client, 1.0, said.append)
    assert said
    await client.close()


async def test_it_waits_for_a_server_that_is_starting(fake: Any, make: Make) -> None:
    made = make()
    fake.fails.add("/health")  # 500, as while the model loads
    start = asyncio.ensure_future(made.engine.start())
    await asyncio.sleep(0.1)
    fake.fails.clear()
    await start
    assert "waiting for the vLLM server" in made.said[0]


async def test_a_node_loads_nothing_before_a_server_elsewhere_is_up(fake: Any) -> None:
    def node(**rollout: str) -> Any:
        config = Config.model_validate({"engine": {"url": fake.url}, "rollout": rollout})
        progress = Progress(time.time, 60.0)
        return SimpleNamespace(config=config, large=None, progress=progress, starting=said.append)

    said: list[str] = []
    fake.fails.add("/health")
    waiting = asyncio.ensure_future(wait_for_server(node()))
    await asyncio.sleep(0.1)
    assert not waiting.done()
    assert "waiting for the vLLM server" in said[0]
    await wait_for_server(node(engine="transformers"))  # which has no use for it
    fake.fails.clear()
    await waiting


async def test_something_else_answers() -> None:
    for answers, why in ((lambda: web.Response(status=404), "404"), (lambda: web.Response(text="hello"), "/version")):

        async def handle(request: web.Request, answer: Any = answers) -> web.Response:
            return answer()  # type: ignore[no-any-return]

        app = web.Application()
        app.router.add_route("*", "/{path:.*}", handle)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]
        client = VllmClient(Address(f"http://127.0.0.1:{port}"))
        with pytest.raises(Unreachable, match=f"is no vLLM server .*{why}.*correct engine.url"):
            await wait_until_healthy(client, 1.0, lambda said: None)
        await client.close()
        await runner.cleanup()


@pytest.mark.parametrize(
    ("change", "options", "words"),
    [
        ({"dev_mode": False}, {}, "VLLM_SERVER_DEV_MODE=1"),
        ({"logprobs_mode": "processed_logprobs"}, {}, "--logprobs-mode raw_logprobs"),
        ({"sleep_mode": False}, {"sleep": True}, "--enable-sleep-mode"),
        ({}, {"transfer": "nccl"}, '--weight-transfer-config \'{"backend":"nccl"}\''),
        ({"overrides": {}}, {}, "--hf-overrides '{\"tie_word_embeddings\": false}'"),
        ({}, {"lora_rank": 4}, "lacks adapters of rank 4; start it with --enable-lora --max-lora-rank 8, or set train"),
        ({"lora_config": {"max_lora_rank": 16}}, {"lora_rank": 24}, "--enable-lora --max-lora-rank 32"),
        (
            {"lora_config": {"max_lora_rank": 16}, "runtime_lora": False},
            {"lora_rank": 4},
            "environment variable VLLM_ALLOW_RUNTIME_LORA_UPDATING=True",
        ),
        ({}, {"quantization": "fp8"}, "start it with --quantization fp8, or set engine.quantization to none"),
        ({"quantization": "fp8"}, {}, "rounded to fp8; start it with another --quantization or none, or set engine."),
    ],
)
async def test_a_missing_flag_is_named(
    make: Make, fake: Any, change: dict[str, Any], options: dict[str, Any], words: str
) -> None:
    for name, value in change.items():
        setattr(fake, name, value)
    with pytest.raises(MissingFlag, match=re.escape(words)):
        await make(**options).engine.start()


async def test_another_tokenizer(make: Make, fake: Any) -> None:
    class Other:
        def encode(self, text: str, **options: Any) -> list[int]:
            return list(text.encode())

    fake.tokenizer = Other()
    with pytest.raises(WrongModel, match=r"serves /models/served, whose tokenizer is not that of .*vllm serve"):
        await make().engine.start()


@pytest.mark.parametrize(("more", "words"), [(8, "larger"), (-8, "smaller")])
async def test_another_vocabulary(make: Make, fake: Any, more: int, words: str) -> None:
    fake.vocabulary += more
    with pytest.raises(WrongModel, match=f"whose vocabulary is {words} than the"):
        await make().engine.start()


async def test_a_server_left_asleep_is_woken(make: Make, fake: Any) -> None:
    fake.asleep = {"weights", "kv_cache"}
    fake.running.clear()
    await make().engine.start()
    assert not fake.asleep
    assert fake.running.is_set()


async def test_a_server_with_a_key(make: Make, fake: Any) -> None:
    fake.locked, fake.scale_out = True, False
    with pytest.raises(EngineSetupError, match=r"refuses \(401 Unauthorized\); start it without --api-key"):
        await make().engine.start()
