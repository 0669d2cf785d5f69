"""A server that speaks vLLM's HTTP as far as the client uses it, with weights that are a number.

Token i of a stream is FIRST + i, its log-probability is minus the number of the weights, minus 1. It records what it
was asked, and fails on demand.
"""

import asyncio
import base64
import io
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from aiohttp import web

from node.config import Config, EngineConfig
from node.device import Device
from node.engines.vllm import VllmEngine
from node.engines.vllm_adapters import AdapterTransfer
from node.engines.vllm_client import Address, VllmClient
from node.engines.vllm_transfer import FileTransfer
from node.engines.vllm_upkeep import Upkeep
from node.engines.vllm_weights import WeightFiles
from node.models import ModelBundle, load_model

FIRST = 10
STOP = 1
PREFIX = "generate-tokens-"


class FakeVllm:
    """One server. Its flags can be changed at any time."""

    def __init__(self, tokenizer: Any, vocabulary: int) -> None:
        self.tokenizer, self.vocabulary = tokenizer, vocabulary
        self.dev_mode = self.scale_out = self.sleep_mode = True
        self.logprobs_mode = "raw_logprobs"
        self.overrides: dict[str, Any] = {"tie_word_embeddings": False}
        self.quantization: str | None = None
        self.lora_config: dict[str, Any] | None = None
        self.runtime_lora = True
        self.adapters: dict[str, int] = {}
        """Their weights, by name."""
        self.token_seconds = 0.0
        self.ends: dict[int, int] = {}
        """Length of an answer by its seed; others run to their budget."""
        self.calls: list[str] = []
        self.bodies: list[dict[str, Any]] = []
        self.weights, self.label = 0, "default"
        self.asleep: set[str] = set()
        self.dies_after: int | None = None
        """Tokens of all streams after which it breaks off every connection."""
        self.fails: set[str] = set()
        """Paths that answer 500."""
        self.silent = self.locked = False
        self.ignores_aborts = False
        self.running = asyncio.Event()
        self.running.set()
        self.aborted: set[str] = set()
        self.streams = 0
        """Open now."""
        self.sent = 0
        self.url = ""
        self.layers = 0
        """Of which it tells the experts: (token + layer) % 8 and the next one."""

    # -- control -----------------------------------------------------------------------------------------------

    async def handle(self, request: web.Request) -> web.StreamResponse:
        path = request.path
        if self.locked and path.startswith("/v1/"):
            return web.json_response({"error": "Unauthorized"}, status=401)
        routes = {
            "/health": ("GET", self._well),
            "/version": ("GET", self._version),
            "/tokenize": ("POST", self._tokenize),
            "/v1/completions": ("POST", self._completions),
        }
        if self.scale_out:
            routes["/inference/v1/generate"] = ("POST", self._generate)
        if self.lora_config and self.runtime_lora:
            routes |= {
                "/v1/models": ("GET", self._models),
                "/v1/load_lora_adapter": ("POST", self._load_adapter),
                "/v1/unload_lora_adapter": ("POST", self._unload_adapter),
            }
        if self.dev_mode:
            routes |= {
                "/server_info": ("GET", self._info),
                "/weight_info": ("GET", self._weight_info),
                "/is_sleeping": ("GET", self._is_sleeping),
                "/pause": ("POST", self._pause),
                "/resume": ("POST", self._resume),
                "/collective_rpc": ("POST", self._reload),
                "/update_weight_version": ("POST", self._label),
                "/reset_prefix_cache": ("POST", self._well),
                "/abort_requests": ("POST", self._abort),
                "/sleep": ("POST", self._sleep),
                "/wake_up": ("POST", self._wake),
            }
        if path not in routes:
            return web.Response(status=404, text='{"detail":"Not Found"}')
        method, handler = routes[path]
        if request.method != method:
            return web.Response(status=405)
        if path in self.fails:
            return web.json_response({"error": {"message": f"{path} failed inside"}}, status=500)
        if method == "POST":
            query = "&".join(f"{key}={value}" for key, value in request.query.items())
            self.calls.append(f"{path}?{query}" if query else path)
        return await handler(request)

    async def _well(self, request: web.Request) -> web.Response:
        return web.json_response({"success": True})

    async def _version(self, request: web.Request) -> web.Response:
        return web.json_response({"version": "0.32.0"})

    async def _info(self, request: web.Request) -> web.Response:
        model = {
            "model": "/models/served",
            "max_model_len": 400,
            "dtype": "torch.float32",
            "logprobs_mode": self.logprobs_mode,
            "enable_sleep_mode": self.sleep_mode,
            "hf_overrides": self.overrides,
            "quantization": self.quantization,
        }
        config = {
            "model_config": model,
            "weight_transfer_config": None,
            "lora_config": self.lora_config,
            "parallel_config": {"worker_cls": "vllm.v1.worker.cpu_worker.CPUWorker"},
        }
        return web.json_response({"vllm_config": config})

    async def _tokenize(self, request: web.Request) -> web.Response:
        text = (await request.json())["prompt"]
        return web.json_response({"tokens": self.tokenizer.encode(text, add_special_tokens=False)})

    async def _weight_info(self, request: web.Request) -> web.Response:
        return web.json_response({"weight_version": self.label})

    async def _is_sleeping(self, request: web.Request) -> web.Response:
        return web.json_response({"is_sleeping": bool(self.asleep) or not self.running.is_set()})

    async def _pause(self, request: web.Request) -> web.Response:
        self.running.clear()
        return web.json_response({})

    async def _resume(self, request: web.Request) -> web.Response:
        self.running.set()
        return web.json_response({})

    async def _reload(self, request: web.Request) -> web.Response:
        body = await request.json()
        assert body["method"] == "reload_weights"
        assert not self.running.is_set() or self.asleep, "weights are reloaded while the server samples"
        assert "weights" not in self.asleep
        self.weights = int((Path(body["kwargs"]["weights_path"]) / "number").read_text())
        return web.json_response({"results": [None]})

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": name} for name in ("served", *self.adapters)]})

    async def _load_adapter(self, request: web.Request) -> web.Response:
        body = await request.json()
        if body["lora_name"] in self.adapters:
            return web.json_response({"error": {"message": "has already been loaded"}}, status=400)
        self.adapters[body["lora_name"]] = int((Path(body["lora_path"]) / "number").read_text())
        return web.Response(text="Success: LoRA adapter added successfully.")

    async def _unload_adapter(self, request: web.Request) -> web.Response:
        del self.adapters[(await request.json())["lora_name"]]
        return web.Response(text="Success: LoRA adapter removed successfully.")

    async def _label(self, request: web.Request) -> web.Response:
        self.label = (await request.json())["new_version"]
        return web.json_response({"success": True})

    async def _abort(self, request: web.Request) -> web.Response:
        if not self.ignores_aborts:
            self.aborted |= set((await request.json())["request_ids"])
        return web.json_response({})

    async def _sleep(self, request: web.Request) -> web.Response:
        self.asleep = {"weights", "kv_cache"}
        self.running.clear()
        return web.json_response({})

    async def _wake(self, request: web.Request) -> web.Response:
        self.asleep -= set(request.query.getall("tags", ["weights", "kv_cache"]))
        if not self.asleep:
            self.running.set()
        return web.json_response({})

    # -- rollouts ----------------------------------------------------------------------------------------------

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        name, sampling = PREFIX + body["request_id"], body["sampling_params"]
        if body.get("model") not in (None, *self.adapters):
            return web.json_response({"error": {"message": "The model does not exist."}}, status=404)
        constant = self.adapters.get(body.get("model"))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        self.streams += 1
        versions: list[dict[str, Any]] = []
        try:
            async for ids, logprobs, finish in self._tokens(request, name, sampling, versions, constant):
                content = [{"token_id": i, "logprob": p} for i, p in zip(ids, logprobs, strict=True)]
                choice = {
                    "token_ids": ids,
                    "logprobs": {"content": content},
                    "finish_reason": finish,
                    "weight_versions": versions if finish else None,
                    "routed_experts": self._experts(len(body["token_ids"]) + versions[-1]["end"]) if finish else None,
                }
                await response.write(f"data: {json.dumps({'choices': [choice]})}\n\n".encode())
            await response.write(b"data: [DONE]\n\n")
        finally:
            self.streams -= 1
        return response

    def _experts(self, tokens: int) -> str | None:
        if not self.layers:
            return None
        first = np.add.outer(np.arange(tokens - 1), np.arange(self.layers))
        file = io.BytesIO()
        np.save(file, (np.stack([first, first + 1], -1) % 8).astype(np.uint8))
        return base64.b64encode(file.getvalue()).decode()

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if max(body["prompt"][0]) >= self.vocabulary:
            return web.json_response({"error": {"message": "Token id is out of vocabulary"}}, status=400)
        if not body.get("stream"):
            return web.json_response({"choices": []})
        self.bodies.append(body)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        name = f"cmpl-{request.headers['X-Request-Id']}-0"
        assert body["logprobs"] == 0
        async for ids, logprobs, finish in self._tokens(request, name, body, []):
            choice = {"token_ids": ids, "logprobs": {"token_logprobs": logprobs}, "finish_reason": finish}
            await response.write(f"data: {json.dumps({'choices': [choice]})}\n\n".encode())
        return response

    async def _tokens(
        self,
        request: web.Request,
        name: str,
        sampling: dict[str, Any],
        versions: list[dict[str, Any]],
        constant: int | None = None,
    ) -> AsyncIterator[tuple[list[int], list[float], str | None]]:
        """In messages of at most 4; `constant`: by these adapters to the end."""
        budget = sampling["max_tokens"]
        length = min(budget, self.ends.get(sampling["seed"], budget))
        ids: list[int] = []
        logprobs: list[float] = []
        for at in range(length):
            await asyncio.sleep(self.token_seconds)
            while not self.running.is_set() or self.silent:  # noqa: ASYNC110 - two things at once
                await asyncio.sleep(0.005)
            if name in self.aborted:
                yield ids, logprobs, "abort"
                return
            last = at + 1 == length
            ids.append(STOP if last and length < budget else FIRST + at % 50)
            logprobs.append(-1.0 - (self.weights if constant is None else constant))
            if versions and versions[-1]["version"] == self.label:
                versions[-1]["end"] += 1
            else:
                versions.append({"version": self.label, "start": at, "end": at + 1})
            self.sent += 1
            if self.dies_after is not None and self.sent >= self.dies_after:
                assert request.transport is not None
                request.transport.abort()
                await asyncio.sleep(5)
            if len(ids) == 4 or last:
                yield ids, logprobs, ("stop" if ids[-1] == STOP else "length") if last else None
                ids, logprobs = [], []


