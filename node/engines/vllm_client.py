"""What a vLLM server is asked over HTTP: health, rollouts as streams of tokens, and control.

Rollouts come from /inference/v1/generate (server flag --enable-scale-out), which says for each token by which weights
it was sampled, or from /v1/completions, which does not. Control (pause, weights, cache) needs the server's development
mode, which has no authentication of its own: such a server must be reachable from nowhere else.
"""

import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import aiohttp

STREAM_TOKENS = 8
"""Tokens of one message of a stream: fewer cost the server time, more are lost when it dies."""
CONNECT_SECONDS = 10.0
LINE_BYTES = 1 << 20
"""Most bytes of one message of a stream."""


class ServerGone(Exception):
    """The server does not answer, died over an answer, or failed inside."""


class ServerRefused(Exception):
    """The server understood and said no (HTTP 4xx); the message has its words."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server listens."""

    url: str
    """http://host:port, without a path of an endpoint."""
    socket: str = ""
    """Path of a Unix socket; the host of `url` is then only a name."""

    def __str__(self) -> str:
        return f"unix:{self.socket}" if self.socket else self.url


@dataclass(frozen=True, slots=True)
class Ask:
    """One sample to be streamed."""

    name: str
    """Names the request to the server, for an abort."""
    token_ids: tuple[int, ...]
    """Prompt, and the tokens sampled before."""
    max_tokens: int
    temperature: float
    seed: int
    stop_ids: tuple[int, ...]
    salt: str
    """Only requests of the same salt share cached keys and values: those of old weights are never taken up."""
    model: str = ""
    """Name of the adapters to sample with; empty: none."""


@dataclass(frozen=True, slots=True)
class Piece:
    """One message of a stream."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: Literal["stop", "length", "abort"] | None
    spans: tuple[tuple[str, int], ...] = ()
    """(name of weights, tokens) of the whole sample, with the last message of a server that tells."""
    routed: str = ""
    """`routed_experts` of prompt and sample, with the last message of a server that was started with the flag."""


class VllmClient:
    """HTTP to one server. Raises ServerGone and ServerRefused from every call."""

    def __init__(self, address: Address, line_bytes: int = LINE_BYTES) -> None:
        self.address, self.line_bytes = address, line_bytes
        self.versions_told = True
        """Whether rollouts come from /inference/v1/generate."""
        self._session: aiohttp.ClientSession | None = None

    # -- plain calls -------------------------------------------------------------------------------------------

    async def get(self, path: str, seconds: float = CONNECT_SECONDS, **query: str) -> Any:
        return await self._call("GET", path, seconds, params=query)

    async def post(
        self, path: str, body: Mapping[str, Any] | None = None, seconds: float = CONNECT_SECONDS, **query: str
    ) -> Any:
        return await self._call("POST", path, seconds, json=body, params=query)

    async def has(self, path: str) -> bool:
        """Whether the server has a POST endpoint: asked with GET it says 405, and 404 where there is none."""
        try:
            await self.get(path)
        except ServerRefused as refused:
            status = str(refused)[:3]
            if status not in ("404", "405"):
                raise
            return status == "405"
        return True

    async def _call(self, method: str, path: str, seconds: float, **options: Any) -> Any:
        """The answer's JSON, or its text where it is none."""
        timeout = aiohttp.ClientTimeout(total=seconds, sock_connect=min(seconds, CONNECT_SECONDS))
        try:
            async with self._open().request(method, self._url(path), timeout=timeout, **options) as response:
                text = await response.text()
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise ServerGone(self._told(path, error, seconds)) from error
        self._check(response.status, text)
        try:
            return json.loads(text)
        except ValueError:
            return text

    # -- rollouts ----------------------------------------------------------------------------------------------

    async def sample(self, ask: Ask) -> AsyncGenerator[Piece, None]:
        """Stream one sample; the last piece has a finish reason. Closing it early aborts the request at the server."""
        path, body, parse = (
            ("/inference/v1/generate", generate_body(ask), generate_piece)
            if self.versions_told
            else ("/v1/completions", completion_body(ask), completion_piece)
        )
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS)
        finished = False
        try:
            async with self._open().post(
                self._url(path), json=body, timeout=timeout, headers={"X-Request-Id": ask.name}
            ) as response:
                if response.status != 200:
                    self._check(response.status, await response.text())
                async for line in response.content:
                    if not line.startswith(b"data: {"):
                        continue
                    message = json.loads(line[6:])
                    if "error" in message:
                        raise ServerGone(f"{self.address}: {_words(message)}")
                    if message.get("choices"):
                        piece = parse(message["choices"][0])
                        finished = finished or piece.finish is not None
                        yield piece
        except (aiohttp.ClientError, OSError, ValueError, KeyError, TypeError) as error:
            raise ServerGone(self._told(path, error)) from error
        if not finished:
            raise ServerGone(f"{self.address}: a stream ended early")

    async def abort(self, names: Sequence[str]) -> None:
        """End requests; their streams then finish with 'abort' and the tokens not sent yet."""
        # the server puts this before every name, and says that all is well about names it does not know
        form = "generate-tokens-{}" if self.versions_told else "cmpl-{}-0"
        await self.post("/abort_requests", {"request_ids": [form.format(name) for name in names]})

    # -- plumbing ----------------------------------------------------------------------------------------------

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None or self._session.closed:
            connector = (
                aiohttp.UnixConnector(self.address.socket, limit=0)
                if self.address.socket
                else aiohttp.TCPConnector(limit=0)
            )
            self._session = aiohttp.ClientSession(connector=connector, read_bufsize=self.line_bytes, trust_env=False)
        return self._session

    def _url(self, path: str) -> str:
        return self.address.url.rstrip("/") + path

    def _told(self, path: str, error: Exception, seconds: float | None = None) -> str:
        what = str(error) or type(error).__name__
        if isinstance(error, TimeoutError):
            what = f"no answer within {seconds or CONNECT_SECONDS:.0f} s"
        return f"{self.address}{path}: {what}"

    def _check(self, status: int, text: str) -> None:
        if status >= 500:
            raise ServerGone(f"{self.address}: {status} {_words(text)}")
        if status >= 400:
            raise ServerRefused(f"{status} {_words(text)}")

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()


