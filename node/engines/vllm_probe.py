"""Is this server fit to sample for the trainer? Each answer no is an error with what to change."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from node.config import EngineConfig
from node.engines.vllm_client import ServerGone, ServerRefused, VllmClient
from node.models import ModelBundle

log = logging.getLogger(__name__)

PROBE_SECONDS = 60.0
"""Deadline of one question: the first answer of a busy server takes its time."""
POLL_SECONDS = 0.5
PROBE_TEXT = "The 12 naïve Füchse — 狐狸, лиса —\n\tjumped_over({'x': [3.14]})! <|im_end|></s><|endoftext|>"


class EngineSetupError(Exception):
    """The engine cannot be used as it is set up; the message says what is wrong and what to change."""


class Unreachable(EngineSetupError):
    """Nothing answers at engine.url, or something that is no vLLM server."""


class WrongModel(EngineSetupError):
    """The server has another model than the trainer, or another tokenizer."""


class MissingFlag(EngineSetupError):
    """The server was started without something that is needed here; the message names it."""


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """What a server said of itself."""

    served: str
    """Where it took its model from."""
    context: int
    """Longest prompt and answer together, in tokens."""
    dtype: str
    logprobs_mode: str
    sleep_mode: bool
    transfer: str
    """Backend of its weight transfer; empty: none was set up."""
    on_cpu: bool
    untied: bool
    """Told to keep the output layer apart from the embedding."""
    lora_rank: int
    """Largest rank of adapters that it takes; 0: none."""
    quantization: str
    """What its weights are rounded to; empty: nothing."""

    @property
    def computes_in(self) -> tuple[str, ...]:
        """Types that its log-probabilities depend on (node/engines/agreement.py)."""
        return (self.dtype, self.quantization) if self.quantization else (self.dtype,)


LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""What `--max-lora-rank` may be (vllm/config/lora.py), but for 1."""


def lora_slot(rank: int) -> int:
    """The smallest --max-lora-rank that takes adapters of a rank."""
    return next(slot for slot in LORA_RANKS if slot >= rank)


async def wait_until_healthy(client: VllmClient, seconds: float, say: Callable[[str], None]) -> None:
    """Return once the server answers that it is well. Raises Unreachable, in the end or when it is no vLLM server."""
    loop = asyncio.get_running_loop()
    started = loop.time()
    while True:
        try:
            await client.get("/health")
            break
        except ServerRefused as refused:
            raise Unreachable(_no_vllm(client, str(refused))) from refused
        except ServerGone as gone:
            waited = loop.time() - started
            if waited >= seconds:
                raise Unreachable(
                    f"no vLLM server answers at {client.address} after {waited:.0f} s ({gone}); "
                    "start one there, correct engine.url, or raise engine.start_seconds"
                ) from gone
            say(f"waiting for the vLLM server: {gone}")
        await asyncio.sleep(POLL_SECONDS)
    try:
        answer = await client.get("/version", PROBE_SECONDS)
    except ServerRefused as refused:
        raise Unreachable(_no_vllm(client, str(refused))) from refused
    if not isinstance(answer, dict) or "version" not in answer:
        raise Unreachable(_no_vllm(client, "/version names no version"))


def _no_vllm(client: VllmClient, why: str) -> str:
    return f"what answers at {client.address} is no vLLM server ({why}); correct engine.url (http://host:port)"


