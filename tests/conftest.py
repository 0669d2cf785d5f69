"""What tests of every room share: a clock, an environment to learn in and small models to learn with."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from protocol.manifest import EnvironmentSpec


class Clock:
    """Time that stands still until a test moves it: `clock.now += 5`."""

    def __init__(self) -> None:
        self.now = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


EVENNESS = '''
from node.interfaces import Message, Score, Task


class Evenness:
    """Rewards answers of even length: something that a random model does half of the time."""

    name, version = "evenness", "1"

    def __init__(self, settings):
        pass

    def task(self, seed, index):
        return Task((Message("user", f"{seed % 1000} {index}"),), 8)

    def score(self, seed, index, answer):
        return Score(float(len(answer) % 2 == 0), True)

    def gold(self, seed, index):
        return "even" if index % 8 else None

    def self_check(self):
        return []
'''


EXPERTS: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "olmoe": {"num_experts": 8, "num_experts_per_tok": 2},
    # a dense layer between two with experts
    "qwen2_moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "mlp_only_layers": [1]},
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "mlp_only_layers": [1]},
}


@pytest.fixture
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("SHOAL_") and name != "SHOAL_CACHE"]:
        monkeypatch.delenv(name)


def install_evenness(site: Path) -> Path:
    """Put the environment into a directory for PYTHONPATH, as a distribution of its own."""
    info = site / "evenness-1.dist-info"
    info.mkdir(parents=True)
    (site / "evenness.py").write_text(EVENNESS)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: evenness\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[shoal.environments]\nevenness@1 = evenness:Evenness\n")
    return site


@pytest.fixture(scope="session")
def evenness_site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For processes that are there before a test begins."""
    return install_evenness(tmp_path_factory.mktemp("evenness") / "site")


@pytest.fixture
def evenness(tmp_path: Path, no_variables: None, monkeypatch: pytest.MonkeyPatch) -> EnvironmentSpec:
    """An environment of its own distribution, found by every process started from the test."""
    monkeypatch.setenv("PYTHONPATH", str(install_evenness(tmp_path / "site")))
    return EnvironmentSpec("evenness", "1", 1, {})


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Directory of a small random model of a type (llama, qwen2, qwen3, or one with experts), with a byte tokenizer.

    `ascii_only`: it can say nothing but printable ASCII, so that every answer is fit to be shared. `settings`: of the
    transformers config, in place of what is here.
    """

    def make(kind: str, *, ascii_only: bool = False, head_dim: int = 8, **settings: Any) -> Path:
        said = "".join(f"-{name}={value}" for name, value in settings.items())
        directory = tmp_path_factory.getbasetemp() / f"tiny-{kind}-{ascii_only}-{head_dim}{said}"
        if not directory.exists():
            _make_tiny(kind, directory, ascii_only, {"head_dim": head_dim, **settings})
        return directory

    return make


def _make_tiny(kind: str, directory: Path, ascii_only: bool, settings: dict[str, Any]) -> None:
    import tokenizers
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    if ascii_only:
        alphabet = [chr(code) for code in range(33, 127)] + [
            "\u0120",
            "\u010a",
        ]  # space and newline, as ByteLevel writes them
    vocabulary = {token: i for i, token in enumerate(["<|im_start|>", "<|im_end|>", *alphabet])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|im_end|>", bos_token="<|im_start|>"
    )
    fast.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    usual: dict[str, Any] = {
        "vocab_size": len(vocabulary),
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "initializer_range": 0.15,
        "tie_word_embeddings": kind != "qwen3",
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 1,
    }
    config = AutoConfig.for_model(kind, **{**usual, **EXPERTS.get(kind, {}), **settings})
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(directory)
    fast.save_pretrained(directory)