@asynccontextmanager
async def serving(fake: FakeVllm, port: int = 0) -> AsyncIterator[FakeVllm]:
    """Run it on a free port of the loopback."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", fake.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", port)
    await site.start()
    assert site._server is not None
    fake.url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"  # type: ignore[attr-defined]
    try:
        yield fake
    finally:
        await runner.cleanup()


@pytest.fixture(scope="session")
def bundle(tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> ModelBundle:
    torch.set_num_threads(1)
    return load_model(str(tiny_model("llama")), device="cpu", dtype="float32", models=tmp_path_factory.getbasetemp())


@pytest.fixture
def serve() -> Any:
    return serving


@pytest.fixture
async def fake(bundle: ModelBundle) -> AsyncIterator[FakeVllm]:
    async with serving(FakeVllm(bundle.tokenizer, bundle.vocabulary_size)) as server:
        yield server


class Made:
    """An engine on a fake server; its weights are the number `number`."""

    def __init__(
        self,
        fake: FakeVllm,
        bundle: ModelBundle,
        root: Path,
        *,
        sleep: bool = False,
        lora_rank: int = 0,
        alone: bool = True,
        **config: Any,
    ) -> None:
        self.number = 0
        self.fake = fake
        self.said: list[str] = []
        settings = EngineConfig(url=fake.url, **{"start_seconds": 5.0, "stall_seconds": 5.0, **config})
        device = Device()
        if lora_rank:
            whole = Config.model_validate({"train": {"lora_rank": lora_rank}})
            transfer: FileTransfer | AdapterTransfer = AdapterTransfer(root, device, bundle, whole)
            transfer.files.export = self._export
        else:
            transfer = FileTransfer(WeightFiles(root, self._export), device)
        self.files = transfer.files
        self.engine = VllmEngine(
            Upkeep(
                VllmClient(Address(fake.url)),
                bundle,
                device,
                transfer,
                settings,
                sleep=sleep,
                say=self.said.append,
                alone=alone,
            )
        )
        device.make_room = self.engine.rest

    def _export(self, directory: Path) -> None:
        (directory / "number").write_text(str(self.number))
        (directory / "model.safetensors").write_bytes(b"weights %d" % self.number)

    async def update(self, number: int, version: int) -> None:
        self.number = number
        await self.engine.update_weights(version)


@pytest.fixture
async def make(fake: FakeVllm, bundle: ModelBundle, tmp_path: Path) -> AsyncIterator[Callable[..., Made]]:
    """Makes engines on the fake server, closed at the end."""
    made: list[Made] = []

    def build(**options: Any) -> Made:
        made.append(Made(fake, bundle, tmp_path / f"weights-{len(made)}", **options))
        return made[-1]

    yield build
    for each in made:
        await each.engine.close()
        each.engine.device.close()