async def inspect(
    client: VllmClient, bundle: ModelBundle, config: EngineConfig, *, sleep: bool, lora_rank: int = 0
) -> ServerFacts:
    """Ask a healthy server what it is, and note how it tells rollouts. Raises WrongModel, MissingFlag, ServerGone.

    `lora_rank`: of the adapters that it is to take; 0: it takes whole weights.
    """
    where = f"the vLLM server at {client.address}"
    if not await client.has("/collective_rpc") or not await client.has("/pause"):
        raise MissingFlag(
            f"{where} has no control endpoints, so it cannot take new weights; "
            "start it with the environment variable VLLM_SERVER_DEV_MODE=1, reachable by this node only"
        )
    client.versions_told = await client.has("/inference/v1/generate")
    if not client.versions_told:
        if not await client.has("/v1/completions"):
            raise MissingFlag(f"{where} generates nothing; start it with --enable-scale-out")
        log.warning("%s has no --enable-scale-out: versions of tokens are told by when they came", where)
    facts = _facts(
        (await client.get("/version", PROBE_SECONDS))["version"],
        await client.get("/server_info", PROBE_SECONDS, config_format="json"),
    )
    for what, there, flag in (
        ("log-probabilities at temperature 1", facts.logprobs_mode == "raw_logprobs", "--logprobs-mode raw_logprobs"),
        ("sleep mode", facts.sleep_mode or not sleep, "--enable-sleep-mode, or set engine.sleep to off"),
        (
            "weights over NCCL",
            facts.transfer == "nccl" or config.transfer != "nccl",
            '--weight-transfer-config \'{"backend":"nccl"}\'',
        ),
        (
            "an output layer of its own, which a CPU needs for this model",  # see node.engines.choose.unties
            bool(lora_rank) or not facts.on_cpu or facts.untied or not bundle.model.config.tie_word_embeddings,
            "--hf-overrides '{\"tie_word_embeddings\": false}' and a model directory with lm_head.weight, "
            "or have the node start it (no engine.url)",
        ),
        (
            f"adapters of rank {lora_rank}",
            facts.lora_rank >= lora_rank,
            f"--enable-lora --max-lora-rank {lora_slot(lora_rank)}, or set train.lora_rank to 0",
        ),
        (
            f"engine.quantization = {config.quantization}",
            config.quantization in ("none", facts.quantization),
            f"--quantization {config.quantization}, or set engine.quantization to none",
        ),
        (
            "weights as the trainer has them: they are rounded to " + facts.quantization,
            facts.quantization in ("", config.quantization),
            f"another --quantization or none, or set engine.quantization to {facts.quantization} if that is known here",
        ),
    ):
        if not there:
            raise MissingFlag(f"{where} lacks {what}; start it with {flag}")
    if lora_rank and not await client.has("/v1/load_lora_adapter"):
        raise MissingFlag(
            f"{where} takes no adapters while it runs; start it with the environment variable "
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True besides --enable-lora, reachable by this node only"
        )
    # a node that was killed may have left it so
    if (await client.get("/is_sleeping", PROBE_SECONDS))["is_sleeping"]:
        if facts.sleep_mode:
            await client.post("/wake_up", seconds=PROBE_SECONDS)
        await client.post("/resume", seconds=PROBE_SECONDS)
    await _same_tokens(client, bundle, facts)
    return facts


def _facts(version: str, info: Any) -> ServerFacts:
    try:
        config = info["vllm_config"]
        model = config["model_config"]
        return ServerFacts(
            served=str(model["model"]),
            context=int(model["max_model_len"]),
            dtype=str(model["dtype"]).removeprefix("torch."),
            logprobs_mode=str(model["logprobs_mode"]),
            sleep_mode=bool(model["enable_sleep_mode"]),
            transfer=str((config["weight_transfer_config"] or {}).get("backend", "")),
            on_cpu="cpu_worker" in config["parallel_config"]["worker_cls"],
            untied=(model["hf_overrides"] or {}).get("tie_word_embeddings") is False,
            lora_rank=int((config["lora_config"] or {}).get("max_lora_rank", 0)),
            quantization=str(model["quantization"] or ""),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise EngineSetupError(
            f"vLLM {version} does not say of itself what is needed here ({error!r}); use version 0.32 or 0.33"
        ) from error


async def _same_tokens(client: VllmClient, bundle: ModelBundle, facts: ServerFacts) -> None:
    """Text must be the same tokens on both sides, and the vocabularies must be equally large."""
    fix = f"start it with this node's model: vllm serve {bundle.directory}"
    answer = await client.post("/tokenize", {"prompt": PROBE_TEXT, "add_special_tokens": False}, PROBE_SECONDS)
    ours = bundle.tokenizer.encode(PROBE_TEXT, add_special_tokens=False)
    if answer["tokens"] != ours:
        raise WrongModel(
            f"the vLLM server at {client.address} serves {facts.served}, whose tokenizer is not that of "
            f"{bundle.name}; {fix}"
        )
    last = bundle.vocabulary_size - 1
    for token, known in ((last, True), (last + 1, False)):
        body = {"prompt": [[token]], "max_tokens": 1}
        try:
            await client.post("/v1/completions", body, PROBE_SECONDS)
            accepted = True
        except ServerRefused:
            accepted = False
        if accepted != known:
            raise WrongModel(
                f"the vLLM server at {client.address} serves {facts.served}, whose vocabulary is "
                f"{'larger' if accepted else 'smaller'} than the {last + 1} tokens of {bundle.name}; {fix}"
            )
