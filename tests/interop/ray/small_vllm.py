"""Stands for `vllm` on a CPU: a tiny real model behind as much of vLLM's HTTP as the node uses.

`python small_vllm.py serve MODEL --uds SOCKET [--token-seconds=X]`. It computes true log-probabilities, so that the
node's own checks (same tokens, same log-probabilities as the trainer) hold or fail as with the real one.
"""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import torch
from aiohttp import web
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

MOST = 4
"""Tokens of one message."""


class SmallVllm:
    def __init__(self, model: Path, token_seconds: float) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(model)
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        self.served, self.token_seconds = str(model), token_seconds
        self.label = "as started"
        self.running = asyncio.Event()
        self.running.set()
        self.aborted: set[str] = set()

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/health", self.well),
            web.get("/version", self.version),
            web.get("/server_info", self.info),
            web.get("/weight_info", self.weight_info),
            web.get("/is_sleeping", self.is_sleeping),
            web.post("/pause", self.pause),
            web.post("/resume", self.resume),
            web.post("/collective_rpc", self.reload),
            web.post("/update_weight_version", self.name),
            web.post("/reset_prefix_cache", self.well),
            web.post("/abort_requests", self.abort),
            web.post("/tokenize", self.tokenize),
            web.post("/v1/completions", self.completions),
            web.post("/inference/v1/generate", self.generate),
        ]

    async def well(self, request: web.Request) -> web.Response:
        return web.json_response({})

    async def version(self, request: web.Request) -> web.Response:
        return web.json_response({"version": "0.32.0"})

    async def info(self, request: web.Request) -> web.Response:
        model = {
            "model": self.served,
            "max_model_len": 512,
            "dtype": "torch.float32",
            "logprobs_mode": "raw_logprobs",
            "enable_sleep_mode": False,
            "hf_overrides": {"tie_word_embeddings": False},
            "quantization": None,
        }
        config = {
            "model_config": model,
            "weight_transfer_config": None,
            "lora_config": None,
            "parallel_config": {"worker_cls": "vllm.v1.worker.cpu_worker.CPUWorker"},
        }
        return web.json_response({"vllm_config": config})

    async def weight_info(self, request: web.Request) -> web.Response:
        return web.json_response({"weight_version": self.label})

    async def is_sleeping(self, request: web.Request) -> web.Response:
        return web.json_response({"is_sleeping": not self.running.is_set()})

    async def pause(self, request: web.Request) -> web.Response:
        self.running.clear()
        return web.json_response({})

    async def resume(self, request: web.Request) -> web.Response:
        self.running.set()
        return web.json_response({})

    async def reload(self, request: web.Request) -> web.Response:
        body = await request.json()
        assert not self.running.is_set(), "weights are reloaded while the server samples"
        self.load(Path(body["kwargs"]["weights_path"]))
        return web.json_response({"results": [None]})

    def load(self, directory: Path) -> None:
        weights = {}
        for file in directory.glob("*.safetensors"):
            weights |= load_file(file)
        self.model.load_state_dict(weights, strict=False)

    async def name(self, request: web.Request) -> web.Response:
        self.label = (await request.json())["new_version"]
        return web.json_response({})

    async def abort(self, request: web.Request) -> web.Response:
        self.aborted |= set((await request.json())["request_ids"])
        return web.json_response({})

    async def tokenize(self, request: web.Request) -> web.Response:
        text = (await request.json())["prompt"]
        return web.json_response({"tokens": self.tokenizer.encode(text, add_special_tokens=False)})

    async def completions(self, request: web.Request) -> web.Response:
        if max((await request.json())["prompt"][0]) >= self.model.config.vocab_size:
            return web.json_response({"error": {"message": "Token id is out of vocabulary"}}, status=400)
        return web.json_response({"choices": []})

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        spans: list[dict[str, Any]] = []
        async for ids, logprobs, finish in self.tokens(body, spans):
            content = [{"token_id": i, "logprob": p} for i, p in zip(ids, logprobs, strict=True)]
            choice = {
                "token_ids": ids,
                "logprobs": {"content": content},
                "finish_reason": finish,
                "weight_versions": spans if finish else None,
            }
            await response.write(f"data: {json.dumps({'choices': [choice]})}\n\n".encode())
        return response

    async def tokens(
        self, body: dict[str, Any], spans: list[dict[str, Any]]
    ) -> AsyncIterator[tuple[list[int], list[float], str | None]]:
        sampling, name = body["sampling_params"], "generate-tokens-" + body["request_id"]
        draws = torch.Generator().manual_seed(sampling["seed"])
        context, ids, logprobs = list(body["token_ids"]), list[int](), list[float]()
        for at in range(sampling["max_tokens"]):
            await asyncio.sleep(self.token_seconds)
            await self.running.wait()
            if name in self.aborted:
                yield ids, logprobs, "abort"
                return
            with torch.no_grad():
                spread = torch.log_softmax(self.model(torch.tensor([context])).logits[0, -1], -1)
            drawn = int(torch.multinomial((spread / sampling["temperature"]).exp(), 1, generator=draws))
            context.append(drawn)
            ids.append(drawn)
            logprobs.append(float(spread[drawn]))
            if spans and spans[-1]["version"] == self.label:
                spans[-1]["end"] += 1
            else:
                spans.append({"version": self.label, "start": at, "end": at + 1})
            stops = drawn in sampling["stop_token_ids"]
            last = stops or at + 1 == sampling["max_tokens"]
            if last or len(ids) == MOST:
                yield ids, logprobs, ("stop" if stops else "length") if last else None
                ids, logprobs = [], []
            if last:
                return


if __name__ == "__main__":
    assert (sys.argv[1], sys.argv[3]) == ("serve", "--uds")
    slow = [argument.partition("=")[2] for argument in sys.argv if argument.startswith("--token-seconds=")]
    torch.set_num_threads(1)
    app = web.Application()
    app.add_routes(SmallVllm(Path(sys.argv[2]), float(slow[-1]) if slow else 0.0).routes())
    web.run_app(app, path=sys.argv[4], print=None)