def _words(answer: Any) -> str:
    """What an error answer says, in one line."""
    try:
        parsed = json.loads(answer) if isinstance(answer, str) else answer
        error = parsed["error"]
        said = error["message"] if isinstance(error, dict) else error
    except (ValueError, KeyError, TypeError):
        said = answer
    return " ".join(str(said).split())[:500]


# -- the two endpoints -----------------------------------------------------------------------------------------


def _sampling(ask: Ask) -> dict[str, Any]:
    """Plain sampling, whatever the model's generation config says: the trainer knows of no top-p and no penalty."""
    return {
        "n": 1,
        "temperature": ask.temperature,
        "max_tokens": ask.max_tokens,
        "seed": ask.seed,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        # our own end-of-turn tokens and no others
        "stop_token_ids": list(ask.stop_ids),
        "ignore_eos": True,
        "logprobs": 0,
    }


def _model(ask: Ask) -> dict[str, str]:
    """A server takes adapters for a model besides its own."""
    return {"model": ask.model} if ask.model else {}


def generate_body(ask: Ask) -> dict[str, Any]:
    sampling = {**_sampling(ask), "detokenize": False, "stream_interval": STREAM_TOKENS}
    return {
        "request_id": ask.name,
        "token_ids": ask.token_ids,
        "stream": True,
        "cache_salt": ask.salt,
        "sampling_params": sampling,
        **_model(ask),
    }


def generate_piece(choice: Mapping[str, Any]) -> Piece:
    """Raises ValueError, KeyError, TypeError for what is not a choice of this endpoint."""
    token_ids = tuple(choice["token_ids"])
    told = (choice["logprobs"] or {}).get("content") or []
    if tuple(entry["token_id"] for entry in told) != token_ids:
        raise ValueError("log-probabilities are not those of the tokens")
    spans = choice.get("weight_versions") or []
    return Piece(
        token_ids,
        _sane(entry["logprob"] for entry in told),
        choice["finish_reason"],
        tuple((span["version"], span["end"] - span["start"]) for span in spans),
        choice.get("routed_experts") or "",
    )


def completion_body(ask: Ask) -> dict[str, Any]:
    return {
        **_sampling(ask),
        "prompt": [ask.token_ids],
        "stream": True,
        "return_token_ids": True,
        "cache_salt": ask.salt,
        **_model(ask),
    }


def completion_piece(choice: Mapping[str, Any]) -> Piece:
    """Raises ValueError, KeyError, TypeError for what is not a choice of this endpoint."""
    token_ids = tuple(choice["token_ids"] or ())
    logprobs = _sane((choice["logprobs"] or {}).get("token_logprobs") or ())
    if len(logprobs) != len(token_ids):
        raise ValueError(f"{len(logprobs)} log-probabilities of {len(token_ids)} tokens")
    return Piece(token_ids, logprobs, choice["finish_reason"])


def _sane(values: Any) -> tuple[float, ...]:
    """Raises ValueError for what stands for no number: vLLM clamps -inf and NaN to -9999."""
    logprobs = tuple(float(value) for value in values)
    if any(not -9999.0 < value <= 1e-3 for value in logprobs):
        raise ValueError(f"no log-probability: {min(logprobs)}")
    return logprobs
