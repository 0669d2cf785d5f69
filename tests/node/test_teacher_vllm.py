"""A teacher over HTTP: a server that answers as vLLM does, with a real model behind it, and one that does not."""

import math
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from aiohttp import web

from node.config import Config
from node.device import Device
from node.interfaces import TeacherError, TrainGroup, TrainSequence
from node.models import ModelBundle, load_model
from node.training.distill import load_teacher, taught
from node.training.teacher_vllm import LOWEST, SEQUENCES_AT_ONCE


class Server:
    """/tokenize and /v1/completions with prompt_logprobs of vLLM 0.33, over a model in this process."""

    def __init__(self, bundle: ModelBundle) -> None:
        self.bundle, self.requests = bundle, list[dict[str, Any]]()
        self.answer: Any = None
        """Instead of the real one."""
        self.impossible = False

    async def tokenize(self, request: web.Request) -> web.Response:
        body = await request.json()
        ids = self.bundle.tokenizer.encode(body["prompt"], add_special_tokens=body["add_special_tokens"])
        return web.json_response({"count": len(ids), "max_model_len": 512, "tokens": ids})

    async def completions(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.requests.append(body)
        if self.answer is not None:
            return web.json_response(self.answer)
        choices = [{"index": i, "prompt_logprobs": self.score(row)} for i, row in enumerate(body["prompt"])]
        return web.json_response({"choices": choices[::-1]})

    def score(self, row: Sequence[int]) -> list[Any]:
        with torch.no_grad():
            scores = self.bundle.model(torch.tensor([row])).logits[0].log_softmax(-1)
        best = scores.argmax(-1).tolist()
        entries: list[Any] = [None]
        for at, token in enumerate(row[1:]):
            value = -9999.0 if self.impossible else float(scores[at, token])
            # the most likely token may be told of besides
            told = {best[at]: float(scores[at, best[at]]), token: value}
            entries.append({str(t): {"logprob": v, "rank": 1, "decoded_token": "?"} for t, v in told.items()})
        return entries


@pytest.fixture
def bundle(tiny_model: Callable[..., Path], tmp_path: Path) -> ModelBundle:
    torch.set_num_threads(1)
    return load_model(str(tiny_model("llama")), device="cpu", dtype="float32", models=tmp_path)


@pytest.fixture
async def server(bundle: ModelBundle) -> AsyncIterator[Server]:
    made = Server(bundle)
    app = web.Application()
    app.add_routes([web.post("/tokenize", made.tokenize), web.post("/v1/completions", made.completions)])
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    made.url = f"http://127.0.0.1:{runner.addresses[0][1]}"  # type: ignore[attr-defined]
    yield made
    await runner.cleanup()


@pytest.fixture
async def teacher(server: Any, bundle: ModelBundle) -> AsyncIterator[Any]:
    device = Device()
    made = await load_teacher(config(server.url), bundle, device)
    yield made
    await made.close()  # type: ignore[union-attr]
    device.close()


def config(url: str) -> Config:
    return Config.model_validate({"train": {"distill_teacher": url}})


def group(*tokens: Sequence[int]) -> TrainGroup:
    sequences = [TrainSequence(tuple(ids), (True,) * len(ids), 0.0, None) for ids in tokens]
    return TrainGroup((9, 8, 7), tuple(sequences), "own")


async def test_it_says_what_the_model_behind_it_thinks(server: Server, teacher: Any, bundle: ModelBundle) -> None:
    groups = [group([20, 21], [], [22]), group(*[[30 + i] for i in range(SEQUENCES_AT_ONCE)])]
    said = await teacher.logprobs(groups)
    assert [len(request["prompt"]) for request in server.requests] == [SEQUENCES_AT_ONCE, 2]
    assert server.requests[0]["prompt_logprobs"] == 0
    with torch.no_grad():
        scores = bundle.model(torch.tensor([[9, 8, 7, 20, 21]])).logits[0].log_softmax(-1)
    assert said[0][0] == pytest.approx([float(scores[2, 20]), float(scores[3, 21])], abs=1e-5)
    assert [len(values) for values in said[0]] == [2, 0, 1]
    assert all(len(values) == 1 and math.isfinite(values[0]) for values in said[1])
    (first,) = await taught(groups[:1], teacher)
    assert first.sequences[0].teacher_logprobs == pytest.approx(said[0][0])


async def test_minus_infinity_is_a_number(server: Server, teacher: Any) -> None:
    server.impossible = True
    assert await teacher.logprobs([group([20, 21])]) == [[(LOWEST, LOWEST)]]


@pytest.mark.parametrize(
    "answer",
    [
        {"choices": []},
        {"choices": [{"index": 0}]},
        {"choices": [{"index": 0, "prompt_logprobs": None}]},
        {"choices": [{"index": 0, "prompt_logprobs": [None, None, None, {"99": {"logprob": -1.0}}]}]},
        {"choices": [{"index": 0, "prompt_logprobs": [{"20": {"logprob": -1.0}}]}]},
        ["no choices"],
        "no JSON object",
    ],
)
async def test_another_answer_is_refused(server: Server, teacher: Any, answer: Any) -> None:
    server.answer = answer
    with pytest.raises(TeacherError, match=r"127.0.0.1:\d+/v1/completions did not answer with prompt_logprobs"):
        await teacher.logprobs([group([20])])


async def test_another_tokenizer_is_refused(
    server: Any, bundle: ModelBundle, tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    other = load_model(str(tiny_model("llama", ascii_only=True)), device="cpu", dtype="float32", models=tmp_path)
    with pytest.raises(TeacherError, match=r"another tokenizer than tiny-llama-True.* ; set train.distill_teacher"):
        await load_teacher(config(server.url), other, Device())


async def test_a_server_that_is_not_there_or_not_vllm(server: Any, bundle: ModelBundle) -> None:
    with pytest.raises(TeacherError, match=r"127.0.0.1:9/tokenize.* ; is it a vLLM server, and up\?"):
        await load_teacher(config("http://127.0.0.1:9"), bundle, Device())
    with pytest.raises(TeacherError, match=r"404.* ; is it a vLLM server, and up\?"):
        await load_teacher(config(f"{server.url}/elsewhere"), bundle, Device())
